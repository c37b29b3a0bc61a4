"""Child processes that work for this one: they read pickled jobs on standard input, and write pickled answers.

A child is started by its command, not by multiprocessing: it needs neither the memory of its parent nor a guard around
the user's script.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from typing import IO, Any


def start_child(
    code: str,
    *arguments: str,
    environment: dict[str, str] | None = None,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start a process that runs this code, and finds modules where this process does."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths, **(environment or {})},
        **options,
    )


def send(file: IO[bytes], message: object) -> None:
    """Write a message. Raises BrokenPipeError if the other process has ended."""
    pickle.dump(message, file)
    file.flush()


def answers() -> IO[bytes]:
    """Return this child's standard output. What libraries print goes to standard error, not between the answers."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return out
