"""Format: the base class of all file formats, with its two kinds: text with a record on each line, and tables."""

import io
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import pyarrow as pa

from vembed.data.examples import BadRecord

MAX_RECORD_BYTES = 32 * 2**20
"""A longer record is a bad one: it usually indicates a broken file."""
PART_BYTES = 32 * 2**20
"""Bytes of a text file that one process of the first pass reads at a time."""
BUFFER_BYTES = 2**14
READ_ROWS = 1024
READ_BYTES = 8 * 2**20
"""Rows and bytes of a table that are made Python objects at a time."""
FILE_BITS = 44
"""Bits behind which numbers and lines of several files hold the number of the file."""

Row = tuple[int, int, Any]
"""Number and line of a record, and the record itself or a `BadRecord`. The number is what `read` takes: a byte
position in text, a row number in a table. Lines count from 1, from the first number that was asked for."""

_BOM = b"\xef\xbb\xbf"


class Format(ABC):
    """A file of records in one format. Records are found in order by `rows`, and read again by number from any thread."""

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
    def open(cls, path: Path) -> "Format":
        """Return the reader of a file."""
        return cls(path)

    @property
    @abstractmethod
    def stop(self) -> int:
        """Number behind the last one."""

    @property
    def single_files(self) -> "Sequence[Format]":
        """The reader of each file, by the number of the file."""
        return (self,)

    @property
    def numbers(self) -> range:
        """All numbers."""
        return range(self.start, self.stop)

    @abstractmethod
    def rows(self, part: range | None = None) -> Iterator[Row]:
        """Yield the rows with numbers in a part; without one all rows. Blank lines are no rows."""

    def read(self, number: int) -> Any:
        """Return one record again, or a `BadRecord`."""
        row = next(self.rows(range(number, number + 1)), None)
        return BadRecord("no record there") if row is None else row[2]

    def where(self, line: int) -> str:
        """Return the name of a record for messages."""
        return f"{self.name}:{line}"

    def files(self) -> Sequence[Path]:
        """Return the files that the records come from."""
        return (self.path,)

    def parts(self) -> list[range]:
        """Return the ranges of numbers that processes may read apart from each other; one if it can only be read whole."""
        return [self.numbers]

    def num_lines(self, part: range) -> int:
        """Return the number of lines of a part."""
        return part.stop - part.start

    def num_records(self) -> int | None:
        """Return the number of records where it is known without reading them."""
        return None

    def select(self, columns: Sequence[str]) -> None:
        """Read only these columns from now on."""
        self.selected = list(columns)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the file again."""
        state = {"name": self.name, "folder": self.folder, "selected": self.selected}
        return type(self), (self.path,), state


class ArrowRows(Format):
    """A table whose records are rows of an Arrow table. Numbers are rows from 0, and lines are rows from 1."""

    @abstractmethod
    def table(self) -> pa.Table:
        """Return all rows, in memory or mapped from disk."""

    @property
    def stop(self) -> int:
        """Number of rows."""
        return int(self.table().num_rows)

    def batches(self, part: range) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a part, as many at a time as fit in memory easily."""
        table = self.table().slice(part.start, len(part))
        row_bytes = max(1, table.nbytes // max(1, table.num_rows))
        num_rows = max(1, min(READ_ROWS, READ_BYTES // row_bytes))
        yield from table.to_batches(max_chunksize=num_rows)

    def rows(self, part: range | None = None) -> Iterator[Row]:
        """Yield rows with the number of each."""
        part = self.numbers if part is None else part
        records = chain.from_iterable(map(python_rows, self.batches(part)))
        for line, record in enumerate(records, 1):
            yield part.start + line - 1, line, record

    def read(self, number: int) -> Any:
        """Return one record again."""
        batches = self.table().slice(number, 1).to_batches()
        return python_rows(batches[0])[0]

    def num_records(self) -> int:
        """Return the number of rows."""
        return self.stop


def python_rows(rows: pa.RecordBatch) -> list[Any]:
    """Return the rows as dicts, with a BadRecord for each that is too long or that Python cannot represent (invalid
    UTF-8, say)."""
    reason = f"a record of more than {MAX_RECORD_BYTES:,d} bytes"
    if rows.nbytes <= MAX_RECORD_BYTES:
        try:
            return list(rows.to_pylist())
        except (ValueError, OverflowError, pa.ArrowException) as error:
            reason = f"values that cannot be read ({first_line(error)})"
    if rows.num_rows == 1:
        return [BadRecord(reason)]
    values = []
    for row in range(rows.num_rows):
        values += python_rows(rows.slice(row, 1))
    return values


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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
        head = os.pread(self._file, len(_BOM), 0)
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

    def open_at(self, start: int) -> BinaryIO:
        """Return the file for sequential reading, with a position of its own: threads read at once."""
        return io.BufferedReader(_PositionedFile(self._file, start), BUFFER_BYTES)


class LineFormat(TextFormat):
    """A text file with a record on each line. Blank lines are no records."""

    @abstractmethod
    def record(self, line: bytes) -> Any:
        """Return the record on a line, or a `BadRecord` with the reason why there is none."""

    def parts(self) -> list[range]:
        """Return parts of equal size."""
        starts = range(0, max(len(self.numbers), 1), PART_BYTES)
        return [self.numbers[start : start + PART_BYTES] for start in starts]

    def rows(self, part: range | None = None) -> Iterator[Row]:
        """Yield the records whose lines begin in a part."""
        part = self.numbers if part is None else part
        position = part.start
        number = 1
        with self.open_at(max(position - 1, self.start)) as file:
            if position > self.start:
                # A line that began before it belongs to the part before.
                skipped = rest_of_line(file) - 1
                position += skipped
                number += skipped > 0
            while position < part.stop and (
                line := file.readline(MAX_RECORD_BYTES + 1)
            ):
                size = len(line)
                if size > MAX_RECORD_BYTES:
                    size += 0 if line.endswith(b"\n") else rest_of_line(file)
                    yield position, number, too_long()
                elif not line.isspace():
                    yield position, number, self.record(line)
                position += size
                number += 1


def too_long() -> BadRecord:
    """Return the reason why a long line is no record."""
    return BadRecord(f"a line of more than {MAX_RECORD_BYTES:,d} bytes")


class _PositionedFile(io.RawIOBase):
    """An open file with a position of its own."""

    def __init__(self, file: int, position: int) -> None:
        self._file = file
        self._position = position

    def readable(self) -> bool:
        """See io."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes."""
        size = os.preadv(self._file, [buffer], self._position)
        self._position += size
        return size


def rest_of_line(file: BinaryIO) -> int:
    """Skip to the next line, which may be far away. Return the number of bytes."""
    size = 0
    while piece := file.readline(BUFFER_BYTES):
        size += len(piece)
        if piece.endswith(b"\n"):
            break
    return size
