"""Readers: the interface for files and tables with random access to records, and the readers of JSON."""

from __future__ import annotations

import itertools
import json
import os
import re
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Protocol

import numpy as np

from vembed.data.examples import BadRecord
from vembed.data.formats.base import Block, Found, RecordBlock, grouped
from vembed.errors import UserError

MAX_RECORD = 32 * 2**20
"""A longer line (in bytes) is a bad record: it usually indicates a broken file."""
PART_BYTES = 32 * 2**20
"""Bytes of a large file that one process of the first pass reads at a time."""
MAX_ARRAY = 2**30
"""Largest file in bytes with a JSON array, which has to be read whole."""

PIECE_BYTES = 2**16
"""Bytes that are read and parsed together: few enough to stay in a core's cache."""

_BOM = b"\xef\xbb\xbf"
_LINE_END = ord("\n")
_AROUND = " \t\r\n\ufeff"
"""Characters around a record that belong to no record."""
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a source, for one process of the first pass: the records that begin from `start` to before `stop`."""

    start: int
    stop: int
    file: int = 0
    first_line: int = 0
    """Number that is added to line numbers of the file."""


class Reader(Protocol):
    """One file or table. `scan` finds all records once; `read` returns one of them again, from any thread."""

    name: str
    folder: Path
    """Default base folder of relative image paths."""
    numbers_in_text: bool
    """True if numbers are represented as text (CSV)."""

    def scan(self) -> Iterator[Found]:
        """Yield all records in order."""
        ...

    def read(self, start: int, size: int) -> Any:
        """Return one record again, from the position and size that `scan` yielded."""
        ...

    def where(self, line: int) -> str:
        """Return the name of a record for messages."""
        ...

    def files(self) -> Sequence[Path]:
        """Return the files that the records come from."""
        ...

    def extent(self) -> tuple[int, int]:
        """Return bounds of the positions and of the line numbers."""
        ...

    def parts(self) -> list[Part]:
        """Return the parts that processes may read apart from each other; one part if it can only be read whole."""
        ...

    def blocks(self, part: Part) -> Iterator[Block]:
        """Yield the records of a part. Lines count from the part's first one."""
        ...

    def num_lines(self, part: Part) -> int:
        """Return the number of lines of a part."""
        ...

    def unpacks(self) -> int:
        """Return the bytes that a pass over the records stores in the cache folder, which `read` then needs."""
        ...


class TextFile:
    """A file whose records are read by byte position.

    `os.pread` is thread-safe. If the file is truncated meanwhile it gives an error, where a memory map would crash the
    process with SIGBUS.
    """

    numbers_in_text = False

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.folder = path.parent
        self.path = path
        self._file = os.open(path, os.O_RDONLY)
        # The reader lives as long as its examples are read, and nobody closes it.
        weakref.finalize(self, os.close, self._file)
        head = self._bytes(0, 4)
        if head.startswith(_UTF16):
            raise UserError(f"{path} is UTF-16 text: save it as UTF-8")
        self._begin = len(_BOM) if head.startswith(_BOM) else 0

    def where(self, line: int) -> str:
        """Return the name of a record for messages."""
        return f"{self.name}:{line}"

    def files(self) -> Sequence[Path]:
        """Return the files that the records come from."""
        return (self.path,)

    def extent(self) -> tuple[int, int]:
        """Return bounds of the positions and of the line numbers. Each line has a byte at least."""
        size = os.fstat(self._file).st_size
        return size + 1, size + 1

    def parts(self) -> list[Part]:
        """Return one part: quoted fields and arrays have no end that could be seen from the middle."""
        return [Part(self._begin, os.fstat(self._file).st_size)]

    def blocks(self, part: Part) -> Iterator[Block]:
        """Yield all records."""
        del part
        return grouped(self.scan())

    def scan(self) -> Iterator[Found]:
        """Yield all records in order."""
        raise NotImplementedError

    def num_lines(self, part: Part) -> int:
        """Return the number of line ends in a part."""
        found, left = 0, part.stop - part.start
        with self._from(part.start) as file:
            while left > 0 and (data := file.read(min(left, PIECE_BYTES))):
                found += data.count(b"\n")
                left -= len(data)
        return found

    def unpacks(self) -> int:
        """Return 0: records are read from the file itself."""
        return 0

    def _bytes(self, start: int, size: int) -> bytes:
        return os.pread(self._file, size, start)

    def _from(self, start: int) -> BinaryIO:
        """Return the file opened again, for sequential reading."""
        file = os.fdopen(os.dup(self._file), "rb")
        file.seek(start)
        return file


class JsonLines(TextFile):
    """A file with one JSON object per line. Blank lines are ignored."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._decode = json.JSONDecoder(parse_constant=_no_constant).raw_decode
        self._num_lines: dict[Part, int] = {}
        """Of parts that were read."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the file again."""
        return _reopened, (type(self), self.path, self.name, self.folder)

    def parts(self) -> list[Part]:
        """Return parts of equal size."""
        size = os.fstat(self._file).st_size
        bounds = [*range(self._begin, max(size, self._begin + 1), PART_BYTES), size]
        return [Part(start, stop) for start, stop in itertools.pairwise(bounds)]

    def num_lines(self, part: Part) -> int:
        """Return the number of line ends in a part."""
        return (
            self._num_lines[part]
            if part in self._num_lines
            else super().num_lines(part)
        )

    def scan(self) -> Iterator[Found]:
        """Yield all records in order."""
        for block in self.blocks(Part(self._begin, os.fstat(self._file).st_size)):
            yield from block.found()

    def blocks(self, part: Part) -> Iterator[Block]:
        """Yield the records whose lines begin in a part."""
        start, number = part.start, 1
        with self._from(max(start - 1, self._begin)) as file:
            if (
                start > self._begin
            ):  # a line that began before belongs to the part before
                while (
                    not (skipped := file.readline(MAX_RECORD)).endswith(b"\n")
                    and skipped
                ):
                    start += len(skipped)
                if not skipped:
                    return
                start += len(skipped) - 1
                number += start > part.start
            while start < part.stop and (
                data := file.read(min(PIECE_BYTES, part.stop - start))
            ):
                # A piece ends with a whole line, so that no record is cut.
                if not data.endswith(b"\n"):
                    data += file.readline(MAX_RECORD + 1)
                # Fast for what is plainly right; the slow way below finds out what is wrong, and where.
                plain = self._plain_records(data)
                if (
                    plain is None
                ):  # line by line, up to the end of the part where one may be too long
                    file.seek(start)
                    stop = start + len(data) if data.endswith(b"\n") else part.stop
                    yield from grouped(self._by_line(file, start, stop, number))
                else:
                    records, ends = plain
                    starts = np.concatenate([[0], ends[:-1]])
                    yield RecordBlock(
                        starts + start,
                        ends - starts,
                        np.arange(number, number + len(records)),
                        records,
                        data,
                    )
                if not data.endswith(b"\n"):
                    return
                start += len(data)
                number += data.count(b"\n") if plain is None else len(plain[0])
        if start >= part.stop:  # the last line may end in a later part
            self._num_lines[part] = number - 1 - (start > part.stop)

    def _plain_records(self, data: bytes) -> tuple[list[Any], np.ndarray] | None:
        """Return the records of whole lines and where their lines end; None if a line is not plainly a record."""
        if len(data) > MAX_RECORD:
            return None
        decode, records, ends, at = self._decode, list[Any](), list[int](), 0
        try:
            text = data.decode()
            while at < len(text):
                stop = text.find("\n", at)
                stop = len(text) if stop < 0 else stop
                record, end = decode(text, at)
                # To the parser a record may go over several lines. After it there may be space.
                if end != stop and (end > stop or text[end:stop].strip(_AROUND)):
                    return None
                records.append(record)
                at = stop + 1
                ends.append(at)
        except (ValueError, RecursionError):
            return None
        if text.isascii():
            return records, np.minimum(ends, len(data))
        found = np.flatnonzero(np.frombuffer(data, np.uint8) == _LINE_END) + 1
        return records, found if data.endswith(b"\n") else np.append(found, len(data))

    def _by_line(
        self, file: BinaryIO, start: int, stop: int, number: int
    ) -> Iterator[Found]:
        inside_long = False
        while (inside_long or start < stop) and (line := file.readline(MAX_RECORD + 1)):
            size = len(line)
            # The rest of a line that is too long is read over, in pieces, up to its end.
            if inside_long or size > MAX_RECORD:
                if not inside_long:
                    yield (
                        start,
                        0,
                        number,
                        BadRecord(f"a line of more than {MAX_RECORD:,d} bytes"),
                    )
                inside_long = not line.endswith(b"\n")
            elif not line.isspace():
                yield start, size, number, self._record(line)
            start += size
            number += line.endswith(b"\n")

    def read(self, start: int, size: int) -> Any:
        """Return one record again, from the position and size that `scan` yielded."""
        return self._record(self._bytes(start, size))

    def _record(self, line: bytes) -> Any:
        try:
            text = line.decode().strip(_AROUND)
            record, end = self._decode(text)
        except UnicodeDecodeError as error:
            return BadRecord(f"not UTF-8 (byte {error.start + 1:,d} of the line)")
        except json.JSONDecodeError as error:
            ends = "; a record stands on one line" if error.pos >= len(text) else ""
            return BadRecord(
                f"not JSON ({error.msg} at column {error.pos + 1:,d}){ends}"
            )
        except RecursionError:
            return BadRecord("JSON that is nested too deeply")
        except ValueError as error:
            return BadRecord(f"not JSON ({error})")
        if end != len(text):
            return BadRecord(
                f"not JSON (more text after its end at column {end + 1:,d})"
            )
        return record


class JsonArray(JsonLines):
    """A file with one JSON array of objects. A scan parses it whole; later its records are read by position."""

    def parts(self) -> list[Part]:
        """Return one part."""
        return TextFile.parts(self)

    def blocks(self, part: Part) -> Iterator[Block]:
        """Yield all records."""
        return TextFile.blocks(self, part)

    def scan(self) -> Iterator[Found]:
        """Yield all records in order. Raise UserError on a syntax error, since the next record cannot be located."""
        size = self.path.stat().st_size
        if size > MAX_ARRAY:
            raise UserError(
                f"{self.name} is one JSON array of {size:,d} bytes and would be read whole: use JSON Lines"
            )
        try:
            text = self._bytes(self._begin, size).decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.name} is not UTF-8 (byte {error.start + 1:,d})"
            ) from error
        start, line, counted = self._begin, 1, 0
        at = _past_space(text, 0) + 1  # `open_reader` has checked the opening bracket
        closed = text[_past_space(text, at) :][:1] == "]"
        while not closed:
            at = _past_space(text, at)
            # The position counts bytes and `at` counts characters: only what is new is encoded.
            start, line, counted = (
                start + len(text[counted:at].encode()),
                line + text.count("\n", counted, at),
                at,
            )
            try:
                record, end = self._decode(text, at)
            except (RecursionError, ValueError) as error:
                self._refuse(
                    text,
                    error.pos if isinstance(error, json.JSONDecodeError) else at,
                    error,
                )
            yield start, len(text[at:end].encode()), line, record
            at = _past_space(text, end)
            if text[at : at + 1] not in {",", "]"}:
                self._refuse(text, at, "expected ',' or ']'")
            closed = text[at] == "]"
            at += 1
        at = _past_space(text, at) + (not counted)
        if text[at:].strip():
            self._refuse(text, at, "more text after the array")

    def _refuse(self, text: str, at: int, why: object) -> NoReturn:
        reason = why.msg if isinstance(why, json.JSONDecodeError) else why
        raise UserError(
            f"{self.where(text.count(chr(10), 0, at) + 1)}: not JSON ({reason}); "
            "in an array nothing can be read past a mistake, in JSON Lines it can"
        )


def _reopened(kind: type[JsonLines], path: Path, name: str, folder: Path) -> JsonLines:
    reader = kind(path)
    reader.name, reader.folder = name, folder
    return reader


def _past_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")
