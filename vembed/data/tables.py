"""Readers of Arrow tables: Parquet files, and `datasets` from a folder or the Hub. Images stay encoded."""

from __future__ import annotations

import bisect
import itertools
import logging
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vembed.data.blocks import Block, Found, grouped
from vembed.data.columns import Columns
from vembed.data.examples import BadRecord
from vembed.data.messages import listed
from vembed.data.readers import MAX_RECORD, Part
from vembed.data.row_blocks import RowBlock, first_line, row_values
from vembed.data.watched_files import MappedFiles
from vembed.errors import UserError

log = logging.getLogger("vembed")

IN_MEMORY = 256 * 2**20
"""Parquet files up to this uncompressed size in bytes are held in memory."""
CHUNK_BYTES = 8 * 2**20
CHUNK_ROWS = 1024
PART_ROWS = 65_536
"""Rows of a large file that one process of the first pass reads at a time."""

Role = Literal["train", "validation"]
_SPLITS: dict[Role, tuple[str, ...]] = {"train": ("train",), "validation": ("validation", "dev", "val", "test")}


class _Rows:
    """Base of readers whose records are rows; `start` is the row number instead of a byte position."""

    numbers_in_text = False

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder

    def where(self, line: int) -> str:
        """Return the name of a record for messages."""
        return f"{self.name}, row {line:,d}"

    def extent(self) -> tuple[int, int]:
        """Return bounds of the positions and of the line numbers."""
        raise NotImplementedError

    def scan(self) -> Iterator[Found]:
        """Yield all records in order."""
        raise NotImplementedError

    def parts(self) -> list[Part]:
        """Return one part: another process would have to open the table anew."""
        return [Part(0, self.extent()[0])]

    def blocks(self, part: Part) -> Iterator[Block]:
        """Yield all records."""
        del part
        return grouped(self.scan())

    def num_lines(self, part: Part) -> int:
        """Return the number of rows of a part."""
        return part.stop - part.start


class ParquetTable(_Rows):
    """A Parquet file. Parquet has no fast random access to rows, so a small file is decompressed into memory, and a
    larger one once into a memory-mapped Arrow file in the cache folder."""

    def __init__(self, path: Path, columns: Columns, unpacked: Path) -> None:
        """`unpacked`: path of the Arrow file, without extension: "<hash of the path>-<hash of the version>"."""
        super().__init__(str(path), path.parent)
        self._path = path
        self._opened_with = path, columns, unpacked
        self._is_mapped = False
        self._mapped = MappedFiles([])
        try:
            with pq.ParquetFile(path) as file:
                names = file.schema_arrow.names
                _check(self.name, columns, names)
                self._batches = self._unpack(file, columns.needed(names), unpacked)
        except (pa.ArrowException, OSError, ValueError, LookupError, OverflowError, MemoryError) as error:
            raise UserError(f"{path} cannot be read as Parquet: {first_line(error)}") from error
        self._ends = np.cumsum([batch.num_rows for batch in self._batches]).tolist()

    def files(self) -> Sequence[Path]:
        """Return the files that the records come from."""
        return (self._path,)

    def extent(self) -> tuple[int, int]:
        """Return the numbers of positions and lines."""
        num_rows = self._ends[-1] if self._ends else 0
        return num_rows + 1, num_rows + 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process maps the same Arrow file."""
        return _reopened, (self._opened_with, self.name, self.folder)

    def parts(self) -> list[Part]:
        """Return parts of equal numbers of rows, where the table is mapped and not held in memory."""
        if not self._is_mapped or not self._ends:
            return super().parts()
        bounds = [*range(0, max(1, self._ends[-1]), PART_ROWS), self._ends[-1]]
        return [Part(start, stop) for start, stop in itertools.pairwise(bounds)]

    def scan(self) -> Iterator[Found]:
        """Yield all records in order."""
        for block in self.blocks(Part(0, self._ends[-1] if self._ends else 0)):
            yield from block.found()

    def blocks(self, part: Part) -> Iterator[Block]:
        """Yield the rows of a part. Lines count from the part's first one."""
        row = 0
        for batch in self._batches:
            first, last = max(row, part.start), min(row + batch.num_rows, part.stop)
            if first < last:
                self._mapped.check()
                for block in _blocks(batch.slice(first - row, last - first), first):
                    yield block.moved(lines=-part.start)
            row += batch.num_rows

    def read(self, start: int, size: int) -> Any:
        """Return one record again, from the position and size that `scan` yielded."""
        self._mapped.check()
        number = bisect.bisect_right(self._ends, start)
        first = self._ends[number - 1] if number else 0
        return row_values(self._batches[number].slice(start - first, size))[0]

    def _unpack(self, file: pq.ParquetFile, names: list[str], unpacked: Path) -> list[pa.RecordBatch]:
        size, largest = _unpacked_size(file, names), _largest_value(self.name, file, names)
        # By rows and bytes, and by the largest value: a column stored once may unpack to gigabytes.
        rows = max(1, min(CHUNK_ROWS, CHUNK_BYTES * file.metadata.num_rows // max(1, size), IN_MEMORY // largest))
        batches = _bounded(file.iter_batches(batch_size=rows, columns=names), self.name, 4 * size + IN_MEMORY)
        if size <= IN_MEMORY:
            return list(batches)
        unpacked = unpacked.with_name(f"{unpacked.name}-{zlib.crc32(repr(names).encode()):08x}.arrow")
        if not unpacked.exists():
            self._write(batches, unpacked, size)
        self._is_mapped, self._mapped = True, MappedFiles([unpacked])
        with pa.memory_map(str(unpacked)) as source:
            arrow = pa.ipc.open_file(source)
            return [arrow.get_batch(number) for number in range(arrow.num_record_batches)]

    def _write(self, batches: Iterator[pa.RecordBatch], unpacked: Path, size: int) -> None:
        # A name of its own for each process: several may unpack the same file at once.
        partial = unpacked.with_suffix(f".{os.getpid()}.partial")
        way_out = "free some space, or set XDG_CACHE_HOME to a folder with more"
        try:
            unpacked.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(unpacked.parent).free
            if free < size:
                raise UserError(
                    f"{self.name} unpacks to {size:,d} bytes, and {unpacked.parent} has {free:,d} left: {way_out}"
                )
            first = next(batches)
            with pa.ipc.new_file(str(partial), first.schema) as sink:
                sink.write_batch(first)
                for batch in _ahead(batches):
                    sink.write_batch(batch)
            for older in unpacked.parent.glob(f"{unpacked.name.partition('-')[0]}-*.arrow"):
                older.unlink(missing_ok=True)
            partial.replace(unpacked)
        except OSError as error:
            raise UserError(f"{self.name} could not be unpacked into {unpacked.parent} ({error}): {way_out}") from error
        finally:
            if partial.exists():
                partial.unlink()


class DatasetTable(_Rows):
    """A `datasets.Dataset`, memory-mapped from disk."""

    def __init__(self, name: str, folder: Path, dataset: Any, columns: Columns) -> None:
        super().__init__(name, folder)
        self._files = [Path(entry["filename"]) for entry in dataset.cache_files]
        self._mapped = MappedFiles(self._files)
        names = dataset.column_names
        _check(name, columns, names)
        self._rows = dataset.select_columns(columns.needed(names)).with_format("arrow")

    def files(self) -> Sequence[Path]:
        """Return the files that the records come from."""
        return self._files

    def extent(self) -> tuple[int, int]:
        """Return the numbers of positions and lines."""
        return len(self._rows) + 1, len(self._rows) + 1

    def scan(self) -> Iterator[Found]:
        """Yield all records in order."""
        for block in self._blocks():
            yield from block.found()

    def blocks(self, part: Part) -> Iterator[Block]:
        """Yield all records."""
        del part
        return self._blocks()

    def _blocks(self) -> Iterator[Block]:
        row, num_rows = 0, 32
        while row < len(self._rows):
            self._mapped.check()
            table = self._rows[row : row + num_rows]
            first = row
            for batch in table.to_batches():
                yield from _blocks(batch, first)
                first += batch.num_rows
            row += table.num_rows
            each = max(1, table.nbytes // max(1, table.num_rows))
            # The first rows tell how large the next chunk may be.
            num_rows = max(1, min(CHUNK_ROWS, CHUNK_BYTES // each))

    def read(self, start: int, size: int) -> Any:
        """Return one record again, from the position and size that `scan` yielded."""
        self._mapped.check()
        return row_values(self._rows[start : start + size])[0]


def _reopened(opened_with: tuple[Path, Columns, Path], name: str, folder: Path) -> ParquetTable:
    table = ParquetTable(*opened_with)
    table.name, table.folder = name, folder
    return table


def is_saved_dataset(path: Path) -> bool:
    """Return whether a folder is one that `datasets.save_to_disk` has written."""
    return any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json", "state.json"))


def open_folder(path: Path, columns: Columns, role: Role) -> DatasetTable:
    """Open a folder that `datasets.save_to_disk` has written."""
    return DatasetTable(str(path), path, saved_split(path, role), columns)


def saved_split(path: Path, role: Role) -> Any:
    """Return the `datasets.Dataset` of a folder that `datasets.save_to_disk` has written, of several the one for this
    role."""
    import datasets  # the import takes a second, which runs on plain files avoid

    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        holds = listed(sorted(entry.name for entry in path.iterdir())) or "nothing"
        raise UserError(
            f"{path} is a folder, but none that `datasets` has saved; it holds {holds}: name a file "
            f"(or it is damaged: {first_line(error)})"
        ) from error
    return _one_split(str(path), found, role)


def open_hub(name: str, columns: Columns, role: Role) -> DatasetTable:
    """Open a Hub dataset: `owner/name`, `owner/name:config` or `owner/name:config:split`."""
    import datasets

    repository, _, rest = name.partition(":")
    config, _, split = rest.partition(":")
    # What is there already is not fetched again. `datasets` shows the progress of each file on stderr.
    log.info("%s: from the Hub, into %s", name, datasets.config.HF_DATASETS_CACHE)
    try:
        found = datasets.load_dataset(repository, config or None, split=split or None)
    except (OSError, ValueError, KeyError, RuntimeError, pa.ArrowException) as error:
        raise UserError(
            f"{name} is no file or folder here, and as a dataset of the Hub it cannot be loaded: {first_line(error)}"
        ) from error
    return DatasetTable(name, Path.cwd(), _one_split(name, found, role), columns)


def _blocks(rows: pa.RecordBatch, first: int) -> Iterator[Block]:
    return iter([RowBlock(rows, first)]) if rows.nbytes <= MAX_RECORD else grouped(_one_by_one(rows, first))


def _one_by_one(rows: pa.RecordBatch, first: int) -> Iterator[Found]:
    for number in range(rows.num_rows):
        one, row = rows.slice(number, 1), first + number
        is_long = one.nbytes > MAX_RECORD
        record = BadRecord(f"a record of more than {MAX_RECORD:,d} bytes") if is_long else row_values(one)[0]
        yield row, 1, row + 1, record


def _one_split(name: str, found: Any, role: Role) -> Any:
    """Return the split for this role, or the dataset itself if it has no splits."""
    if not isinstance(found, dict):
        return found
    splits = list(found)
    for split in _SPLITS[role]:
        if split in splits:
            return found[split]
    if len(splits) == 1:
        return found[splits[0]]
    raise UserError(f"{name} has the splits {listed(splits)}, and none is called {' or '.join(_SPLITS[role])}")


def _check(name: str, columns: Columns, names: Sequence[str]) -> None:
    try:
        columns.check(names)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error


def _largest_value(name: str, file: pq.ParquetFile, names: list[str]) -> int:
    """Return how large one value may be where many values are stored once; 1 for files that are hardly compressed.

    Raise UserError if a column unpacks to far more than a file of this size can hold, such as gigabytes of one letter.
    """
    largest = 1
    for group in range(file.metadata.num_row_groups):
        for number in range(file.metadata.num_columns):
            column = file.metadata.row_group(group).column(number)
            if column.path_in_schema.split(".")[0] not in names:
                continue
            unpacked, packed = column.total_uncompressed_size, max(column.total_compressed_size, 1)
            if unpacked > 2 * MAX_RECORD and unpacked > 1000 * packed:
                raise UserError(
                    f"{name}: {column.path_in_schema} unpacks from {packed:,d} to {unpacked:,d} bytes, which no texts "
                    f"or images do; a record has at most {MAX_RECORD:,d} bytes"
                )
            if unpacked > 100 * packed:
                largest = max(largest, unpacked)
    return largest


def _bounded(batches: Iterator[pa.RecordBatch], name: str, most: int) -> Iterator[pa.RecordBatch]:
    """Yield the batches; raise UserError if their values are many times larger than the file says."""
    total = 0
    for batch in batches:
        total += batch.nbytes
        if total > most:
            raise UserError(f"{name}: its records unpack to more than {most:,d} bytes, far more than the file says")
        yield batch


def _ahead(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the batches, each decompressed by a thread while the one before is written."""
    with ThreadPoolExecutor(1, thread_name_prefix="vembed-parquet") as pool:
        coming = pool.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = pool.submit(next, batches, None)
            yield batch


def _unpacked_size(file: pq.ParquetFile, names: list[str]) -> int:
    """Return the uncompressed bytes of the columns, from the file's metadata."""
    total = 0
    for group in range(file.metadata.num_row_groups):
        for number in range(file.metadata.num_columns):
            column = file.metadata.row_group(group).column(number)
            if column.path_in_schema.split(".")[0] in names:
                total += column.total_uncompressed_size
    return total
