"""Documents: everything that is searched, each content once, by number; texts stay in their files."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from vembed.data.documents import document_id, document_item, open_document_reader
from vembed.data.examples import BadRecord, Example, ImageRef, Item
from vembed.data.images.files import ImageRoot
from vembed.data.near_duplicates import casefolded
from vembed.errors import UserError
from vembed.evaluation.beir_folder import texts_path
from vembed.mining.config import DataOptions
from vembed.mining.record_tables import BeirTable, RowSource

NOT_FOUND = -1


def content_key(item: Item) -> int:
    """A 63-bit number that is the same for items with the same text apart from case, width and spaces, and the same images."""
    digest = hashlib.blake2b(digest_size=8)
    if item.text is not None:
        digest.update(b"t" + casefolded(item.text).encode("utf-8", "surrogatepass"))
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


NUM_SHOWN = 10
ROWS = -1
"""In place of a file's number: the rows of the training data."""


class CorpusFile:
    """One file of documents."""

    def __init__(self, path: str, options: DataOptions) -> None:
        place = Path(path).expanduser()
        self.reader = open_document_reader(texts_path(place, "corpus") or place)
        self.images = ImageRoot(
            options.image_root or str(self.reader.folder),
            allow_urls=options.allow_image_urls,
        )

    def item(self, record: Any) -> Item:
        """The document that a record means; `BadRecord` says why it means none."""
        return document_item(record, self.images)


@dataclass(frozen=True)
class _Entries:
    """Positions, contents and ids of documents, as arrays of equal length."""

    sources: np.ndarray
    """Number of the file; -1 for the rows of the training data."""
    starts: np.ndarray
    """Offset of the record in its file, or the row number."""
    slots: np.ndarray
    """Place among the positives and negatives of a row; 0 for a record of a file."""
    keys: np.ndarray
    """Contents without differences of case and spaces."""
    exact: np.ndarray
    """Contents as they are."""
    ids: np.ndarray
    """Keys of ids; 0 where there is none."""

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, numbers: np.ndarray) -> _Entries:
        """Some of them, in this order."""
        return _Entries(*(getattr(self, field.name)[numbers] for field in fields(self)))

    def distinct(self) -> _Entries:
        """Each content once, where it came first."""
        # return_index gives the first place of each key; sorted, the documents keep the order of the files.
        _, first = np.unique(self.keys, return_index=True)
        return self.take(np.sort(first))

    def followed_by(self, others: _Entries) -> _Entries:
        """These, then the others."""
        pairs = (
            (getattr(self, field.name), getattr(others, field.name))
            for field in fields(self)
        )
        return _Entries(*(np.concatenate(pair) for pair in pairs))


class _Collector:
    """Entries that are being collected."""

    def __init__(self) -> None:
        self.columns = [array("q") for _ in fields(_Entries)]

    def add(self, *values: int) -> None:
        """One more: a value for each field of `_Entries`."""
        for column, value in zip(self.columns, values, strict=True):
            column.append(value)

    def entries(self) -> _Entries:
        """All of them."""
        return _Entries(*(np.array(column, np.int64) for column in self.columns))


class Documents:
    """Distinct documents by number: first the candidates, then documents of the rows that the corpus does not hold."""

    def __init__(
        self,
        rows: RowSource,
        files: Sequence[CorpusFile],
        corpus: _Entries,
        extra: _Entries,
        notes: Sequence[str],
    ) -> None:
        candidates = corpus.distinct()
        if len(candidates) < len(corpus):
            notes = [
                *notes,
                f"joined {len(corpus) - len(candidates):,d} documents with equal content",
            ]
        self.num_candidates = len(candidates)
        # Documents of the rows that the corpus lacks are scored as positives and negatives, and never mined.
        is_new = KeyIndex(candidates.keys).find(extra.keys) < 0
        self._entries = candidates.followed_by(
            extra.take(np.flatnonzero(is_new)).distinct()
        )
        self._by_content = KeyIndex(self._entries.keys)
        # An id leads to the document that stands for its content, also where that one came first under another id.
        with_id = corpus.take(np.flatnonzero(corpus.ids))
        self._by_id = KeyIndex(with_id.ids)
        self._number_of_id = self._by_content.find(with_id.keys)
        self._rows = rows
        self._files = tuple(files)
        self.notes = tuple(notes)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def keys(self) -> np.ndarray:
        """The content of each document as a number."""
        return self._entries.keys

    @property
    def exact(self) -> np.ndarray:
        """The same, where case and spaces count."""
        return self._entries.exact

    def item(self, number: int) -> Item:
        """A document as it is encoded."""
        source, start, slot = self._place(number)
        if source < 0:
            return items_of(self._rows.example(start))[slot]
        file = self._files[source]
        try:
            return file.item(file.reader.read(start))
        except BadRecord as error:
            raise UserError(
                f"{file.reader.name} has changed since the run began ({error}): start again"
            ) from error

    def identity(self, number: int) -> str | None:
        """A document's id in its file, if it has one."""
        source, start, _ = self._place(number)
        return (
            None if source < 0 else document_id(self._files[source].reader.read(start))
        )

    def find_contents(self, keys: Sequence[int] | np.ndarray) -> np.ndarray:
        """The numbers of documents with these contents, -1 where there is none."""
        return self._by_content.find(np.asarray(keys, np.int64))

    def find_ids(self, identities: Sequence[str]) -> np.ndarray:
        """The numbers of documents with these ids, -1 where there is none."""
        places = self._by_id.find(
            np.array([id_key(identity) for identity in identities], np.int64)
        )
        is_known = places >= 0
        places[is_known] = self._number_of_id[places[is_known]]
        return places

    @property
    def has_ids(self) -> bool:
        """True if any document has an id."""
        return len(self._by_id) > 0

    def summary(self) -> str:
        """One line for the log."""
        extra = len(self) - self.num_candidates
        text = f"documents: {self.num_candidates:,d} to search"
        if extra:
            text += f"; {extra:,d} documents of the rows are not among them, and are no candidates"
        return text + "".join(f"; {note}" for note in self.notes)

    def _place(self, number: int) -> tuple[int, int, int]:
        entries = self._entries
        return (
            int(entries.sources[number]),
            int(entries.starts[number]),
            int(entries.slots[number]),
        )


def open_documents(options: DataOptions, rows: RowSource) -> Documents:
    """The documents of `corpus_path`, of the BEIR-style folders in `data_path`, or else of the rows themselves."""
    corpus_path = options.corpus_path
    paths = [corpus_path] if isinstance(corpus_path, str) else corpus_path
    if paths is None:
        paths = [table.name for table in rows.tables if isinstance(table, BeirTable)]
    files = [CorpusFile(path, options) for path in paths]
    of_rows = _Collector()
    # With a corpus too: positives and negatives of the rows get scores, also those that the corpus lacks.
    for row in range(len(rows)):
        for slot, item in enumerate(items_of(rows.example(row))):
            of_rows.add(ROWS, row, slot, content_key(item), item.key(), 0)
    # Without a corpus the documents of all rows are the candidates.
    if not files:
        nothing = _Collector().entries()
        return Documents(rows, files, of_rows.entries(), nothing, ())
    corpus, notes = _of_files(files, options.on_bad_record)
    return Documents(rows, files, corpus, of_rows.entries(), notes)


def _of_files(
    files: Sequence[CorpusFile], on_bad_record: str
) -> tuple[_Entries, list[str]]:
    collector = _Collector()
    problems = list[str]()
    num_bad = 0
    for source, file in enumerate(files):
        for start, line, record in file.reader.rows():
            try:
                item = file.item(record)
            except BadRecord as error:
                num_bad += 1
                if len(problems) < NUM_SHOWN:
                    problems.append(f"{file.reader.where(line)}: {error}")
                continue
            identity = document_id(record)
            number = 0 if identity is None else id_key(identity)
            collector.add(source, start, 0, content_key(item), item.key(), number)
    entries = collector.entries()
    if num_bad and (on_bad_record == "stop" or not len(entries)):
        raise UserError(
            f"{num_bad:,d} documents of corpus_path cannot be used, fix them, or set on_bad_record: skip to leave "
            "them out:\n  " + "\n  ".join(problems)
        )
    if not len(entries):
        raise UserError(
            f"{', '.join(file.reader.name for file in files)} holds no documents"
        )
    if not num_bad:
        return entries, []
    note = f"left out {num_bad:,d} that cannot be used, the first: {problems[0]}"
    return entries, [note]


def items_of(example: Example) -> tuple[Item, ...]:
    """The documents of a row: positives, then negatives."""
    return example.positives + example.negatives


def row_value(item: Item, image_folder: str) -> Any:
    """An item as a row of training data holds it; paths of images relative to `image_folder` where they are in it."""
    images = [_image_value(image, image_folder) for image in item.images]
    if not images:
        return item.text
    value: dict[str, Any] = {} if item.text is None else {"text": item.text}
    return value | {"image": images[0] if len(images) == 1 else images}


def _image_value(image: ImageRef, image_folder: str) -> str:
    if image.path is None:
        raise UserError(
            "images that are held inside a Parquet file cannot be written as negatives: save them as files"
        )
    path = Path(image.path)
    return (
        str(path.relative_to(image_folder))
        if path.is_relative_to(image_folder)
        else image.path
    )
