"""Format: the base class of all file formats, and the rows and blocks that a format gives."""

from __future__ import annotations

import copy
import io
import itertools
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Self

import numpy as np

from vembed.data.examples import BadRecord
from vembed.errors import UserError

MAX_RECORD_BYTES = 32 * 2**20
"""A longer record is a bad one: it usually indicates a broken file."""
BLOCK_ROWS = 256
"""Rows of a block where the format gives them one by one."""
PIECE_BYTES = 2**16
"""Bytes that are read and parsed together: few enough to stay in a core's cache."""

Row = tuple[int, int, Any]
"""Number and line of a record, and the record itself or a `BadRecord`. The number is what `read` takes: a byte
position in text, a row number in a table. Lines count from 1, from the first number that was asked for."""

_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a source, for one process of the first pass: the records with numbers from `start` to before `stop`."""

    start: int
    stop: int


class Block:
    """Consecutive rows of a source: their numbers and lines (int64 [n]), and their records."""

    def __init__(
        self, numbers: np.ndarray, lines: np.ndarray, records: list[Any] | None = None
    ) -> None:
        self.numbers = numbers
        self.lines = lines
        self._records = records or []

    def records(self) -> list[Any]:
        """Return the records, each a dict in general, or a `BadRecord`."""
        return self._records

    def columns(self) -> tuple[str, ...] | None:
        """Return the columns of the records; None if the records differ in them or one has none."""
        records = self.records()
        if set(map(type, records)) != {dict}:
            return None
        columns = set(map(tuple, records))
        return columns.pop() if len(columns) == 1 else None

    def are_texts(self, columns: Sequence[str]) -> bool:
        """Return True if all values of these columns are texts that can be embedded. False: look at each."""
        values = [record[name] for name in columns for record in self.records()]
        if set(map(type, values)) != {str} or not all(values):
            return False
        if any(map(str.isspace, values)):
            return False
        joined = "".join(values)
        try:
            return "\0" not in joined and (joined.isascii() or bool(joined.encode()))
        except UnicodeEncodeError:
            return False

    def moved(self, numbers: int, lines: int) -> Self:
        """Return the block with something added to its numbers and lines."""
        block = copy.copy(self)
        block.numbers = self.numbers + numbers
        block.lines = self.lines + lines
        return block

    def rows(self) -> Iterator[Row]:
        """Yield the rows one by one."""
        return zip(
            self.numbers.tolist(), self.lines.tolist(), self.records(), strict=True
        )


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
        self.selected: Sequence[str] | None = None

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
        return grouped(self.rows(start, stop))

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

    def parts(self) -> list[Part]:
        """Return the parts that processes may read apart from each other; one part if it can only be read whole."""
        return [Part(self.start, self.stop)]

    def num_lines(self, part: Part) -> int:
        """Return the number of lines of a part."""
        return part.stop - part.start

    def first_line(self, part: Part) -> int:
        """Return the number from which the lines of the part's file count."""
        del part
        return 0

    def num_records(self) -> int | None:
        """Return the number of records where it is known without reading them."""
        return None

    def select(self, columns: Sequence[str]) -> None:
        """Read only these columns from now on. Formats without columns on disk read all."""

    def sample(self, count: int) -> list[Row]:
        """Return the first rows."""
        return list(itertools.islice(self.rows(), count))

    def __getstate__(self) -> dict[str, Any]:
        """Another process opens the file again."""
        return {
            "path": self.path,
            "name": self.name,
            "folder": self.folder,
            "selected": self.selected,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See __getstate__."""
        self.__init__(state["path"])  # type: ignore[misc]
        self.name = state["name"]
        self.folder = state["folder"]
        if state["selected"] is not None:
            self.select(state["selected"])


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
        head = self._bytes(0, 4)
        if head.startswith(_UTF16):
            raise UserError(f"{path} is UTF-16 text: save it as UTF-8")
        self.start = len(_BOM) if head.startswith(_BOM) else 0

    @property
    def stop(self) -> int:
        """Size of the file."""
        return os.fstat(self._file).st_size

    def num_lines(self, part: Part) -> int:
        """Return the number of line ends in a part."""
        count = 0
        left = part.stop - part.start
        with self.open_at(part.start) as file:
            while left > 0 and (data := file.read(min(left, 16 * PIECE_BYTES))):
                count += data.count(b"\n")
                left -= len(data)
        return count

    def _bytes(self, start: int, size: int) -> bytes:
        return os.pread(self._file, size, start)

    def _line(self, start: int) -> bytes:
        """Return the line that begins at a position."""
        size = 2**12
        while True:
            data = self._bytes(start, size)
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


def grouped(rows: Iterable[Row]) -> Iterator[Block]:
    """Yield rows that come one by one in blocks."""
    rows = iter(rows)
    while chunk := list(itertools.islice(rows, BLOCK_ROWS)):
        numbers = np.array([number for number, _, _ in chunk], np.int64)
        lines = np.array([line for _, line, _ in chunk], np.int64)
        yield Block(numbers, lines, [record for _, _, record in chunk])
