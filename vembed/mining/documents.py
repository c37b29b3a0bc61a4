"""Documents: everything that is searched, each content once, by number; texts stay in their files."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vembed.data.distinct import KeyIndex
from vembed.data.documents import document_id, document_item, open_document_reader
from vembed.data.examples import BadRecord, Example, ImageRef, Item
from vembed.data.images.files import ImageRoot
from vembed.data.near_duplicates import casefolded
from vembed.errors import UserError
from vembed.evaluation.beir_folder import texts_path
from vembed.mining.config import DataOptions, paths_of
from vembed.mining.record_tables import BeirTable, Rows

NUM_SHOWN = 10
NUM_COLUMNS = 6
FILE, START, SLOT, KEY, EXACT, ID = range(NUM_COLUMNS)
"""Columns of a table of documents, which has a row for each: number of the file, or ROWS; offset of the record in its
file, or number of the row; place among the positives and negatives of a row; content apart from case and spaces;
content as it is; key of the id, or 0."""
ROWS = -1
"""In place of a file's number: the rows of the training data."""


def content_key(item: Item) -> int:
    """A 63-bit number that is the same for items with the same text apart from case, width and spaces, and the same images."""
    return item.key(casefolded)


def id_key(identity: object) -> int:
    """A 63-bit number for an id; 7 and "7" are the same id."""
    digest = hashlib.blake2b(str(identity).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def array_identity(values: np.ndarray) -> list[int]:
    """Return two numbers that tell an array from others: its length, and a sum that changes where values are changed or
    exchanged."""
    # The position goes into the sum: an XOR of the numbers alone would not see two exchanged.
    mixed = values * 31 + np.arange(len(values))
    return [len(values), int(np.bitwise_xor.reduce(mixed, initial=0))]


class CorpusFile:
    """One file of documents."""

    def __init__(
        self, path: str, image_root: str | None, *, allow_image_urls: bool
    ) -> None:
        place = Path(path).expanduser()
        self.reader = open_document_reader(texts_path(place, "corpus") or place)
        folder = image_root or str(self.reader.folder)
        self._images = ImageRoot(folder, allow_urls=allow_image_urls)

    def item(self, record: Any) -> Item:
        """The document that a record means; `BadRecord` says why it means none."""
        return document_item(record, self._images)

    def read(self, start: int) -> tuple[Any, Item]:
        """The record at an offset, and the document that it means."""
        record = self.reader.read(start)
        try:
            return record, self.item(record)
        except BadRecord as error:
            raise UserError(
                f"{self.reader.name} has changed since the run began ({error}): start again"
            ) from error


def read_corpus(
    files: Sequence[CorpusFile], on_bad_record: str
) -> tuple[np.ndarray, list[str]]:
    """Return the table of the documents of some files, and lines for the log."""
    table = array("q")
    problems: list[str] = []
    num_bad = 0
    for number, file in enumerate(files):
        for start, line, record in file.reader.rows():
            try:
                item = file.item(record)
            except BadRecord as error:
                num_bad += 1
                if len(problems) < NUM_SHOWN:
                    problems.append(f"{file.reader.where(line)}: {error}")
                continue
            identity = document_id(record)
            key = 0 if identity is None else id_key(identity)
            table.extend((number, start, 0, content_key(item), item.key(), key))
    if num_bad and (on_bad_record == "stop" or not table):
        raise UserError(
            f"{num_bad:,d} documents of corpus_path cannot be used, fix them, or set on_bad_record: skip to leave "
            "them out:\n  " + "\n  ".join(problems)
        )
    if not table:
        names = ", ".join(file.reader.name for file in files)
        raise UserError(f"{names} holds no documents")
    notes = []
    if num_bad:
        notes = [f"left out {num_bad:,d} that cannot be used, the first: {problems[0]}"]
    return _as_table(table), notes


def distinct_by(table: np.ndarray, column: int) -> np.ndarray:
    """The rows of a table with distinct values in a column, where each came first."""
    # return_index gives the first place of each value; sorted, the documents keep the order of the files.
    _, first = np.unique(table[:, column], return_index=True)
    return table[np.sort(first)]


class Documents:
    """Distinct documents by number: first the candidates, then documents of the rows that the corpus does not hold."""

    def __init__(self, options: DataOptions, rows: Rows) -> None:
        """The documents of `corpus_path`, of the BEIR-style folders in `data_path`, or else of the rows themselves."""
        paths = paths_of(options.corpus_path)
        if not paths:
            paths = [
                table.name for table in rows.tables if isinstance(table, BeirTable)
            ]
        self._rows = rows
        self._files = []
        for path in paths:
            allows = options.allow_image_urls
            file = CorpusFile(path, options.image_root, allow_image_urls=allows)
            self._files.append(file)
        of_rows = array("q")
        for row in range(len(rows)):
            for slot, item in enumerate(items_of(rows.example(row))):
                of_rows.extend((ROWS, row, slot, content_key(item), item.key(), 0))
        # With a corpus, documents of the rows that it lacks are scored as positives and negatives, and never mined.
        # Without one the documents of all rows are the candidates.
        corpus = _as_table(of_rows)
        extra = corpus[:0]
        self.notes: list[str] = []
        if self._files:
            extra = corpus
            corpus, self.notes = read_corpus(self._files, options.on_bad_record)
        candidates = distinct_by(corpus, KEY)
        num_copies = len(corpus) - len(candidates)
        if num_copies:
            self.notes.append(f"joined {num_copies:,d} documents with equal content")
        self.num_candidates = len(candidates)
        is_new = KeyIndex(candidates[:, KEY]).find(extra[:, KEY]) < 0
        self._table = np.concatenate([candidates, distinct_by(extra[is_new], KEY)])
        self.exact = self._table[:, EXACT].copy()
        """The content of each document as a number, where case and spaces count."""
        # An id leads to the document that stands for its content, also where that one came first under another id.
        with_id = corpus[corpus[:, ID] != 0]
        self._by_content = KeyIndex(self._table[:, KEY])
        self._by_id = KeyIndex(with_id[:, ID])
        self._number_of_id = self.find_contents(with_id[:, KEY])
        self.has_ids = len(with_id) > 0

    def __len__(self) -> int:
        return len(self._table)

    def item(self, number: int) -> Item:
        """A document as it is encoded."""
        file, start, slot = map(int, self._table[number, : SLOT + 1])
        if file == ROWS:
            return items_of(self._rows.example(start))[slot]
        return self._files[file].read(start)[1]

    def identity(self, number: int) -> str | None:
        """A document's id in its file, if it has one."""
        file, start = map(int, self._table[number, : START + 1])
        if file == ROWS:
            return None
        return document_id(self._files[file].reader.read(start))

    def find_contents(self, keys: Sequence[int] | np.ndarray) -> np.ndarray:
        """The numbers of documents with these contents, -1 where there is none."""
        return self._by_content.find(np.asarray(keys, np.int64))

    def find_ids(self, identities: Sequence[str]) -> np.ndarray:
        """The numbers of documents with these ids, -1 where there is none."""
        keys = np.array([id_key(identity) for identity in identities], np.int64)
        places = self._by_id.find(keys)
        is_known = places >= 0
        places[is_known] = self._number_of_id[places[is_known]]
        return places

    def summary(self) -> str:
        """One line for the log."""
        extra = len(self) - self.num_candidates
        text = f"documents: {self.num_candidates:,d} to search"
        if extra:
            text += f"; {extra:,d} documents of the rows are not among them, and are no candidates"
        return text + "".join(f"; {note}" for note in self.notes)


def _as_table(values: array[int]) -> np.ndarray:
    return np.array(values, np.int64).reshape(-1, NUM_COLUMNS)


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
    if path.is_relative_to(image_folder):
        return str(path.relative_to(image_folder))
    return image.path
