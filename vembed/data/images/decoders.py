"""Decoders: threads that decode images, each with a process of its own after the first images.

Threads share one interpreter, and the Python between two calls of the decoder keeps a second core idle.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from vembed.data.child_process import answers, send, start_child
from vembed.data.examples import ImageRef
from vembed.data.images.files import image_name, load_image
from vembed.data.images.picture_bytes import Arrays, FirstHalf, ProcessorCode
from vembed.errors import RunError, UserError

DECODED_BY_THREADS = 512
"""Images after which processes are started: few images need none."""
IMAGES_OF_JOB = 16
"""Most images of a job. A process has work for so long while no thread here gets the interpreter's lock."""
PIPE_BYTES = 2**20
"""The pixels of some images wait in the pipe, so that a process need not wait for its thread."""


class Decoding(NamedTuple):
    """An image that is being decoded, and its place in its job."""

    job: Future[list[Arrays | Exception]]
    place: int

    def wait(self) -> Arrays:
        """Return what was made of the image. Raises UserError for a broken one, RunError if its process ended."""
        result = self.job.result()[self.place]
        if isinstance(result, Exception):
            raise result
        return result


class Decoders:
    """A number of decoders. Their processes end with this object or with the program."""

    def __init__(self, first: FirstHalf, count: int) -> None:
        """`first`: what is applied to a decoded image."""
        self._count = count
        self._threads = _Threads(first, count)
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="vembed-images")
        self.close = weakref.finalize(self, _close, self._pool, self._threads)
        """End threads and processes. What is not decoded yet never will be."""

    def start(self, images: Sequence[ImageRef]) -> list[Decoding]:
        """Begin to decode images, in their order."""
        size = max(1, min(IMAGES_OF_JOB, len(images) // self._count))
        decodings = []
        for start in range(0, len(images), size):
            chunk = images[start : start + size]
            job = self._pool.submit(self._threads.decode, chunk)
            decodings += [Decoding(job, place) for place in range(len(chunk))]
        return decodings

    @property
    def pids(self) -> list[int]:
        """Numbers of the processes."""
        return sorted(child.pid for child in self._threads.children)


class _Threads:
    """What the threads do. Holds no reference to those who want the images."""

    def __init__(self, first: FirstHalf, count: int) -> None:
        self.children: list[subprocess.Popen[bytes]] = []
        self._first = first
        self._num_decoded = 0
        # The code of a processor may be in a module that another process does not find.
        self._may_start = count > 1 and not isinstance(first, ProcessorCode)
        self._of_thread = threading.local()

    def decode(self, images: Sequence[ImageRef]) -> list[Arrays | Exception]:
        """Decode images: here at first, later in this thread's process."""
        self._num_decoded += len(images)
        if not self._may_start or self._num_decoded <= DECODED_BY_THREADS:
            return [_decoded(image, self._first) for image in images]
        child: subprocess.Popen[bytes] | None = getattr(self._of_thread, "child", None)
        if child is None:
            # A session of its own: signals for the whole group are answered by this process.
            child = start_child(
                "from vembed.data.images.decoders import decode_for_parent as run; run()",
                environment={"OMP_NUM_THREADS": "1"},
                start_new_session=True,
                pipesize=PIPE_BYTES,
            )
            self._of_thread.child = child
            self.children.append(child)
            assert child.stdin is not None
            send(child.stdin, self._first)
        assert child.stdin is not None and child.stdout is not None
        results: list[Arrays | Exception] = []
        try:
            send(child.stdin, images)
            for _ in images:
                results.append(pickle.load(child.stdout))
        except (EOFError, BrokenPipeError):
            error = RunError(
                f"the process that decoded {image_name(images[len(results)])} ended with exit code {child.wait()}: "
                "take the image out, or scale it down"
            )
            results += [error] * (len(images) - len(results))
        return results


def _decoded(image: ImageRef, first: FirstHalf) -> Arrays | Exception:
    try:
        return first(load_image(image))
    except UserError as error:
        return error
    except Exception:
        return RuntimeError(traceback.format_exc())


def decode_for_parent() -> None:
    """Decode the images that standard input names, until it ends. Runs in a child process, without torch."""
    out = answers()
    jobs = sys.stdin.buffer
    first: FirstHalf = pickle.load(jobs)
    try:
        while True:
            for image in pickle.load(jobs):
                send(out, _decoded(image, first))
    except (EOFError, BrokenPipeError):  # the parent has ended
        os._exit(0)


def _close(pool: ThreadPoolExecutor, threads: _Threads) -> None:
    pool.shutdown(wait=False, cancel_futures=True)
    for child in threads.children:
        child.kill()
        with child:  # closes the pipes, and waits
            pass
