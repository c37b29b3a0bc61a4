"""Thumbnails of images inside a report: small JPEG files as data addresses, so that the page stays one file."""

from __future__ import annotations

import base64
import io
from functools import lru_cache

from vembed.data.examples import ImageRef
from vembed.data.images.files import load_image
from vembed.errors import UserError

EDGE_PIXELS = 96
"""Of the longer edge; shown at half the size, so that it is sharp on dense screens."""
JPEG_QUALITY = 70


@lru_cache(maxsize=256)
def thumbnail(path: str) -> str | None:
    """Return the data address of an image file, or None if it cannot be read. Addresses are not fetched."""
    return None if "://" in path else thumbnail_of(ImageRef(path=path))


def thumbnail_of(image: ImageRef) -> str | None:
    """Return the data address of an image that is no address, or None if it cannot be read."""
    try:
        picture = load_image(image)
    except UserError:
        # The report of a run whose images have moved still shows their names.
        return None
    picture.thumbnail((EDGE_PIXELS, EDGE_PIXELS))
    target = io.BytesIO()
    picture.save(target, "JPEG", quality=JPEG_QUALITY)
    content = base64.b64encode(target.getvalue()).decode("ascii")
    return f"data:image/jpeg;base64,{content}"
