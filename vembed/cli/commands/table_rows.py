"""Rows of tables and of saved data sets as JSON lines, which `vembed encode` reads like records."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path

from vembed.config.user_folders import cache_folder
from vembed.data.examples import BadRecord
from vembed.data.formats.base import Format
from vembed.data.formats.json_lines import JsonLines, is_array
from vembed.data.formats.opening import open_reader
from vembed.data.formats.saved_datasets import is_saved_dataset
from vembed.data.formats.table import ENDINGS, ending_of
from vembed.errors import UserError


def is_table(path: Path) -> bool:
    """Return whether the file's ending is that of a table, packed or not; a JSON array is one too."""
    form = ENDINGS.get(ending_of(path))
    if form is JsonLines:
        return path.suffix.lower() in ENDINGS and path.is_file() and is_array(path)
    return form is not None


def open_table(path: Path) -> Format:
    """Open a table. Raise UserError if a folder holds several data sets."""
    if path.is_dir():
        splits = sorted(
            child.name for child in path.iterdir() if is_saved_dataset(child)
        )
        if len(splits) > 1:
            raise UserError(
                f"{path} holds the data sets {', '.join(splits)}: give one of them, as {path / splits[0]}"
            )
    return open_reader(str(path), None, "train", cache_folder())


def table_rows(path: Path, names: Collection[str]) -> Iterator[bytes]:
    """Yield every row as its line and an object, and a row that cannot be read as its line and a string, the reason.
    Only the wanted columns are read, if there are any."""
    reader = open_table(path)
    columns = [name for name in reader.columns or () if name in names]
    if columns:
        reader.select(columns)
    for _, line, record in reader.rows():
        yield row_line(line, str(record) if isinstance(record, BadRecord) else record)


def row_line(line: int, row: object) -> bytes:
    """Return a row and the line where it stands as JSON."""
    text = json.dumps([line, row], ensure_ascii=False, default=str)
    return text.encode(errors="surrogateescape")
