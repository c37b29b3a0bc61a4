"""Files of vectors that grow chunk by chunk and have their name only when they are whole: .npy and Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vembed.errors import UserError
from vembed.saving.durability import replaced_file

HEADER_BYTES = 128
"""The format wants a multiple of 64; these have room for any number of rows."""


def check_target(output: str) -> Path:
    """The path of a file that can be written, by its ending and its folder."""
    target = Path(output)
    if target.suffix not in (".npy", ".parquet"):
        raise UserError(
            f"{output} ends in {target.suffix or 'nothing'}, and vembed encode writes .npy and .parquet"
        )
    if not target.absolute().parent.is_dir():
        raise UserError(
            f"{target.absolute().parent} is not a folder, so {target.name} cannot be written there"
        )
    return target


def kept_path(target: Path) -> Path:
    """Return the file beside a .npy file that holds the kept columns, one object per row."""
    return target.with_suffix(".kept.jsonl")


def check_kept_names(keep: Sequence[str]) -> None:
    """Raise UserError if kept columns cannot have these names."""
    if len(set(keep)) < len(keep) or "embedding" in keep:
        raise UserError(
            f"--keep {','.join(keep)}: name each column once, and none embedding, as the vectors are named"
        )


def kept_beside(target: Path, keep: Sequence[str]) -> str:
    """Return where the kept columns are, for the log."""
    if not keep:
        return ""
    return f"; {', '.join(keep)} in {kept_path(target) if target.suffix == '.npy' else 'the same file'}"


class VectorWriter(Protocol):
    """Takes rows in order."""

    def write(
        self,
        embeddings_ND: np.ndarray,
        ids: list[str | None],
        arrays: Mapping[str, list[Any]],
    ) -> None:
        """Append rows, with their ids and the columns that are kept."""
        ...

    def close(self) -> None:
        """Finish the file."""
        ...


class _NoWriter:
    """Writer of the other processes: writes nothing."""

    def write(
        self,
        embeddings_ND: np.ndarray,
        ids: list[str | None],
        arrays: Mapping[str, list[Any]],
    ) -> None:
        """Let the first process write."""

    def close(self) -> None:
        """There is nothing to end."""


class _NpyWriter:
    """A .npy file that grows; its header has a fixed size and is written again at the end with the number of rows. Kept
    columns go to a file of their own."""

    def __init__(
        self,
        file: BinaryIO,
        shape: tuple[int, ...],
        beside: BinaryIO | None,
        dtype: np.dtype[Any],
    ) -> None:
        self.file = file
        self.dtype = dtype
        self.shape = shape
        self.beside = beside
        self.num_rows = 0
        self._header()

    def write(
        self,
        embeddings_ND: np.ndarray,
        ids: list[str | None],  # noqa: ARG002
        arrays: Mapping[str, list[Any]],
    ) -> None:
        """Append rows."""
        self.num_rows += len(embeddings_ND)
        self.file.write(np.ascontiguousarray(embeddings_ND, self.dtype).tobytes())
        if self.beside is not None:
            for values in zip(*arrays.values(), strict=True):
                line = json.dumps(
                    dict(zip(arrays, values, strict=True)), ensure_ascii=False
                )
                self.beside.write(line.encode() + b"\n")

    def close(self) -> None:
        """Say how many rows there are."""
        self.file.seek(0)
        self._header()

    def _header(self) -> None:
        shape = (self.num_rows, *self.shape)
        text = f"{{'descr': '{self.dtype.str}', 'fortran_order': False, 'shape': {shape}, }}"
        # Version 1.0: 6 bytes of magic, 2 of version, 2 of length, then a Python literal, padded with blanks, and a
        # newline.
        magic = b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little")
        self.file.write(magic + text.ljust(HEADER_BYTES - 11).encode() + b"\n")


class _ParquetWriter:
    """A row group per chunk: the kept columns, the embedding, and the id where the first record has one."""

    def __init__(
        self, file: BinaryIO, num_dims: int, keep: Sequence[str], dtype: np.dtype[Any]
    ) -> None:
        self.file = file
        self.dtype = dtype
        self.num_dims = num_dims
        self.keep = tuple(keep)
        self.writer: pq.ParquetWriter | None = None
        self.has_ids = False

    def write(
        self,
        embeddings_ND: np.ndarray,
        ids: list[str | None],
        columns: Mapping[str, list[Any]],
    ) -> None:
        """Append rows."""
        if self.writer is None:
            # The first chunk decides on the columns: a Parquet file has one schema, which is written before the first
            # row group.
            self.has_ids = ids[0] is not None and "id" not in self.keep
            self._open({name: _type_of(values) for name, values in columns.items()})
        assert self.writer is not None
        schema = self.writer.schema
        flat = pa.array(np.ascontiguousarray(embeddings_ND, self.dtype).reshape(-1))
        arrays = [pa.array(ids, pa.string())] if self.has_ids else []
        arrays += [
            _column(name, columns[name], schema.field(name).type) for name in self.keep
        ]
        arrays.append(pa.FixedSizeListArray.from_arrays(flat, self.num_dims))
        self.writer.write_table(pa.Table.from_arrays(arrays, schema=schema))

    def close(self) -> None:
        """Write the footer."""
        if self.writer is None:
            self._open({})
        assert self.writer is not None
        self.writer.close()

    def _open(self, columns: Mapping[str, pa.DataType]) -> None:
        fields = [pa.field("id", pa.string())] if self.has_ids else []
        fields += [pa.field(name, kind) for name, kind in columns.items()]
        fields.append(
            pa.field(
                "embedding", pa.list_(pa.from_numpy_dtype(self.dtype), self.num_dims)
            )
        )
        names = [field.name for field in fields[:-1]]
        self.writer = pq.ParquetWriter(
            self.file, pa.schema(fields), compression="zstd", use_dictionary=names
        )


def _type_of(values: Sequence[Any]) -> pa.DataType:
    """Return the type of a kept column by its first values: numbers and booleans as they are, all else as text."""
    try:
        kind = pa.infer_type(values)
    except pa.ArrowException:
        return pa.string()
    is_plain = (
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
    )
    return kind if is_plain else pa.string()


def _column(name: str, values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_string(kind):
        texts = [
            value
            if value is None or isinstance(value, str)
            else json.dumps(value, ensure_ascii=False)
            for value in values
        ]
        return pa.array(texts, kind)
    try:
        return pa.array(values, kind)
    except pa.ArrowException as error:
        raise UserError(
            f"--keep {name}: a later value is no {kind} as the first ones are: {error}"
        ) from error


@contextmanager
def vector_writer(
    target: Path,
    shape: tuple[int, ...],
    keep: Sequence[str] = (),
    *,
    active: bool,
    dtype: Literal["float32", "int8", "uint8"] = "float32",
) -> Iterator[VectorWriter]:
    """Writes beside the target and moves it there at the end; not `active`: takes vectors and writes nothing. `shape`:
    of what stands for one input, more than one dimension in .npy alone. `keep`: names of the kept columns."""
    if not active:
        yield _NoWriter()
        return
    is_array = target.suffix == ".npy"
    targets = [target, kept_path(target)] if is_array and keep else [target]
    with ExitStack() as stack:
        partials = [stack.enter_context(replaced_file(path)) for path in targets]
        file, *beside = [
            stack.enter_context(partial.open("wb")) for partial in partials
        ]  # closed before they are renamed
        writer: VectorWriter
        if is_array:
            writer = _NpyWriter(
                file, shape, beside[0] if beside else None, np.dtype(dtype)
            )
        else:
            writer = _ParquetWriter(file, shape[0], keep, np.dtype(dtype))
        yield writer
        writer.close()
