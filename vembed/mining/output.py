"""Files of training data that grow row by row and have their name only when they are whole: JSON Lines and Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vembed.errors import UserError
from vembed.files import replaced_file

ENDINGS = (".jsonl", ".ndjson", ".parquet", ".pq")
ROWS_PER_GROUP = 4096


def check_output(path: str) -> Path:
    """The path of a file that can be written, by its ending and its folder."""
    target = Path(path).expanduser()
    if target.suffix.lower() not in ENDINGS:
        raise UserError(
            f"output_path: {path} ends in {target.suffix or 'nothing'}; write .jsonl or .parquet, which data_path reads"
        )
    if not target.absolute().parent.is_dir():
        raise UserError(
            f"{target.absolute().parent} is no folder, so {target.name} cannot be written there"
        )
    return target


def write_rows(target: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write beside the target and move it there at the end; nothing is left where an error ends it."""
    try:
        with replaced_file(target) as partial:
            if target.suffix.lower() not in (".jsonl", ".ndjson"):
                _write_parquet(partial, rows)
                return
            # A lone surrogate becomes its escape, as JSON has it.
            with partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
                for row in rows:
                    text = json.dumps(row, ensure_ascii=False, default=_no_json)
                    file.write(text + "\n")
    except OSError as error:
        raise UserError(
            f"{target} cannot be written: {error.strerror or error}"
        ) from error


def _write_parquet(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Groups of rows are held as tables until the end: only then are the types of all columns known."""
    tables = [pa.table({})]
    remaining = iter(rows)
    try:
        while group := list(islice(remaining, ROWS_PER_GROUP)):
            names = dict.fromkeys(name for row in group for name in row)
            tables.append(
                pa.table(
                    {name: pa.array([row.get(name) for row in group]) for name in names}
                )
            )
        table = pa.concat_tables(tables[1:] or tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        first = str(error).splitlines()[0]
        raise UserError(
            f"a Parquet column has one type, and the rows hold several ({first}): write .jsonl"
        ) from error
    # A whole number beyond 64 bits, a lone surrogate.
    except (OverflowError, UnicodeEncodeError) as error:
        raise UserError(
            f"Parquet cannot hold a value of the rows ({error}): write .jsonl"
        ) from error
    pq.write_table(table, path, compression="zstd")


def _no_json(value: Any) -> Any:
    if isinstance(value, bytes):
        raise UserError(
            "rows with images inside them cannot be written as JSON Lines: write .parquet"
        )
    return str(value)  # dates and decimals of Parquet
