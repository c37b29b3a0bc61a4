"""Corpus: the documents of a file, each content once. Texts stay in the file."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from vembed.data.documents import ID_FIELDS, document_id, document_text
from vembed.data.examples import (
    LONE_SURROGATE,
    BadRecord,
    Item,
    ReadAs,
    has_lone_surrogate,
)
from vembed.data.formats.base import Format
from vembed.errors import UserError


class Corpus(Sequence[Item]):
    """Documents that are read when they are asked for; 20 bytes are held for each."""

    def __init__(
        self,
        reader: Format,
        rows: dict[str, np.ndarray],
        settings: ReadAs | None = None,
    ) -> None:
        """`rows`: `numbers` of the records, `lengths` of the texts in characters, `keys` of the contents."""
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
        record = self._reader.read(int(self._rows["numbers"][place]))
        item = Item(text=document_text(record)) if isinstance(record, dict) else Item()
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


def read_corpus(reader: Format, problems: list[str]) -> FoundCorpus:
    """Read a corpus once, without holding its texts. What is wrong with records is added to `problems`."""
    # 28 bytes for each document. Lines are not among them: they are counted again for the few that are named.
    # Plain arrays grow in place; lists of Python numbers would take 30 to 40 bytes for each number.
    rows = {
        "numbers": array("q"),
        "lengths": array("i"),
        "keys": array("q"),
        "hashes": array("q"),
    }
    problem_lines: list[tuple[int, str]] = []
    for number, line, record in reader.rows():
        identified = identified_text(record)
        if isinstance(identified, str):
            problem_lines.append((line, identified))
            continue
        identity, text = identified
        values = number, len(text), Item(text=text).key(), _hash(identity)
        for column, value in zip(rows.values(), values, strict=True):
            column.append(value)
    # frombuffer shares the arrays' memory, but takes no empty one.
    held = {
        name: np.frombuffer(row, row.typecode) if row else np.empty(0, row.typecode)
        for name, row in rows.items()
    }
    repeated = _repeats(held["hashes"])
    if repeated.any():  # the file is read once more for their lines
        numbers = set(held["numbers"][repeated].tolist())
        records = (
            (line, document_id(record))
            for number, line, record in reader.rows()
            if number in numbers
        )
        problem_lines += [(line, f"_id {name} occurs twice") for line, name in records]
    problems += [
        f"{reader.where(line)}: {reason}" for line, reason in sorted(problem_lines)
    ]
    held = _without(held, repeated)
    hashes = held.pop("hashes")
    is_copy = _repeats(held["keys"])
    order = np.argsort(hashes)
    identities = Identities(hashes[order], _numbers(held["keys"], is_copy)[order])
    return FoundCorpus(
        Corpus(reader, _without(held, is_copy)), identities, int(is_copy.sum())
    )


def identified_text(record: Any) -> tuple[str, str] | str:
    """Return `_id` and text of a record, or what is wrong with it."""
    if isinstance(record, BadRecord):
        return str(record)
    identity = document_id(record)
    if identity is None:
        return f"no id ({', '.join(ID_FIELDS)} are read)"
    text = document_text(record)
    if has_lone_surrogate(text):
        return f"{identity} {LONE_SURROGATE}"
    return (identity, text) if text else f"{identity} has no text"


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
