"""JSON Lines: one object on each line. A file that is one JSON array of objects is read too."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from vembed.data.examples import BadRecord
from vembed.data.formats.base import Format, LineFormat, Row, TextFormat
from vembed.errors import UserError

MAX_ARRAY_BYTES = 2**30
"""Largest file with a JSON array, which has to be read whole."""
HEAD_BYTES = 2**12

_AROUND = " \t\r\n\ufeff"
"""Characters around a record that belong to no record."""
_SPACE = re.compile(r"[ \t\r\n]*")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


_decode = json.JSONDecoder(parse_constant=_refuse_constant).raw_decode


class JsonLines(LineFormat):
    """A file with one JSON object per line. Blank lines are ignored."""

    endings: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson", ".json")
    title = "JSON Lines"

    @classmethod
    def open(cls, path: Path) -> Format:
        """Return the reader of a file: as an array if it is one."""
        return JsonArray(path) if _is_array(path) else cls(path)

    def record(self, line: bytes) -> Any:
        """See LineFormat."""
        try:
            text = line.decode().strip(_AROUND)
            record, end = _decode(text)
        except UnicodeDecodeError as error:
            return BadRecord(f"not UTF-8 (byte {error.start + 1:,d} of the line)")
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


class JsonArray(TextFormat):
    """A file with one JSON array of objects. A pass parses it whole; later its records are read by position."""

    def rows(self, part: range | None = None) -> Iterator[Row]:
        """Yield all records in order. Raise UserError on a syntax error, since the next record cannot be located."""
        del part
        size = self.stop
        if size > MAX_ARRAY_BYTES:
            raise UserError(
                f"{self.name} is one JSON array of {size:,d} bytes and would be read whole: use JSON Lines"
            )
        try:
            text = os.pread(self._file, size, self.start).decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.name} is not UTF-8 (byte {error.start + 1:,d})"
            ) from error
        number = self.start
        line = 1
        counted = 0
        at = _past_space(text, _past_space(text, 0) + 1)
        is_closed = text.startswith("]", at)
        at += is_closed
        while not is_closed:
            at = _past_space(text, at)
            # The number counts bytes and `at` counts characters: only what is new is encoded.
            number += len(text[counted:at].encode())
            line += text.count("\n", counted, at)
            counted = at
            try:
                record, at = _decode(text, at)
            except (RecursionError, ValueError) as error:
                self._refuse(text, getattr(error, "pos", at), error)
            yield number, line, record
            at = _past_space(text, at)
            if not text.startswith((",", "]"), at):
                self._refuse(text, at, "expected ',' or ']'")
            is_closed = text[at] == "]"
            at += 1
        at = _past_space(text, at)
        if at < len(text):
            self._refuse(text, at, "more text after the array")

    def read(self, number: int) -> Any:
        """Return one record again."""
        size = 2**12
        while True:
            data = os.pread(self._file, size, number)
            try:
                # A character may be cut at the end; the record before it is whole.
                return _decode(data.decode(errors="ignore"))[0]
            except (ValueError, RecursionError) as error:
                if len(data) < size:
                    return BadRecord(f"not JSON ({error})")
            size *= 8

    def _refuse(
        self,
        text: str,
        at: int,
        reason: object,
    ) -> NoReturn:
        line = text.count("\n", 0, at) + 1
        raise UserError(
            f"{self.where(line)}: not JSON ({reason}); in an array nothing can be read past a mistake, in JSON Lines "
            "it can"
        )


def _is_array(path: Path) -> bool:
    """Return whether a file is one JSON array."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    # An array of arrays holds no records.
    return head.startswith(b"[") and not head.startswith(b"[[")


def _past_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
