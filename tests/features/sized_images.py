"""First half of an image processor that does what an image's size says, without torch, so that processes start fast."""

import time

import numpy as np
from PIL import Image

from vembed.data.examples import ImageRef
from vembed.data.images.decoders import PIXELS_KEY

SECONDS = 60.0
SLOW = (3, 5)
LARGE = (5, 3)
WRONG = (7, 7)
"""Sizes of images that `Sized` is slow with, makes large, and fails on."""
LARGE_BYTES = 20 * 2**20


class Sized:
    """A first half that does what the image's size says."""

    def __call__(self, picture):
        if picture.size == SLOW:
            time.sleep(SECONDS)
        if picture.size == WRONG:
            raise ZeroDivisionError("a bug")
        size = LARGE_BYTES if picture.size == LARGE else 1
        return {PIXELS_KEY: np.full(size, picture.width, np.uint8)}


def file_of(folder, size):
    path = folder / f"{size[0]}x{size[1]}-{len(list(folder.iterdir()))}.png"
    Image.new("RGB", size, (9, 9, 9)).save(path)
    return ImageRef(path=str(path))


def use_until_ready(decoders, image, count):
    end = time.monotonic() + SECONDS
    while len(decoders.pids) < count:
        assert time.monotonic() < end, "no process has started"
        for decoding in decoders.start([image] * 8):
            decoding.wait()
