"""Reader of CSV and TSV files."""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from vembed.data.columns import Columns, guess_mapping, refuse_repeated
from vembed.data.examples import BadRecord
from vembed.data.formats.base import Found
from vembed.data.formats.json_files import MAX_RECORD, TextFile
from vembed.errors import UserError

log = logging.getLogger("vembed")

DELIMITERS = (",", ";", "\t", "|")
"""Delimiters that are recognised."""
_SEPARATOR = re.compile(r"sep=(.)\r?\n")


class DelimitedFile(TextFile):
    """CSV or TSV with a header. Fields may be quoted and then hold newlines; empty cells are None."""

    numbers_in_text = True

    def __init__(self, path: Path, delimiter: str, columns: Columns) -> None:
        super().__init__(path)
        # The limit is global to the process; raising it is harmless.
        csv.field_size_limit(max(csv.field_size_limit(), MAX_RECORD))
        first, number = self._first_line(), 1
        if said := _SEPARATOR.fullmatch(first):  # a line for Excel, before the header
            self._begin, number = self._begin + len(first.encode()), 2
        self._delimiter = said[1] if said else delimiter_of(first, delimiter)
        if self._delimiter != delimiter:
            log.info(
                "%s: fields are separated by %r, not %r, as its header shows",
                path,
                self._delimiter,
                delimiter,
            )
        self._header: list[str] = []
        start, size, number, problem = next(
            self._spans(self._begin, number), (0, 0, number, "there is none")
        )
        header = BadRecord(problem) if problem else self._row(self._bytes(start, size))
        if isinstance(header, BadRecord):
            hint = (
                ", or let `vembed init --data` make such a copy"
                if "not UTF-8" in str(header)
                else ""
            )
            raise UserError(
                f"{self.where(number)}: the header cannot be read: {header}{hint}"
            )
        self._header = header
        self._data = start + size, number + self._bytes(start, size).count(b"\n")
        self._check_header(columns)

    @property
    def header(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self._header)

    def scan(self) -> Iterator[Found]:
        """Yield all records in order."""
        for start, size, number, problem in self._spans(*self._data):
            if problem is not None:
                yield start, 0, number, BadRecord(problem)
                continue
            raw = self._bytes(start, size)
            if raw.strip(b" \r\n"):
                yield start, size, number, self._record(raw)

    def read(self, start: int, size: int) -> Any:
        """Return one record again, from the position and size that `scan` yielded."""
        return self._record(self._bytes(start, size))

    def _check_header(self, columns: Columns) -> None:
        refuse_repeated(self.name, self._header)
        try:
            columns.check(self._header)
        except UserError as error:
            is_odd = not guess_mapping(self._header, ("query", "positive"))
            hint = (
                "; the first line of the file is taken for the names of the columns"
                if is_odd
                else ""
            )
            raise UserError(f"{self.name}: {error}{hint}") from error

    def _first_line(self) -> str:
        with self._from(self._begin) as file:
            return file.readline(MAX_RECORD).decode(errors="replace")

    def _spans(
        self, start: int, number: int
    ) -> Iterator[tuple[int, int, int, str | None]]:
        """Yield the position, size, first line and problem of each record.

        An unclosed quote would consume the records after it, so an unparsable record ends with its first line.
        """
        with self._from(start) as file:
            feed = _Lines(file)
            rows = csv.reader(feed, delimiter=self._delimiter, strict=True)
            while True:
                feed.begin_record()
                problem = None
                try:
                    row = next(rows, None)
                    if row is None:
                        return
                    if (
                        self._header
                        and len(row) != len(self._header)
                        and feed.num_lines > 1
                    ):
                        problem = f"quoted over {feed.num_lines:,d} lines, which make {len(row):,d} cells"
                    elif (
                        self._header
                        and feed.num_lines > 1
                        and self._are_rows(start, feed.size)
                    ):
                        problem = f"quoted over {feed.num_lines:,d} lines, each of which is a row"
                except csv.Error as error:
                    problem = f"not CSV ({_reason(error)})"
                except BadRecord as error:
                    problem = str(error)
                size, num_lines = feed.size, feed.num_lines
                if problem is not None and num_lines > 1:
                    size, num_lines = feed.first_size, 1
                    file.seek(start + size)
                if self._is_tsv and size <= MAX_RECORD:
                    problem = (
                        None  # quotes in TSV may be ordinary characters: `_row` decides
                    )
                yield start, size, number, problem
                start += size
                number += num_lines

    def _are_rows(self, start: int, size: int) -> bool:
        """Return whether each line of a record in TSV is a row: its quotes are ordinary characters then."""
        lines = self._bytes(start, size).rstrip(b"\r\n").split(b"\n")
        return self._is_tsv and all(
            line.count(b"\t") == len(self._header) - 1 for line in lines
        )

    @property
    def _is_tsv(self) -> bool:
        return self._delimiter == "\t"

    def _record(self, raw: bytes) -> dict[str, str | None] | BadRecord:
        row = self._row(raw)
        if isinstance(row, BadRecord):
            return row
        if len(row) != len(self._header):
            return BadRecord(
                f"the number of cells is {len(row):,d}, and the header has {len(self._header):,d}"
            )
        return {
            name: cell or None for name, cell in zip(self._header, row, strict=True)
        }

    def _row(self, raw: bytes) -> list[str] | BadRecord:
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            return BadRecord(
                f"not UTF-8 (byte {error.start + 1:,d} of the record): save the file as UTF-8"
            )
        try:
            row = next(csv.reader([text], delimiter=self._delimiter, strict=True), [])
            if not self._is_tsv or len(row) == len(self._header):
                return row
        except csv.Error as error:
            if not self._is_tsv:
                return BadRecord(f"not CSV ({_reason(error)})")
        # Many TSV files do not use quoting; a quote is an ordinary character there.
        return text.rstrip("\r\n").split("\t")


def delimiter_of(header: str, expected: str) -> str:
    """Return the delimiter of a file with this header: the expected one, unless it gives a single field and another
    delimiter gives several."""

    def num_fields(delimiter: str) -> int:
        try:
            return len(next(csv.reader([header], delimiter=delimiter, strict=True), []))
        except csv.Error:
            return 0

    if num_fields(expected) > 1:
        return expected
    best = max(DELIMITERS, key=num_fields)
    return best if num_fields(best) > 1 else expected


class _Lines:
    """Iterator of a file's lines for csv.reader that counts the bytes of the current record."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.begin_record()

    def begin_record(self) -> None:
        """Reset the counters at the start of a record."""
        self.size = self.first_size = self.num_lines = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = piece = self._file.readline(MAX_RECORD + 1)
        if not line:
            raise StopIteration
        size = len(line)
        while len(piece) > MAX_RECORD and not piece.endswith(b"\n"):
            piece = self._file.readline(MAX_RECORD + 1)
            size += len(piece)
        self.size += size
        self.first_size = self.first_size or size
        self.num_lines += 1
        if size > MAX_RECORD:
            raise BadRecord(f"a line of more than {MAX_RECORD:,d} bytes")
        if self.size > MAX_RECORD:
            raise BadRecord(f"a quote that is not closed within {MAX_RECORD:,d} bytes")
        return line.decode(errors="surrogateescape")


def _reason(error: csv.Error) -> str:
    """Return csv's error without its advice to programmers."""
    reason = str(error).partition(" - ")[0]
    if reason.startswith("new-line character seen in unquoted field"):
        return "a carriage return without quotes around it, or lines that end with one alone: end them with line feeds"
    return reason
