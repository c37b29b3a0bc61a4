"""docs/tutorial.md, literally: its commands in order, in an empty folder; the served vectors are the model's."""

from __future__ import annotations

import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.commands import start
from tests.docs.pages import ROOT, blocks
from tests.harness import LIMIT
from tests.tiny import shared, tiny_bert_st
from vembed.cli.main import app
from vembed.parallel.launch import free_port

PAGE = ROOT / "docs" / "tutorial.md"
LAST = "## Smaller and faster"
"""The walk ends before it: tests/export traces a graph."""


def steps() -> list[tuple[str, str]]:
    """(language, text) of each command and each piece of Python, in order."""
    end = PAGE.read_text(encoding="utf-8").partition(LAST)[0].count("\n")
    found = [
        one for one in blocks("bash", "python") if one.page == PAGE and one.line < end
    ]
    lines = [
        ("bash", line)
        for one in found
        if one.language == "bash"
        for line in one.text.splitlines()
    ]
    return [
        *lines,
        *(("python", one.text) for one in found if one.language == "python"),
    ]


@contextmanager
def started(words: list[str]) -> Iterator[None]:
    """The command in another terminal; it says when it is ready."""
    said = Path("said.txt")
    said.touch()
    process = start(*words[1:], module=words[0], stdout=said)
    try:
        until = time.monotonic() + LIMIT
        while not said.read_text().endswith("\n"):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.02)
        assert "POST /v1/embeddings" in said.read_text()
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(LIMIT)
    assert code == 0 and said.read_text().splitlines()[1:] == ["stopped"]


def test_the_walk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    model, port = str(shared(tiny_bert_st)), str(free_port())
    todo = [(language, text.replace("8080", port)) for language, text in steps()]
    serve = next(
        number
        for number, (_, text) in enumerate(todo)
        if text.startswith("vembed serve")
    )
    for _, text in todo[:serve]:
        run(shlex.split(text.replace("--model demo", f"--model {model}")))
    with started(shlex.split(todo[serve][1])):
        for language, text in todo[serve + 1 :]:
            if language == "python":
                exec(compile(text, str(PAGE), "exec"), {"__name__": "__docs__"})
            else:
                run(shlex.split(text))
    assert "\n" in capsys.readouterr().out, "the best document is printed"


def run(words: list[str]) -> None:
    if words[0] == "pip":
        return
    if words[0] == "vembed":
        more = ["report_to=none", "max_steps=2"] if words[1] == "train" else []
        done = CliRunner().invoke(app, [*words[1:], *more])
        assert done.exit_code == 0, done.output
        if words[1] == "check-server":
            assert f"{words[2]}/v1/embeddings equals output" in done.output
    elif words[0] == "cp" or shutil.which(words[0]) is not None:
        subprocess.run(words, check=True, capture_output=True)
