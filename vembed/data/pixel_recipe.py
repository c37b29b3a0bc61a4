"""PixelRecipe: an image processor in two halves, bytes made by threads on the host and numbers made on the device.

The processors of Transformers convert every image to float32 on the host, in Python that holds the interpreter's lock
for most of the time. A recipe does the same with the same result: resizing and cropping leave 8 bits per value, which
are kept and moved, and scale and mean are applied to whole micro-batches where the model computes. A recipe is used
only if it reproduces the processor bit by bit on test images.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.image_transforms import center_crop, get_resize_output_image_size

PIXELS = "pixel_values"
"""Key of the pixels in the inputs of a model."""
GRID = "image_grid_thw"
"""Key of the number of patches along time, height and width."""
_PROBES = ((64, 48), (48, 64), (211, 90))
"""Width and height of the test images: to be enlarged, to be reduced, and to be cropped."""
_AT_ONCE = 2**18
"""Numbers that are computed together on a CPU: they fit in its cache."""

Processed = dict[str, Tensor]


class PixelRecipe(ABC):
    """Both halves of an image processor."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale

    @abstractmethod
    def halfway(self, picture: Image.Image) -> Processed:
        """Return the pixels of one RGB image as uint8, and its other tensors. Called by threads of the host."""

    @abstractmethod
    def _by_channel(self, pixels: Tensor) -> Tensor:
        """View halfway pixels of several images as [n, channels, ..., ...]."""

    def _arranged(self, numbers: Tensor) -> Tensor:
        """Bring the numbers, by channel, to the shape that the model takes."""
        return numbers

    def finished(self, halfway: Mapping[str, Tensor]) -> Processed:
        """Return what the processor itself would have returned, on the device of `halfway`."""
        numbers = self._arranged(self._scale.apply(self._by_channel(halfway[PIXELS])))
        return {**halfway, PIXELS: numbers}


class Scale:
    """The elementwise half of a processor: (value / divisor - mean) / deviation, in float32."""

    def __init__(self, divisor: Any, mean: Any, deviation: Any) -> None:
        """One number or one of each channel. They stay arrays, and tensors: PyTorch multiplies by the inverse of a
        plain number, which rounds differently."""
        self._terms = [np.asarray(one, np.float32).reshape(1, -1, 1, 1) for one in (divisor, mean, deviation)]
        self._table = self._computed(np.arange(256, dtype=np.float32).reshape(1, 1, 1, -1))[0, :, 0]
        """[channels or 1, 256]: the number of each byte."""
        self._on_device: dict[torch.device, list[Tensor]] = {}

    def apply(self, values: Tensor) -> Tensor:
        """Return the numbers of uint8 values [n, channels, a, b] as contiguous float32."""
        if values.device.type == "cpu":
            # NumPy computes in the calling thread. PyTorch would wake a team of threads in each thread that decodes.
            numbers = np.empty(values.shape, np.float32)
            step = max(_AT_ONCE // max(values[0].numel(), 1), 1)
            for start in range(0, len(values), step):
                self._write(values[start : start + step].numpy(), numbers[start : start + step])
            return torch.from_numpy(numbers)
        if values.device not in self._on_device:  # copied once, since every copy waits for the device
            self._on_device[values.device] = [torch.from_numpy(one).to(values.device) for one in self._terms]
        of_divisor, of_mean, of_deviation = self._on_device[values.device]
        floats = values.to(torch.float32, memory_format=torch.contiguous_format)
        return floats.div_(of_divisor).sub_(of_mean).div_(of_deviation)

    def _write(self, values: np.ndarray, numbers: np.ndarray) -> None:
        # A look-up takes half the time of the arithmetic, and gives its bits.
        table = np.broadcast_to(self._table, (values.shape[1], 256))
        for channel, by_byte in enumerate(table):
            np.take(by_byte, values[:, channel], out=numbers[:, channel], mode="clip")

    def _computed(self, values: np.ndarray) -> np.ndarray:
        divisor, mean, deviation = self._terms
        return (values / divisor - mean) / deviation


@dataclass(frozen=True)
class Resizing:
    """The size that an image is resized to, and cropped to."""

    size: Mapping[str, int]
    resample: Image.Resampling
    crop: tuple[int, int] | None
    """Height and width."""

    def apply(self, picture: Image.Image) -> np.ndarray:
        """Return the resized and cropped image, [height, width, channels]."""
        return self._cropped(self._resized(picture))

    def _resized(self, picture: Image.Image) -> np.ndarray:
        if not self.size:
            return np.asarray(picture)
        if "shortest_edge" in self.size:
            looked_at = np.broadcast_to(np.uint8(0), (3, picture.height, picture.width))
            height, width = get_resize_output_image_size(
                looked_at, size=self.size["shortest_edge"], default_to_square=False, input_data_format="channels_first"
            )
        else:
            height, width = self.size["height"], self.size["width"]
        return resized(picture, height, width, self.resample)

    def _cropped(self, pixels_HWC: np.ndarray) -> np.ndarray:
        if self.crop is None:
            return pixels_HWC
        height, width = self.crop
        top, left = (pixels_HWC.shape[0] - height) // 2, (pixels_HWC.shape[1] - width) // 2
        if top < 0 or left < 0:  # a smaller image gets a black border, which is rare
            return _padded(pixels_HWC, height, width)
        return pixels_HWC[top : top + height, left : left + width]


def resized(picture: Image.Image, height: int, width: int, resample: Image.Resampling) -> np.ndarray:
    """Return the image in another size, [height, width, channels]."""
    if picture.size != (width, height):
        picture = picture.resize((width, height), resample=resample)
    return np.asarray(picture)


def _padded(pixels_HWC: np.ndarray, height: int, width: int) -> np.ndarray:
    return np.asarray(
        center_crop(pixels_HWC, (height, width), data_format="channels_last", input_data_format="channels_last")
    )


class WholeImages(PixelRecipe):
    """Images of one size, as CLIP, SigLIP and ViT take them. Halfway: [1, height, width, channels]."""

    def __init__(self, scale: Scale, resizing: Resizing) -> None:
        super().__init__(scale)
        self._resizing = resizing

    def halfway(self, picture: Image.Image) -> Processed:
        """Return the resized and cropped image."""
        pixels_HWC = np.array(self._resizing.apply(picture), order="C")
        return {PIXELS: torch.from_numpy(pixels_HWC)[None]}

    def _by_channel(self, pixels: Tensor) -> Tensor:
        return pixels.permute(0, 3, 1, 2)


class Patches(PixelRecipe):
    """Patches of images of any size, as Qwen-VL takes them. Halfway: [patches, channels, patch_size ** 2]."""

    def __init__(self, scale: Scale, settings: Mapping[str, Any]) -> None:
        super().__init__(scale)
        self._area = int(settings["size"]["shortest_edge"]), int(settings["size"]["longest_edge"])
        self._resample = Image.Resampling(int(settings["resample"]))
        self._patch, self._merge = int(settings["patch_size"]), int(settings["merge_size"])
        self._frames = int(settings["temporal_patch_size"])

    def halfway(self, picture: Image.Image) -> Processed:
        """Return the patches of one image, those of a merged token one after the other, and the grid."""
        rows, columns = self._grid(picture)
        patch, merge = self._patch, self._merge
        pixels = resized(picture, rows * patch, columns * patch, self._resample)
        blocks = pixels.reshape(rows // merge, merge, patch, columns // merge, merge, patch, pixels.shape[-1])
        # To [rows of tokens, columns of tokens, rows and columns inside of a token, channels, height, width].
        patches = np.ascontiguousarray(blocks.transpose(0, 3, 1, 4, 6, 2, 5))
        return {
            PIXELS: torch.from_numpy(patches.reshape(rows * columns, pixels.shape[-1], patch * patch)),
            GRID: torch.tensor([[1, rows, columns]]),
        }

    def _grid(self, picture: Image.Image) -> tuple[int, int]:
        """Return the rows and columns of patches: whole tokens, within the limits on the image area."""
        height, width, side = picture.height, picture.width, self._patch * self._merge
        smallest, largest = self._area
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side**2 > largest:
            shrink = math.sqrt(height * width / largest)
            rows = max(1, math.floor(height / shrink / side))
            columns = max(1, math.floor(width / shrink / side))
        elif rows * columns * side**2 < smallest:
            grow = math.sqrt(smallest / (height * width))
            rows, columns = math.ceil(height * grow / side), math.ceil(width * grow / side)
        return rows * self._merge, columns * self._merge

    def _by_channel(self, pixels: Tensor) -> Tensor:
        return pixels[:, :, None, :]

    def _arranged(self, numbers: Tensor) -> Tensor:
        # An image is a film of equal frames, next to each other in a patch.
        return numbers.expand(-1, -1, self._frames, -1).flatten(1)


class ByProcessor(PixelRecipe):
    """Images of one size whose first half the processor itself makes, without scale and mean."""

    def __init__(self, scale: Scale, processor: Any) -> None:
        super().__init__(scale)
        self._processor = processor

    def halfway(self, picture: Image.Image) -> Processed:
        """Return the resized image [1, channels, height, width]."""
        made = self._processor(images=[picture], return_tensors="pt", do_rescale=False, do_normalize=False)
        return {PIXELS: made[PIXELS]}

    def _by_channel(self, pixels: Tensor) -> Tensor:
        return pixels


def find_recipe(processor: Any) -> PixelRecipe | None:
    """Return the recipe that gives what the processor gives; None: there is none."""
    settings = processor.to_dict()
    for recipe in _candidates(processor, settings):
        if all(_agrees(recipe, processor, _noise(*size)) for size in _PROBES):
            return recipe
    return None


def _candidates(processor: Any, settings: Mapping[str, Any]) -> list[PixelRecipe]:
    found: list[PixelRecipe] = []
    size, crop = dict(settings.get("size") or {}), dict(settings.get("crop_size") or {})
    does_resize, does_crop = bool(settings.get("do_resize")), bool(settings.get("do_center_crop"))
    for scale in _scales(settings):
        if "temporal_patch_size" in settings:
            found.append(Patches(scale, settings))
        elif not does_resize or set(size) in ({"shortest_edge"}, {"height", "width"}):
            resizing = Resizing(
                size if does_resize else {},
                Image.Resampling(int(settings.get("resample") or Image.Resampling.NEAREST)),
                (crop["height"], crop["width"]) if does_crop else None,
            )
            found.append(WholeImages(scale, resizing))
    # The processors that resize with torchvision, and those with rules of their own.
    return found + [ByProcessor(scale, processor) for scale in _scales(settings) if "patch_size" not in settings]


def _scales(settings: Mapping[str, Any]) -> Sequence[Scale]:
    """Return the ways in which processors compute the same formula, with different rounding."""
    factor = float(settings["rescale_factor"]) if settings.get("do_rescale") else 1.0
    normalizes = bool(settings.get("do_normalize"))
    mean = np.asarray(settings["image_mean"] if normalizes else 0.0, np.float64)
    deviation = np.asarray(settings["image_std"] if normalizes else 1.0, np.float64)
    # The processors that use torchvision put the factor into mean and deviation, in float32.
    fused = (np.float32(one) * np.float32(1 / factor) for one in (mean, deviation))
    return Scale(1 / factor, mean, deviation), Scale(1.0, *fused)


def _agrees(recipe: PixelRecipe, processor: Any, picture: Image.Image) -> bool:
    """Return whether both give the same bits for a picture."""
    halfway = recipe.halfway(picture)
    if halfway[PIXELS].dtype != torch.uint8:
        return False
    found, wanted = recipe.finished(halfway), dict(processor(images=[picture], return_tensors="pt"))
    return found.keys() == wanted.keys() and all(
        wanted[name].dtype == found[name].dtype and torch.equal(wanted[name], found[name]) for name in wanted
    )


def _noise(width: int, height: int) -> Image.Image:
    """Return a picture with every value of a byte in every channel."""
    values = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    values.reshape(-1, 3)[:256] = np.arange(256, dtype=np.uint8)[:, None]
    return Image.fromarray(values)
