"""State files of runs: one reader, which refuses what is no file, too large, empty or cut, in one sentence."""

import json
import os
import re
from pathlib import Path

import pytest

import vembed
from tests.training.test_run import settings
from vembed import files
from vembed.cli.main import run_process
from vembed.errors import UserError

READERS = [
    files.read_state_bytes,
    files.read_state_text,
    files.read_json_object,
    files.read_yaml,
]


def pipe(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def huge(path):
    with path.open("wb") as file:
        file.truncate(40 * 2**30)


def folder(path):
    path.mkdir()


@pytest.mark.parametrize("make", [pipe, device, huge, folder])
@pytest.mark.parametrize("read", READERS)
def test_what_is_no_state_file_is_refused(make, read, tmp_path):
    path = tmp_path / "state.json"
    make(path)
    with pytest.raises(UserError, match=r"^\S*state\.json (is|has|cannot)"):
        read(path)


@pytest.mark.parametrize("content", [b"", b'{"a": [1', b"\xff\xfe{", b"[1]"])
def test_empty_and_cut_files_are_damaged(content, tmp_path):
    path = tmp_path / "state.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"^\S*state\.json is damaged"):
        files.read_json_object(path)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("metrics.jsonl", pipe),
        ("metrics.jsonl", device),
        ("training_log.txt", pipe),
        ("training_log.txt", device),
        (".final.new", Path.touch),
    ],
)
def test_a_run_does_not_begin_where_its_files_cannot_be(name, make, tmp_path):
    options = settings(tmp_path, max_steps=1, val_data_path=None)
    output = Path(options["output_dir"])
    output.mkdir()
    make(output / name)
    with pytest.raises(UserError, match=re.escape(name)):
        vembed.train(options)
    assert not (output / "metrics.jsonl").is_file()


def test_a_shortened_metrics_file_is_named_at_resume(tmp_path):
    options = settings(tmp_path, max_steps=4, save_steps=2, val_data_path=None)
    path = vembed.train(options).output_dir / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:40])
    again = vembed.train({**options, "max_steps": 5, "resume": True})
    log = (again.output_dir / "training_log.txt").read_text()
    assert "metrics.jsonl is damaged: it has 40 bytes" in log


@pytest.mark.parametrize("name", ["/", "runs\0x", "/proc/self/run", "/dev/run"])
def test_an_output_dir_that_holds_no_files_is_refused(name, tmp_path):
    options = settings(tmp_path, max_steps=1, val_data_path=None)
    with pytest.raises(UserError, match="output_dir"):
        vembed.train({**options, "output_dir": name})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("log_file", "a\0b"),
        ("model_name", "x" * 300),
    ],
)
def test_a_name_that_no_file_can_have_is_one_sentence(option, value, tmp_path, capsys):
    config = tmp_path / "cfg.json"
    config.write_text(json.dumps({**settings(tmp_path), option: value}))
    assert run_process("train", [str(config)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {option}")
    assert "Traceback" not in error
