"""Picture bytes: the first half of an image processor, from a decoded image to 8 bits per value, without torch.

The processes that decode images import this module and the decoder, and nothing else: they start in a fifth of a
second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

PIXELS = "pixel_values"
"""Key of the pixels in the inputs of a model."""
GRID = "image_grid_thw"
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
            picture = resized(picture, height, width, self.resample)
        elif self.size:
            height = self.size["height"]
            picture = resized(picture, height, self.size["width"], self.resample)
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
        return {PIXELS: planes_CHW[None]}


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
        pixels = np.asarray(
            resized(picture, rows * patch, columns * patch, self.resample)
        )
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
            PIXELS: patches.reshape(rows * columns, pixels.shape[-1], patch * patch),
            GRID: np.array([[1, rows, columns]], np.int64),
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
        made = self.processor(images=[picture], return_tensors="pt", **self.options)
        return {name: tensor.numpy() for name, tensor in made.items()}


def resized(
    picture: Image.Image, height: int, width: int, resample: Image.Resampling
) -> Image.Image:
    """Return the image in another size."""
    if picture.size == (width, height):
        return picture
    return picture.resize((width, height), resample=resample)
