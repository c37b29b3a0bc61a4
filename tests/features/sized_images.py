"""First halves of image processors that do what an image's size says, without torch, so that processes start fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from vembed.data.examples import ImageRef
from vembed.data.images.decode_worker import HALF_BYTES
from vembed.data.images.decoders import Decoders
from vembed.data.images.files import load_image
from vembed.data.images.picture_bytes import PIXELS, Arrays

SECONDS = 60.0
SLOW, LARGE, WRONG = (3, 5), (5, 3), (7, 7)
"""Sizes of images that `Sized` is slow with, makes large, and fails on."""


class Sized:
    """A first half that does what the image's size says."""

    def __call__(self, picture: Image.Image) -> Arrays:
        if picture.size == SLOW:
            time.sleep(SECONDS)
        if picture.size == WRONG:
            raise ZeroDivisionError("a bug")
        return {
            PIXELS: np.full(
                HALF_BYTES + 1 if picture.size == LARGE else 1, picture.width, np.uint8
            )
        }


class Here:
    """Decoding in this process, where nothing is slow."""

    def __call__(self, ref: ImageRef) -> Arrays:
        picture = load_image(ref)
        return {
            PIXELS: np.full(
                HALF_BYTES + 1 if picture.size == LARGE else 1, picture.width, np.uint8
            )
        }


def file_of(folder: Path, size: tuple[int, int]) -> ImageRef:
    path = folder / f"{size[0]}x{size[1]}-{len(list(folder.iterdir()))}.png"
    Image.new("RGB", size, (9, 9, 9)).save(path)
    return ImageRef(path=str(path))


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def use_until_ready(decoders: Decoders, image: ImageRef, count: int) -> None:
    def used() -> bool:
        for decoding in decoders.start([image] * 8):
            decoders.wait(decoding)
        return len(decoders.pids) == count

    until(used)
