"""Decoders: threads that decode images, each with a process of its own after the first images.

Threads share one interpreter, and the Python between two calls of the decoder keeps a second core idle. The processes
import this module without torch, so that they start in a fifth of a second. An image becomes 8 bits per value: the
first half of an image processor.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vembed.data.child_process import Child, answers, send
from vembed.data.examples import ImageRef
from vembed.data.images.files import image_name, load_image
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
        return sorted(child.process.pid for child in self._threads.children)


class _Threads:
    """What the threads do. Holds no reference to those who want the images."""

    def __init__(self, first: FirstHalf, count: int) -> None:
        self.children: list[Child] = []
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
        child: Child | None = getattr(self._of_thread, "child", None)
        if child is None:
            child = Child(
                "from vembed.data.images.decoders import decode_for_parent as run; run()",
                pipesize=PIPE_BYTES,
            )
            self._of_thread.child = child
            self.children.append(child)
            child.send(self._first)
        results = []
        try:
            child.send(images)
            for _ in images:
                results.append(child.receive())
        except (EOFError, BrokenPipeError):
            exit_code = child.process.wait()
            error = RunError(
                f"the process that decoded {image_name(images[len(results)])} ended with exit code {exit_code}: "
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
        child.close()


PIXELS_KEY = "pixel_values"
"""Key of the pixels in the inputs of a model."""
GRID_KEY = "image_grid_thw"
"""Key of the number of patches along time, height and width."""

Arrays = dict[str, np.ndarray]
"""Arrays that a processor makes of one image, by the names of the model's inputs."""
FirstHalf = Callable[[Image.Image], Arrays]
"""Converter of one RGB image. It can be pickled, and may be called by several threads."""


@dataclass(frozen=True)
class Resizing:
    """The size that an image is resized to, and cropped to. Makes [1, channels, height, width]."""

    size: Mapping[str, int]
    """`shortest_edge`, or `height` and `width`; empty: images keep their size."""
    resample: Image.Resampling
    crop: tuple[int, int] | None
    """Height and width."""

    def __call__(self, picture: Image.Image) -> Arrays:
        """Return the resized and cropped image."""
        if "shortest_edge" in self.size:
            short = self.size["shortest_edge"]
            long = int(short * max(picture.size) / min(picture.size))
            is_high = picture.width <= picture.height
            height, width = (long, short) if is_high else (short, long)
            picture = picture.resize((width, height), self.resample)
        elif self.size:
            size = (self.size["width"], self.size["height"])
            picture = picture.resize(size, self.resample)
        if self.crop is not None:
            height, width = self.crop
            top = (picture.height - height) // 2
            left = (picture.width - width) // 2
            # What lies outside of a smaller image is black.
            picture = picture.crop((left, top, left + width, top + height))
        lines = np.frombuffer(picture.tobytes("raw", "RGB;L"), np.uint8)
        planes_HCW = lines.reshape(picture.height, 3, picture.width)
        # A copy: `tobytes` gives memory that cannot be written.
        planes_CHW = np.array(planes_HCW.transpose(1, 0, 2), order="C")
        return {PIXELS_KEY: planes_CHW[None]}


@dataclass(frozen=True)
class Patching:
    """The patches of an image of any size. Makes [patches, channels, patch_size ** 2] and the grid."""

    area: tuple[int, int]
    """Smallest and largest number of pixels."""
    resample: Image.Resampling
    patch_size: int
    merge_size: int

    def __call__(self, picture: Image.Image) -> Arrays:
        """Return the patches, those of a merged token one after the other, and the grid."""
        rows, columns = self._grid(picture)
        patch = self.patch_size
        merge = self.merge_size
        size = (columns * patch, rows * patch)
        pixels = np.asarray(picture.resize(size, self.resample))
        blocks = pixels.reshape(
            rows // merge,
            merge,
            patch,
            columns // merge,
            merge,
            patch,
            pixels.shape[-1],
        )
        # To [rows of tokens, columns of tokens, rows and columns inside of a token, channels, height, width].
        patches = np.ascontiguousarray(blocks.transpose(0, 3, 1, 4, 6, 2, 5))
        return {
            PIXELS_KEY: patches.reshape(
                rows * columns, pixels.shape[-1], patch * patch
            ),
            GRID_KEY: np.array([[1, rows, columns]], np.int64),
        }

    def _grid(self, picture: Image.Image) -> tuple[int, int]:
        """Return the rows and columns of patches: whole tokens, within the limits on the image area."""
        height = picture.height
        width = picture.width
        side = self.patch_size * self.merge_size
        smallest, largest = self.area
        rows = round(height / side)
        columns = round(width / side)
        if rows * columns * side**2 > largest:
            shrink = math.sqrt(height * width / largest)
            rows = max(1, math.floor(height / shrink / side))
            columns = max(1, math.floor(width / shrink / side))
        elif rows * columns * side**2 < smallest:
            grow = math.sqrt(smallest / (height * width))
            rows = math.ceil(height * grow / side)
            columns = math.ceil(width * grow / side)
        return rows * self.merge_size, columns * self.merge_size


@dataclass(frozen=True)
class ProcessorCode:
    """The processor's own code, with options that leave out its second half, if it has one that can be left out."""

    processor: Any
    options: Mapping[str, bool]

    def __call__(self, picture: Image.Image) -> Arrays:
        """Return the tensors of the processor."""
        processed = self.processor(
            images=[picture], return_tensors="pt", **self.options
        )
        return {name: tensor.numpy() for name, tensor in processed.items()}
