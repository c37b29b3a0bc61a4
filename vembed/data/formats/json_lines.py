"""JSON Lines: one object on each line. A file that is one JSON array of objects is read too."""

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from vembed.data.examples import BadRecord, NotUtf8
from vembed.data.formats.base import Format, LineFormat, Row
from vembed.errors import UserError

MAX_ARRAY_BYTES = 2**28
"""Largest file with a JSON array."""
HEAD_BYTES = 2**12

_AROUND = " \t\r\n\ufeff"
"""Characters around a record that belong to no record."""


def refuse_constant(name: str) -> NoReturn:
    """Raise for NaN and the infinities, which JSON does not have."""
    raise ValueError(f"{name} is no number in JSON")


_decode = json.JSONDecoder(parse_constant=refuse_constant).raw_decode


class JsonLines(LineFormat):
    """A file with one JSON object per line. Blank lines are ignored."""

    endings = (".jsonl", ".ndjson", ".json")
    title = "JSON Lines"

    @classmethod
    def open(cls, path: Path) -> Format:
        """Return the reader of a file: as an array if it is one."""
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
        # An array of arrays holds no records.
        is_array = head.startswith(b"[") and not head.startswith(b"[[")
        return JsonArray(path) if is_array else cls(path)

    def record(self, line: bytes) -> Any:
        """See LineFormat."""
        try:
            text = line.decode().strip(_AROUND)
            record, end = _decode(text)
        except UnicodeDecodeError as error:
            return NotUtf8(f"not UTF-8 (byte {error.start + 1:,d} of the line)")
        except json.JSONDecodeError as error:
            ends = "; a record stands on one line" if error.pos >= len(text) else ""
            return BadRecord(f"not JSON ({error.msg}: column {error.pos + 1:,d}){ends}")
        except (RecursionError, ValueError) as error:
            return BadRecord(f"not JSON ({error})")
        if end != len(text):
            return BadRecord(
                f"not JSON (more text after its end at column {end + 1:,d})"
            )
        return record


class JsonArray(Format):
    """A file with one JSON array of objects, which is held in memory. Numbers are places from 0, lines places from 1."""

    @cached_property
    def records(self) -> list[Any]:
        """All records. Raises UserError on a syntax error, since the next record cannot be located."""
        size = self.path.stat().st_size
        if size > MAX_ARRAY_BYTES:
            raise UserError(
                f"{self.name} is one JSON array of {size:,d} bytes and would be held in memory: use JSON Lines"
            )
        try:
            records: list[Any] = json.loads(
                self.path.read_bytes(), parse_constant=refuse_constant
            )
        except (RecursionError, ValueError) as error:
            raise UserError(
                f"{self.name} is an array that is not JSON ({error}); in JSON Lines records beside a mistake can be read"
            ) from error
        return records

    @property
    def stop(self) -> int:
        """Number of records."""
        return len(self.records)

    def rows(self, part: range | None = None) -> Iterator[Row]:
        """Yield the records of a part."""
        part = self.numbers if part is None else part
        for line, number in enumerate(part, 1):
            yield number, line, self.records[number]
