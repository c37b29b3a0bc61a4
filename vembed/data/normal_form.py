"""Normal form of contents: what counts as the same text or image where training and validation are compared."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from pathlib import Path

from vembed.data.examples import ImageRef, Item

_WORD = re.compile(r"\w+")


def normal_text(text: str) -> str:
    """Return a text without differences of case, width, spaces and punctuation."""
    plain = text if text.isascii() else unicodedata.normalize("NFKC", text)
    return " ".join(_WORD.findall(plain.casefold())) or " ".join(plain.split())


def normal_key(item: Item) -> int:
    """Return a 63-bit number that is equal for equal normalised texts and equal image files. Reads image files."""
    digest = hashlib.blake2b(digest_size=8)
    if item.text is not None:
        digest.update(b"t" + normal_text(item.text).encode("utf-8", "surrogatepass"))
    for image in item.images:
        digest.update(b"\x00i" + _image_digest(image))
    return int.from_bytes(digest.digest(), "little") >> 1


def _image_digest(image: ImageRef) -> bytes:
    """Return a hash of the file's bytes; of the path where there is no file to read."""
    if image.data is not None:
        return hashlib.blake2b(image.data, digest_size=16).digest()
    path = Path(str(image.path))
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).digest()
    except OSError:
        return image.identity()
