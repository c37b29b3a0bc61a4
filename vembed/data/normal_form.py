"""Normal form of contents: what counts as the same text or image where training and validation are compared."""

from __future__ import annotations

import functools
import hashlib
import re
import unicodedata
from pathlib import Path

from vembed.data.examples import ImageRef, Item

_ASCII_WORD = re.compile(r"\w+", re.ASCII)
_LAST_MARK = 0xFFFF
"""Marks of rare scripts beyond it would make the regular expressions many times slower."""


def normal_text(text: str) -> str:
    """Return a text without differences of case, width, spaces and punctuation."""
    plain = text if text.isascii() else unicodedata.normalize("NFKC", text)
    word = _ASCII_WORD if text.isascii() else _word()
    return " ".join(word.findall(plain.casefold())) or " ".join(plain.split())


@functools.cache
def word_marks() -> str:
    """Return the characters that belong to the letter before them, such as the vowel signs of Hindi and Thai, for a set
    of characters in a regular expression. `\\w` has none of them.

    Variation selectors, which choose the look of an emoji, are not among them.
    """
    marks = [
        code
        for code in range(0x300, _LAST_MARK + 1)
        if unicodedata.category(chr(code)) in ("Mn", "Mc")
    ]
    return "".join(
        re.escape(chr(code)) for code in marks if not 0xFE00 <= code <= 0xFE0F
    )


@functools.cache
def _word() -> re.Pattern[str]:
    return re.compile(rf"\w[\w{word_marks()}]*")


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
