"""PixelRecipe: an image processor in two halves, bytes made on the host's cores and numbers made on the device.

The processors of Transformers convert every image to float32 on the host, in Python that holds the interpreter's lock
for most of the time. A recipe does the same with the same result: resizing and cropping leave 8 bits per value, which
are kept and moved, and scale and mean are applied to whole micro-batches where the model computes. A recipe is used
only if it reproduces the processor bit by bit on test images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vembed.data.images.picture_bytes import (
    PIXELS,
    FirstHalf,
    Patching,
    ProcessorCode,
    Resizing,
)

_PROBES = ((64, 48), (48, 64), (211, 90))
"""Width and height of the test images: to be enlarged, to be reduced, and to be cropped."""
_AT_ONCE = 2**17
"""Numbers that are computed together on a CPU: they fit in its cache."""

Processed = dict[str, Tensor]


class Scale:
    """The elementwise half of a processor: (value / divisor - mean) / deviation, in float32."""

    def __init__(self, divisor: Any, mean: Any, deviation: Any) -> None:
        """One number or one of each channel. They stay arrays, and tensors: PyTorch multiplies by the inverse of a
        plain number, which rounds differently."""
        self._terms = [
            np.asarray(term, np.float32).reshape(1, -1, 1, 1)
            for term in (divisor, mean, deviation)
        ]
        self._on_device: dict[torch.device, list[Tensor]] = {}

    def apply(self, values: Tensor) -> Tensor:
        """Return the numbers of uint8 values [n, channels, a, b] as contiguous float32."""
        device = values.device
        if device.type != "cpu":
            if device not in self._on_device:
                # Copied once, since every copy waits for the device.
                self._on_device[device] = [
                    torch.from_numpy(term).to(device) for term in self._terms
                ]
            of_divisor, of_mean, of_deviation = self._on_device[device]
            floats = values.to(torch.float32, memory_format=torch.contiguous_format)
            return floats.div_(of_divisor).sub_(of_mean).div_(of_deviation)
        # NumPy computes in the calling thread. PyTorch would wake a team of threads in each thread that collates.
        divisor, mean, deviation = self._terms
        numbers = np.empty(values.shape, np.float32)
        step = max(_AT_ONCE // max(values[0].numel(), 1), 1)
        for start in range(0, len(values), step):
            chunk = numbers[start : start + step]
            np.copyto(chunk, values[start : start + step].numpy())
            if not (divisor == 1).all():
                chunk /= divisor
            chunk -= mean
            chunk /= deviation
        return torch.from_numpy(numbers)


@dataclass(frozen=True)
class PixelRecipe:
    """Both halves of an image processor. The first makes [1, channels, height, width] of an image, or, of one of any
    size as Qwen-VL takes it, [patches, channels, n]."""

    scale: Scale
    first: FirstHalf
    frames: int | None = None
    """Where patches are made: an image is a film of so many equal frames, next to each other in a patch."""

    def halfway(self, picture: Image.Image) -> Processed:
        """Return the pixels of one RGB image as uint8, and its other tensors."""
        return {
            name: torch.from_numpy(array) for name, array in self.first(picture).items()
        }

    def finished(self, halfway: Mapping[str, Tensor]) -> Processed:
        """Return what the processor itself would have returned, on the device of `halfway`, for one or more images."""
        pixels = halfway[PIXELS]
        if self.frames is None:
            scaled = self.scale.apply(pixels)
        else:
            # [patches, channels, n] to [patches, channels * frames * n]
            scaled = self.scale.apply(pixels[:, :, None, :])
            scaled = scaled.expand(-1, -1, self.frames, -1).flatten(1)
        return {**halfway, PIXELS: scaled}


def find_recipe(processor: Any) -> PixelRecipe | None:
    """Return the recipe that gives what the processor gives; None: there is none."""
    settings = processor.to_dict()
    for recipe in _candidates(processor, settings):
        if all(_agrees(recipe, processor, _noise(*size)) for size in _PROBES):
            return recipe
    return None


def _candidates(processor: Any, settings: Mapping[str, Any]) -> list[PixelRecipe]:
    recipes: list[PixelRecipe] = []
    size = dict(settings.get("size") or {})
    resample = Image.Resampling(
        int(settings.get("resample") or Image.Resampling.NEAREST)
    )
    crop = None
    if settings.get("do_center_crop"):
        crop_size = dict(settings.get("crop_size") or {})
        crop = (crop_size["height"], crop_size["width"])
    if not settings.get("do_resize"):
        size = {}
    scales = _scales(settings)
    if "temporal_patch_size" in settings:
        size = dict(settings["size"])
        patching = Patching(
            (int(size["shortest_edge"]), int(size["longest_edge"])),
            resample,
            int(settings["patch_size"]),
            int(settings["merge_size"]),
        )
        frames = int(settings["temporal_patch_size"])
        recipes += [PixelRecipe(scale, patching, frames) for scale in scales]
    elif set(size) in (set(), {"shortest_edge"}, {"height", "width"}):
        resizing = Resizing(size, resample, crop)
        recipes += [PixelRecipe(scale, resizing) for scale in scales]
    # The processors that resize with torchvision, and those with rules of their own.
    if "patch_size" not in settings:
        code = ProcessorCode(processor, {"do_rescale": False, "do_normalize": False})
        recipes += [PixelRecipe(scale, code) for scale in scales]
    return recipes


def _scales(settings: Mapping[str, Any]) -> Sequence[Scale]:
    """Return the ways in which processors compute the same formula, with different rounding."""
    factor = float(settings["rescale_factor"]) if settings.get("do_rescale") else 1.0
    normalizes = bool(settings.get("do_normalize"))
    mean = np.asarray(settings["image_mean"] if normalizes else 0.0, np.float64)
    deviation = np.asarray(settings["image_std"] if normalizes else 1.0, np.float64)
    # The processors that use torchvision put the factor into mean and deviation, in float32.
    fused = (
        np.float32(values) * np.float32(1 / factor) for values in (mean, deviation)
    )
    return Scale(1 / factor, mean, deviation), Scale(1.0, *fused)


def _agrees(recipe: PixelRecipe, processor: Any, picture: Image.Image) -> bool:
    """Return whether both give the same bits for a picture."""
    halfway = recipe.halfway(picture)
    if halfway[PIXELS].dtype != torch.uint8:
        return False
    tensors = recipe.finished(halfway)
    wanted = dict(processor(images=[picture], return_tensors="pt"))
    return tensors.keys() == wanted.keys() and all(
        wanted[name].dtype == tensors[name].dtype
        and torch.equal(wanted[name], tensors[name])
        for name in wanted
    )


def _noise(width: int, height: int) -> Image.Image:
    """Return a picture with every value of a byte in every channel."""
    values = np.random.default_rng(width).integers(
        0, 256, (height, width, 3), dtype=np.uint8
    )
    values.reshape(-1, 3)[:256] = np.arange(256, dtype=np.uint8)[:, None]
    return Image.fromarray(values)
