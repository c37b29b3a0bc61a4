"""CSV and TSV files."""

import csv
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from vembed.data.examples import BadRecord, NotUtf8
from vembed.data.formats.base import (
    MAX_RECORD_BYTES,
    Row,
    TextFormat,
    rest_of_line,
    too_long,
)
from vembed.errors import UserError

log = logging.getLogger("vembed")

DELIMITERS = (",", ";", "\t", "|")
"""Delimiters that are recognised."""
_SEPARATOR = re.compile(r"sep=(.)\r?\n")


class DelimitedFile(TextFormat):
    """CSV with a header. Fields may be quoted and then hold newlines; empty cells are None."""

    endings = (".csv",)
    title = "CSV"
    numbers_are_text = True
    expected_delimiter: ClassVar[str] = ","

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        # The limit is global to the process; raising it is harmless.
        csv.field_size_limit(max(csv.field_size_limit(), MAX_RECORD_BYTES))
        self.columns = ()
        with self.open_at(self.start) as file:
            first = file.readline(MAX_RECORD_BYTES).decode(errors="replace")
        line = 1
        self._delimiter = delimiter_of(first, self.expected_delimiter)
        if separator := _SEPARATOR.fullmatch(first):  # a line for Excel
            self.start += len(first.encode())
            line = 2
            self._delimiter = separator[1]
        if self._delimiter != self.expected_delimiter:
            log.info(
                f"{path}: fields are separated by {self._delimiter!r}, not {self.expected_delimiter!r}, as its header shows"
            )
        records = self._records(self.start, line)
        _, line, cells = next(records, (0, line, None))
        if cells is None:
            raise UserError(f"{self.where(line)}: there is no header")
        if isinstance(cells, BadRecord):
            raise UserError(f"{self.where(line)}: the header cannot be read: {cells}")
        self.start, self._first_line, _ = next(records, (self.stop, line + 1, None))
        self.columns = tuple(cells)

    def rows(self, part: range | None = None) -> Iterator[Row]:
        """Yield the records that begin in a part. Lines count from the beginning of the file."""
        part = self.numbers if part is None else part
        assert self.columns is not None
        for number, line, cells in self._records(part.start, self._first_line):
            if number >= part.stop:
                return
            record: Any = cells
            if not isinstance(cells, BadRecord) and len(cells) != len(self.columns):
                record = BadRecord(
                    f"the number of cells is {len(cells):,d}, and the header has {len(self.columns):,d}"
                )
            elif not isinstance(cells, BadRecord):
                values = [cell or None for cell in cells]
                record = dict(zip(self.columns, values, strict=True))
            yield number, line, record

    def _records(
        self, start: int, number: int
    ) -> Iterator[tuple[int, int, list[str] | BadRecord]]:
        """Yield position, line and cells of each record. `number`: of the line at `start`.

        An unclosed quote would take the records after it, so a record that cannot be parsed ends with its first line.
        """
        file = self.open_at(start)
        while line := file.readline(MAX_RECORD_BYTES + 1):
            size = len(line)
            num_lines = 1
            cells: list[str] | BadRecord
            if size > MAX_RECORD_BYTES:
                size += 0 if line.endswith(b"\n") else rest_of_line(file)
                cells = too_long()
            else:
                cells = self._cells(line)
                if isinstance(cells, BadRecord) and line.count(b'"') % 2:
                    lines, cells = self._quoted(file, line, cells)
                    num_lines = len(lines)
                    size = sum(map(len, lines))
                    if num_lines == 1:  # the lines behind it are records
                        file = self.open_at(start + size)
                is_wrong = isinstance(cells, BadRecord) or (
                    self.columns and len(cells) != len(self.columns)
                )
                if self._delimiter == "\t" and is_wrong:
                    # Many TSV files do not use quoting; a quote is an ordinary character there.
                    cells = self._cells(line, quoting=csv.QUOTE_NONE)
            if line.strip(b" \r\n"):
                yield start, number, cells
            start += size
            number += num_lines

    def _quoted(
        self,
        file: BinaryIO,
        first: bytes,
        problem: BadRecord,
    ) -> tuple[list[bytes], list[str] | BadRecord]:
        """Return the lines and cells of a record in whose first line a quote stays open. What gives no record is the
        first line alone, with its problem."""
        lines = [first]
        size = len(first)
        num_quotes = first.count(b'"')
        while num_quotes % 2 and (line := file.readline(MAX_RECORD_BYTES + 1)):
            size += len(line)
            if size > MAX_RECORD_BYTES:
                reason = (
                    f"a quote that is not closed within {MAX_RECORD_BYTES:,d} bytes"
                )
                return lines[:1], BadRecord(reason)
            lines.append(line)
            num_quotes += line.count(b'"')
        cells = self._cells(b"".join(lines))
        if isinstance(cells, BadRecord):
            return lines[:1], problem
        if self.columns and len(cells) != len(self.columns):
            reason = (
                f"quoted over {len(lines):,d} lines, which make {len(cells):,d} cells"
            )
            return lines[:1], BadRecord(reason)
        num_tabs = {line.count(b"\t") for line in lines}
        if self.columns and self._delimiter == "\t" and num_tabs == {len(cells) - 1}:
            return lines[:1], problem  # each line is a row of its own
        return lines, cells

    def _cells(
        self, record: bytes, quoting: Any = csv.QUOTE_MINIMAL
    ) -> list[str] | BadRecord:
        """Return the cells of a record, or why it has none."""
        try:
            text = record.decode()
        except UnicodeDecodeError as error:
            return NotUtf8(
                f"not UTF-8 (byte {error.start + 1:,d} of the record): save the file as UTF-8"
            )
        try:
            rows = csv.reader(
                [text], delimiter=self._delimiter, quoting=quoting, strict=True
            )
            return next(rows, [])
        except csv.Error as error:
            return BadRecord(f"not CSV ({str(error).partition(' - ')[0]})")


class TsvFile(DelimitedFile):
    """TSV with a header."""

    endings = (".tsv",)
    title = "TSV"
    expected_delimiter = "\t"


def delimiter_of(header: str, expected: str) -> str:
    """Return the delimiter of a file with this header: the expected one, unless it gives a single field and another
    delimiter gives several."""

    def num_fields(delimiter: str) -> int:
        try:
            reader = csv.reader([header], delimiter=delimiter, strict=True)
            return len(next(reader, []))
        except csv.Error:
            return 0

    if num_fields(expected) > 1:
        return expected
    best = max(DELIMITERS, key=num_fields)
    return best if num_fields(best) > 1 else expected
