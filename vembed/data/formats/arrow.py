"""ArrowRows: base of the formats whose records are rows of Arrow batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from vembed.data.examples import BadRecord
from vembed.data.formats.base import MAX_RECORD_BYTES, Block, Format, row_values


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
            records: Any = batch
            if batch.nbytes > MAX_RECORD_BYTES:
                records = _one_by_one(batch)
            yield Block(numbers, numbers - first + line, records)
            first += batch.num_rows
            line += batch.num_rows

    def read(self, number: int) -> Any:
        """Return one record again."""
        return row_values(next(self.batches(number, number + 1)))[0]

    def num_records(self) -> int:
        """Return the number of rows."""
        return self.stop


def _one_by_one(batch: pa.RecordBatch) -> list[Any]:
    """Return the records of large rows, with a BadRecord for each that is too large."""
    records: list[Any] = []
    for number in range(batch.num_rows):
        row = batch.slice(number, 1)
        if row.nbytes > MAX_RECORD_BYTES:
            reason = f"a record of more than {MAX_RECORD_BYTES:,d} bytes"
            records.append(BadRecord(reason))
        else:
            records += row_values(row)
    return records
