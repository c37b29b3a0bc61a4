"""CSV and TSV files."""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from vembed.data.examples import BadRecord
from vembed.data.formats.base import MAX_RECORD_BYTES, Row, TextFormat
from vembed.errors import UserError

log = logging.getLogger("vembed")

DELIMITERS = (",", ";", "\t", "|")
"""Delimiters that are recognised."""
_SEPARATOR = re.compile(r"sep=(.)\r?\n")


class DelimitedFile(TextFormat):
    """CSV with a header. Fields may be quoted and then hold newlines; empty cells are None."""

    endings: ClassVar[tuple[str, ...]] = (".csv",)
    title = "CSV"
    numbers_are_text = True
    expected_delimiter = ","

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        # The limit is global to the process; raising it is harmless.
        csv.field_size_limit(max(csv.field_size_limit(), MAX_RECORD_BYTES))
        self.columns = ()
        first = self._first_line()
        line = 1
        if separator := _SEPARATOR.fullmatch(first):  # a line for Excel
            self.start += len(first.encode())
            line = 2
            self._delimiter = separator[1]
        else:
            self._delimiter = delimiter_of(first, self.expected_delimiter)
        if self._delimiter != self.expected_delimiter:
            log.info(
                "%s: fields are separated by %r, not %r, as its header shows",
                path,
                self._delimiter,
                self.expected_delimiter,
            )
        header_row = next(self._parsed(self.start, line), None)
        if header_row is None:
            raise UserError(f"{self.where(line)}: there is no header")
        _, line, cells, header_size = header_row
        if isinstance(cells, BadRecord):
            hint = (
                ", or let `vembed init --data` make such a copy"
                if "not UTF-8" in str(cells)
                else ""
            )
            raise UserError(
                f"{self.where(line)}: the header cannot be read: {cells}{hint}"
            )
        self.columns = tuple(cells)
        self.start = header_row[0] + header_size
        self._num_header_lines = self._bytes(0, self.start).count(b"\n")

    def rows(self, start: int | None = None, stop: int | None = None) -> Iterator[Row]:
        """Yield the records that begin in a range. Lines count from the beginning of the file."""
        start = self.start if start is None else start
        stop = self.stop if stop is None else stop
        assert self.columns is not None
        for number, line, cells, _ in self._parsed(start, 1 + self._num_header_lines):
            if number >= stop:
                return
            if isinstance(cells, BadRecord):
                yield number, line, cells
            elif len(cells) != len(self.columns):
                reason = f"the number of cells is {len(cells):,d}, and the header has {len(self.columns):,d}"
                yield number, line, BadRecord(reason)
            else:
                yield number, line, self._as_record(cells)

    def read(self, number: int) -> Any:
        """Return one record again."""
        assert self.columns is not None
        line = self._line(number)
        # Most records are one line. In that of a longer one a quote stays open, and the line has no cells.
        cells = _cells_of_line(line, self._delimiter)
        if len(cells) == len(self.columns):
            return self._as_record(cells)
        return super().read(number)

    def _as_record(self, cells: list[str]) -> dict[str, str | None]:
        assert self.columns is not None
        values = [cell or None for cell in cells]
        return dict(zip(self.columns, values, strict=True))

    def _first_line(self) -> str:
        with self.open_at(self.start) as file:
            return file.readline(MAX_RECORD_BYTES).decode(errors="replace")

    def _parsed(
        self, start: int, line: int
    ) -> Iterator[tuple[int, int, list[str] | BadRecord, int]]:
        """Yield position, line, cells and size of each record.

        An unclosed quote would consume the records after it, so an unparsable record ends with its first line.
        """
        with self.open_at(start) as file:
            lines = _Lines(file)
            rows = csv.reader(lines, delimiter=self._delimiter, strict=True)
            while True:
                lines.begin_record()
                cells: list[str] | BadRecord
                try:
                    row = next(rows, None)
                    if row is None:
                        return
                    cells = self._checked(row, lines)
                except csv.Error as error:
                    cells = BadRecord(f"not CSV ({_reason(error)})")
                except BadRecord as error:
                    cells = error
                if isinstance(cells, BadRecord) and lines.num_lines > 1:
                    lines.keep_first()
                    file.seek(start + lines.size)
                if self.is_tsv and isinstance(cells, BadRecord):
                    # Many TSV files do not use quoting; a quote is an ordinary character there.
                    cells = self._by_tabs(lines, cells)
                if not lines.is_blank:
                    yield start, line, cells, lines.size
                start += lines.size
                line += lines.num_lines

    def _checked(self, row: list[str], lines: _Lines) -> list[str] | BadRecord:
        """Return the cells of a record, or why they are none."""
        num_lines = lines.num_lines
        if self.columns and num_lines > 1:
            if len(row) != len(self.columns):
                return BadRecord(
                    f"quoted over {num_lines:,d} lines, which make {len(row):,d} cells"
                )
            if self.is_tsv and lines.count_each(b"\t") == {len(row) - 1}:
                return BadRecord(
                    f"quoted over {num_lines:,d} lines, each of which is a row"
                )
        if lines.has_foreign_bytes:
            return lines.refuse_encoding()
        if self.is_tsv and self.columns and len(row) != len(self.columns):
            return BadRecord("another number of cells")
        return row

    def _by_tabs(self, lines: _Lines, problem: BadRecord) -> list[str] | BadRecord:
        """Return the cells of a line whose quotes are ordinary characters."""
        if lines.size > MAX_RECORD_BYTES:
            return problem
        try:
            text = lines.data.decode()
        except UnicodeDecodeError:
            return lines.refuse_encoding()
        return text.rstrip("\r\n").split("\t")

    @property
    def is_tsv(self) -> bool:
        """True if cells are separated by tabs."""
        return self._delimiter == "\t"


class TsvFile(DelimitedFile):
    """TSV with a header."""

    endings: ClassVar[tuple[str, ...]] = (".tsv",)
    title = "TSV"
    expected_delimiter = "\t"


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


def _cells_of_line(line: bytes, delimiter: str) -> list[str]:
    """Return the cells of a line; none if something is wrong with it."""
    try:
        return next(csv.reader([line.decode()], delimiter=delimiter, strict=True), [])
    except (csv.Error, UnicodeDecodeError):
        return []


class _Lines:
    """Iterator of a file's lines for csv.reader that keeps the bytes of the current record."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.begin_record()

    def begin_record(self) -> None:
        """Forget the record before."""
        self._lines: list[bytes] = []
        self.size = 0
        self.has_foreign_bytes = False

    @property
    def num_lines(self) -> int:
        """Lines of the record."""
        return len(self._lines)

    @property
    def data(self) -> bytes:
        """Bytes of the record."""
        return b"".join(self._lines)

    @property
    def is_blank(self) -> bool:
        """True for an empty line."""
        return not self.data.strip(b" \r\n")

    def count_each(self, character: bytes) -> set[int]:
        """Return how often a character is in each line."""
        return {line.count(character) for line in self._lines}

    def keep_first(self) -> None:
        """Take the first line alone for the record."""
        self._lines = self._lines[:1]
        self.size = self._first_size

    def refuse_encoding(self) -> BadRecord:
        """Return what is wrong with bytes that are not UTF-8."""
        try:
            self.data.decode()
        except UnicodeDecodeError as error:
            return BadRecord(
                f"not UTF-8 (byte {error.start + 1:,d} of the record): save the file as UTF-8"
            )
        return BadRecord("not UTF-8: save the file as UTF-8")

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._file.readline(MAX_RECORD_BYTES + 1)
        if not line:
            raise StopIteration
        size = len(line)
        piece = line
        while len(piece) > MAX_RECORD_BYTES and not piece.endswith(b"\n"):
            piece = self._file.readline(MAX_RECORD_BYTES + 1)
            size += len(piece)
        if not self._lines:
            self._first_size = size
        self._lines.append(line)
        self.size += size
        if size > MAX_RECORD_BYTES:
            raise BadRecord(f"a line of more than {MAX_RECORD_BYTES:,d} bytes")
        if self.size > MAX_RECORD_BYTES:
            raise BadRecord(
                f"a quote that is not closed within {MAX_RECORD_BYTES:,d} bytes"
            )
        try:
            return line.decode()
        except UnicodeDecodeError:
            self.has_foreign_bytes = True
            return line.decode(errors="surrogateescape")


def _reason(error: csv.Error) -> str:
    """Return csv's error without its advice to programmers."""
    reason = str(error).partition(" - ")[0]
    if reason.startswith("new-line character seen in unquoted field"):
        return "a carriage return without quotes around it, or lines that end with one alone: end them with line feeds"
    return reason
