"""Messages over the pipes between this process and the child processes that it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import IO


def send(file: IO[bytes], data: bytes) -> None:
    """Write one message."""
    file.write(len(data).to_bytes(8, "little") + data)
    file.flush()


def messages(file: IO[bytes]) -> Iterator[bytes]:
    """Yield messages until the other side closes the pipe or ends."""
    while len(head := file.read(8)) == 8:
        yield file.read(int.from_bytes(head, "little"))


def command_of(module: str) -> list[str]:
    """Return the command that runs a module in a process of its own. It runs nothing of the user's script, which
    `multiprocessing` would import."""
    return [sys.executable, "-m", module]


def environment() -> dict[str, str]:
    """Return the environment of a child process, which finds modules where this process does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}


def output_for_answers() -> IO[bytes]:
    """Return this child's standard output. What libraries print goes to standard error, not between the answers."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return out
