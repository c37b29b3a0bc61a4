"""The lock on output_dir, and starts that leave the folder as it was."""

import os
from pathlib import Path

import pytest

import vembed
from tests.cli.conftest import vembed as command
from tests.commands import CODE
from tests.commands import command as run_command
from tests.tiny import shared, tiny_bert
from tests.training.test_run import settings, settings_without_validation
from vembed.errors import UserError
from vembed.training.checkpoint.folders import LOCK, OutputLock

__all__ = ["command"]


def test_the_lock_of_a_killed_run_is_free_at_once(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from vembed.training.checkpoint.folders import OutputLock\n"
        "lock = OutputLock(Path(sys.argv[1])); lock.take(); os._exit(9)"
    )
    run_command(code, str(tmp_path), module=CODE, code=9)
    assert (tmp_path / LOCK).exists()
    with OutputLock(tmp_path) as lock:
        lock.take()


def test_a_folder_that_the_lock_has_made_and_nobody_has_filled_goes_with_it(tmp_path):
    with OutputLock(tmp_path / "run") as lock:
        lock.take()
    assert not (tmp_path / "run").exists()


# ---- starts that are refused -----------------------------------------------------------------------------------------


def contents(folder):
    files = {}
    for path in folder.rglob("*"):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            files[name] = (path.read_bytes(), path.stat().st_mtime_ns)
    return files


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run with checkpoints."""
    folder = tmp_path_factory.mktemp("finished")
    options = settings_without_validation(folder, save_steps=2)
    vembed.train(options)
    return options


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"learning_rate": 0.5, "resume": "run/checkpoint-2"},
            "other settings: learning_rate",
        ),
        ({"data_path": "mistyped.jsonl", "overwrite": True}, "mistyped.jsonl"),
        ({"model_name": "run/final", "overwrite": True}, "is in output_dir"),
        ({}, "of an earlier run"),
    ],
)
def test_a_refused_start_changes_nothing(changes, said, finished, monkeypatch):
    output = Path(finished["output_dir"])
    monkeypatch.chdir(output.parent)
    before = contents(output)
    assert "checkpoint-2/state.json" in before and "metrics.jsonl" in before
    with pytest.raises(UserError, match=said):
        vembed.train({**finished, **changes})
    assert contents(output) == before


def test_a_run_that_is_going_on_is_named_before_its_checkpoints(finished, command):
    output = Path(finished["output_dir"])
    config = str(output / "config.yaml")
    with OutputLock(output) as lock:
        lock.take()
        refused = command("train", config, code=2)
    assert f"host {os.uname().nodename}, process {os.getpid()}, " in refused.err


def test_a_refused_start_makes_no_folder(tmp_path):
    output = tmp_path / "a" / "b"
    options = settings(tmp_path, output_dir=str(output))
    with pytest.raises(UserError):
        vembed.train({**options, "data_path": "none.jsonl"})
    assert not output.parent.exists()


def test_replaced_weights_under_the_same_name_are_refused(tmp_path):
    model = tiny_bert(tmp_path / "model")
    options = settings_without_validation(
        tmp_path, model_name=str(model), use_lora=True, save_steps=2, max_steps=2
    )
    vembed.train(options)
    weights = shared(tiny_bert, dropout=0.5)
    (model / "config.json").write_bytes((weights / "config.json").read_bytes())
    with pytest.raises(UserError, match="other settings: model_name_files"):
        vembed.train(
            {
                **options,
                "resume": True,
                "max_steps": 4,
            }
        )
