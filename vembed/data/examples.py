"""Item and Example: the contents of a record as texts and images. Reads no file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from vembed.errors import UserError, printable

Kind = Literal["query", "document"]


LONE_SURROGATE = "has a lone surrogate in it, which is no character"


def has_lone_surrogate(text: str) -> bool:
    """Return whether a text has half of a character in it, as JSON may; no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


_HTTP = ("http://", "https://")
IMAGE_KEYS = frozenset({"image", "images", "path"})
"""Keys of a query or document that hold paths of images."""


@dataclass(frozen=True, slots=True)
class ImageRef:
    """Reference to one image: a path (resolved against image_root), an address, or its encoded bytes."""

    path: str | None = None
    data: bytes | None = None
    where: str = field(default="", compare=False)
    """File and line of a record with the image, for messages."""

    @property
    def is_address(self) -> bool:
        """True if the image is to be fetched."""
        return self.path is not None and self.path.startswith(_HTTP)

    def identity(self) -> bytes:
        """Return bytes that identify the image, without decoding it."""
        if self.data is not None:
            return self.data
        return b"path:" + str(self.path).encode()


def input_digest(
    modality: str,
    token_ids: np.ndarray | None,
    images: Sequence[ImageRef],
    *,
    num_bytes: int,
    identity_of: Callable[[ImageRef], bytes] = ImageRef.identity,
) -> bytes:
    """Return a hash of a model input, from its token ids and images."""
    digest = hashlib.blake2b(modality.encode(), digest_size=num_bytes)
    if token_ids is not None:
        digest.update(token_ids.tobytes())
    for image in images:
        identity = identity_of(image)
        # The length prefix separates images: without it, ["ab", "c"] and ["a", "bc"] would be equal.
        digest.update(len(identity).to_bytes(8, "little") + identity)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class Item:
    """One input to embed: a text, one or several images, or both."""

    text: str | None = None
    images: tuple[ImageRef, ...] = ()
    prompt: str | None = None
    """Prompt of this input, in place of the model's. It is no part of the content."""
    max_length: int | None = None
    """Limit of this input in tokens, where it is below the model's."""

    def read_from(self, where: str) -> Item:
        """Return the item with the file and line of its record on its images."""
        images = tuple(replace(image, where=where) for image in self.images)
        return replace(self, images=images)

    def key(
        self,
        text_form: Callable[[str], str] = str,
        image_form: Callable[[ImageRef], bytes] = ImageRef.identity,
    ) -> int:
        """Return a 63-bit hash of the content, equal on every process and in every run. Texts and images that have one
        form are equal."""
        digest = hashlib.blake2b(digest_size=8)
        if self.text is not None:
            text = text_form(self.text)
            digest.update(b"t" + text.encode("utf-8", "surrogatepass"))
        for image in self.images:
            digest.update(b"\x00i" + image_form(image))
        # 63 bits fit a signed int64 tensor.
        return int.from_bytes(digest.digest(), "little") >> 1


@dataclass(frozen=True, slots=True)
class Example:
    """One record: a query, its positives, its negatives, and scores if the data have them."""

    query: Item
    positives: tuple[Item, ...]
    negatives: tuple[Item, ...] = ()
    scores: tuple[float, ...] | None = None
    """One score per positive: the similarity of a scored pair, or a graded relevance."""
    where: str = ""
    """File and line, for messages."""
    negative_scores: tuple[float, ...] | None = None
    """One score per negative, by a teacher that scored them."""
    label: str | None = None
    """Class of the query, in labelled data; the positive is of the same class then."""

    @property
    def documents(self) -> tuple[Item, ...]:
        """Positives and negatives."""
        return self.positives + self.negatives

    @property
    def items(self) -> tuple[Item, ...]:
        """Query, positives and negatives."""
        return (self.query, *self.documents)

    def with_items(
        self,
        query: Callable[[Item], Item],
        document: Callable[[Item], Item],
    ) -> Example:
        """Return the example with other items, each made of the one in its place."""
        return replace(
            self,
            query=query(self.query),
            positives=tuple(map(document, self.positives)),
            negatives=tuple(map(document, self.negatives)),
        )


class Examples(Protocol):
    """Examples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


@dataclass(frozen=True, slots=True)
class ReadAs:
    """Prompts and maximum length of the inputs of one source; None: those of the run."""

    query_prompt: str | None = None
    document_prompt: str | None = None
    max_length: int | None = None

    @classmethod
    def of(cls, source: Any) -> ReadAs:
        """Return the settings of an entry of `data_path`."""
        return cls(source.query_prompt, source.document_prompt, source.max_length)

    def apply(self, example: Example) -> Example:
        """Return the example with these settings on its items. A prompt that a record gives itself stays."""
        if self == ReadAs():
            return example
        return example.with_items(self.query, self.document)

    def query(self, item: Item) -> Item:
        """Return a query with these settings."""
        return self._item(item, self.query_prompt)

    def document(self, item: Item) -> Item:
        """Return a document with these settings."""
        return self._item(item, self.document_prompt)

    def _item(self, item: Item, prompt: str | None) -> Item:
        return replace(
            item,
            prompt=prompt if item.prompt is None else item.prompt,
            max_length=self.max_length,
        )


class BadRecord(UserError):  # noqa: N818 - it names the record, not an error of ours
    """An invalid record, with the reason. The caller that reads the file adds file and line."""


class NotUtf8(BadRecord):
    """A record whose bytes are no UTF-8 text. Many of them say that the file has another encoding."""


class ImageRoot:
    """Base folder of relative image paths, which must not lead out of it. Absolute paths are used unchanged."""

    def __init__(self, folder: str, *, allow_urls: bool) -> None:
        self.folder = os.path.normpath(Path(folder).absolute())
        self.allow_urls = allow_urls
        self._real = os.path.realpath(folder)
        self._inside: dict[str, bool] = {}

    @classmethod
    def of(cls, options: Any, folder: Path) -> ImageRoot:
        """Return that of a file in a folder, by `image_root` and `allow_image_urls` of a run or a command on data."""
        return cls(
            options.image_root or str(folder), allow_urls=options.allow_image_urls
        )

    def reference(self, path: str) -> ImageRef:
        """Return the reference for a path or address in a record. Opens nothing."""
        name = printable(path, 200)
        if "\0" in path or not path.strip():
            raise BadRecord("an image path is empty or has a NUL character in it")
        if path.startswith(_HTTP):
            if not self.allow_urls:
                raise BadRecord(
                    f"image {name} is an address, and none is fetched unless allow_image_urls: true"
                )
            return ImageRef(path=path)
        if path.startswith("/"):
            return ImageRef(path=os.path.normpath(path))
        whole = os.path.normpath(f"{self.folder}/{path}")
        # Folders are resolved once; only the last component is checked for every path.
        parent = whole.rpartition("/")[0]
        if parent not in self._inside:
            is_in_both = _is_in(os.path.realpath(parent), self._real)
            self._inside[parent] = _is_in(parent, self.folder) and is_in_both
        is_inside = self._inside[parent]
        # Path.is_symlink raises an error for a name that is too long.
        if is_inside and os.path.islink(whole):  # noqa: PTH114
            is_inside = _is_in(os.path.realpath(whole), self._real)
        if not is_inside:
            raise BadRecord(
                f"image path {name} leads out of image_root ({self.folder}): set image_root, or write the whole path"
            )
        return ImageRef(path=whole)

    def name_of(self, image: ImageRef) -> str:
        """Return how a record names an image: by a relative path where `reference` takes it, else by the path as it is."""
        path = image.path
        if path is None:
            raise UserError(
                "images that are held inside a Parquet file cannot be written as negatives: save them as files"
            )
        if _is_in(path, self.folder):
            # A link inside may lead out of it.
            with suppress(BadRecord):
                name = os.path.relpath(path, self.folder)
                self.reference(name)
                return name
        return path

    def renamed(self, value: Any, target: ImageRoot, *, is_path: bool) -> Any:
        """Return a value of a record with its images named as records of another root name them. `is_path`: a bare string
        is a path."""
        if isinstance(value, str) and is_path:
            return target.name_of(self.reference(value))
        if isinstance(value, list):
            return [self.renamed(entry, target, is_path=is_path) for entry in value]
        # A path beside bytes is a name alone.
        if isinstance(value, dict) and value.get("bytes") is None:
            return {
                key: self.renamed(entry, target, is_path=key in IMAGE_KEYS)
                for key, entry in value.items()
            }
        return value


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


# ---- equal contents ------------------------------------------------------------

Value = TypeVar("Value")


def distinct(
    values: Sequence[Value], key: Callable[[Value], Hashable]
) -> tuple[list[Value], np.ndarray]:
    """Return the first value of each key, and for every value the position of its equal among them, int64 [n]."""
    position: dict[Hashable, int] = {}
    firsts: list[Value] = []
    where = np.empty(len(values), dtype=np.int64)
    for number, value in enumerate(values):
        place = position.setdefault(key(value), len(firsts))
        if place == len(firsts):
            firsts.append(value)
        where[number] = place
    return firsts, where


class KeyIndex:
    """Positions of many numbers; of equal ones the first counts."""

    def __init__(self, values: np.ndarray) -> None:
        self._values, self._positions = np.unique(values, return_index=True)

    def find(self, values: np.ndarray) -> np.ndarray:
        """Return the position of each wanted number, -1 where there is none."""
        if not len(self._values):
            return np.full(len(values), -1)
        # searchsorted gives their number for what is larger than all.
        last = len(self._values) - 1
        place = np.minimum(np.searchsorted(self._values, values), last)
        return np.where(self._values[place] == values, self._positions[place], -1)


def spread(count: int, limit: int) -> range:
    """Return at most `limit` of so many numbers, spread over all."""
    return range(0, count, max(-(-count // limit), 1))
