"""Parquet files. Parquet has no fast access to single rows, so the rows are copied into an Arrow file."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from vembed.data.formats.base import READ_BYTES, READ_ROWS, ArrowRows, first_line
from vembed.errors import UserError
from vembed.files import cache_folder, new_copy, short_hash, stamp

PROBED_ROWS = 64
MAX_READ_BYTES = 2**28
"""Bytes of the rows read at a time, by the size of the first ones: a value that many rows have is stored once."""
PART_ROW_BYTES = 64 * 2**20
"""Bytes of the rows that one process of the first pass reads at a time."""


class ParquetFile(ArrowRows):
    """A Parquet file."""

    endings = (".parquet", ".pq")
    title = "Parquet"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with self._opened() as file:
            metadata = file.metadata
            self.columns = tuple(file.schema_arrow.names)
        self._num_rows = int(metadata.num_rows)
        num_bytes = sum(
            metadata.row_group(number).total_byte_size
            for number in range(metadata.num_row_groups)
        )
        self._row_bytes = max(1, num_bytes // max(self._num_rows, 1))
        self._copy: pa.Table | None = None
        self._lock = threading.Lock()

    @property
    def stop(self) -> int:
        """Number of rows."""
        return self._num_rows

    def parts(self) -> list[range]:
        """Return ranges of rows of the copy in the cache folder."""
        self.table()  # made once, before other processes read it
        step = max(1, PART_ROW_BYTES // self._row_bytes)
        starts = range(0, max(self.stop, 1), step)
        return [self.numbers[start : start + step] for start in starts]

    def batches(self, part: range) -> Iterator[pa.RecordBatch]:
        """Yield rows of the copy. All rows in their order need none."""
        if part == self.numbers and self._copy is None:
            return self._read()
        return super().batches(part)

    def table(self) -> pa.Table:
        """Return the copy, made once for each version of the Parquet file."""
        with self._lock:
            if self._copy is None:
                self._copy = self._made_copy()
        return self._copy

    def _made_copy(self) -> pa.Table:
        version = short_hash(stamp(self.path), self.selected)
        name = f"{short_hash(str(self.path.absolute()))}-{version}"
        target = cache_folder() / "parquet" / name / "rows.arrow"
        with suppress(OSError, pa.ArrowException):  # there is none, or a damaged one
            copy = pa.ipc.open_stream(pa.memory_map(str(target))).read_all()
            if copy.num_rows == self.stop:
                return copy
        with self._opened() as file:
            schema = file.schema_arrow
            if self.selected is not None:
                schema = pa.schema([schema.field(name) for name in self.selected])
        # A stream may have another dictionary for each batch, as the row groups of a Parquet file have.
        with (
            new_copy(target, self.name) as partial,
            pa.ipc.new_stream(str(partial), schema) as writer,
        ):
            for batch in self._read():
                writer.write_batch(batch)
        return pa.ipc.open_stream(pa.memory_map(str(target))).read_all()

    def _read(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows, in batches that fit in memory."""
        with self._opened() as file:
            first = list(range(min(file.num_row_groups, 1)))
            probe = next(file.iter_batches(PROBED_ROWS, first, self.selected), None)
        num_rows = min(READ_ROWS, READ_BYTES // self._row_bytes)
        if probe is not None and probe.num_rows:
            num_rows = min(num_rows, MAX_READ_BYTES * probe.num_rows // probe.nbytes)
        with self._opened() as file:
            # Group by group: Arrow cannot join dictionaries of several row groups inside of lists and structs.
            for group in range(file.num_row_groups):
                yield from file.iter_batches(
                    max(num_rows, 1), [group], self.selected, use_threads=False
                )

    @contextmanager
    def _opened(self) -> Iterator[pq.ParquetFile]:
        """Open the file, and name it in errors."""
        try:
            # Without pre_buffer, which would read whole columns of a row group ahead.
            with pq.ParquetFile(self.path, buffer_size=2**20, pre_buffer=False) as file:
                yield file
        except UserError:
            raise
        except (OSError, ValueError, LookupError, pa.ArrowException) as error:
            raise UserError(
                f"{self.name} cannot be read as Parquet: {first_line(error)}"
            ) from error
