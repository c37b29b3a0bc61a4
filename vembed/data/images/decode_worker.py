"""Worker that decodes images in a process of its own. Reads jobs on stdin; the pixels go through shared memory.

Threads share one interpreter, and the Python between two calls of the decoder keeps a second core idle. A process that
is started by its command needs neither the memory of its parent nor a guard around the user's script. The memory has no
name and is freed with the processes, however they end; the worker ends where its input does.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import traceback
from collections.abc import Sequence
from typing import IO, Any

import numpy as np

from vembed.data.child_process import answers, send, start_child
from vembed.data.examples import ImageRef
from vembed.data.images.files import load_image
from vembed.data.images.picture_bytes import Arrays, FirstHalf
from vembed.errors import UserError

HALF_BYTES = 16 * 2**20
"""Shared memory of one job. A worker has two jobs at most, so that it never waits for the next one."""
SECONDS_TO_END = 5.0
"""A worker that decodes longer than this after its input ended is killed."""
_HEADER = struct.Struct("<qq")
"""Number of the job in hand, and position of the image in it; names the image if the process ends."""
_HEADER_BYTES = 4096
_ALIGNMENT = 64
_MOST_TRACE = 4000
"""Characters of a traceback in an answer: the answers of a job must fit into the pipe (64 KiB)."""
_SIGNALS = {
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
}
"""Signals for a whole process group, which the parent answers by ending its workers when it is ready."""

_Places = dict[str, tuple[str, tuple[int, ...], int]]
"""Data type, shape and position in the shared memory of each array of an image."""


class WorkerEnded(Exception):  # noqa: N818 - the caller decides whether it is an error
    """The process ended by itself. `position`: of the image in the oldest job that it had in hand, if any."""

    def __init__(self, reason: str, position: int | None) -> None:
        super().__init__(reason)
        self.position = position


class DecodeWorker:
    """A process that decodes images. Used by one thread."""

    def __init__(self, first: bytes) -> None:
        """Start the process. `first`: the pickled first half of the image processor."""
        area = os.memfd_create("vembed-pixels", os.MFD_CLOEXEC)
        try:
            os.ftruncate(area, _HEADER_BYTES + 2 * HALF_BYTES)
            self._area = mmap.mmap(area, 0)
            # A signal that is blocked here is blocked in the new process from its first moment on.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            try:
                self._process = start_child(
                    "import sys; from vembed.data.images.decode_worker import main; main(int(sys.argv[1]))",
                    str(area),
                    environment={"OMP_NUM_THREADS": "1"},
                    pass_fds=[area],
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        finally:
            os.close(area)
        _HEADER.pack_into(self._area, 0, -1, -1)
        self._is_ready = False
        self._sent = self._received = 0
        self._write(first)

    def is_ready(self) -> bool:
        """Return whether the process has started. Raise WorkerEnded if it could not."""
        if not self._is_ready and select.select([self._out], [], [], 0)[0]:
            reason = self._answer()
            if reason is not None:
                raise WorkerEnded(reason, None)
            self._is_ready = True
        return self._is_ready

    def send(self, images: Sequence[ImageRef]) -> None:
        """Give the process a job. It has two at most."""
        self._write((self._sent, images))
        self._sent += 1

    def receive(self) -> list[Arrays | Exception | None]:
        """Return the pixels of each image of the oldest job, or why there are none; None: they are too large."""
        results = [
            {name: self._copied(*place) for name, place in answer.items()}
            if isinstance(answer, dict)
            else answer
            for answer in self._answer()
        ]
        self._received += 1
        return results

    def close(self) -> None:
        """End the process and wait for its end."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(
                BrokenPipeError
            ):  # it ended before it read everything
                pipe.close()
        try:
            self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    @property
    def _out(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def _write(self, message: object) -> None:
        assert self._process.stdin is not None
        try:
            send(self._process.stdin, message)
        except BrokenPipeError:
            raise self._ended() from None

    def _answer(self) -> Any:
        try:
            return pickle.load(self._out)  # from this process's own child
        except EOFError:
            raise self._ended() from None

    def _ended(self) -> WorkerEnded:
        code = self._process.wait()
        reason = (
            f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        )
        job, position = _HEADER.unpack_from(self._area, 0)
        return WorkerEnded(reason, position if job == self._received else None)

    def _copied(self, dtype: str, shape: tuple[int, ...], start: int) -> np.ndarray:
        # A copy, since the next job but one overwrites it.
        shared = np.frombuffer(self._area, dtype, math.prod(shape), start)
        return np.array(shared).reshape(shape)


def main(area_number: int) -> None:
    """Decode the images that standard input names, until it ends."""
    out = answers()
    jobs = sys.stdin.buffer
    area = mmap.mmap(area_number, 0)
    try:
        first: FirstHalf = pickle.loads(pickle.load(jobs))  # from the parent process
    except Exception as error:
        send(out, f"{type(error).__name__}: {error}"[:_MOST_TRACE])
        return
    try:
        send(out, None)
        while True:
            send(out, _decoded(area, first, *pickle.load(jobs)))
    except EOFError:
        return
    except BrokenPipeError:  # the parent has ended
        os._exit(0)


def _decoded(
    area: mmap.mmap,
    first: FirstHalf,
    number: int,
    images: Sequence[ImageRef],
) -> Any:
    """Decode the images of a job. Return for each the places of its pixels, None if they do not fit, or an error."""
    start = _HEADER_BYTES + number % 2 * HALF_BYTES
    end = start + HALF_BYTES
    answers: list[_Places | Exception | None] = []
    for position, image in enumerate(images):
        _HEADER.pack_into(area, 0, number, position)
        try:
            made = first(load_image(image))
            size = sum(
                -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in made.values()
            )
            answers.append(_written(area, made, start) if start + size <= end else None)
            start += size if start + size <= end else 0
        except UserError as error:
            answers.append(error)
        except Exception:
            answers.append(RuntimeError(traceback.format_exc()[-_MOST_TRACE:]))
    _HEADER.pack_into(area, 0, -1, -1)
    return answers


def _written(area: mmap.mmap, made: Arrays, start: int) -> _Places:
    """Write arrays to the shared memory. Return their places."""
    places = {}
    for name, array in made.items():
        np.frombuffer(area, array.dtype, array.size, start).reshape(array.shape)[
            ...
        ] = array
        places[name] = (array.dtype.str, array.shape, start)
        start += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return places
