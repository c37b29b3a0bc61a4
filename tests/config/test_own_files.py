"""Names that would harm a run: its own files as log or data."""

import pytest

from vembed.config.loading import load_config
from vembed.errors import UserError

BASE = {"model_name": "m", "data_path": "d.jsonl"}


@pytest.mark.parametrize("name", ["metrics.jsonl", "final", "checkpoint-5"])
def test_the_log_takes_no_name_of_the_runs_own(refused, name):
    said = f"log_file: '{name}' must be the name of a file"
    assert said in refused(f"log_file: {name}\n")


@pytest.mark.parametrize("name", ["metrics.jsonl", "final/data.jsonl"])
def test_data_among_the_runs_own_files_are_refused(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    for option, source in (
        ("data_path", str(path)),
        ("data_path", [{"path": str(path)}]),
        ("val_data_path", str(path)),
    ):
        options = {option: source, "output_dir": str(tmp_path)}
        message = rf"{option}: .* that the run writes itself"
        with pytest.raises(UserError, match=message):
            load_config(BASE | options)


def test_data_of_another_name_in_output_dir_are_kept(tmp_path):
    path = tmp_path / "train.jsonl"
    path.touch()
    load_config({**BASE, "data_path": str(path), "output_dir": str(tmp_path)})
