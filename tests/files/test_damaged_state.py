"""State files that a command reads back, replaced by what is none: one sentence, never a wait."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import yaml

from tests.files.test_state_files import device, huge, pipe
from tests.tiny import shared, tiny_bert_st
from tests.training.test_run import settings
from vembed.cli.main import run_process

WAIT_SECONDS = 120


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


DAMAGES = (pipe, device, huge, Path.touch, cut)


def report(root):
    """A run with evaluations."""
    config = settings(root, max_steps=2, eval_steps=1)
    write_yaml(root / "cfg.yaml", config)
    assert run_process("train", [str(root / "cfg.yaml")]) == 0
    return ["report", str(root / "run")]


def stages(root):
    merge = {"models": ["first", str(shared(tiny_bert_st))]}
    stage = [{"name": "first"}, {"name": "second", "merge": merge}]
    config = settings(root, max_steps=1, model_name=str(shared(tiny_bert_st)))
    write_yaml(root / "cfg.yaml", {**config, "val_data_path": None, "stages": stage})
    return ["train", str(root / "cfg.yaml")]


def write_yaml(path, values):
    path.write_text(yaml.safe_dump(values))


TABLE = [
    (report, "run", ["config.yaml", "metrics.jsonl", "run.json", "evaluations/*.json"]),
    (stages, "run", ["*/stage.json"]),
]


def fail(*_):
    raise TimeoutError(f"waits for more than {WAIT_SECONDS} s")


@pytest.fixture
def time_limit():
    before = signal.signal(signal.SIGALRM, fail)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("time_limit")
@pytest.mark.parametrize(("prepare", "folder", "patterns"), TABLE)
def test_damaged_state_is_one_sentence(prepare, folder, patterns, tmp_path, capsys):
    root = tmp_path / "root"
    root.mkdir()
    command, *words = prepare(root)
    if command != "report":
        assert run_process(command, words) == 0, capsys.readouterr().err
    whole = tmp_path / "whole"
    shutil.copytree(root, whole)
    files = {path for pattern in patterns for path in (whole / folder).glob(pattern)}
    names = sorted(path.relative_to(whole) for path in files if not path.is_dir())
    assert len(names) >= len(patterns)
    for name in names:
        for damage in DAMAGES:
            shutil.rmtree(root)
            shutil.copytree(whole, root)
            if damage is not cut:
                (root / name).unlink()
            damage(root / name)
            capsys.readouterr()
            signal.alarm(WAIT_SECONDS)
            code = run_process(command, words)
            signal.alarm(0)
            error = capsys.readouterr().err
            facts = (damage.__name__, name, error)
            assert "Traceback" not in error, facts
            assert code in (0, 1, 2), facts
            if code:
                assert error.count("error:") == 1, facts
                assert str(name) in error, facts
