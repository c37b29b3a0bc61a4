"""RowBlock: rows of a table as a block, which become Python objects only where they are looked at one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from vembed.data.examples import BadRecord
from vembed.data.formats.base import Block


class RowBlock(Block):
    """Consecutive rows of a table."""

    def __init__(self, rows: pa.RecordBatch, first: int) -> None:
        """`first`: number of the first row."""
        starts = np.arange(first, first + rows.num_rows)
        super().__init__(starts, np.ones_like(starts), starts + 1)
        self._rows = rows

    def records(self) -> list[Any]:
        """See Block."""
        return row_values(self._rows)

    def names(self) -> tuple[str, ...] | None:
        """See Block."""
        names = tuple(self._rows.schema.names)
        return names if len(set(names)) == len(names) else None

    def are_texts(self, names: Sequence[str]) -> bool:
        """See Block."""
        return all(_is_texts(self._rows.column(name)) for name in names)


def row_values(rows: pa.RecordBatch | pa.Table) -> list[Any]:
    """Return the rows as dicts, with a BadRecord for each row that Python cannot represent (invalid UTF-8, say)."""
    try:
        values: list[Any] = rows.to_pylist()
    except (ValueError, OverflowError, pa.ArrowException) as error:
        if rows.num_rows == 1:
            return [BadRecord(f"values that cannot be read ({first_line(error)})")]
        return [
            value
            for row in range(rows.num_rows)
            for value in row_values(rows.slice(row, 1))
        ]
    return values


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _is_texts(column: pa.Array) -> bool:
    """Return True if all values are texts that can be embedded, from the column's bytes."""
    is_long = pa.types.is_large_string(column.type)
    if (
        column.null_count
        or not len(column)
        or not (is_long or pa.types.is_string(column.type))
    ):
        return False
    _, bounds, data = column.buffers()
    held = (
        np.frombuffer(bounds, np.int64) if is_long else np.frombuffer(bounds, np.int32)
    )
    offsets = held[column.offset :][: len(column) + 1].astype(np.int64)
    if data is None or not (np.diff(offsets) > 0).all():
        return False
    text = np.frombuffer(data, np.uint8)
    own = text[offsets[0] : offsets[-1]]
    if own.min() == 0:
        return False
    if own.max() >= 0x80:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:  # not UTF-8
            return False
    # A text that begins with a visible ASCII character is not blank; few others have to be looked at.
    begins = text[offsets[:-1]]
    odd = np.flatnonzero((begins <= 0x20) | (begins >= 0x7F))
    if not len(odd):
        return True
    # pa.array would import pandas, which takes half a second in each process of the first pass.
    numbers = pa.Array.from_buffers(
        pa.int64(), len(odd), [None, pa.py_buffer(odd.astype(np.int64))]
    )
    return not any(one.isspace() for one in column.take(numbers).to_pylist())
