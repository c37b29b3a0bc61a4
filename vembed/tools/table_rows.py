"""Rows of CSV, TSV and Parquet files as JSON lines, so that `vembed encode` reads them like records."""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Collection, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from vembed.data.delimited import delimiter_of
from vembed.data.readers import MAX_RECORD
from vembed.errors import UserError

DELIMITED = {".csv": ",", ".tsv": "\t"}
PARQUET = (".parquet", ".pq")
CHUNK_ROWS = 1024


def is_table(path: Path) -> bool:
    """Return whether the file's suffix is that of a table."""
    return path.suffix.lower() in (*DELIMITED, *PARQUET)


def num_rows(path: Path) -> int | None:
    """Return the number of rows if the file stores it."""
    if path.suffix.lower() not in PARQUET:
        return None
    try:
        return int(pq.read_metadata(path).num_rows)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}") from error


def table_rows(path: Path, wanted: Collection[str]) -> Iterator[bytes]:
    """Yield every row as one object. For Parquet, read only the wanted columns, if the file has any of them."""
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
