"""Pixels: images processed by the model's own image processor, decoded on demand and cached.

A processor is taken apart into two halves: bytes made on the host's cores, and numbers made on the device. The
processors of Transformers convert every image to float32 on the host, in Python that holds the interpreter's lock for
most of the time. A recipe does the same with the same result: resizing and cropping leave 8 bits per value, which are
kept and moved, and scale and mean are applied to whole micro-batches where the model computes. A recipe is used only if
it reproduces the processor bit by bit on test images.
"""

import io
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vembed.data.examples import ImageRef
from vembed.data.images.decoders import (
    PIXELS_KEY,
    Arrays,
    Decoders,
    Decoding,
    FirstHalf,
    Patching,
    ProcessorCode,
    Resizing,
)
from vembed.data.images.files import image_name, image_size, load_image
from vembed.errors import UserError
from vembed.models.families.description import ModelDescription
from vembed.models.processors import load_image_processor
from vembed.parallel.environment import num_cores

CONVOLUTION_STRIDE = 32
"""Total stride in pixels of a convolutional network whose config has no patch size."""
_PROBES = ((64, 48), (48, 64), (211, 90))
"""Width and height of the test images: to be enlarged, to be reduced, and to be cropped."""

Processed = dict[str, Tensor]


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
        decoders: int | None,
    ) -> None:
        """`decoders`: images that are decoded at once; None: one per core of this process."""
        self._processor = load_image_processor(description)
        self._recipe = find_recipe(self._processor)
        config = description.read_config(description.image_folder).to_dict()
        vision = config.get("vision_config", config)
        # A network that halves its resolution at each stage (ConvNeXt) has the patches of its last stage.
        num_halvings = len(vision.get("depths") or [0]) - 1
        self._patch_size = CONVOLUTION_STRIDE
        if vision.get("patch_size") is not None:
            self._patch_size = int(vision["patch_size"]) * 2**num_halvings
        self._kept: OrderedDict[ImageRef, Arrays] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._num_bytes = 0
        """Of all images that are kept."""
        self._num_decoders = decoders or num_cores()
        self.decoders = Decoders(self._recipe.first, self._num_decoders)
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
        self.decode_ahead(images)
        with self._lock:
            entries = [
                self._kept.get(image) or self._decoding.get(image) for image in images
            ]
        decoded = {}
        image = None
        try:
            for image, entry in zip(images, entries, strict=True):
                # Not begun where more is being decoded than the cache holds, or where it was pushed out just now.
                begun = self.decoders.start([image])[0] if entry is None else entry
                decoded[image] = begun.wait() if isinstance(begun, Decoding) else begun
        finally:
            with self._lock:
                for done in (*decoded, image):
                    self._decoding.pop(done, None)  # type: ignore[arg-type]
                for done, arrays in decoded.items():
                    if done not in self._kept:
                        self._bytes_of_one = max(_size(arrays), 1)
                        self._num_bytes += self._bytes_of_one
                    self._kept[done] = arrays
                    self._kept.move_to_end(done)
                while self._num_bytes > self._cache_bytes:
                    self._num_bytes -= _size(self._kept.popitem(last=False)[1])
        ordered = [decoded[image] for image in images]
        # By NumPy, in the calling thread: PyTorch would wake a team of threads beside those that decode.
        stacked = {}
        for name in ordered[0]:
            joined = np.concatenate([arrays[name] for arrays in ordered])
            stacked[name] = torch.from_numpy(joined)
        return stacked

    def finished(self, stacked: Processed) -> Processed:
        """Return the stacked tensors as the model takes them: bytes become numbers, on the device where they are."""
        return self._recipe.finished(stacked)

    def decode_ahead(self, images: Sequence[ImageRef]) -> None:
        """Begin to decode images. No more than half of the cache is decoded ahead: what is not read yet would push out
        what is."""
        with self._lock:
            missing = [
                image
                for image in dict.fromkeys(images)
                if image not in self._kept and image not in self._decoding
            ]
            fits = self._cache_bytes // (2 * self._bytes_of_one)
            most = max(fits, 2 * self._num_decoders) - len(self._decoding)
            chosen = missing[: max(most, 0)]
            begun = self.decoders.start(chosen)
            self._decoding.update(zip(chosen, begun, strict=True))

    @cached_property
    def num_patches(self) -> int:
        """Positions that an image tower computes for one image of any size."""
        wide = self.alone(blank_image(64, 48))
        high = self.alone(blank_image(48, 64))
        shape = wide[PIXELS_KEY].shape
        if shape != high[PIXELS_KEY].shape:
            raise UserError(
                "the model's image processor gives images of different sizes, and vembed needs one size: set crop_size "
                "and do_center_crop in preprocessor_config.json"
            )
        if "spatial_shapes" in wide:  # already patches, padded to a fixed number
            return int(shape[1])
        # One class token and the patch grid.
        rows = shape[-2] // self._patch_size
        columns = shape[-1] // self._patch_size
        return 1 + rows * columns

    def num_vision_tokens(self, image: ImageRef) -> int:
        """Return the number of tokens of an image in a vision-language model. Reads only its header."""
        width, height = image_size(image)
        try:
            patches = self._processor.get_number_of_image_patches(height, width)
        except ValueError as error:
            raise UserError(
                f"{image_name(image)}, {width} x {height} pixels, cannot be used: {error}"
            ) from error
        return int(patches) // self.merge_size**2

    def alone(self, image: ImageRef) -> Processed:
        """Return the tensors of one image as the model takes them, decoded in the calling thread."""
        return self.finished(self._recipe.halfway(load_image(image)))


def _size(arrays: Arrays) -> int:
    return sum(array.nbytes for array in arrays.values())


# ---- recipes -------------------------------------------------------------------------------------------------------


class Scale:
    """The elementwise half of a processor: (value / divisor - mean) / deviation, in float32."""

    def __init__(
        self,
        divisor: Any,
        mean: Any,
        deviation: Any,
    ) -> None:
        """One number or one of each channel. They become tensors: PyTorch multiplies by the inverse of a plain number,
        which rounds differently."""
        terms = []
        for term in (divisor, mean, deviation):
            values = np.asarray(term, np.float32).reshape(1, -1, 1, 1)
            terms.append(torch.from_numpy(values))
        self._on_device = {torch.device("cpu"): terms}

    def apply(self, values: Tensor) -> Tensor:
        """Return the numbers of uint8 values [n, channels, a, b] as contiguous float32."""
        device = values.device
        if device not in self._on_device:
            # Copied once, since every copy waits for the device.
            terms = self._on_device[torch.device("cpu")]
            self._on_device[device] = [term.to(device) for term in terms]
        divisor, mean, deviation = self._on_device[device]
        floats = values.to(torch.float32, memory_format=torch.contiguous_format)
        return floats.div_(divisor).sub_(mean).div_(deviation)


@dataclass(frozen=True)
class PixelRecipe:
    """Both halves of an image processor. The first makes [1, channels, height, width] of an image, or, of one of any
    size as Qwen-VL takes it, [patches, channels, n]."""

    first: FirstHalf
    scale: Scale | None
    """None: the first half makes numbers, and there is no second one."""
    frames: int | None = None
    """Where patches are made: an image is a film of so many equal frames, next to each other in a patch."""

    def halfway(self, picture: Image.Image) -> Processed:
        """Return the pixels of one RGB image as uint8, and its other tensors."""
        arrays = self.first(picture)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def finished(self, halfway: Mapping[str, Tensor]) -> Processed:
        """Return what the processor itself would have returned, on the device of `halfway`, for one or more images."""
        if self.scale is None:
            return dict(halfway)
        pixels = halfway[PIXELS_KEY]
        if self.frames is None:
            scaled = self.scale.apply(pixels)
        else:
            # [patches, channels, n] to [patches, channels * frames * n]
            scaled = self.scale.apply(pixels[:, :, None, :])
            scaled = scaled.expand(-1, -1, self.frames, -1).flatten(1)
        return {**halfway, PIXELS_KEY: scaled}


def find_recipe(processor: Any) -> PixelRecipe:
    """Return the recipe that gives what the processor gives: its own code where it cannot be taken apart."""
    settings = processor.to_dict()
    pictures = []
    for width, height in _PROBES:
        draw = np.random.default_rng(width)
        values = draw.integers(0, 256, (height, width, 3), np.uint8)
        # Every value of a byte in every channel.
        values.reshape(-1, 3)[:256] = np.arange(256, dtype=np.uint8)[:, None]
        pictures.append(Image.fromarray(values))
    for first, frames in _first_halves(processor, settings):
        for scale in _scales(settings):
            recipe = PixelRecipe(first, scale, frames)
            if all(_agrees(recipe, processor, picture) for picture in pictures):
                return recipe
    return PixelRecipe(ProcessorCode(processor, {}), None)


def _first_halves(
    processor: Any, settings: Mapping[str, Any]
) -> Iterator[tuple[FirstHalf, int | None]]:
    """Yield what may be the processor's first half, with the number of frames where it makes patches."""
    size = dict(settings.get("size") or {})
    resample = Image.Resampling(
        int(settings.get("resample") or Image.Resampling.NEAREST)
    )
    if "temporal_patch_size" in settings:
        area = (int(size["shortest_edge"]), int(size["longest_edge"]))
        patch_size = int(settings["patch_size"])
        merge_size = int(settings["merge_size"])
        frames = int(settings["temporal_patch_size"])
        yield Patching(area, resample, patch_size, merge_size), frames
        return
    if not settings.get("do_resize"):
        size = {}
    crop = None
    if settings.get("do_center_crop"):
        crop_size = dict(settings.get("crop_size") or {})
        crop = (crop_size["height"], crop_size["width"])
    if set(size) in (set(), {"shortest_edge"}, {"height", "width"}):
        yield Resizing(size, resample, crop), None
    # The processors that resize with torchvision, and those with rules of their own.
    if "patch_size" not in settings:
        options = {"do_rescale": False, "do_normalize": False}
        yield ProcessorCode(processor, options), None


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


def _agrees(
    recipe: PixelRecipe,
    processor: Any,
    picture: Image.Image,
) -> bool:
    """Return whether both give the same bits for a picture."""
    halfway = recipe.halfway(picture)
    if halfway[PIXELS_KEY].dtype != torch.uint8:
        return False
    tensors = recipe.finished(halfway)
    expected = dict(processor(images=[picture], return_tensors="pt"))
    if tensors.keys() != expected.keys():
        return False
    return all(
        tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name])
        for name, tensor in tensors.items()
    )
