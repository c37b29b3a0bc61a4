"""Decoders: threads that decode images, and processes that take over where the step waits for images."""

from __future__ import annotations

import logging
import os
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vembed.data.examples import ImageRef
from vembed.data.images.decode_worker import HALF_BYTES, DecodeWorker, WorkerEnded
from vembed.data.images.files import image_name
from vembed.data.images.picture_bytes import Arrays, FirstHalf
from vembed.errors import RunError

WAITED_FOR = 512
"""Images that somebody had to wait for, after which processes are started: few images, and models that are slower than
the decoding, need none."""
IMAGES_OF_JOB = 32
"""Most images that a process gets at once. It has work for so long while no thread here gets the interpreter's lock."""
IDLE_SECONDS = 60.0
"""Processes without work for so long are ended; the next images start them again as the first ones did."""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Decoding:
    """An image that is being decoded."""

    image: ImageRef
    result: Arrays | None = None
    error: BaseException | None = None
    is_done: bool = False


class Decoders:
    """A number of decoders, each of them a thread that decodes images itself or hands jobs to its process.

    The processes start beside the threads' work, so that nothing waits for them. They end with this object, with the
    program, or when there was nothing to do for a while.
    """

    def __init__(
        self, decode: Callable[[ImageRef], Arrays], first: FirstHalf, count: int
    ) -> None:
        """`decode`: decodes an image in the calling thread. `first`: what the processes apply to a decoded image."""
        self._count = count
        self._work = _Work(first, count)
        self._decode = decode
        self._end: Callable[[], object] | None = None

    def start(self, images: Sequence[ImageRef]) -> list[Decoding]:
        """Begin to decode images, in their order."""
        if self._end is None:
            threads = [
                threading.Thread(
                    target=_run,
                    args=(self._work, self._decode),
                    name=f"vembed-images-{number}",
                    daemon=True,
                )
                for number in range(self._count)
            ]
            self._end = weakref.finalize(self, _end, self._work, threads)
            for thread in threads:
                thread.start()
        return self._work.put(images)

    def wait(self, decoding: Decoding) -> Arrays:
        """Return what was made of the image. Raises UserError for a broken one, RunError if its process ended."""
        if not decoding.is_done:
            self._work.wait(decoding)
        if decoding.error is not None:
            raise decoding.error
        assert decoding.result is not None
        return decoding.result

    def close(self) -> None:
        """End threads and processes, and wait for their end. What is not decoded yet never will be."""
        if self._end is not None:
            self._end()

    @property
    def pids(self) -> list[int]:
        """Numbers of the processes that are ready."""
        return sorted(self._work.pids)


class _Work:
    """Images that wait, shared by those who want them and those who decode. Holds no reference to the former."""

    def __init__(self, first: FirstHalf, count: int) -> None:
        self.pids: set[int] = set()
        self._first = first
        self._count = count
        self._pickled: bytes | None = None
        # Where there is one core, or no such memory (macOS), threads do all the work.
        self._may_start = count > 1 and hasattr(os, "memfd_create")
        self._waiting: deque[Decoding] = deque()
        self._lock = threading.Lock()
        self._more = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)
        self._num_waited_for = 0
        self._bytes_of_one = 1
        self.is_closed = False

    def put(self, images: Sequence[ImageRef]) -> list[Decoding]:
        """Add images."""
        decodings = [Decoding(image) for image in images]
        with self._lock:
            if self.is_closed:
                raise RuntimeError("the decoders of images are closed")
            self._waiting.extend(decodings)
            self._more.notify(min(len(decodings), self._count))
        return decodings

    def put_back(self, decodings: Sequence[Decoding]) -> None:
        """Return images that were taken."""
        with self._lock:
            self._waiting.extendleft(reversed(decodings))
            self._more.notify(self._count)

    def take(self, most: int, seconds: float | None) -> list[Decoding]:
        """Return the next images, at most so many, and no more than a fair share. Empty: there are none within the
        time, or no more will come."""
        with self._lock:
            if not self._waiting and not self.is_closed and seconds != 0:
                self._more.wait_for(lambda: self._waiting or self.is_closed, seconds)
            if self.is_closed:
                return []
            fits = max(HALF_BYTES // self._bytes_of_one, 1)
            count = min(
                most,
                fits,
                max(len(self._waiting) // (2 * self._count), 1),
                len(self._waiting),
            )
            return [self._waiting.popleft() for _ in range(count)]

    def finish(
        self, decodings: Sequence[Decoding], results: Sequence[Arrays | BaseException]
    ) -> None:
        """Hand over what became of images."""
        with self._lock:
            for decoding, result in zip(decodings, results, strict=True):
                if isinstance(result, BaseException):
                    decoding.error = result
                else:
                    decoding.result = result
                    self._bytes_of_one = max(
                        sum(array.nbytes for array in result.values()),
                        self._bytes_of_one,
                    )
                decoding.is_done = True
            self._done.notify_all()

    def wait(self, decoding: Decoding) -> None:
        """Wait for an image."""
        with self._lock:
            self._num_waited_for += not decoding.is_done
            self._done.wait_for(lambda: decoding.is_done or self.is_closed)
            if not decoding.is_done:
                decoding.error = RuntimeError("the decoders of images were closed")

    def new_process(self) -> DecodeWorker | None:
        """Return a process, if the time for processes has come and it can be started."""
        if not self._may_start or self._num_waited_for < WAITED_FOR:
            return None
        try:
            if self._pickled is None:
                self._pickled = pickle.dumps(self._first)
            return DecodeWorker(self._pickled)
        except (
            OSError,
            WorkerEnded,
            pickle.PicklingError,
            TypeError,
            AttributeError,
        ) as error:
            self.go_without(error)
            return None

    def go_without(self, reason: object) -> None:
        """Start no more processes."""
        if self._may_start:
            log.info(
                "images are decoded by threads only (no process could be started: %s)",
                reason,
            )
        self._may_start = False

    def slow_down(self) -> None:
        """Start processes again only if they are needed again."""
        self._num_waited_for = 0

    def close(self) -> None:
        """Let all who wait go on, and end the threads."""
        with self._lock:
            self.is_closed = True
            self._more.notify_all()
            self._done.notify_all()


def _end(work: _Work, threads: Sequence[threading.Thread]) -> None:
    work.close()
    for thread in threads:
        if (
            thread is not threading.current_thread()
        ):  # the last reference may be given up in any thread
            thread.join()


def _run(work: _Work, decode: Callable[[ImageRef], Arrays]) -> None:
    """Decode images until there are no more: here, and through a process as soon as one is ready."""
    process: DecodeWorker | None = None
    try:
        while not work.is_closed:
            process = process or work.new_process()
            try:
                if process is not None and process.is_ready():
                    _pass_on(process, work, decode)
                    process.close()
                    process = None
                    work.slow_down()
                    continue
            except WorkerEnded as error:
                assert process is not None
                process.close()
                process = None
                work.go_without(error)
            for decoding in work.take(1, None):
                _decode_here(decoding, work, decode)
    finally:
        if process is not None:
            process.close()


def _decode_here(
    decoding: Decoding, work: _Work, decode: Callable[[ImageRef], Arrays]
) -> None:
    try:
        result: Arrays | BaseException = decode(decoding.image)
    except BaseException as error:  # whoever waits for the image gets it
        result = error
    work.finish([decoding], [result])


def _pass_on(
    process: DecodeWorker, work: _Work, decode: Callable[[ImageRef], Arrays]
) -> None:
    """Have images decoded by a process, until there are none for a while or it ends."""
    sent: deque[list[Decoding]] = deque()
    work.pids.add(process.pid)
    try:
        while True:
            taken = work.take(IMAGES_OF_JOB, 0 if sent else IDLE_SECONDS)
            if taken:
                sent.append(taken)
                process.send([decoding.image for decoding in taken])
            elif not sent:
                return
            if len(sent) == 2 or not taken:
                results = process.receive()
                job = sent.popleft()
                pairs = [
                    (decoding, result)
                    for decoding, result in zip(job, results, strict=True)
                    if result is not None
                ]
                work.finish(
                    [decoding for decoding, _ in pairs], [result for _, result in pairs]
                )
                for decoding, result in zip(job, results, strict=True):
                    if result is None:  # too large for the shared memory
                        _decode_here(decoding, work, decode)
    except WorkerEnded as error:
        if error.position is not None:
            failed = sent[0].pop(error.position)
            work.finish([failed], [_lost(failed.image, error)])
        work.put_back([decoding for job in sent for decoding in job])
    except BaseException as error:  # whoever waits for an image of these gets it
        lost = [decoding for job in sent for decoding in job]
        work.finish(lost, [error] * len(lost))
        raise
    finally:
        work.pids.discard(process.pid)


def _lost(image: ImageRef, error: WorkerEnded) -> RunError:
    return RunError(
        f"the process that decoded {image_name(image)} ended by itself ({error}): the file makes the decoder fail, or "
        "the machine's memory ran out; take the image out of the data, or use fewer processes"
    )
