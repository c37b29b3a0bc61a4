"""Rows of CSV, TSV and Parquet files and of saved data sets as JSON lines, which `vembed encode` reads like records."""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vembed.data.delimited import delimiter_of
from vembed.data.opening import kind_of
from vembed.data.readers import MAX_RECORD
from vembed.data.tables import is_saved_dataset, saved_split
from vembed.errors import UserError

DELIMITED = {".csv": ",", ".tsv": "\t"}
PARQUET = (".parquet", ".pq")
CHUNK_ROWS = 1024


def is_table(path: Path) -> bool:
    """Return whether the file's suffix is that of a table, packed or not."""
    return kind_of(path) in (*DELIMITED, *PARQUET)


def num_rows(path: Path) -> int | None:
    """Return the number of rows if the table stores it."""
    if path.is_dir():
        return len(_saved(path))
    path.open("rb").close()  # a file that is missing is said as for lines, not in Arrow's words
    if path.suffix.lower() not in PARQUET:
        return None
    try:
        return int(pq.read_metadata(path).num_rows)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}") from error


def table_rows(path: Path, wanted: Collection[str]) -> Iterator[bytes]:
    """Yield every row as one object. Of Parquet and data sets only the wanted columns are read, if there are any."""
    if path.is_dir():
        dataset = _saved(path)
        columns = [name for name in dataset.column_names if name in wanted] or dataset.column_names
        for table in dataset.select_columns(columns).with_format("arrow").iter(CHUNK_ROWS):
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
    # The csv module's own limit is 131,072 characters, for all readers of the process.
    csv.field_size_limit(max(csv.field_size_limit(), MAX_RECORD))
    expected = DELIMITED[path.suffix.lower()]
    with path.open("rb") as raw:
        if raw.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise UserError(f"{path} is UTF-16 text: save it as UTF-8")
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        delimiter = delimiter_of(text.readline(), expected)
        text.seek(0)
        rows = csv.reader(text, delimiter=delimiter)
        header = next(rows, [])
        for number, row in enumerate((row for row in rows if row), 1):
            if len(row) != len(header):
                sizes = f"the number of cells is {len(row):,d}, and the header has {len(header):,d}"
                raise UserError(f"{path}, row {number:,d}: {sizes}")
            cells = {name: cell or None for name, cell in zip(header, row, strict=True)}
            yield json.dumps(cells, ensure_ascii=False).encode(errors="surrogateescape")


def _saved(folder: Path) -> Any:
    """Return a data set that `datasets` has saved. Raise UserError if the folder holds several."""
    splits = sorted(one.name for one in folder.iterdir() if is_saved_dataset(one))
    if len(splits) > 1:
        raise UserError(f"{folder} holds the data sets {', '.join(splits)}: give one of them, as {folder / splits[0]}")
    return saved_split(folder, "train")
