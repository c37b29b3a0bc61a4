"""Files of vectors that grow chunk by chunk and have their name only when they are whole: .npy and Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vembed.errors import UserError
from vembed.saving.durability import replaced_file


class NpyWriter:
    """A .npy file that grows. Kept columns go to a file of their own."""

    def __init__(
        self,
        file: BinaryIO,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        kept_file: BinaryIO | None,
    ) -> None:
        self.file = file
        self.shape = shape
        self.dtype = dtype
        self.kept_file = kept_file
        self.num_rows = 0
        self._write_header()

    def write(self, vectors: np.ndarray, columns: Mapping[str, list[Any]]) -> None:
        """Append rows."""
        self.num_rows += len(vectors)
        self.file.write(np.ascontiguousarray(vectors, self.dtype).tobytes())
        if self.kept_file is not None:
            for values in zip(*columns.values(), strict=True):
                row = dict(zip(columns, values, strict=True))
                line = json.dumps(row, ensure_ascii=False) + "\n"
                self.kept_file.write(line.encode())

    def close(self) -> None:
        """Write the header again, with the number of rows."""
        self.file.seek(0)
        self._write_header()

    def _write_header(self) -> None:
        # NumPy pads it for any number of rows, so that it keeps its size.
        header = {
            "descr": self.dtype.str,
            "fortran_order": False,
            "shape": (self.num_rows, *self.shape),
        }
        np.lib.format.write_array_header_1_0(self.file, header)


class ParquetWriter:
    """A row group per chunk: the kept columns, and the embedding."""

    def __init__(self, file: BinaryIO, num_dims: int, dtype: np.dtype[Any]) -> None:
        self.file = file
        self.num_dims = num_dims
        self.dtype = dtype
        self.writer: pq.ParquetWriter | None = None

    def write(self, vectors: np.ndarray, columns: Mapping[str, list[Any]]) -> None:
        """Append rows. The first ones decide on the schema, which is written before the first row group."""
        arrays = {}
        for name, values in columns.items():
            kind = None if self.writer is None else self.writer.schema.field(name).type
            arrays[name] = _column(name, values, kind)
        flat = pa.array(np.ascontiguousarray(vectors, self.dtype).reshape(-1))
        arrays["embedding"] = pa.FixedSizeListArray.from_arrays(flat, self.num_dims)
        table = pa.table(arrays)
        if self.writer is None:
            self.writer = pq.ParquetWriter(
                self.file,
                table.schema,
                compression="zstd",
                use_dictionary=list(columns),
            )
        self.writer.write_table(table)

    def close(self) -> None:
        """Write the footer."""
        if self.writer is None:
            self.write(np.empty((0, self.num_dims)), {})
        assert self.writer is not None
        self.writer.close()


def _column(name: str, values: Sequence[Any], kind: pa.DataType | None) -> pa.Array:
    """Return a kept column: numbers and booleans as they are, all else as text. `kind`: that of the first values."""
    if kind is None:
        try:
            kind = pa.infer_type(values)
        except pa.ArrowException:
            kind = pa.string()
        if not (pa.types.is_primitive(kind) and not pa.types.is_temporal(kind)):
            kind = pa.string()
    if pa.types.is_string(kind):
        texts = []
        for value in values:
            if value is not None and not isinstance(value, str):
                value = json.dumps(value, ensure_ascii=False)  # noqa: PLW2901
            texts.append(value)
        values = texts
    try:
        return pa.array(values, kind)
    except pa.ArrowException as error:
        raise UserError(
            f"--keep {name}: a later value is no {kind} as the first ones are: {error}"
        ) from error


@contextmanager
def vector_writer(
    target: Path, shape: tuple[int, ...], dtype: str, *, keeps_columns: bool
) -> Iterator[NpyWriter | ParquetWriter]:
    """Write beside the target and move it there at the end. `shape`: of what stands for one input, more than one
    dimension in .npy alone."""
    is_array = target.suffix == ".npy"
    targets = [target]
    if is_array and keeps_columns:
        targets.append(target.with_suffix(".kept.jsonl"))
    with ExitStack() as stack:
        partials = [stack.enter_context(replaced_file(path)) for path in targets]
        # Closed before they are renamed.
        files = [stack.enter_context(partial.open("wb")) for partial in partials]
        writer: NpyWriter | ParquetWriter
        if is_array:
            kept_file = files[1] if keeps_columns else None
            writer = NpyWriter(files[0], shape, np.dtype(dtype), kept_file)
        else:
            writer = ParquetWriter(files[0], shape[0], np.dtype(dtype))
        yield writer
        writer.close()
