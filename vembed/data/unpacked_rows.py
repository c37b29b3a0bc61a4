"""UnpackedRows: the rows of a Parquet file in Arrow files of the cache folder, from which single rows are read."""

from __future__ import annotations

import bisect
import itertools
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pyarrow as pa

from vembed.data.direct_file import DirectFile
from vembed.data.messages import ROOM
from vembed.data.row_blocks import first_line
from vembed.errors import UserError

MOST_OPEN = 256
"""Files that are kept open. A large table has about 64."""
SECONDS_UNTIL_ABANDONED = 600
"""A file without its final name that was not written to for so long is of a process that was killed."""


@dataclass(frozen=True, slots=True)
class RowRange:
    """Consecutive rows that are stored in one file."""

    start: int
    num_rows: int
    size: int
    """Bytes of the rows, as the table's metadata give them."""
    rows_together: int
    """Rows of one Arrow batch, which is read for each of its rows."""

    @property
    def stop(self) -> int:
        """Number of the first row after the range."""
        return self.start + self.num_rows


class UnpackedRows:
    """Rows of a table, a file for each range of rows. A file has its name only when it is whole.

    Rows are read and not mapped: memory does not grow with what was read, and a truncated file is an error.
    """

    def __init__(self, name: str, folder: Path, ranges: Sequence[RowRange]) -> None:
        """`name`: of the table, for messages."""
        self.name = name
        self.folder = folder
        self.ranges = tuple(ranges)
        self._starts = [one.start for one in ranges]

    def missing(self) -> int:
        """Return the bytes of the ranges that are not stored, or not whole."""
        return sum(
            one.size
            for number, one in enumerate(self.ranges)
            if not self._is_stored(number)
        )

    def number_of(self, row: int) -> int:
        """Return the number of the range that holds a row."""
        return bisect.bisect_right(self._starts, row) - 1

    def row(self, row: int) -> pa.RecordBatch:
        """Return one row."""
        number = self.number_of(row)
        own, path = self.ranges[number], self._path(number)
        batch, place = divmod(row - own.start, own.rows_together)
        try:
            return _opened(path).get_batch(batch).slice(place, 1)
        except (OSError, pa.ArrowException) as error:
            raise UserError(
                f"{path}, the unpacked copy of {self.name}, can no longer be read ({first_line(error)}): start again"
            ) from error

    def stored(
        self, number: int, batches: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the batches of a range, and store them if they are not stored yet."""
        first = None if self._is_stored(number) else next(batches, None)
        if first is None:
            yield from batches
            return
        path = self._path(number)
        # A name of its own for each process: several may unpack the same table at once.
        partial = path.with_suffix(f".{os.getpid()}.partial")
        file = None
        try:
            with self._errors_of_the_disk():
                self.folder.mkdir(parents=True, exist_ok=True)
                self._remove_abandoned()
                file = _RangeFile(
                    partial, first.schema, self.ranges[number].rows_together
                )
            for batch in itertools.chain([first], batches):
                with self._errors_of_the_disk():
                    file.write(batch)
                yield batch
            with self._errors_of_the_disk():
                file.close()
                partial.replace(path)
        finally:
            if file is not None:
                file.abandon()
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def remove_older(self) -> None:
        """Remove what was unpacked of other versions of the table, whose folders begin with another hash."""
        version = self.folder.name.partition("-")[0]
        with suppress(OSError):
            for older in self.folder.parent.iterdir():
                if older.name.partition("-")[0] != version:
                    shutil.rmtree(older, ignore_errors=True)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:05d}.arrow"

    def _is_stored(self, number: int) -> bool:
        own, path = self.ranges[number], self._path(number)
        try:
            path.stat()  # one that was deleted may still be open
            num_batches = _opened(path).num_record_batches
        except (OSError, pa.ArrowException):  # missing or damaged: written again
            return False
        return bool(num_batches == -(-own.num_rows // own.rows_together))

    def _remove_abandoned(self) -> None:
        for other in self.folder.glob("*.partial"):
            with suppress(FileNotFoundError):
                if time.time() - other.stat().st_mtime > SECONDS_UNTIL_ABANDONED:
                    other.unlink()

    @contextmanager
    def _errors_of_the_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self.name} could not be unpacked into {self.folder} ({error}): {ROOM}"
            ) from error


class _RangeFile:
    """An Arrow file that is being written, in batches of so many rows each; the last one may have fewer."""

    def __init__(self, path: Path, schema: pa.Schema, rows_together: int) -> None:
        self._file = DirectFile(path)
        self._sink = pa.ipc.new_file(pa.PythonFile(self._file, "w"), schema)
        self._rows_together = rows_together
        self._begun: list[pa.RecordBatch] = []
        """Rows of the next batch, fewer than it will have."""

    def write(self, rows: pa.RecordBatch) -> None:
        """Write rows; some may wait for the next ones."""
        missing = self._rows_together - sum(one.num_rows for one in self._begun)
        if self._begun:
            self._begun.append(rows.slice(0, missing))
            if rows.num_rows < missing:
                return
            self._write_begun()
            rows = rows.slice(missing)
        whole = rows.num_rows - rows.num_rows % self._rows_together
        if whole:
            # One call writes many batches: in Python each would take as long as its checks.
            self._sink.write_table(
                pa.Table.from_batches([rows.slice(0, whole)]),
                max_chunksize=self._rows_together,
            )
        if whole < rows.num_rows:
            self._begun = [rows.slice(whole)]

    def close(self) -> None:
        """Write what is left, and the end of the file."""
        if self._begun:
            self._write_begun()
        self._sink.close()
        self._file.close()

    def abandon(self) -> None:
        """Close the file as it is."""
        self._file.abandon()

    def _write_begun(self) -> None:
        self._sink.write_table(pa.Table.from_batches(self._begun).combine_chunks())
        self._begun = []


@lru_cache(MOST_OPEN)
def _opened(path: Path) -> pa.RecordBatchFileReader:
    return pa.ipc.open_file(pa.OSFile(str(path)))
