"""Corpus: the documents of a file, each content once. Texts stay in the file."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from vembed.data.examples import (
    LONE_SURROGATE,
    BadRecord,
    Item,
    ReadAs,
    has_lone_surrogate,
)
from vembed.data.formats.json_files import Reader
from vembed.errors import UserError

ID_FIELDS = ("_id", "id", "doc_id", "document_id", "docid", "pid")
"""Names of the id in records of a corpus; the first one that is there."""


class Corpus(Sequence[Item]):
    """Documents that are read when they are asked for; 24 bytes are held for each."""

    def __init__(
        self,
        reader: Reader,
        rows: dict[str, np.ndarray],
        settings: ReadAs | None = None,
    ) -> None:
        """`rows`: `starts` and `sizes` of the records, `lengths` of the texts in characters, `keys` of the contents."""
        self._reader = reader
        self._rows = rows
        self._settings = settings or ReadAs()

    @property
    def keys(self) -> np.ndarray:
        """Keys of the contents, int64 [n]."""
        return self._rows["keys"]

    @property
    def lengths(self) -> np.ndarray:
        """Lengths of the texts in characters, int32 [n]."""
        return self._rows["lengths"]

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, place: int) -> Item: ...
    @overload
    def __getitem__(self, place: slice) -> Corpus: ...
    def __getitem__(self, place: int | slice) -> Item | Corpus:
        if isinstance(place, slice):
            return Corpus(
                self._reader,
                {name: values[place] for name, values in self._rows.items()},
                self._settings,
            )
        record = self._reader.read(
            int(self._rows["starts"][place]), int(self._rows["sizes"][place])
        )
        item = Item(text=titled_text(record)) if isinstance(record, dict) else Item()
        # The text was checked at opening and is read again only now; its key tells whether it is still the same.
        if item.key() != self.keys[place]:
            raise UserError(
                f"{self._reader.name} has changed since it was opened: start again"
            )
        return self._settings.document(item)

    def read_as(self, settings: ReadAs) -> Corpus:
        """Return the documents with the prompt and the length of a source."""
        return Corpus(self._reader, self._rows, settings)


@dataclass(frozen=True, slots=True)
class Identities:
    """Numbers of documents by their `_id`. Held as hashes of 63 bits."""

    hashes: np.ndarray
    """int64 [n], in ascending order."""
    numbers: np.ndarray
    """int32 [n]"""

    def find(self, identity: str) -> int | None:
        """Return the number of a document; None: there is none of this name."""
        wanted = _hash(identity)
        at = int(np.searchsorted(self.hashes, wanted))
        return (
            int(self.numbers[at])
            if at < len(self.hashes) and self.hashes[at] == wanted
            else None
        )


@dataclass(frozen=True, slots=True)
class FoundCorpus:
    """Documents of a file, their names, and the number of records with the content of an earlier one."""

    documents: Corpus
    identities: Identities
    num_joined: int


def read_corpus(reader: Reader, problems: list[str]) -> FoundCorpus:
    """Read a corpus once, without holding its texts. What is wrong with records is added to `problems`."""
    # 32 bytes for each document. Lines are not among them: they are counted again for the few that are named.
    # Plain arrays grow in place; lists of Python numbers would take 30 to 40 bytes for each number.
    rows = {
        "starts": array("q"),
        "sizes": array("I"),
        "lengths": array("i"),
        "keys": array("q"),
        "hashes": array("q"),
    }
    found: list[tuple[int, str]] = []
    for start, size, line, record in reader.scan():
        given = identified_text(record)
        if isinstance(given, str):
            found.append((line, given))
            continue
        identity, text = given
        values = start, size, len(text), Item(text=text).key(), _hash(identity)
        for one, value in zip(rows.values(), values, strict=True):
            one.append(value)
    # frombuffer shares the arrays' memory, but takes no empty one.
    held = {
        name: np.frombuffer(one, one.typecode) if one else np.empty(0, one.typecode)
        for name, one in rows.items()
    }
    repeated = _repeats(held["hashes"])
    if repeated.any():  # the file is read once more for their lines
        starts = set(held["starts"][repeated].tolist())
        records = (
            (line, record_id(record))
            for start, _, line, record in reader.scan()
            if start in starts
        )
        found += [(line, f"_id {name} occurs twice") for line, name in records]
    problems += [f"{reader.where(line)}: {reason}" for line, reason in sorted(found)]
    held = _without(held, repeated)
    hashes, is_copy = held.pop("hashes"), _repeats(held["keys"])
    order = np.argsort(hashes)
    identities = Identities(hashes[order], _numbers(held["keys"], is_copy)[order])
    return FoundCorpus(
        Corpus(reader, _without(held, is_copy)), identities, int(is_copy.sum())
    )


def identified_text(record: Any) -> tuple[str, str] | str:
    """Return `_id` and text of a record, or what is wrong with it."""
    if isinstance(record, BadRecord):
        return str(record)
    identity = record_id(record)
    if identity is None:
        return "no field _id"
    text = titled_text(record)
    if has_lone_surrogate(text):
        return f"{identity} {LONE_SURROGATE}"
    return (identity, text) if text else f"{identity} has no text"


def record_id(record: Any) -> str | None:
    """Return the id of a record of a corpus, if it has one."""
    given = record if isinstance(record, dict) else {}
    found = next(
        (given[name] for name in ID_FIELDS if given.get(name) is not None), None
    )
    return (
        str(found)
        if isinstance(found, str | int) and not isinstance(found, bool)
        else None
    )


def titled_text(record: dict[str, Any]) -> str:
    """Return title and text of a document joined by a space, as BEIR encodes them; just one if the other is empty."""
    parts = [record.get("title"), record.get("text")]
    return " ".join(part for part in parts if isinstance(part, str) and part).strip()


def _hash(identity: str) -> int:
    return Item(text=identity).key()


def _without(
    rows: dict[str, np.ndarray], is_left_out: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the columns without some rows. Most corpora lose none, and their columns are not copied."""
    return (
        {name: values[~is_left_out] for name, values in rows.items()}
        if is_left_out.any()
        else rows
    )


def _repeats(keys: np.ndarray) -> np.ndarray:
    """Return, per key, whether an equal one stands before it."""
    repeated = np.zeros(len(keys), bool)
    ordered = np.sort(keys)
    # Plain sorting takes less time and memory than a stable argsort, which most corpora do not need.
    if not (ordered[1:] == ordered[:-1]).any():
        return repeated
    order = np.argsort(keys, kind="stable")
    repeated[order[1:]] = keys[order[1:]] == keys[order[:-1]]
    return repeated


def _numbers(keys: np.ndarray, is_copy: np.ndarray) -> np.ndarray:
    """Return, per record, the number of its content among the contents in the order of the file (int32 [n])."""
    if not is_copy.any():
        return np.arange(len(keys), dtype=np.int32)
    firsts = keys[~is_copy]
    order = np.argsort(firsts)
    numbers: np.ndarray = order[np.searchsorted(firsts, keys, sorter=order)].astype(
        np.int32
    )
    return numbers
