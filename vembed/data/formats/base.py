"""Format: the base class of all file formats, and the rows and blocks that a format gives."""

from __future__ import annotations

import io
import itertools
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vembed.data.examples import BadRecord, has_lone_surrogate
from vembed.errors import UserError

MAX_RECORD_BYTES = 32 * 2**20
"""A longer record is a bad one: it usually indicates a broken file."""
BLOCK_ROWS = 256
"""Rows of a block where the format gives them one by one."""
PIECE_BYTES = 2**16
FILE_BITS = 44
"""Bits behind which numbers and lines of several files hold the number of the file."""

Row = tuple[int, int, Any]
"""Number and line of a record, and the record itself or a `BadRecord`. The number is what `read` takes: a byte
position in text, a row number in a table. Lines count from 1, from the first number that was asked for."""

_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


@dataclass
class Block:
    """Consecutive rows of a source: their numbers and lines (int64 [n]), and their records.

    Rows of a table become Python objects only where they are looked at one by one.
    """

    numbers: np.ndarray
    lines: np.ndarray
    records: list[Any] | pa.RecordBatch
    """Each a dict in general, or a `BadRecord`."""

    def columns(self) -> tuple[str, ...] | None:
        """Return the columns of the records; None if the records differ in them or one has none."""
        if isinstance(self.records, pa.RecordBatch):
            names = tuple(self.records.schema.names)
            return names if len(set(names)) == len(names) else None
        if set(map(type, self.records)) != {dict}:
            return None
        columns = set(map(tuple, self.records))
        return columns.pop() if len(columns) == 1 else None

    def are_texts(self, columns: Sequence[str]) -> bool:
        """Return True if all values of these columns are texts that can be embedded. False: look at each."""
        if isinstance(self.records, pa.RecordBatch):
            return all(_are_texts(self.records.column(name)) for name in columns)
        values = [record[name] for name in columns for record in self.records]
        if set(map(type, values)) != {str} or not all(values):
            return False
        if any(map(str.isspace, values)):
            return False
        joined = "".join(values)
        return "\0" not in joined and not has_lone_surrogate(joined)

    def moved(self, by: int) -> Block:
        """Return the block with something added to its numbers and lines."""
        return replace(self, numbers=self.numbers + by, lines=self.lines + by)

    def rows(self) -> Iterator[Row]:
        """Yield the rows one by one."""
        records = self.records
        if isinstance(records, pa.RecordBatch):
            records = row_values(records)
        return zip(self.numbers.tolist(), self.lines.tolist(), records, strict=True)


def _are_texts(column: pa.Array) -> bool:
    is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    if column.null_count or not is_text:
        return False
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:  # not UTF-8
        return False
    texts = column.cast(pa.large_string())
    _, bounds, data = texts.buffers()
    offsets = np.frombuffer(bounds, np.int64)[texts.offset :][: len(texts) + 1]
    if (np.diff(offsets) == 0).any() or pc.any(pc.utf8_is_space(texts)).as_py():
        return False
    return bool(np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]].all())


def row_values(rows: pa.RecordBatch) -> list[Any]:
    """Return the rows as dicts, with a BadRecord for each row that Python cannot represent (invalid UTF-8, say)."""
    try:
        values: list[Any] = rows.to_pylist()
    except (ValueError, OverflowError, pa.ArrowException) as error:
        if rows.num_rows == 1:
            return [BadRecord(f"values that cannot be read ({first_line(error)})")]
        values = []
        for row in range(rows.num_rows):
            values += row_values(rows.slice(row, 1))
    return values


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class Format:
    """A file of records in one format. Records are found in order by `rows`, and read again by number from any thread.

    A format declares its endings and its title, and defines `stop`, and `rows` or `blocks`. All else
    has a default here. A format that is a table sets `columns`.
    """

    endings: ClassVar[tuple[str, ...]] = ()
    """Endings of the files, such as `.csv`."""
    title: ClassVar[str] = ""
    """Name of the format in messages and docs."""
    numbers_are_text: ClassVar[bool] = False
    """True if numbers are represented as text (CSV)."""
    start = 0
    """Smallest number."""
    columns: tuple[str, ...] | None = None
    """Columns of a table; None where each record has its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        """Name in messages: the path, or what the file was copied from."""
        self.folder = path.parent
        """Default base folder of relative image paths."""
        self.selected: list[str] | None = None
        """The columns that are read; None: all. Formats without columns on disk read all."""

    @classmethod
    def open(cls, path: Path) -> Format:
        """Return the reader of a file."""
        return cls(path)

    @property
    def stop(self) -> int:
        """Number behind the last one."""
        raise NotImplementedError

    def rows(self, start: int | None = None, stop: int | None = None) -> Iterator[Row]:
        """Yield the rows with numbers from `start` to before `stop`; without them all rows. Blank lines are no rows."""
        for block in self.blocks(start, stop):
            yield from block.rows()

    def blocks(
        self, start: int | None = None, stop: int | None = None
    ) -> Iterator[Block]:
        """Yield the same rows in blocks."""
        rows = self.rows(start, stop)
        while chunk := list(itertools.islice(rows, BLOCK_ROWS)):
            numbers, lines, records = zip(*chunk, strict=True)
            yield Block(
                np.array(numbers, np.int64), np.array(lines, np.int64), list(records)
            )

    def read(self, number: int) -> Any:
        """Return one record again, or a `BadRecord`."""
        row = next(self.rows(number, number + 1), None)
        return BadRecord("no record there") if row is None else row[2]

    def where(self, line: int) -> str:
        """Return the name of a record for messages."""
        return f"{self.name}:{line}"

    def files(self) -> Sequence[Path]:
        """Return the files that the records come from."""
        return (self.path,)

    def parts(self) -> list[range]:
        """Return the ranges of numbers that processes may read apart from each other; one if it can only be read whole."""
        return [range(self.start, self.stop)]

    def num_lines(self, part: range) -> int:
        """Return the number of lines of a part."""
        return part.stop - part.start

    def num_records(self) -> int | None:
        """Return the number of records where it is known without reading them."""
        return None

    def select(self, columns: Sequence[str]) -> None:
        """Read only these columns from now on."""
        self.selected = list(columns)

    def sample(self, count: int) -> list[Row]:
        """Return the first rows."""
        return list(itertools.islice(self.rows(), count))

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the file again."""
        state = {"name": self.name, "folder": self.folder, "selected": self.selected}
        return type(self), (self.path,), state


class ArrowRows(Format):
    """A table whose records are rows of Arrow batches. Numbers are rows from 0, and lines are rows from 1."""

    def batches(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Yield rows `start` to `stop` - 1, as many at a time as fit in memory easily."""
        raise NotImplementedError

    def blocks(
        self, start: int | None = None, stop: int | None = None
    ) -> Iterator[Block]:
        """Yield rows in blocks."""
        first = self.start if start is None else start
        line = 1
        for batch in self.batches(first, self.stop if stop is None else stop):
            records: Any = batch
            if batch.nbytes > MAX_RECORD_BYTES:
                records = []
                for row in (batch.slice(at, 1) for at in range(batch.num_rows)):
                    if row.nbytes > MAX_RECORD_BYTES:
                        reason = f"a record of more than {MAX_RECORD_BYTES:,d} bytes"
                        records.append(BadRecord(reason))
                    else:
                        records += row_values(row)
            numbers = np.arange(first, first + batch.num_rows)
            yield Block(numbers, numbers - first + line, records)
            first += batch.num_rows
            line += batch.num_rows

    def read(self, number: int) -> Any:
        """Return one record again."""
        return row_values(next(self.batches(number, number + 1)))[0]

    def num_records(self) -> int:
        """Return the number of rows."""
        return self.stop


class TextFormat(Format):
    """A file whose records are read by byte position.

    `os.pread` is thread-safe. If the file is truncated meanwhile it gives an error, where a memory map would crash the
    process with SIGBUS.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = os.open(path, os.O_RDONLY)
        # The reader lives as long as its examples are read, and nobody closes it.
        weakref.finalize(self, os.close, self._file)
        head = os.pread(self._file, 4, 0)
        if head.startswith(_UTF16):
            raise UserError(f"{path} is UTF-16 text: save it as UTF-8")
        self.start = len(_BOM) if head.startswith(_BOM) else 0

    @property
    def stop(self) -> int:
        """Size of the file."""
        return os.fstat(self._file).st_size

    def num_lines(self, part: range) -> int:
        """Return the number of line ends in a part."""
        count = 0
        for start in range(part.start, part.stop, 2**20):
            size = min(2**20, part.stop - start)
            count += os.pread(self._file, size, start).count(b"\n")
        return count

    def lines(
        self, start: int | None = None, stop: int | None = None
    ) -> Iterator[tuple[int, int, bytes]]:
        """Yield position, number and bytes of each line that begins in a range. Of a line that is too long to be a
        record, the bytes are cut."""
        position = self.start if start is None else start
        stop = self.stop if stop is None else stop
        number = 1
        with self.open_at(max(position - 1, self.start)) as file:
            if position > self.start:
                # A line that began before `start` belongs to the part before.
                skipped = rest_of_line(file) - 1
                position += skipped
                number += skipped > 0
            while position < stop and (line := file.readline(MAX_RECORD_BYTES + 1)):
                yield position, number, line
                position += len(line)
                if len(line) > MAX_RECORD_BYTES and not line.endswith(b"\n"):
                    position += rest_of_line(file)
                number += 1

    def line_at(self, start: int) -> bytes:
        """Return the line that begins at a position, for `read`."""
        size = 2**12
        while True:
            data = os.pread(self._file, size, start)
            end = data.find(b"\n")
            if end >= 0:
                return data[: end + 1]
            if len(data) < size or size > MAX_RECORD_BYTES:
                return data
            size *= 8

    def open_at(self, start: int) -> BinaryIO:
        """Return the file for sequential reading, with a position of its own: threads read at once."""
        return io.BufferedReader(_PositionedFile(self._file, start), PIECE_BYTES)


class _PositionedFile(io.RawIOBase):
    """An open file with a position of its own."""

    def __init__(self, file: int, position: int) -> None:
        self._file = file
        self._position = position

    def readable(self) -> bool:
        """See io."""
        return True

    def seekable(self) -> bool:
        """See io."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a position, counted from the beginning or from here."""
        self._position = offset + (self._position if whence == 1 else 0)
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes."""
        size = os.preadv(self._file, [buffer], self._position)
        self._position += size
        return size


def rest_of_line(file: BinaryIO) -> int:
    """Skip to the next line, which may be far away. Return the number of bytes."""
    size = 0
    while piece := file.readline(PIECE_BYTES):
        size += len(piece)
        if piece.endswith(b"\n"):
            break
    return size
