"""State files that a command reads back, empty or cut: one sentence. What is no file is in test_state_files.py."""

import os
import shutil

import pytest
import yaml

from tests.tiny import shared, tiny_bert_st
from tests.training.test_run import settings
from vembed.cli.main import run_process


def empty(path):
    os.truncate(path, 0)


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


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
        for damage in (empty, cut):
            shutil.rmtree(root)
            shutil.copytree(whole, root)
            damage(root / name)
            capsys.readouterr()
            code = run_process(command, words)
            error = capsys.readouterr().err
            facts = (damage.__name__, name, error)
            assert "Traceback" not in error, facts
            assert code in (0, 1, 2), facts
            if code:
                assert error.count("error:") == 1, facts
                assert str(name) in error, facts
