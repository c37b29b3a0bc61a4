"""Names that would harm a run: its own files as log or data."""

import pytest

from vembed.config.loading import load_config
from vembed.errors import UserError

BASE = {"model_name": "m", "data_path": "d.jsonl"}


@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        "final",
        "checkpoint-5",
    ],
)
def test_the_log_takes_no_name_of_the_runs_own(name):
    with pytest.raises(
        UserError,
        match=rf"log_file: '{name}' must be the name of a file",
    ):
        load_config({**BASE, "log_file": name})


@pytest.mark.parametrize("option", ["data_path", "val_data_path"])
@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        "final/data.jsonl",
    ],
)
def test_data_among_the_runs_own_files_are_refused(tmp_path, option, name):
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"query": "a", "positive": "b"}\n')
    with pytest.raises(
        UserError,
        match=rf"{option}: .* is in output_dir under a name that the run writes itself",
    ):
        load_config({**BASE, option: str(path), "output_dir": str(tmp_path / "run")})
    with pytest.raises(UserError, match=option):
        load_config(
            {**BASE, option: [{"path": str(path)}], "output_dir": str(tmp_path / "run")}
        )


def test_data_of_another_name_in_output_dir_are_kept(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"query": "a", "positive": "b"}\n')
    load_config({**BASE, "data_path": str(path), "output_dir": str(tmp_path)})
