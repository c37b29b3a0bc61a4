"""Child processes that work for this one: they read pickled jobs on standard input, and write pickled answers.

A child is started by its command, not by multiprocessing: it needs neither the memory of its parent nor a guard around
the user's script.
"""

import os
import pickle
import subprocess
import sys
from typing import IO, Any


class Child:
    """A process that runs some code, and finds modules where this process does."""

    def __init__(
        self,
        code: str,
        **options: Any,
    ) -> None:
        """`options`: of subprocess.Popen. A session of its own: signals for the whole group are answered by this
        process."""
        paths = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
            start_new_session=True,
            **options,
        )

    def send(self, message: object) -> None:
        """Send a job. Raises BrokenPipeError if the process has ended."""
        assert self.process.stdin is not None
        send(self.process.stdin, message)

    def receive(self) -> Any:
        """Return the next answer. Raises EOFError if the process has ended."""
        assert self.process.stdout is not None
        return pickle.load(self.process.stdout)  # from this process's own child

    def close(self) -> None:
        """End the process, close the pipes, and wait."""
        self.process.kill()
        with self.process:
            pass


def send(file: IO[bytes], message: object) -> None:
    """Write a message."""
    pickle.dump(message, file)
    file.flush()


def answers() -> IO[bytes]:
    """Return this child's standard output. What libraries print goes to standard error, not between the answers."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return out
