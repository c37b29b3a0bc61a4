"""Item and Example: what a record means, in text, images or both. Nothing here reads a file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from vembed.errors import UserError

Kind = Literal["query", "document"]


@dataclass(frozen=True, slots=True)
class ImageRef:
    """Where one image is: a path (already resolved against image_root), an address, or its encoded bytes."""

    path: str | None = None
    data: bytes | None = None

    def identity(self) -> bytes:
        """Bytes that are equal for equal images, without decoding them."""
        return self.data if self.data is not None else b"path:" + str(self.path).encode()


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that is embedded: a text, one or several images, or both."""

    text: str | None = None
    images: tuple[ImageRef, ...] = ()

    def key(self) -> int:
        """A 63-bit number that is the same for equal content, on every process and in every run."""
        digest = hashlib.blake2b(digest_size=8)
        if self.text is not None:
            digest.update(b"t" + self.text.encode("utf-8", "surrogatepass"))
        for image in self.images:
            digest.update(b"\x00i" + image.identity())
        return int.from_bytes(digest.digest(), "little") >> 1


@dataclass(frozen=True, slots=True)
class Example:
    """One record: a query, what it should find, what it should not, and scores where the data have them."""

    query: Item
    positives: tuple[Item, ...]
    negatives: tuple[Item, ...] = ()
    scores: tuple[float, ...] | None = None
    """One score per positive: the similarity of a scored pair, or a graded relevance."""
    where: str = ""
    """File and line, for messages."""


class BadRecord(UserError):  # noqa: N818 - it names the record, not an error of ours
    """A record that cannot be used, and why; who reads the file adds file and line."""
