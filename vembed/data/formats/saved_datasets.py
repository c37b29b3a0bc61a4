"""Readers of tables whose records are rows: `datasets` from a folder or the Hub. Images stay encoded."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from vembed.data.columns import Columns, refuse_repeated
from vembed.data.examples import BadRecord
from vembed.data.formats.base import Block, Found, grouped
from vembed.data.formats.json_files import MAX_RECORD, Part
from vembed.data.messages import listed
from vembed.data.row_blocks import RowBlock, first_line, row_values
from vembed.data.watched_files import MappedFiles
from vembed.errors import UserError

log = logging.getLogger("vembed")

CHUNK_BYTES = 8 * 2**20
CHUNK_ROWS = 1024

Role = Literal["train", "validation"]
_SPLITS: dict[Role, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("validation", "dev", "val", "test"),
}


class Rows:
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

    def unpacks(self) -> int:
        """Return the bytes that a pass over the records stores in the cache folder."""
        return 0


class DatasetTable(Rows):
    """A `datasets.Dataset`, memory-mapped from disk."""

    def __init__(self, name: str, folder: Path, dataset: Any, columns: Columns) -> None:
        super().__init__(name, folder)
        self._files = [Path(entry["filename"]) for entry in dataset.cache_files]
        self._mapped = MappedFiles(self._files)
        names = dataset.column_names
        check_columns(name, columns, names)
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
                yield from blocks_of(batch, first)
                first += batch.num_rows
            row += table.num_rows
            each = max(1, table.nbytes // max(1, table.num_rows))
            # The first rows tell how large the next chunk may be.
            num_rows = max(1, min(CHUNK_ROWS, CHUNK_BYTES // each))

    def read(self, start: int, size: int) -> Any:
        """Return one record again, from the position and size that `scan` yielded."""
        self._mapped.check()
        return row_values(self._rows[start : start + size])[0]


def is_saved_dataset(path: Path) -> bool:
    """Return whether a folder is one that `datasets.save_to_disk` has written."""
    return any(
        (path / name).is_file()
        for name in ("dataset_info.json", "dataset_dict.json", "state.json")
    )


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
        raise UserError(
            f"{path} was saved by `datasets`, and is damaged: {first_line(error)}"
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


def blocks_of(rows: pa.RecordBatch, first: int) -> Iterator[Block]:
    """Return blocks of rows, of which `first` is the number of the first."""
    return (
        iter([RowBlock(rows, first)])
        if rows.nbytes <= MAX_RECORD
        else grouped(_one_by_one(rows, first))
    )


def _one_by_one(rows: pa.RecordBatch, first: int) -> Iterator[Found]:
    for number in range(rows.num_rows):
        one, row = rows.slice(number, 1), first + number
        is_long = one.nbytes > MAX_RECORD
        record = (
            BadRecord(f"a record of more than {MAX_RECORD:,d} bytes")
            if is_long
            else row_values(one)[0]
        )
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
    raise UserError(
        f"{name} has the splits {listed(splits)}, and none is called {' or '.join(_SPLITS[role])}"
    )


def check_columns(name: str, columns: Columns, names: Sequence[str]) -> None:
    """Raise UserError if a table lacks a required column, or has two of one name."""
    refuse_repeated(name, names)
    try:
        columns.check(names)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
