"""A run on two processes that the command starts."""

from pathlib import Path

from tests.cli.conftest import write_config
from tests.commands import command


def test_a_mistake_in_the_data_on_two_processes_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path, "")
    Path("train.jsonl").write_text('{"query": "a", "positive": "b"}\n{"query": ""}\n')
    done = command("train", "cfg.yaml", "--nproc", "2", code=2)
    assert "error: " in done.stderr and "train.jsonl:2" in done.stderr
    assert "Traceback" not in done.stderr
