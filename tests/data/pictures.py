"""Small encoded images for tests."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def encoded(
    format_name: str = "JPEG",
    size: tuple[int, int] = (24, 16),
    seed: int = 0,
    **options: Any,
) -> bytes:
    """An image of random colours as a file of that format holds it."""
    pixels = np.random.default_rng(seed).integers(
        0, 255, (size[1], size[0], 3), dtype=np.uint8
    )
    return encode(Image.fromarray(pixels), format_name, **options)


def encode(image: Image.Image, format_name: str, **options: Any) -> bytes:
    """That image as a file of that format holds it."""
    buffer = io.BytesIO()
    image.save(buffer, format_name, **options)
    return buffer.getvalue()


def write(path: Path, format_name: str = "JPEG", seed: int = 0) -> Path:
    """Write an image and return where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(format_name, seed=seed))
    return path
