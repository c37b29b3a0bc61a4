"""Parquet files. Parquet has no fast access to single rows, so the rows are copied into an Arrow file."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from vembed.config.user_folders import cache_folder
from vembed.data.cache import short_hash, stamp
from vembed.data.formats.arrow import (
    ArrowRows,
    first_line,
    row_values,
    without_dictionaries,
)
from vembed.data.formats.base import MAX_RECORD_BYTES, Part, Row
from vembed.data.formats.copies import partial_copy, remove_older
from vembed.data.messages import ROOM
from vembed.errors import UserError

MAX_HELD_BYTES = 2**20
"""Uncompressed bytes of a file whose copy is held in memory. That of a larger one is in the cache folder."""
BATCH_BYTES = 32 * 2**10
"""Bytes of a batch of the copy, which is read for each of its rows."""
MAX_BATCH_ROWS = 256
READ_ROWS = 4096
READ_BYTES = 8 * 2**20
"""Rows and bytes that are decompressed at a time."""
MAX_READ_BYTES = 2**28
"""Bytes that the rows read at a time may have at most, where one value is stored for many rows."""
PART_ROWS_BYTES = 64 * 2**20
"""Bytes of the rows that one process of the first pass reads at a time."""
MAX_RATIO = 1024
"""Bytes of records for one byte of the file, at most. A text that many rows have is stored once; with 600,000 questions
for 400 answers of 1,000 letters it comes to 180."""


class ParquetFile(ArrowRows):
    """A Parquet file."""

    endings: ClassVar[tuple[str, ...]] = (".parquet", ".pq")
    title = "Parquet"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with self._named_errors(), pq.ParquetFile(path) as file:
            self.columns = tuple(file.schema_arrow.names)
            self._metadata = file.metadata
        self._lock = threading.Lock()

    @property
    def stop(self) -> int:
        """Number of rows."""
        return int(self._metadata.num_rows)

    def select(self, columns: Sequence[str]) -> None:
        """Read only these columns from now on."""
        self.selected = list(columns)
        self.__dict__.pop("_size", None)
        self.__dict__.pop("_copy", None)

    def parts(self) -> list[Part]:
        """Return ranges of whole batches, where the copy is in the cache folder."""
        if self._is_held or not self.stop:
            return [Part(0, self.stop)]
        with self._lock:
            _ = self._copy  # made once, before other processes read it
        batch_bytes = max(1, self._size * self._batch_rows // self.stop)
        step = self._batch_rows * max(1, PART_ROWS_BYTES // batch_bytes)
        return [
            Part(start, min(start + step, self.stop))
            for start in range(0, self.stop, step)
        ]

    def batches(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Yield rows as they are in the batches of the copy, single ones cut out."""
        with self._lock:
            copy = self._copy
        rows = self._batch_rows
        first = start // rows
        last = -(-stop // rows)
        # Some batches together: for one alone Python's part would take longer than the checks.
        together = max(1, READ_ROWS // rows) if stop - start > rows else 1
        for number in range(first, last, together):
            end = min(number + together, last)
            try:
                parts = [copy.get_batch(batch) for batch in range(number, end)]
            except (OSError, pa.ArrowException) as error:
                raise UserError(
                    f"the unpacked copy of {self.name} can no longer be read ({first_line(error)}): start again"
                ) from error
            batch = parts[0] if len(parts) == 1 else pa.concat_batches(parts)
            offset = number * rows
            begin = max(start - offset, 0)
            yield batch.slice(begin, min(stop - offset, batch.num_rows) - begin)

    def sample(self, count: int) -> list[Row]:
        """Return the first rows, without a copy."""
        with self._named_errors(), pq.ParquetFile(self.path) as file:
            batch = next(file.iter_batches(count, columns=self.selected), None)
        records = [] if batch is None else row_values(batch)
        return [(row, row + 1, record) for row, record in enumerate(records)]

    @cached_property
    def _size(self) -> int:
        """Uncompressed bytes of the columns in use. Raise UserError if a column unpacks to far more than texts do."""
        size = 0
        self._largest_value = 1
        for number in range(self._metadata.num_row_groups):
            group = self._metadata.row_group(number)
            for place in range(group.num_columns):
                column = group.column(place)
                name = column.path_in_schema.split(".")[0]
                if self.selected is not None and name not in self.selected:
                    continue
                unpacked = column.total_uncompressed_size
                packed = max(column.total_compressed_size, 1)
                if unpacked > 2 * MAX_RECORD_BYTES and unpacked > 1000 * packed:
                    raise UserError(
                        f"{self.name}: {column.path_in_schema} unpacks from {packed:,d} to {unpacked:,d} bytes, which "
                        f"no texts or images do; a record has at most {MAX_RECORD_BYTES:,d} bytes"
                    )
                if unpacked > 100 * packed:
                    self._largest_value = max(self._largest_value, unpacked)
                size += unpacked
        return size

    @property
    def _is_held(self) -> bool:
        return self._size <= MAX_HELD_BYTES

    @cached_property
    def _batch_rows(self) -> int:
        """Rows of each batch of the copy; the last one may have fewer."""
        row_bytes = max(1, self._size // max(self.stop, 1))
        return max(1, min(MAX_BATCH_ROWS, BATCH_BYTES // row_bytes))

    @cached_property
    def _copy(self) -> pa.RecordBatchFileReader:
        """The rows as an Arrow file, made once for each version of the file."""
        if self._is_held:
            sink = pa.BufferOutputStream()
            self._write(sink)
            return pa.ipc.open_file(pa.BufferReader(sink.getvalue()))
        version = short_hash(stamp(self.path), self.selected, self._batch_rows)
        name = f"{short_hash(str(self.path.absolute()))}-{version}"
        target = cache_folder() / "parquet" / name / "rows.arrow"
        copy = self._opened(target)
        if copy is None:
            self._check_space(target)
            with (
                partial_copy(target, self.name) as partial,
                pa.OSFile(str(partial), "wb") as file,
            ):
                self._write(file)
            remove_older(target)
            copy = self._opened(target)
        if copy is None:
            raise UserError(f"{target}, a copy of {self.name}, cannot be read")
        return copy

    def _opened(self, target: Path) -> pa.RecordBatchFileReader | None:
        """Open a copy; None if there is none, or a damaged one."""
        try:
            # Read and not mapped: memory does not grow with what was read, and a truncated file is an error.
            copy = pa.ipc.open_file(pa.OSFile(str(target)))
        except (OSError, pa.ArrowException):
            return None
        is_whole = copy.num_record_batches == -(-self.stop // self._batch_rows)
        return copy if is_whole else None

    def _check_space(self, target: Path) -> None:
        folder = next(parent for parent in target.absolute().parents if parent.exists())
        free = shutil.disk_usage(folder).free
        if free < self._size:
            raise UserError(
                f"{self.name} unpacks to {self._size:,d} bytes, and {folder} has {free:,d} left: {ROOM}"
            )

    def _write(self, sink: Any) -> None:
        """Write all rows as batches of equal size."""
        writer = None
        waiting: list[pa.RecordBatch] = []
        num_waiting = 0
        for batch in self._read():
            writer = writer or pa.ipc.new_file(sink, batch.schema)
            waiting.append(batch)
            num_waiting += batch.num_rows
            if num_waiting >= READ_ROWS:
                table = pa.Table.from_batches(waiting).combine_chunks()
                whole = num_waiting - num_waiting % self._batch_rows
                writer.write_table(table.slice(0, whole), self._batch_rows)
                waiting = table.slice(whole).to_batches()
                num_waiting -= whole
        if writer is None:
            writer = pa.ipc.new_file(sink, pa.schema([]))
        if waiting:
            table = pa.Table.from_batches(waiting).combine_chunks()
            writer.write_table(table, self._batch_rows)
        writer.close()

    def _read(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows. Raise UserError if they are many times larger than the file."""
        limit = MAX_RATIO * self.path.stat().st_size + 4 * MAX_HELD_BYTES
        size = 0
        row_bytes = max(1, self._size // max(self.stop, 1))
        num_rows = min(READ_ROWS, READ_BYTES // row_bytes)
        # A value that many rows have is stored once, and each row unpacks it.
        num_rows = max(1, min(num_rows, MAX_READ_BYTES // self._largest_value))
        # Without pre_buffer, which would read whole columns of a row group ahead.
        with (
            self._named_errors(),
            pq.ParquetFile(
                self.path, metadata=self._metadata, buffer_size=2**20, pre_buffer=False
            ) as file,
        ):
            # Arrow cannot join dictionaries of several row groups inside of lists and structs.
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(
                    num_rows, row_groups=[group], columns=self.selected
                ):
                    size += batch.nbytes
                    if size > limit:
                        raise UserError(
                            f"{self.name}: its records unpack to more than {limit:,d} bytes, far more than the file "
                            "says: write it without dictionaries (in pandas df.to_parquet(..., use_dictionary=False)), "
                            "or as JSON Lines"
                        )
                    yield without_dictionaries(batch)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Raise a UserError that names the file for an error of its contents."""
        try:
            yield
        except UserError:
            raise
        except (
            pa.ArrowException,
            OSError,
            ValueError,
            LookupError,
            OverflowError,
            MemoryError,
        ) as error:
            raise UserError(
                f"{self.name} cannot be read as Parquet: {first_line(error)}"
            ) from error
