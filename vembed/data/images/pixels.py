"""Pixels: images processed by the model's own image processor, decoded on demand and cached."""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vembed.cores import num_cores
from vembed.data.examples import ImageRef
from vembed.data.images.decoders import Decoders, Decoding
from vembed.data.images.files import image_name, load_image
from vembed.data.images.picture_bytes import (
    PIXELS,
    Arrays,
    FirstHalf,
    ProcessorCode,
)
from vembed.data.images.pixel_recipe import Processed, find_recipe
from vembed.errors import UserError
from vembed.models.families.backbones import read_config
from vembed.models.families.description import ModelDescription
from vembed.models.processors import load_image_processor

CONVOLUTION_STRIDE = 32
"""Total stride in pixels of a convolutional network whose config has no patch size."""


def blank_image(width: int = 32, height: int = 32) -> ImageRef:
    """Return a small grey image, for ranks without inputs left."""
    encoded = io.BytesIO()
    Image.new("RGB", (width, height), (128, 128, 128)).save(encoded, "PNG")
    return ImageRef(data=encoded.getvalue())


class Pixels:
    """Processed images with an LRU cache of `cache_bytes`. Gradient Cache runs every micro-batch twice; the second pass
    reads cached images, which are kept as bytes."""

    def __init__(
        self,
        description: ModelDescription,
        *,
        cache_bytes: int,
        decoders: int | None = None,
    ) -> None:
        """`decoders`: images that are decoded at once; None: one per core of this process."""
        self._processor = load_image_processor(description)
        self._recipe = find_recipe(self._processor)
        config = read_config(
            Path(description.image_source or description.source),
            trust_remote_code=description.trust_remote_code,
        ).to_dict()
        vision = config.get("vision_config", config)
        # A network that halves its resolution at each stage (ConvNeXt) has the patches of its last stage.
        num_halvings = len(vision.get("depths") or [0]) - 1
        self._patch_size = CONVOLUTION_STRIDE
        if vision.get("patch_size") is not None:
            self._patch_size = int(vision["patch_size"]) * 2**num_halvings
        self._first: FirstHalf = ProcessorCode(self._processor, {})
        if self._recipe is not None:
            self._first = self._recipe.first
        self._kept: OrderedDict[ImageRef, Arrays] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._num_bytes = 0
        """Of all images that are kept."""
        self._num_decoders = decoders or num_cores()
        self.decoders = Decoders(self._first, self._num_decoders)
        self._decoding: dict[ImageRef, Decoding] = {}
        self._bytes_of_one = 1
        """Of the last image that was made."""
        self._lock = threading.Lock()

    @property
    def merge_size(self) -> int:
        """Patches along each side that a vision-language model merges into one token."""
        return int(self._processor.merge_size)

    def stack(self, images: Sequence[ImageRef]) -> Processed:
        """Return the images' tensors, concatenated along the first dimension. `finished` gives what the model takes."""
        made = self._all(images)
        # By NumPy, in the calling thread: PyTorch would wake a team of threads beside those that decode.
        return {
            name: torch.from_numpy(np.concatenate([arrays[name] for arrays in made]))
            for name in made[0]
        }

    def finished(self, stacked: Processed) -> Processed:
        """Return the stacked tensors as the model takes them: bytes become numbers, on the device where they are."""
        if self._recipe is None or stacked[PIXELS].dtype != torch.uint8:
            return stacked
        return self._recipe.finished(stacked)

    def decode_ahead(self, images: Sequence[ImageRef]) -> None:
        """Begin to decode images. No more than half of the cache is decoded ahead: what is not read yet would push out
        what is."""
        with self._lock:
            wanted = []
            for image in dict.fromkeys(images):
                if image not in self._kept and image not in self._decoding:
                    wanted.append(image)
            fits = self._cache_bytes // (2 * self._bytes_of_one)
            most = max(fits, 2 * self._num_decoders) - len(self._decoding)
            chosen = wanted[: max(most, 0)]
            begun = self.decoders.start(chosen)
            self._decoding.update(zip(chosen, begun, strict=True))

    def forget(self) -> None:
        """Empty the cache."""
        with self._lock:
            self._kept.clear()
            self._num_bytes = 0

    @cached_property
    def num_patches(self) -> int:
        """Positions that an image tower computes for one image of any size."""
        wide, high = (self.alone(blank_image(*size)) for size in ((64, 48), (48, 64)))
        shape = wide[PIXELS].shape
        if shape != high[PIXELS].shape:
            raise UserError(
                "the model's image processor gives images of different sizes, and vembed needs one size: set crop_size "
                "and do_center_crop in preprocessor_config.json"
            )
        if "spatial_shapes" in wide:  # already patches, padded to a fixed number
            return int(shape[1])
        # One class token and the patch grid.
        return 1 + (shape[-2] // self._patch_size) * (shape[-1] // self._patch_size)

    def num_vision_tokens(self, image: ImageRef, width: int, height: int) -> int:
        """Return the number of tokens of an image of this size in a vision-language model."""
        try:
            patches = self._processor.get_number_of_image_patches(height, width)
        except ValueError as error:
            raise UserError(
                f"{image_name(image)}, {width} x {height} pixels, cannot be used: {error}"
            ) from error
        return int(patches) // self.merge_size**2

    def alone(self, image: ImageRef) -> Processed:
        """Return the tensors of one image as the model takes them, decoded in the calling thread."""
        return self.finished(
            {
                name: torch.from_numpy(array)
                for name, array in self._first(load_image(image)).items()
            }
        )

    def _all(self, images: Sequence[ImageRef]) -> list[Arrays]:
        """Return what was made of each image, and keep it."""
        self.decode_ahead(images)
        with self._lock:
            entries = [
                self._kept.get(image) or self._decoding.get(image) for image in images
            ]
        made: dict[ImageRef, Arrays] = {}
        image = None
        try:
            for image, entry in zip(images, entries, strict=True):
                # Not begun where more is being decoded than the cache holds, or where it was pushed out just now.
                begun = self.decoders.start([image])[0] if entry is None else entry
                made[image] = begun.wait() if isinstance(begun, Decoding) else begun
        finally:
            with self._lock:
                for done in (*made, image):
                    self._decoding.pop(done, None)  # type: ignore[arg-type]
                for done, arrays in made.items():
                    if done not in self._kept:
                        self._bytes_of_one = max(_size(arrays), 1)
                        self._num_bytes += self._bytes_of_one
                    self._kept[done] = arrays
                    self._kept.move_to_end(done)
                while self._num_bytes > self._cache_bytes:
                    self._num_bytes -= _size(self._kept.popitem(last=False)[1])
        return [made[image] for image in images]


def _size(arrays: Arrays) -> int:
    return sum(array.nbytes for array in arrays.values())
