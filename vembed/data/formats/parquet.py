"""Parquet files. Parquet has no fast access to single rows, so the rows are copied into an Arrow file."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from vembed.data.cache import short_hash, stamp
from vembed.data.formats.base import (
    MAX_RECORD_BYTES,
    ArrowRows,
    Row,
    first_line,
    row_values,
)
from vembed.data.formats.copies import new_copy
from vembed.errors import UserError
from vembed.files import cache_folder

MAX_HELD_BYTES = 2**20
"""Uncompressed bytes of a file whose copy is held in memory. That of a larger one is in the cache folder."""
BATCH_BYTES = 32 * 2**10
"""Bytes of a batch of the copy, which is read for each of its rows."""
MAX_BATCH_ROWS = 256
READ_ROWS = 4096
READ_BYTES = 8 * 2**20
"""Rows and bytes that are decompressed at a time."""
PROBED_ROWS = 64
MAX_READ_BYTES = 2**28
"""Bytes of the rows read at a time, by the size of the first ones: a value that many rows have is stored once."""
MAX_RATIO = 1024
"""Bytes of records for one byte of the file, at most. With 600,000 questions for 400 answers of 1,000 letters it is 180."""
PART_BYTES = 64 * 2**20
"""Bytes of the rows that one process of the first pass reads at a time."""


class ParquetFile(ArrowRows):
    """A Parquet file."""

    endings: ClassVar[tuple[str, ...]] = (".parquet", ".pq")
    title = "Parquet"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._metadata: pq.FileMetaData | None = None
        with self._opened() as file:
            self._metadata = file.metadata
            self.columns = tuple(file.schema_arrow.names)
        self._num_rows = int(self._metadata.num_rows)
        self._num_bytes = 0
        for number in range(self._metadata.num_row_groups):
            group = self._metadata.row_group(number)
            self._num_bytes += group.total_byte_size
            for place in range(group.num_columns):
                self._check_ratio(group.column(place))
        self._row_bytes = max(1, self._num_bytes // max(self._num_rows, 1))
        self._batch_rows = max(1, min(MAX_BATCH_ROWS, BATCH_BYTES // self._row_bytes))
        self._copy: pa.RecordBatchFileReader | None = None
        self._lock = threading.Lock()

    def _check_ratio(self, column: pq.ColumnChunkMetaData) -> None:
        """Raise UserError if a column unpacks to far more than texts and images do."""
        packed = max(column.total_compressed_size, 1)
        unpacked = column.total_uncompressed_size
        if unpacked > max(MAX_RATIO * packed, 2 * MAX_RECORD_BYTES):
            raise UserError(
                f"{self.name}: {column.path_in_schema} unpacks from {packed:,d} to {unpacked:,d} bytes, which no texts "
                f"or images do; a record has at most {MAX_RECORD_BYTES:,d} bytes"
            )

    @property
    def stop(self) -> int:
        """Number of rows."""
        return self._num_rows

    def parts(self) -> list[range]:
        """Return ranges of whole batches, where the copy is in the cache folder."""
        step = max(self.stop, 1)
        if self._num_bytes > MAX_HELD_BYTES:
            self.copy()  # made once, before other processes read it
            batch_bytes = self._row_bytes * self._batch_rows
            step = self._batch_rows * max(1, PART_BYTES // batch_bytes)
        starts = range(0, max(self.stop, 1), step)
        return [range(start, min(start + step, self.stop)) for start in starts]

    def batches(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Yield rows as they are in the batches of the copy."""
        copy = self.copy()
        together = 1
        if stop - start > self._batch_rows:
            # For one batch alone Python's part would take longer than the checks.
            most_rows = min(READ_ROWS, READ_BYTES // self._row_bytes)
            together = max(1, most_rows // self._batch_rows)
        while start < stop:
            first, begin = divmod(start, self._batch_rows)
            last = min(first + together, copy.num_record_batches)
            try:
                parts = [copy.get_batch(number) for number in range(first, last)]
            except (OSError, pa.ArrowException) as error:
                raise UserError(
                    f"the unpacked copy of {self.name} can no longer be read ({first_line(error)}): start again"
                ) from error
            batch = pa.concat_batches(parts) if len(parts) > 1 else parts[0]
            batch = batch.slice(begin, stop - start)
            yield batch
            start += batch.num_rows

    def sample(self, count: int) -> list[Row]:
        """Return the first rows, without a copy."""
        with self._opened() as file:
            batch = next(file.iter_batches(count, columns=self.selected), None)
        records = [] if batch is None else row_values(batch)
        return [(row, row + 1, record) for row, record in enumerate(records)]

    def copy(self) -> pa.RecordBatchFileReader:
        """Return the rows as an Arrow file, made once for each version of the Parquet file."""
        with self._lock:
            self._copy = self._copy or self._made_copy()
        return self._copy

    def _made_copy(self) -> pa.RecordBatchFileReader:
        if self._num_bytes <= MAX_HELD_BYTES:
            sink = pa.BufferOutputStream()
            self._write(sink)
            return pa.ipc.open_file(sink.getvalue())
        version = short_hash(stamp(self.path), self.selected, self._batch_rows)
        name = f"{short_hash(str(self.path.absolute()))}-{version}"
        target = cache_folder() / "parquet" / name / "rows.arrow"
        try:
            # Read and not mapped: memory does not grow with what was read, and a truncated file is an error.
            return pa.ipc.open_file(pa.OSFile(str(target)))
        except (OSError, pa.ArrowException):  # there is none, or a damaged one
            with (
                new_copy(target, self.name) as partial,
                pa.OSFile(str(partial), "wb") as file,
            ):
                self._write(file)
        return pa.ipc.open_file(pa.OSFile(str(target)))

    def _write(self, sink: Any) -> None:
        """Write all rows as batches of equal size."""
        writer = None
        rest = None
        for batch in self._read():
            table = pa.Table.from_batches([batch])
            if rest is not None:
                table = pa.concat_tables([rest, table]).combine_chunks()
            writer = writer or pa.ipc.new_file(sink, table.schema)
            num_whole = table.num_rows - table.num_rows % self._batch_rows
            writer.write_table(table.slice(0, num_whole), self._batch_rows)
            rest = table.slice(num_whole)
        writer = writer or pa.ipc.new_file(sink, pa.schema([]))
        if rest is not None:
            writer.write_table(rest)
        writer.close()

    def _read(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows. Raise UserError if they are many times larger than the file."""
        limit = MAX_RATIO * self.path.stat().st_size + 4 * MAX_HELD_BYTES
        size = 0
        with self._opened() as file:
            first = list(range(min(file.num_row_groups, 1)))
            probe = next(file.iter_batches(PROBED_ROWS, first, self.selected), None)
        num_rows = min(READ_ROWS, READ_BYTES // self._row_bytes)
        if probe is not None and probe.num_rows:
            num_rows = min(num_rows, MAX_READ_BYTES * probe.num_rows // probe.nbytes)
        with self._opened() as file:
            # Group by group: Arrow cannot join dictionaries of several row groups inside of lists and structs.
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(
                    max(num_rows, 1), [group], self.selected, use_threads=False
                ):
                    size += batch.nbytes
                    if size > limit:
                        raise UserError(
                            f"{self.name}: its records unpack to more than {limit:,d} bytes, far more than the file "
                            "says: write it without dictionaries (in pandas df.to_parquet(..., use_dictionary=False)), "
                            "or as JSON Lines"
                        )
                    yield _without_dictionaries(batch)

    @contextmanager
    def _opened(self) -> Iterator[pq.ParquetFile]:
        """Open the file, and name it in errors."""
        try:
            # Without pre_buffer, which would read whole columns of a row group ahead.
            with pq.ParquetFile(
                self.path,
                metadata=self._metadata,
                buffer_size=2**20,
                pre_buffer=False,
            ) as file:
                yield file
        except UserError:
            raise
        except (OSError, ValueError, LookupError, pa.ArrowException) as error:
            raise UserError(
                f"{self.name} cannot be read as Parquet: {first_line(error)}"
            ) from error


def _without_dictionaries(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows with their values in place of numbers in a dictionary, which may differ between row groups."""
    for place, field in enumerate(rows.schema):
        kind = _plain_type(field.type)
        if kind != field.type:
            rows = rows.set_column(place, field.name, rows.column(place).cast(kind))
    return rows


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Return a type without dictionaries, also inside of lists and structs."""
    if pa.types.is_dictionary(kind):
        return kind.value_type
    if pa.types.is_list(kind):
        return pa.list_(_plain_type(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain_type(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain_type(kind.value_type), kind.list_size)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain_type(field.type)) for field in kind])
    return kind
