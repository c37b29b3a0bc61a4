"""ArrowRows: base of the formats whose records are rows of Arrow batches, and what they share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from vembed.data.examples import BadRecord
from vembed.data.formats.base import MAX_RECORD_BYTES, Block, Format


class ArrowRows(Format):
    """A table. Numbers are rows from 0, and lines are rows from 1."""

    def batches(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Yield rows `start` to `stop` - 1, as many at a time as fit in memory easily."""
        raise NotImplementedError

    def blocks(
        self, start: int | None = None, stop: int | None = None
    ) -> Iterator[Block]:
        """Yield rows in blocks."""
        first = self.start if start is None else start
        line = 1
        for batch in self.batches(first, self.stop if stop is None else stop):
            numbers = np.arange(first, first + batch.num_rows)
            lines = np.arange(line, line + batch.num_rows)
            if batch.nbytes <= MAX_RECORD_BYTES:
                yield ArrowBlock(numbers, lines, batch)
            else:
                yield Block(numbers, lines, _one_by_one(batch))
            first += batch.num_rows
            line += batch.num_rows

    def read(self, number: int) -> Any:
        """Return one record again."""
        return row_values(next(self.batches(number, number + 1)))[0]

    def num_records(self) -> int:
        """Return the number of rows."""
        return self.stop


class ArrowBlock(Block):
    """Rows that become Python objects only where they are looked at one by one."""

    def __init__(
        self, numbers: np.ndarray, lines: np.ndarray, batch: pa.RecordBatch
    ) -> None:
        super().__init__(numbers, lines)
        self._batch = batch

    def records(self) -> list[Any]:
        """See Block."""
        return row_values(self._batch)

    def columns(self) -> tuple[str, ...] | None:
        """See Block."""
        names = tuple(self._batch.schema.names)
        return names if len(set(names)) == len(names) else None

    def are_texts(self, columns: Sequence[str]) -> bool:
        """See Block."""
        return all(_are_texts(self._batch.column(name)) for name in columns)


def row_values(rows: pa.RecordBatch | pa.Table) -> list[Any]:
    """Return the rows as dicts, with a BadRecord for each row that Python cannot represent (invalid UTF-8, say)."""
    try:
        values: list[Any] = rows.to_pylist()
    except (ValueError, OverflowError, pa.ArrowException) as error:
        if rows.num_rows == 1:
            return [BadRecord(f"values that cannot be read ({first_line(error)})")]
        single_rows = (rows.slice(row, 1) for row in range(rows.num_rows))
        return [row_values(row)[0] for row in single_rows]
    return values


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _one_by_one(batch: pa.RecordBatch) -> list[Any]:
    """Return the records of large rows, with a BadRecord for each that is too large."""
    records: list[Any] = []
    for number in range(batch.num_rows):
        row = batch.slice(number, 1)
        if row.nbytes > MAX_RECORD_BYTES:
            records.append(
                BadRecord(f"a record of more than {MAX_RECORD_BYTES:,d} bytes")
            )
        else:
            records += row_values(row)
    return records


def _are_texts(column: pa.Array) -> bool:
    """Return True if all values are texts that can be embedded, from the column's bytes."""
    is_long = pa.types.is_large_string(column.type)
    is_text = is_long or pa.types.is_string(column.type)
    if column.null_count or not len(column) or not is_text:
        return False
    _, bounds, data = column.buffers()
    all_offsets = np.frombuffer(bounds, np.int64 if is_long else np.int32)
    offsets = all_offsets[column.offset :][: len(column) + 1].astype(np.int64)
    if data is None or not (np.diff(offsets) > 0).all():
        return False
    letters = np.frombuffer(data, np.uint8)
    used = letters[offsets[0] : offsets[-1]]
    if used.min() == 0:
        return False
    if used.max() >= 0x80:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:  # not UTF-8
            return False
    # A text that begins with a visible ASCII character is not blank; few others have to be looked at.
    first_letters = letters[offsets[:-1]]
    unclear = np.flatnonzero((first_letters <= 0x20) | (first_letters >= 0x7F))
    return not any(column[int(row)].as_py().isspace() for row in unclear)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return a type without dictionaries."""
    if pa.types.is_dictionary(kind):
        return kind.value_type
    if pa.types.is_list(kind):
        return pa.list_(plain_type(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(plain_type(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(plain_type(kind.value_type), kind.list_size)
    if pa.types.is_struct(kind):
        fields = [field.with_type(plain_type(field.type)) for field in kind]
        return pa.struct(fields)
    return kind


def without_dictionaries(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows with their values in place of numbers in a dictionary, which may differ between row groups."""
    types = [plain_type(field.type) for field in rows.schema]
    if types == rows.schema.types:
        return rows
    columns = [
        column.cast(kind) for column, kind in zip(rows.columns, types, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, rows.schema.names)
