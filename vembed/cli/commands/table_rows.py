"""Rows of CSV, TSV and Parquet files and of saved data sets as JSON lines, which `vembed encode` reads like records."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vembed.data.examples import BadRecord
from vembed.data.formats.delimited import DelimitedFile
from vembed.data.formats.opening import kind_of
from vembed.data.formats.saved_datasets import is_saved_dataset, saved_split
from vembed.errors import UserError
from vembed.mining.record_tables import AnyColumns

DELIMITED = {".csv": ",", ".tsv": "\t"}
PARQUET = (".parquet", ".pq")
CHUNK_ROWS = 1024


def is_table(path: Path) -> bool:
    """Return whether the file's suffix is that of a table, packed or not."""
    return kind_of(path) in (*DELIMITED, *PARQUET)


def num_rows(path: Path) -> int | None:
    """Return the number of rows if the table stores it. Raise UserError if the table cannot be read."""
    if path.is_dir():
        return len(_saved(path))
    path.open(
        "rb"
    ).close()  # a file that is missing is said as for lines, not in Arrow's words
    if path.suffix.lower() not in PARQUET:
        _delimited(path)  # its header
        return None
    try:
        return int(pq.read_metadata(path).num_rows)
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}"
        ) from error


def table_rows(path: Path, wanted: Collection[str]) -> Iterator[bytes]:
    """Yield every row as one object, and a row of CSV or TSV that cannot be read as a string, the reason.

    Of Parquet and data sets only the wanted columns are read, if there are any.
    """
    if path.is_dir():
        dataset = _saved(path)
        columns = [
            name for name in dataset.column_names if name in wanted
        ] or dataset.column_names
        for table in (
            dataset.select_columns(columns).with_format("arrow").iter(CHUNK_ROWS)
        ):
            for row in table.to_pylist():
                yield json.dumps(row, default=str).encode()
        return
    if path.suffix.lower() in PARQUET:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = [name for name in names if name in wanted] or names
            for batch in file.iter_batches(batch_size=CHUNK_ROWS, columns=columns):
                for row in batch.to_pylist():
                    yield json.dumps(row, default=str).encode()
        return
    for _, _, _, record in _delimited(path).scan():
        row = str(record) if isinstance(record, BadRecord) else record
        yield json.dumps(row, ensure_ascii=False).encode(errors="surrogateescape")


def _delimited(path: Path) -> DelimitedFile:
    return DelimitedFile(path, DELIMITED[path.suffix.lower()], AnyColumns())


def _saved(folder: Path) -> Any:
    """Return a data set that `datasets` has saved. Raise UserError if the folder holds several."""
    splits = sorted(path.name for path in folder.iterdir() if is_saved_dataset(path))
    if len(splits) > 1:
        raise UserError(
            f"{folder} holds the data sets {', '.join(splits)}: give one of them, as {folder / splits[0]}"
        )
    return saved_split(folder, "train")
