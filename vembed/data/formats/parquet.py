"""ParquetTable: reader of Parquet files. Small ones are held in memory, larger ones unpacked into the cache folder."""

from __future__ import annotations

import bisect
import threading
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vembed.data.columns import Columns
from vembed.data.formats.base import Block, Found
from vembed.data.formats.json_files import MAX_RECORD, Part
from vembed.data.formats.saved_datasets import (
    CHUNK_BYTES,
    CHUNK_ROWS,
    Rows,
    blocks_of,
    check_columns,
)
from vembed.data.row_blocks import first_line, row_values
from vembed.data.unpacked_rows import RowRange, UnpackedRows
from vembed.errors import UserError

IN_MEMORY = 256 * 2**20
"""Uncompressed bytes of the Parquet files of one source that are held in memory."""
PART_BYTES = 64 * 2**20
"""Uncompressed bytes that one process of the first pass reads at a time, in whole row groups."""
MOST_PARTS = 64
"""Parts of one file: each is a file of the cache folder, and those are kept open."""
TOGETHER_BYTES = 32 * 2**10
"""Bytes that are read for one record of an unpacked table."""
TOGETHER_ROWS = 256
SAMPLE_ROWS = 64
"""Rows of a row group that tell how large its rows are."""
USUAL_TIMES = 4
"""Bytes of records for one byte of the metadata's sizes, up to which these are good enough."""
MOST_TIMES = 1024
"""Bytes of records for one byte of the file, at most. A text that many rows have is stored once; with 600,000 questions
for 400 answers of 1,000 letters it comes to 180."""
READ_BYTES = 2**20
"""Bytes of a column that are read from the file at a time. A row group may have gigabytes."""


@dataclass(frozen=True, slots=True)
class GroupRun:
    """Consecutive row groups that are read together."""

    first: int
    last: int
    start: int
    """Number of the first row."""
    num_rows: int
    size: int
    """Uncompressed bytes of the columns in use."""
    largest: int
    """Bytes that one value may have where many values are stored once; 1 for columns that are hardly compressed."""

    def and_next(self, following: GroupRun) -> GroupRun:
        """Return the row groups of both."""
        return GroupRun(
            self.first,
            following.last,
            self.start,
            self.num_rows + following.num_rows,
            self.size + following.size,
            max(self.largest, following.largest),
        )

    def rows_at_once(self) -> int:
        """Return the rows to decompress at a time: by rows and bytes, and by the largest value, since a column stored
        once may unpack to gigabytes."""
        return max(
            1,
            min(
                CHUNK_ROWS,
                CHUNK_BYTES * self.num_rows // max(1, self.size),
                IN_MEMORY // self.largest,
            ),
        )

    def row_range(self) -> RowRange:
        """Return the rows as they are stored when they are unpacked."""
        together = max(
            1, min(TOGETHER_ROWS, TOGETHER_BYTES * self.num_rows // max(1, self.size))
        )
        return RowRange(self.start, self.num_rows, self.size, together)


class ParquetTable(Rows):
    """A Parquet file. Parquet has no fast random access to rows, so a small file is decompressed into memory. Rows of a
    larger one are stored in the cache folder by the pass that checks them, to be read from there."""

    def __init__(
        self, path: Path, columns: Columns, unpacked: Path, num_files: int = 1
    ) -> None:
        """`unpacked`: folder for the rows, named by a hash of the file's version, inside of a folder for this file.
        `num_files`: files of the source, which share the memory for small ones."""
        super().__init__(str(path), path.parent)
        self._path = path
        with _named_errors(path), pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            check_columns(self.name, columns, names)
            self._columns = columns.needed(names)
            self._metadata = file.metadata
            groups = _by_sample(
                self.name,
                file,
                _row_groups(self.name, file, self._columns),
                self._columns,
            )
        size, num_rows = (
            sum(one.size for one in groups),
            sum(one.num_rows for one in groups),
        )
        is_held = size <= IN_MEMORY // num_files or not num_rows
        self._runs = _joined(groups, max(PART_BYTES, size // MOST_PARTS))
        self._num_rows = num_rows
        self._unpacked: UnpackedRows | None = None
        if not is_held:
            ranges = [one.row_range() for one in self._runs]
            layout = zlib.crc32(repr((self._columns, ranges)).encode())
            self._unpacked = UnpackedRows(
                self.name, unpacked.with_name(f"{unpacked.name}-{layout:08x}"), ranges
            )
            self._unpacked.remove_older()
        self._held: _Held | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Another process reads the same files; what this one holds in memory it reads itself."""
        return {**self.__dict__, "_held": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See __getstate__."""
        self.__dict__.update(state, _lock=threading.Lock())

    def files(self) -> Sequence[Path]:
        """Return the files that the records come from."""
        return (self._path,)

    def extent(self) -> tuple[int, int]:
        """Return the numbers of positions and lines."""
        return self._num_rows + 1, self._num_rows + 1

    def unpacks(self) -> int:
        """Return the bytes that going through the records will store in the cache folder."""
        return 0 if self._unpacked is None else self._unpacked.missing()

    def parts(self) -> list[Part]:
        """Return the runs of row groups, where the table is not held in memory."""
        if self._unpacked is None:
            return [Part(0, self._num_rows)]
        return [Part(one.start, one.stop) for one in self._unpacked.ranges]

    def scan(self) -> Iterator[Found]:
        """Yield all records in order."""
        for part in self.parts():
            for block in self.blocks(part):
                yield from block.moved(lines=part.start).found()

    def blocks(self, part: Part) -> Iterator[Block]:
        """Yield the rows of a part, and store them where they can be read again. Lines count from the part's first."""
        with _named_errors(self._path):
            first = part.start
            for batch in self._batches(part):
                for block in blocks_of(batch, first):
                    yield block.moved(lines=-part.start)
                first += batch.num_rows

    def read(self, start: int, size: int) -> Any:
        """Return one record again, from the position and size that `scan` yielded."""
        del size
        if self._unpacked is not None:
            return row_values(self._unpacked.row(start))[0]
        with _named_errors(self._path):
            return row_values(self._in_memory().row(start))[0]

    def _batches(self, part: Part) -> Iterator[pa.RecordBatch]:
        if self._unpacked is None:
            return iter(self._in_memory().batches)
        number = self._unpacked.number_of(part.start)
        return self._unpacked.stored(
            number, _ahead(self._read_groups(self._runs[number]))
        )

    def _in_memory(self) -> _Held:
        with self._lock:
            if self._held is None:
                self._held = _Held(
                    [batch for run in self._runs for batch in self._read_groups(run)]
                )
            return self._held

    def _read_groups(self, run: GroupRun) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the row groups. Raise UserError if they are many times larger than the file says."""
        total, num_rows, most = 0, 0, USUAL_TIMES * run.size + IN_MEMORY
        # Without pre_buffer, which would read whole columns of a row group ahead.
        with pq.ParquetFile(
            self._path,
            metadata=self._metadata,
            buffer_size=READ_BYTES,
            pre_buffer=False,
        ) as file:
            for batch in self._batches_of(file, run):
                total, num_rows = total + batch.nbytes, num_rows + batch.num_rows
                if total > most:
                    raise _far_more(self.name, f"more than {most:,d}")
                yield _without_dictionaries(batch)
        if num_rows != run.num_rows:
            raise ValueError(
                f"{num_rows:,d} rows where the metadata name {run.num_rows:,d}"
            )

    def _batches_of(
        self, file: pq.ParquetFile, run: GroupRun
    ) -> Iterator[pa.RecordBatch]:
        groups = list(range(run.first, run.last + 1))
        kinds = [one.type for one in file.schema_arrow if one.name in self._columns]
        # Arrow cannot join dictionaries of several row groups inside of lists and structs.
        is_apart = any(pa.types.is_nested(one) and _plain(one) != one for one in kinds)
        for some in [[one] for one in groups] if is_apart else [groups]:
            yield from file.iter_batches(
                run.rows_at_once(), row_groups=some, columns=self._columns
            )


class _Held:
    """Rows of a table in memory."""

    def __init__(self, batches: list[pa.RecordBatch]) -> None:
        self.batches = batches
        self._starts = [0]
        for batch in batches:
            self._starts.append(self._starts[-1] + batch.num_rows)

    def row(self, row: int) -> pa.RecordBatch:
        """Return one row."""
        number = bisect.bisect_right(self._starts, row) - 1
        return self.batches[number].slice(row - self._starts[number], 1)


def _row_groups(name: str, file: pq.ParquetFile, names: list[str]) -> list[GroupRun]:
    """Return the row groups that have rows.

    Raise UserError if a column unpacks to far more than a file of this size can hold, such as gigabytes of one letter.
    """
    metadata, found, start = file.metadata, list[GroupRun](), 0
    paths = [file.schema.column(number).path for number in range(metadata.num_columns)]
    used = [
        (number, path)
        for number, path in enumerate(paths)
        if path.split(".")[0] in names
    ]
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        size, largest = 0, 1
        for place, path in used:
            column = group.column(place)
            unpacked, packed = (
                column.total_uncompressed_size,
                max(column.total_compressed_size, 1),
            )
            if unpacked > 2 * MAX_RECORD and unpacked > 1000 * packed:
                raise UserError(
                    f"{name}: {path} unpacks from {packed:,d} to {unpacked:,d} bytes, which no texts "
                    f"or images do; a record has at most {MAX_RECORD:,d} bytes"
                )
            if unpacked > 100 * packed:
                largest = max(largest, unpacked)
            size += unpacked
        if group.num_rows:
            found.append(GroupRun(number, number, start, group.num_rows, size, largest))
        start += group.num_rows
    return found


def _by_sample(
    name: str, file: pq.ParquetFile, groups: list[GroupRun], columns: list[str]
) -> list[GroupRun]:
    """Return the row groups with the sizes that some of their rows tell, where those are many times what the metadata
    say: the metadata count a text once that many rows have."""
    times = []
    for place in sorted({0, len(groups) // 2, len(groups) - 1}) if groups else ():
        group = groups[place]
        num_rows = min(SAMPLE_ROWS, group.rows_at_once())
        rows = _without_dictionaries(
            next(file.iter_batches(num_rows, row_groups=[group.first], columns=columns))
        )
        times.append(rows.nbytes / rows.num_rows * group.num_rows / max(group.size, 1))
    mean = sum(times) / max(len(times), 1)
    if mean <= USUAL_TIMES:
        return groups
    sized = [replace(one, size=int(one.size * mean)) for one in groups]
    size = sum(one.size for one in sized)
    if size > MOST_TIMES * Path(name).stat().st_size + IN_MEMORY:
        raise _far_more(name, f"about {size:,d}")
    return sized


def _far_more(name: str, size: str) -> UserError:
    return UserError(
        f"{name}: its records unpack to {size} bytes, far more than the file says: if it holds the same long texts "
        "many times, write it without dictionaries (in pandas df.to_parquet(..., use_dictionary=False)), or as JSON "
        "Lines"
    )


def _joined(groups: list[GroupRun], size: int) -> list[GroupRun]:
    """Return runs of row groups that have at least so many bytes, except the last."""
    runs: list[GroupRun] = []
    for one in groups:
        if runs and runs[-1].size < size:
            runs[-1] = runs[-1].and_next(one)
        else:
            runs.append(one)
    return runs


def _ahead(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the batches, each decompressed by a thread while the one before is checked and written."""
    with ThreadPoolExecutor(1, thread_name_prefix="vembed-parquet") as pool:
        coming = pool.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = pool.submit(next, batches, None)
            yield batch


def _without_dictionaries(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows with their values in place of numbers in a dictionary, which may differ between row groups."""
    plain = pa.schema([pa.field(one.name, _plain(one.type)) for one in rows.schema])
    if plain.types == rows.schema.types:
        return rows
    columns = [
        column.cast(field.type)
        for column, field in zip(rows.columns, plain, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=plain)


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return a type without dictionaries."""
    if pa.types.is_dictionary(kind):
        return kind.value_type
    if pa.types.is_list(kind):
        return pa.list_(_plain(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain(kind.value_type), kind.list_size)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type)) for field in kind])
    return kind


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Raise a UserError that names the file for an error of its contents."""
    try:
        yield
    except (
        pa.ArrowException,
        OSError,
        ValueError,
        LookupError,
        OverflowError,
        MemoryError,
    ) as error:
        raise UserError(
            f"{path} cannot be read as Parquet: {first_line(error)}"
        ) from error
