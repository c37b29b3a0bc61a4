"""Tables: the records of files by number, whole with every field, read again when they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vembed.config.entries import DataSource
from vembed.config.user_folders import cache_folder
from vembed.data.columns import Columns
from vembed.data.examples import BadRecord, Example
from vembed.data.first_pass import build_index
from vembed.data.formats.base import Found
from vembed.data.formats.json_files import Reader, TextFile
from vembed.data.formats.opening import open_reader
from vembed.data.images.files import ImageRoot
from vembed.data.index_parts import NUM_SHOWN
from vembed.data.messages import joined, listed
from vembed.data.records import RecordFormat
from vembed.errors import UserError
from vembed.evaluation.beir_folder import is_beir_folder, open_texts, qrels_files
from vembed.evaluation.corpus import record_id, titled_text
from vembed.evaluation.qrels import read_judgements
from vembed.mining.config import RowOptions

SPLITS = ("train", "dev", "validation", "val", "test")


class Table(Protocol):
    """Rows of training data by number."""

    name: str
    image_folder: str

    def __len__(self) -> int: ...

    def record(self, number: int) -> dict[str, Any]:
        """The row as it stands in the file, with every field."""
        ...

    def example(self, number: int) -> Example:
        """Meaning of a row."""
        ...


class AllColumns(Columns):
    """Keeps every column of a table, also those that training does not read."""

    def needed(self, columns: Any) -> list[str]:
        """All columns."""
        return list(columns)


class AnyColumns(AllColumns):
    """Takes tables without queries, as files of documents are."""

    def check(self, columns: Any) -> None:
        """Every header will do."""


class TextLines(TextFile):
    """A plain text file: every line that is not blank is one record, a string."""

    def scan(self) -> Iterator[Found]:
        """All lines in order."""
        start = self._begin
        with self._from(start) as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield start, len(line), number, self._text(line)
                start += len(line)

    def read(self, start: int, size: int) -> Any:
        """One line again."""
        return self._text(self._bytes(start, size))

    def _text(self, line: bytes) -> str | BadRecord:
        try:
            return line.decode().strip()
        except UnicodeDecodeError:
            return BadRecord("not UTF-8: save the file as UTF-8")


class FileTable:
    """The rows of one source that training would use."""

    def __init__(
        self, reader: Reader, form: RecordFormat, images: ImageRoot, name: str
    ) -> None:
        self.name = name
        self.image_folder = images.folder
        self.index = build_index(reader, form, with_keys=False)
        self._reader, self._form = reader, form

    def __len__(self) -> int:
        return len(self.index)

    def record(self, number: int) -> dict[str, Any]:
        """The row as it stands in the file, with every field."""
        found = self._reader.read(
            int(self.index.starts[number]), int(self.index.sizes[number])
        )
        if not isinstance(found, dict):
            raise UserError(
                f"{self._where(number)} has changed since the run began: start again"
            )
        return found

    def example(self, number: int) -> Example:
        """Meaning of a row."""
        where = self._where(number)
        try:
            return self._form.example(self.record(number), where)
        except BadRecord as error:
            raise UserError(
                f"{where} has changed since the run began ({error}): start again"
            ) from error

    def _where(self, number: int) -> str:
        return self._reader.where(int(self.index.lines[number]))


class BeirTable:
    """A BEIR-style folder as rows: a query with its relevant documents and the ids of all."""

    def __init__(self, folder: Path, split: str | None) -> None:
        self.name = str(folder)
        self.image_folder = str(folder)
        self._queries, self._corpus = (
            open_texts(folder, "queries"),
            open_texts(folder, "corpus"),
        )
        relevant = read_qrels(qrels_file(folder, split))
        # Only judged documents are kept in memory, by position; the corpus may be large.
        wanted = {identity for found in relevant.values() for identity in found}
        places = {
            str(record_id(one)): (start, size)
            for start, size, one in _objects(self._corpus)
        }
        self._documents = {
            identity: places[identity] for identity in wanted if identity in places
        }
        self._rows = [
            (str(record_id(one)), start, size)
            for start, size, one in _objects(self._queries)
            if any(
                identity in self._documents
                for identity in relevant.get(str(record_id(one)), ())
            )
        ]
        self._relevant = relevant
        self._form = RecordFormat(Columns(), ImageRoot(str(folder), allow_urls=False))
        if not self._rows:
            raise UserError(
                f"{folder} has no query with a relevant document in {qrels_file(folder, split).name}"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def record(self, number: int) -> dict[str, Any]:
        """The query, the texts of its relevant documents, and the ids."""
        identity, start, size = self._rows[number]
        ids = [one for one in self._relevant[identity] if one in self._documents]
        texts = [titled_text(self._corpus.read(*self._documents[one])) for one in ids]
        query = titled_text(self._queries.read(start, size))
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


class RowSource(Protocol):
    """Rows by number, of any origin."""

    tables: Sequence[Table]

    def __len__(self) -> int: ...

    def record(self, row: int, /) -> dict[str, Any]:
        """A row as it stands in its file."""
        ...

    def example(self, row: int, /) -> Example:
        """Meaning of a row."""
        ...


class Rows:
    """The rows of all sources, one below the other."""

    tables: Sequence[Table]

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
        return table.record(number)

    def example(self, row: int) -> Example:
        """Meaning of a row."""
        table, number = self.locate(row)
        return table.example(number)


def open_rows(options: RowOptions) -> Rows:
    """Check every record of `data_path`; a `UserError` names the first ten that cannot be used."""
    given = (
        options.data_path
        if isinstance(options.data_path, list)
        else [options.data_path]
    )
    if not given:
        raise UserError(
            "data_path is an empty list: name at least one file, folder or dataset"
        )
    tables: list[Table] = []
    for entry in given:
        source = DataSource(path=entry) if isinstance(entry, str) else entry
        folder = Path(source.path)
        if is_beir_folder(folder):
            tables.append(BeirTable(folder, options.split))
        else:
            tables.append(_open_file(options, source, alone=len(given) == 1))
    _refuse_bad_records(
        options, [table for table in tables if isinstance(table, FileTable)]
    )
    return Rows(tables)


def _open_file(options: RowOptions, source: DataSource, *, alone: bool) -> FileTable:
    mapping = (
        options.column_mapping
        if source.column_mapping is None
        else source.column_mapping
    )
    # A mapping for all sources may name columns that one of them lacks; a source's own may not.
    may_miss = not alone and source.column_mapping is None
    columns = AllColumns(mapping, may_miss=may_miss)
    reader = open_reader(source.path, columns, "train", cache_folder())
    images = ImageRoot(
        options.image_root or str(reader.folder), allow_urls=options.allow_image_urls
    )
    form = RecordFormat(
        columns,
        images,
        mode=options.retrieval_mode,
        numbers_in_text=reader.numbers_in_text,
    )
    table = FileTable(reader, form, images, source.name or source.path)
    if table.index.missing and not may_miss:
        raise UserError(
            f"{reader.name}: column_mapping names {listed(table.index.missing)}, which no record has"
        )
    return table


def _refuse_bad_records(options: RowOptions, tables: Sequence[FileTable]) -> None:
    num_bad, num_good = (
        sum(table.index.num_bad for table in tables),
        sum(map(len, tables)),
    )
    problems = [problem for table in tables for problem in table.index.problems][
        :NUM_SHOWN
    ]
    if num_bad and (options.on_bad_record == "stop" or not num_good):
        more = (
            [f"and {num_bad - len(problems):,d} more"]
            if num_bad > len(problems)
            else []
        )
        raise UserError(
            f"{num_bad:,d} of {num_bad + num_good:,d} records cannot be used, mend them, or set on_bad_record: skip to "
            "leave them out:\n  " + "\n  ".join(joined(problems) + more)
        )
    for table in tables:
        if not len(table):
            raise UserError(f"{table.name} holds no records")


def qrels_file(folder: Path, split: str | None) -> Path:
    """The qrels of a BEIR-style folder for a split; without one the first of train, dev, validation, val and test."""
    found = qrels_files(folder)
    wanted = [split] if split else [*SPLITS, *(found if len(found) == 1 else ())]
    for name in wanted:
        if name in found:
            return found[name]
    raise UserError(
        f"{folder / 'qrels'} holds {', '.join(sorted(found)) or 'no file'}, and none of {', '.join(wanted)}: "
        "give split, the name of the file that is meant"
    )


def read_qrels(path: Path) -> dict[str, list[str]]:
    """Query id -> ids of its relevant documents (grade 1 or more)."""
    relevant: dict[str, list[str]] = {}
    for where, found in read_judgements(path):
        if isinstance(found, str):
            raise UserError(f"{where}: {found}")
        query, document, grade = found
        if grade > 0:
            relevant.setdefault(query, []).append(document)
    return relevant


def _objects(reader: Reader) -> Iterator[tuple[int, int, dict[str, Any]]]:
    for start, size, line, record in reader.scan():
        if record_id(record) is None:
            raise UserError(f"{reader.where(line)}: no record with a field _id")
        yield start, size, record
