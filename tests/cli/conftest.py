"""The command, in this process where that is the same, and as a process of its own where it is not."""

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.data.files import pair, write_jsonl
from tests.harness import run_ranks
from tests.tiny import shared, texts, tiny_bert_st
from vembed.cli.main import app, run_process

OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def vembed(tmp_path, monkeypatch, capsys):
    """Runs `vembed TEXT WORDS` in an empty folder, in this process; the text is split into words. Its exit code is
    `code`."""
    monkeypatch.chdir(tmp_path)
    for name in (
        *OF_A_RANK,
        "MASTER_ADDR",
        "MASTER_PORT",
        "ACCELERATE_MIXED_PRECISION",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def run(text, *words, code=0):
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            app([*text.split(), *words])
        done = Ended(end.value.code or 0, *capsys.readouterr())
        assert done.code == code, done.err
        return done

    return run


@pytest.fixture
def refused(vembed):
    """Runs a command whose message names all parts, and ends with exit code 2."""

    def run(words, *parts):
        done = vembed(words, code=2)
        for part in parts:
            assert part in done.err, done.err
        return done

    return run


def on_ranks(text, *words):
    """Run a verb on two ranks in the current folder, as the processes that a launcher has started."""
    return run_ranks(_on_rank, 2, [*text.split(), *words])


def _on_rank(words):
    out = io.StringIO()
    err = io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run_process(words[0], words[1:])
    return Ended(code, out.getvalue(), err.getvalue())


@pytest.fixture
def process(tmp_path, monkeypatch):
    """Runs `python WORDS` in an empty folder, with torch out of reach: what runs here may not need it."""
    monkeypatch.chdir(tmp_path)
    Path("no_torch").mkdir()
    Path("no_torch/torch.py").write_text("raise AssertionError('torch was imported')\n")

    for name in OF_A_RANK:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "no_torch"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def run(*words, code=0):
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
        return Ended(code, done.stdout, done.stderr)

    return run


@pytest.fixture
def cfg(vembed):
    """A config of two lines."""
    Path("cfg.yaml").write_text("model_name: some/model\ndata_path: train.jsonl\n")
    return "cfg.yaml"


def write_config(folder, more):
    """Write 16 pairs and a config that trains on them, with further lines."""
    words = texts(32)
    rows = [pair(words[2 * row], f"{words[2 * row + 1]} {row}") for row in range(16)]
    write_jsonl(folder / "train.jsonl", rows)
    config = f"model_name: {shared(tiny_bert_st)}\ndata_path: {folder}/train.jsonl\n"
    config += "lr: 1e-3\nlogging_steps: 1\nreport_to: none\n"
    (folder / "cfg.yaml").write_text(config + more)
    return folder / "cfg.yaml"
