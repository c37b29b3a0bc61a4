"""Small encoded images for tests."""

import io

import numpy as np
from PIL import Image


def encoded(
    format_name="JPEG",
    size=(24, 16),
    seed=0,
    **options,
):
    """An image of random colours as a file of that format holds it."""
    pixels = np.random.default_rng(seed).integers(
        0, 255, (size[1], size[0], 3), dtype=np.uint8
    )
    return encode(Image.fromarray(pixels), format_name, **options)


def encode(image, format_name, **options):
    """That image as a file of that format holds it."""
    buffer = io.BytesIO()
    image.save(buffer, format_name, **options)
    return buffer.getvalue()


def write(path, format_name="JPEG", seed=0):
    """Write an image and return where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(format_name, seed=seed))
    return path
