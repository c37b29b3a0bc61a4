"""docs/tutorial.md, literally: its commands in order, in an empty folder; the served vectors are the model's."""

import shlex
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

from tests.commands import invoke, start
from tests.docs.pages import ROOT, blocks
from tests.harness import LIMIT
from tests.tiny import shared, tiny_bert_st
from vembed.parallel.launch import free_port

PAGE = ROOT / "docs" / "tutorial.md"
LAST = "## Smaller and faster"
"""The walk ends before it: tests/export traces a graph."""


def steps():
    """(language, text) of each command and each piece of Python, in order."""
    end = PAGE.read_text(encoding="utf-8").partition(LAST)[0].count("\n")
    lines = []
    programs = []
    for block in blocks("bash", "python"):
        if block.page != PAGE or block.line >= end:
            continue
        if block.language == "bash":
            lines += [("bash", line) for line in block.text.splitlines()]
        else:
            programs.append(("python", block.text))
    return lines + programs


@contextmanager
def started(arguments):
    """The command in another terminal; it says when it is ready."""
    output = Path("output.txt")
    output.touch()
    process = start(*arguments[1:], module=arguments[0], stdout=output)
    try:
        until = time.monotonic() + LIMIT
        while not output.read_text().endswith("\n"):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.02)
        assert "POST /v1/embeddings" in output.read_text()
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(LIMIT)
    assert code == 0 and output.read_text().splitlines()[1:] == ["stopped"]


def test_the_walk(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    model = str(shared(tiny_bert_st))
    port = str(free_port())
    remaining = [(language, text.replace("8080", port)) for language, text in steps()]
    (serve,) = [
        number
        for number, (_, text) in enumerate(remaining)
        if text.startswith("vembed serve")
    ]
    for _, text in remaining[:serve]:
        run(shlex.split(text.replace("--model demo", f"--model {model}")))
    with started(shlex.split(remaining[serve][1])):
        for language, text in remaining[serve + 1 :]:
            if language == "python":
                exec(compile(text, str(PAGE), "exec"), {"__name__": "__docs__"})
            else:
                run(shlex.split(text))
    assert "\n" in capsys.readouterr().out, "the best document is printed"


def run(arguments):
    if arguments[0] == "pip":
        return
    if arguments[0] == "vembed":
        extra = ["report_to=none", "max_steps=2"] if arguments[1] == "train" else []
        done = invoke(*arguments[1:], *extra)
        if arguments[1] == "check-server":
            assert f"{arguments[2]}/v1/embeddings equals output" in done.output
    elif arguments[0] == "cp" or shutil.which(arguments[0]) is not None:
        subprocess.run(arguments, check=True, capture_output=True)
