"""Contents as identity: one number per document or query, the same for texts that differ in case and spaces alone."""

from __future__ import annotations

import functools
import hashlib
import re
import unicodedata

import numpy as np

from vembed.data.examples import Item
from vembed.data.normal_form import word_marks

NOT_FOUND = -1


def normalised(text: str) -> str:
    """The text without differences of case, width and spaces."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return " ".join(text.casefold().split())


def content_key(item: Item) -> int:
    """A 63-bit number that is the same for items with the same normalised text and the same images."""
    digest = hashlib.blake2b(digest_size=8)
    if item.text is not None:
        digest.update(b"t" + normalised(item.text).encode("utf-8", "surrogatepass"))
    for image in item.images:
        digest.update(b"\x00i" + image.identity())
    return int.from_bytes(digest.digest(), "little") >> 1


def id_key(identity: object) -> int:
    """A 63-bit number for an id; 7 and "7" are the same id."""
    return (
        int.from_bytes(
            hashlib.blake2b(str(identity).encode(), digest_size=8).digest(), "little"
        )
        >> 1
    )


def array_identity(values: np.ndarray) -> list[int]:
    """Return two numbers that tell an array from others: its length, and a sum that changes where values are changed or
    exchanged."""
    # The position goes into the sum: an XOR of the numbers alone would not see two exchanged.
    return [
        len(values),
        int(np.bitwise_xor.reduce(values * 31 + np.arange(len(values)), initial=0)),
    ]


class KeyIndex:
    """Positions of many keys; of equal keys the first counts."""

    def __init__(self, keys: np.ndarray) -> None:
        self._keys, self._positions = np.unique(keys, return_index=True)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """The position of each key, NOT_FOUND where there is none."""
        if not len(self._keys):
            return np.full(len(keys), NOT_FOUND, np.int64)
        places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[places] == keys, self._positions[places], NOT_FOUND)


# Thai and Lao, Myanmar, Khmer, Hiragana and Katakana, Chinese characters with extension A, Hangul syllables.
_LETTERS_ALONE = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
)


def words(text: str) -> list[str]:
    """The words of a text, normalised; in scripts without spaces every letter is one, with its marks."""
    return _word().findall(normalised(text))


@functools.cache
def _word() -> re.Pattern[str]:
    letter = rf"[^\W{_LETTERS_ALONE}]"
    return re.compile(
        rf"{letter}+(?:[{word_marks()}]+{letter}*)*|(?=\w)[{_LETTERS_ALONE}][{word_marks()}]*"
    )
