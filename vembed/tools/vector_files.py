"""Files of vectors that grow chunk by chunk and have their name only when they are whole: .npy and Parquet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vembed.errors import UserError

HEADER_BYTES = 128


def check_target(output: str) -> Path:
    """The path of a file that can be written, by its ending and its folder."""
    target = Path(output)
    if target.suffix not in (".npy", ".parquet"):
        raise UserError(f"{output} ends in {target.suffix or 'nothing'}, and vembed encode writes .npy and .parquet")
    if not target.absolute().parent.is_dir():
        raise UserError(f"{target.absolute().parent} is not a folder, so {target.name} cannot be written there")
    return target


class VectorWriter(Protocol):
    """Takes rows in order."""

    def write(self, embeddings_ND: np.ndarray, ids: list[str | None]) -> None:
        """Append rows."""
        ...

    def close(self) -> None:
        """Finish the file."""
        ...


class _NoWriter:
    """Writer of the other processes: writes nothing."""

    def write(self, embeddings_ND: np.ndarray, ids: list[str | None]) -> None:
        """Let the first process write."""

    def close(self) -> None:
        """There is nothing to end."""


class _NpyWriter:
    """A .npy file that grows; its header has a fixed size and is written again at the end with the number of rows."""

    def __init__(self, file: BinaryIO, shape: tuple[int, ...]) -> None:
        self.file = file
        self.shape = shape
        self.num_rows = 0
        self._header()

    def write(self, embeddings_ND: np.ndarray, ids: list[str | None]) -> None:  # noqa: ARG002 - an array has no names
        """Append rows."""
        self.num_rows += len(embeddings_ND)
        self.file.write(np.ascontiguousarray(embeddings_ND, np.float32).tobytes())

    def close(self) -> None:
        """Say how many rows there are."""
        self.file.seek(0)
        self._header()

    def _header(self) -> None:
        shape = (self.num_rows, *self.shape)
        text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
        magic = b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little")
        self.file.write(magic + text.ljust(HEADER_BYTES - 11).encode() + b"\n")


class _ParquetWriter:
    """A row group per chunk: the embedding, and the id where the first record has one."""

    def __init__(self, file: BinaryIO, num_dims: int) -> None:
        self.file = file
        self.num_dims = num_dims
        self.writer: pq.ParquetWriter | None = None
        self.has_ids = False

    def write(self, embeddings_ND: np.ndarray, ids: list[str | None]) -> None:
        """Append rows."""
        if self.writer is None:
            self.has_ids = ids[0] is not None
            self._open()
        assert self.writer is not None
        flat = pa.array(np.ascontiguousarray(embeddings_ND, np.float32).reshape(-1))
        columns = [pa.array(ids, pa.string())] if self.has_ids else []
        columns.append(pa.FixedSizeListArray.from_arrays(flat, self.num_dims))
        self.writer.write_table(pa.Table.from_arrays(columns, schema=self.writer.schema))

    def close(self) -> None:
        """Write the footer."""
        if self.writer is None:
            self._open()
        assert self.writer is not None
        self.writer.close()

    def _open(self) -> None:
        fields = [pa.field("id", pa.string())] if self.has_ids else []
        fields.append(pa.field("embedding", pa.list_(pa.float32(), self.num_dims)))
        self.writer = pq.ParquetWriter(self.file, pa.schema(fields), compression="zstd", use_dictionary=["id"])


@contextmanager
def vector_writer(target: Path, shape: tuple[int, ...], *, active: bool) -> Iterator[VectorWriter]:
    """Writes beside the target and moves it there at the end; not `active`: takes vectors and writes nothing. `shape`:
    of what stands for one input, more than one dimension in .npy alone."""
    if not active:
        yield _NoWriter()
        return
    partial = target.with_name(target.name + ".part")
    try:
        with partial.open("wb") as file:
            writer = _NpyWriter(file, shape) if target.suffix == ".npy" else _ParquetWriter(file, shape[0])
            yield writer
            writer.close()
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
