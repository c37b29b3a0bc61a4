"""Corpus: the documents of a file, each content once. Texts stay in the file."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from vembed.data.distinct import KeyIndex
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
        numbers: np.ndarray,
        lengths: np.ndarray,
        keys: np.ndarray,
        settings: ReadAs | None = None,
    ) -> None:
        self._reader = reader
        self._numbers = numbers
        """Numbers of the records, int64 [n]."""
        self.lengths = lengths
        """Lengths of the texts in characters, int32 [n]."""
        self.keys = keys
        """Keys of the contents, int64 [n]."""
        self._settings = settings or ReadAs()

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Corpus: ...
    def __getitem__(self, index: int | slice) -> Item | Corpus:
        if isinstance(index, slice):
            return Corpus(
                self._reader,
                self._numbers[index],
                self.lengths[index],
                self.keys[index],
                self._settings,
            )
        record = self._reader.read(int(self._numbers[index]))
        item = Item(text=document_text(record)) if isinstance(record, dict) else Item()
        # The text was checked at opening and is read again only now; its key tells whether it is still the same.
        if item.key() != self.keys[index]:
            raise UserError(
                f"{self._reader.name} has changed since it was opened: start again"
            )
        return self._settings.document(item)

    def read_as(self, settings: ReadAs) -> Corpus:
        """Return the documents with the prompt and the length of a source."""
        return Corpus(self._reader, self._numbers, self.lengths, self.keys, settings)


@dataclass(frozen=True, slots=True)
class IdentifiedCorpus:
    """Documents of a file, by number and by `_id`."""

    documents: Corpus
    num_joined: int
    """Records with the content of an earlier one."""
    identities: KeyIndex
    """The records by `_id`, as hashes of 63 bits."""
    document_of: np.ndarray
    """Of each record, the index of its document."""

    def find(self, identity: str) -> int | None:
        """Return the index of a document; None: there is none of this name."""
        record = int(self.identities.find(np.array([_hash(identity)]))[0])
        return None if record < 0 else int(self.document_of[record])


def read_corpus(reader: Format, problems: list[str]) -> IdentifiedCorpus:
    """Read a corpus once, without holding its texts. What is wrong with records is added to `problems`."""
    # 28 bytes for each document. Lines are not among them: they are counted again for the few that are named.
    # Plain arrays grow in place; lists of Python numbers would take 30 to 40 bytes for each number.
    columns = [array("q"), array("i"), array("q"), array("q")]
    problem_lines: list[tuple[int, str]] = []
    for number, _, identity, text in identified_texts(reader, problem_lines):
        values = (number, len(text), Item(text=text).key(), _hash(identity))
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    # Shares the arrays' memory. frombuffer takes no empty array.
    numbers, lengths, keys, hashes = (
        np.frombuffer(column, column.typecode) if column else np.array(column)
        for column in columns
    )
    is_first = _first_occurrences(hashes)
    if not is_first.all():  # the file is read once more for the lines
        repeated = set(numbers[~is_first].tolist())
        for number, line, record in reader.rows():
            if number in repeated:
                reason = f"_id {document_id(record)} occurs twice"
                problem_lines.append((line, reason))
        numbers = numbers[is_first]
        lengths = lengths[is_first]
        keys = keys[is_first]
        hashes = hashes[is_first]
    for line, reason in sorted(problem_lines):
        problems.append(f"{reader.where(line)}: {reason}")
    is_first = _first_occurrences(keys)
    document_of = np.arange(len(keys), dtype=np.int32)
    num_joined = len(keys) - int(is_first.sum())
    if num_joined:  # most corpora have none, and their columns are not copied
        document_of = KeyIndex(keys[is_first]).find(keys).astype(np.int32)
        numbers = numbers[is_first]
        lengths = lengths[is_first]
        keys = keys[is_first]
    documents = Corpus(reader, numbers, lengths, keys)
    return IdentifiedCorpus(documents, num_joined, KeyIndex(hashes), document_of)


def identified_texts(
    reader: Format, problems: list[tuple[int, str]]
) -> Iterator[tuple[int, int, str, str]]:
    """Yield number, line, `_id` and text of the records. The line of another one, and the reason, go to `problems`."""
    for number, line, record in reader.rows():
        identity = document_id(record)
        text = document_text(record)
        if isinstance(record, BadRecord):
            problems.append((line, str(record)))
        elif identity is None:
            problems.append((line, f"no id ({', '.join(ID_FIELDS)} are read)"))
        elif has_lone_surrogate(text):
            problems.append((line, f"{identity} {LONE_SURROGATE}"))
        elif not text:
            problems.append((line, f"{identity} has no text"))
        else:
            yield number, line, identity, text


def _hash(identity: str) -> int:
    return Item(text=identity).key()


def _first_occurrences(keys: np.ndarray) -> Any:
    """Return, per key, whether none before it is equal (bool [n])."""
    is_first = np.zeros(len(keys), bool)
    is_first[np.unique(keys, return_index=True)[1]] = True
    return is_first
