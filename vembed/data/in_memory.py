"""Training data from Python objects: lists of dicts, tables and data sets, stored where the readers find them."""

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vembed.errors import UserError, listed
from vembed.files import cache_folder, written_aside

IN_MEMORY_FOLDER = "python"
"""Folder inside the cache; a file's name is the hash of its content."""


def as_path(name: str, value: Any) -> Any:
    """Return the path of data given as objects; anything else, such as a path, a name or a list of them, as it is."""
    if isinstance(value, Path):
        return str(value)
    if _is_of("datasets", "Dataset", value):
        return _stored_dataset(value)
    if _is_of("pandas", "DataFrame", value) or _is_of("pyarrow", "Table", value):
        return _stored_table(name, value)
    if _is_of("datasets", "DatasetDict", value):
        raise UserError(
            f"{name} is a DatasetDict with the splits {listed(value)}: give one of them, such as "
            f"data[{next(iter(value), 'train')!r}]"
        )
    if isinstance(value, list):
        if value and all(
            isinstance(entry, Mapping) and "path" not in entry for entry in value
        ):
            return _stored_rows(name, value)
        return [as_path(name, entry) for entry in value]
    return value


def _is_of(
    library: str,
    kind: str,
    value: Any,
) -> bool:
    """Return whether a value is of a library's class. The library is imported only if the caller has done so."""
    module = sys.modules.get(library)
    return module is not None and isinstance(value, getattr(module, kind, ()))


def _stored_table(name: str, table: Any) -> str:
    """Return the path of a Parquet file with the columns of a `pandas.DataFrame` or a `pyarrow.Table`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    try:
        if not isinstance(table, pa.Table):
            table = pa.Table.from_pandas(table, preserve_index=False)
        pq.write_table(table, sink)
    except pa.ArrowException as error:
        raise UserError(
            f"{name}: the table has a column of mixed types: {str(error).splitlines()[0]}"
        ) from error
    return _stored(name, sink.getvalue().to_pybytes(), "parquet")


def _stored_dataset(dataset: Any) -> str:
    folder = cache_folder() / IN_MEMORY_FOLDER / f"dataset-{dataset._fingerprint}"
    if not folder.is_dir():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        dataset.save_to_disk(str(partial))
        try:
            partial.rename(folder)
        except OSError:  # another process that was faster has written the same
            if not folder.is_dir():
                raise
    return str(folder)


def _stored_rows(name: str, rows: list[Mapping[str, Any]]) -> str:
    lines = []
    for number, row in enumerate(rows, 1):
        try:
            line = json.dumps(dict(row), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{name}, record {number}: {error}; records in a list hold texts, numbers and paths of images (a "
                "datasets.Dataset may hold images too)"
            ) from error
        lines.append(line + "\n")
    data = "".join(lines).encode("utf-8", "surrogatepass")
    return _stored(name, data, "jsonl")


def _stored(name: str, data: bytes, kind: str) -> str:
    """Return the path of a file with the data. Messages about its records begin with it, so it has the option's name."""
    digest = hashlib.sha256(data).hexdigest()[:16]
    path = cache_folder() / IN_MEMORY_FOLDER / f"{name}-{digest}.{kind}"
    if not path.is_file():
        with written_aside(path) as partial:
            partial.write_bytes(data)
    return str(path)
