"""Images: resolution of references in records, a check before training, and decoding."""

import functools
import http.client
import io
import re
import stat
import struct
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from PIL import ExifTags, Image, UnidentifiedImageError

from vembed.data.examples import ImageRef
from vembed.errors import UserError, printable

MAX_PIXELS = 89_478_485
"""Larger images are refused, since a small file may decompress to gigabytes. About 9,400 x 9,400."""
MAX_IMAGE_BYTES = 256 * 2**20
"""Larger image files are refused."""
URL_SECONDS = 30.0
_SUFFIXES = (
    ".jpg .jpeg .jpe .jfif .mpo .png .apng .webp .gif .bmp .tif .tiff .avif "
    ".ppm .pgm .pbm .pnm .jp2 .j2k"
)
IMAGE_SUFFIXES = frozenset(_SUFFIXES.split())
"""Endings of files that are taken for images in a folder."""
IMAGE_PATH = re.compile(
    rf"\S.*({'|'.join(map(re.escape, sorted(IMAGE_SUFFIXES)))})", re.IGNORECASE
)
"""Texts that are probably paths of images."""
_FORMATS = "JPEG MPO PNG WEBP GIF BMP TIFF PPM JPEG2000 AVIF"
# Exceptions that Pillow's readers raise on broken files.
_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    OverflowError,
    MemoryError,
    struct.error,
    zlib.error,
)
# EXIF orientation values.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = [_TURNS[number] for number in (5, 6, 7, 8)]


def image_problem(image: ImageRef) -> str | None:
    """Return why an image cannot be decoded; None if it can.

    The pixels are decoded, as in training: damage in the middle of a file shows only then. Addresses are not fetched.
    """
    if image.is_address:
        return None
    try:
        with _opened(image) as picture:
            picture.load()
    except UserError as error:
        return str(error)
    return None


def load_image(image: ImageRef) -> Image.Image:
    """Return the image upright and in RGB; the first frame of an animation. Raise UserError if it is broken.

    An address is fetched; without `allow_image_urls` no ImageRef holds one.
    """
    with _opened(image) as picture:
        turn = _turn(picture)
        picture.load()
        upright = picture if turn is None else picture.transpose(turn)
    if upright.mode == "RGB":  # `convert` would copy it
        return upright
    if upright.mode.startswith("I"):
        # 16 bits: `convert` would clip everything above 255.
        upright = upright.convert("I").point(lambda value: value / 257).convert("L")
    if upright.mode == "P" and "transparency" in upright.info:
        upright = upright.convert("RGBA")
    return upright.convert("RGB")


def image_size(image: ImageRef) -> tuple[int, int]:
    """Return width and height of the image that `load_image` returns, from the file's header only."""
    with _opened(image) as picture:
        width, height = picture.size
        return (height, width) if _turn(picture) in _SIDEWAYS else (width, height)


@contextmanager
def _opened(image: ImageRef) -> Iterator[Image.Image]:
    """Open an image, if it has a size that is read. Errors, also Pillow's on broken files, become a UserError with the
    image's name."""
    file: BinaryIO
    try:
        if image.path is None:
            file = io.BytesIO(image.data or b"")
        elif image.is_address:
            file = io.BytesIO(_fetch(image.path))
        else:
            # Opening a pipe would block forever.
            if not stat.S_ISREG(Path(image.path).stat().st_mode):
                raise UserError("is not a regular file")
            file = Path(image.path).open("rb")  # noqa: SIM115 - closed below
        with file:
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            if size == 0:
                raise UserError("is empty")
            if size > MAX_IMAGE_BYTES:
                raise UserError(
                    f"has {size:,d} bytes, and at most {MAX_IMAGE_BYTES:,d} are read: scale it down"
                )
            with Image.open(file, formats=_formats()) as picture:
                if picture.width * picture.height > MAX_PIXELS:
                    raise Image.DecompressionBombError
                kind = None
                if picture.mode == "F":
                    kind = "floating-point"
                elif picture.mode == "I" and picture.format == "TIFF":
                    kind = "signed or 32-bit"
                if kind is not None:
                    raise UserError(
                        f"has {kind} pixels, whose range is unknown: convert it to 8 bits"
                    )
                yield picture
    except UserError as error:
        raise UserError(f"{image_name(image)} {error}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UserError(
            f"{image_name(image)} has more than {MAX_PIXELS:,d} pixels: scale it down"
        ) from error
    except UnidentifiedImageError as error:
        raise UserError(
            f"{image_name(image)} is not an image, or of an unknown format (known: {', '.join(_formats())})"
        ) from error
    except FileNotFoundError as error:
        raise UserError(f"{image_name(image)} does not exist") from error
    except _BROKEN as error:
        reason = str(error) or type(error).__name__
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        raise UserError(
            f"{image_name(image)} is broken or cannot be read: {reason}"
        ) from error


def image_name(image: ImageRef) -> str:
    """Return what messages call an image."""
    name = f"of {len(image.data or b''):,d} bytes"
    if image.path is not None:
        name = printable(image.path, 300)
    return f"image {name} ({image.where})" if image.where else f"image {name}"


@functools.cache
def _formats() -> tuple[str, ...]:
    """Return the available raster formats. Pillow would start Ghostscript for EPS."""
    Image.init()
    return tuple(name for name in _FORMATS.split() if name in Image.OPEN)


def _turn(picture: Image.Image) -> Image.Transpose | None:
    """Return the transpose that turns the image upright, from metadata before the pixels.

    Metadata after the pixels is ignored, so that `image_size` and `load_image` agree without decoding.
    """
    if picture.format == "TIFF":
        return None  # Pillow applies the orientation itself
    if picture.format == "PNG" and "exif" not in picture.info:
        return None  # `getexif` would decode the pixels to read metadata after them
    try:
        orientation = picture.getexif().get(ExifTags.Base.Orientation)
    except _BROKEN:  # damaged metadata does not make the image invalid
        return None
    return _TURNS.get(orientation) if isinstance(orientation, int) else None


def _fetch(address: str) -> bytes:
    request = urllib.request.Request(address, headers={"User-Agent": "vembed"})
    try:
        with urllib.request.urlopen(request, timeout=URL_SECONDS) as answer:
            data: bytes = answer.read(MAX_IMAGE_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"cannot be fetched: {error}") from error
    return data
