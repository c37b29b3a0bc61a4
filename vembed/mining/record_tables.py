"""Tables: the records of files by number, whole with every field, read again when they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vembed.config.entries import DataSource
from vembed.data.columns import Columns
from vembed.data.documents import document_id, document_text
from vembed.data.example_store import Records, open_records, refuse_bad_records
from vembed.data.examples import Example
from vembed.data.formats.base import Format
from vembed.data.images.files import ImageRoot
from vembed.data.records import RecordFormat
from vembed.errors import UserError
from vembed.evaluation.beir_folder import (
    choose_qrels,
    is_beir_folder,
    open_texts,
    read_judgements,
)
from vembed.files import cache_folder
from vembed.mining.config import RowOptions

SPLITS = ("train", "dev", "validation", "val", "test")


class AllColumns(Columns):
    """Keeps every column of a table, also those that training does not read."""

    def needed(self, columns: Any) -> list[str]:
        """All columns."""
        return list(columns)


class BeirTable:
    """A BEIR-style folder as rows: a query with its relevant documents and the ids of all."""

    def __init__(self, folder: Path, split: str | None) -> None:
        self.name = str(folder)
        self.image_folder = str(folder)
        self._queries = open_texts(folder, "queries")
        self._corpus = open_texts(folder, "corpus")
        qrels = choose_qrels(folder, [split] if split else SPLITS)
        relevant = read_qrels(qrels)
        # Only judged documents are kept in memory, by position; the corpus may be large.
        judged: set[str] = set()
        for documents in relevant.values():
            judged.update(documents)
        self._documents: dict[str, int] = {}
        for number, record in _objects(self._corpus):
            identity = str(document_id(record))
            if identity in judged:
                self._documents[identity] = number
        self._rows: list[tuple[str, int]] = []
        for number, record in _objects(self._queries):
            identity = str(document_id(record))
            if not self._documents.keys().isdisjoint(relevant.get(identity, ())):
                self._rows.append((identity, number))
        self._relevant = relevant
        self._form = RecordFormat(Columns(), ImageRoot(str(folder), allow_urls=False))
        if not self._rows:
            raise UserError(
                f"{folder} has no query with a relevant document in {qrels.name}"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def record(self, number: int) -> dict[str, Any]:
        """The query, the texts of its relevant documents, and the ids."""
        identity, place = self._rows[number]
        ids = []
        texts = []
        for document in self._relevant[identity]:
            if document in self._documents:
                ids.append(document)
                texts.append(
                    document_text(self._corpus.read(self._documents[document]))
                )
        query = document_text(self._queries.read(place))
        return {
            "query_id": identity,
            "query": query,
            "positive": texts,
            "positive_ids": ids,
        }

    def example(self, number: int) -> Example:
        """Meaning of a row."""
        record = self.record(number)
        return self._form.example(
            {"query": record["query"], "positive": record["positive"]},
            f"{self.name}, query {record['query_id']}",
        )


Table = Any
"""Rows by number: whole records with every field (`record`), and examples (`example`). With `name` and `image_folder`."""


class Rows:
    """The rows of all tables, one below the other."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = tuple(tables)
        self._ends = np.cumsum([len(table) for table in tables])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def locate(self, row: int) -> tuple[Table, int]:
        """The table of a row, and its number there."""
        # right: a row at an end belongs to the next table, and empty tables are passed over.
        source = int(np.searchsorted(self._ends, row, side="right"))
        return self.tables[source], row - (int(self._ends[source - 1]) if source else 0)

    def record(self, row: int) -> dict[str, Any]:
        """A row as it stands in its file."""
        table, number = self.locate(row)
        record: dict[str, Any] = table.record(number)
        return record

    def example(self, row: int) -> Example:
        """Meaning of a row."""
        table, number = self.locate(row)
        example: Example = table.example(number)
        return example


def open_rows(options: RowOptions) -> Rows:
    """Check every record of `data_path`; a `UserError` names the first ten that cannot be used."""
    entries = (
        options.data_path
        if isinstance(options.data_path, list)
        else [options.data_path]
    )
    if not entries:
        raise UserError(
            "data_path is an empty list: name at least one file, folder or dataset"
        )
    tables: list[Table] = []
    for entry in entries:
        source = DataSource(path=entry) if isinstance(entry, str) else entry
        folder = Path(source.path)
        if is_beir_folder(folder):
            tables.append(BeirTable(folder, options.split))
        else:
            mapping = source.column_mapping
            if mapping is None:
                mapping = options.column_mapping
            # A mapping for all sources may name columns that one of them lacks. A source's own may not.
            may_miss = len(entries) > 1 and source.column_mapping is None
            columns = AllColumns(mapping, may_miss=may_miss)
            cache = cache_folder()
            tables.append(open_records(options, source, columns, "train", cache))
    refuse_bad_records(
        [table for table in tables if isinstance(table, Records)],
        on_bad_record=options.on_bad_record,
        purpose="work",
    )
    return Rows(tables)


def read_qrels(path: Path) -> dict[str, list[str]]:
    """Query id -> ids of its relevant documents (grade 1 or more)."""
    relevant: dict[str, list[str]] = {}
    for where, judgement in read_judgements(path):
        if isinstance(judgement, str):
            raise UserError(f"{where}: {judgement}")
        query, document, grade = judgement
        if grade > 0:
            relevant.setdefault(query, []).append(document)
    return relevant


def _objects(reader: Format) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line, record in reader.rows():
        if document_id(record) is None:
            raise UserError(f"{reader.where(line)}: no record with a field _id")
        yield number, record
