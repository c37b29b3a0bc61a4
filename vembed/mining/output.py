"""Files of training data that grow row by row and have their name only when they are whole: JSON Lines and Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from vembed.errors import UserError

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


class RowWriter(Protocol):
    """Takes rows in order."""

    def write(self, row: dict[str, Any]) -> None:
        """Append a row."""
        ...

    def close(self) -> None:
        """Finish the file."""
        ...


class _JsonLines:
    def __init__(self, path: Path) -> None:
        # A lone surrogate becomes its escape, as JSON has it.
        self._file = path.open("w", encoding="utf-8", errors="backslashreplace")

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, ensure_ascii=False, default=_no_json) + "\n")

    def close(self) -> None:
        self._file.close()


class _Parquet:
    """Groups of rows are held as tables until the end: only then are the types of all columns known."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[dict[str, Any]] = []
        self._tables: list[pa.Table] = []

    def write(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if len(self._rows) == ROWS_PER_GROUP:
            self._flush()

    def close(self) -> None:
        self._flush()
        try:
            table = (
                pa.concat_tables(self._tables, promote_options="permissive")
                if self._tables
                else pa.table({})
            )
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise _mixed(error) from error
        pq.write_table(table, self._path, compression="zstd")

    def _flush(self) -> None:
        if not self._rows:
            return
        names = list(dict.fromkeys(name for row in self._rows for name in row))
        try:
            columns = {
                name: pa.array([row.get(name) for row in self._rows]) for name in names
            }
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise _mixed(error) from error
        except (
            OverflowError,
            UnicodeEncodeError,
        ) as error:  # a whole number beyond 64 bits, a lone surrogate
            raise UserError(
                f"Parquet cannot hold a value of the rows ({error}): write .jsonl"
            ) from error
        self._tables.append(pa.table(columns))
        self._rows = []


@contextmanager
def row_writer(target: Path) -> Iterator[RowWriter]:
    """Write beside the target and move it there at the end; nothing is left where an error ends it."""
    partial = target.with_name(target.name + ".part")
    is_lines = target.suffix.lower() in (".jsonl", ".ndjson")
    writer: RowWriter = _JsonLines(partial) if is_lines else _Parquet(partial)
    try:
        yield writer
        writer.close()
        partial.replace(target)
    except OSError as error:
        raise UserError(
            f"{target} cannot be written: {error.strerror or error}"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _mixed(error: Exception) -> UserError:
    first = str(error).splitlines()[0]
    return UserError(
        f"a Parquet column has one type, and the rows hold several ({first}): write .jsonl"
    )


def _no_json(value: Any) -> Any:
    if isinstance(value, bytes):
        raise UserError(
            "rows with images inside them cannot be written as JSON Lines: write .parquet"
        )
    return str(value)  # dates and decimals of Parquet
