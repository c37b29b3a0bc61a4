"""Safetensors files read and written piece by piece, so that no tensor has to be whole in memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from vembed.errors import UserError
from vembed.models.families.model_files import METADATA, read_header

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_ALIGNMENT = 8
"""Bytes: the data of a safetensors file begin at a multiple of it."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a file: its dtype and shape, and the bytes where it begins and ends."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int = 0
    end: int = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class TensorReader:
    """A safetensors file, read by ranges of elements. It maps no memory, so that what was read can be given back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        stored, self.metadata = read_header(path)
        self.entries: dict[str, TensorEntry] = {}
        for name, entry in stored.items():
            if entry.dtype not in _DTYPES:
                raise UserError(
                    f"{path}: {name} is stored as {entry.dtype}, which vembed cannot compute with"
                )
            self.entries[name] = TensorEntry(
                _DTYPES[entry.dtype], entry.shape, entry.begin, entry.end
            )

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return elements `start` to `stop` of the flattened tensor, as they are stored."""
        entry = self.entries[name]
        stop = entry.size if stop is None else min(stop, entry.size)
        if stop <= start:
            return torch.empty(0, dtype=entry.dtype)
        width = entry.dtype.itemsize
        buffer = bytearray((stop - start) * width)
        # preadv gives at most 2 GiB at once, and less over a network file system.
        view = memoryview(buffer)
        done = 0
        offset = entry.begin + start * width
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            while done < len(buffer):
                count = os.preadv(descriptor, [view[done:]], offset + done)
                if count == 0:
                    raise UserError(
                        f"{self.path} ends within {name}: the file is incomplete; copy it again"
                    )
                done += count
        finally:
            os.close(descriptor)
        return torch.frombuffer(buffer, dtype=entry.dtype)

    def whole(self, name: str) -> Tensor:
        """Return the tensor in its shape."""
        return self.read(name).reshape(self.entries[name].shape)


class TensorWriter:
    """A new safetensors file, whose tensors are written one after the other, in any number of pieces each."""

    def __init__(
        self,
        path: Path,
        entries: Mapping[str, TensorEntry],
        metadata: Mapping[str, str],
    ) -> None:
        """`entries`: what will be written, in this order; their offsets are set here."""
        self.path = path
        self._left = sum(entry.size for entry in entries.values())
        header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
        offset = 0
        for name, entry in entries.items():
            end = offset + entry.size * entry.dtype.itemsize
            header[name] = {
                "dtype": _CODES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        # The format: 8 bytes with the header's length, the header (JSON, padded with spaces), the tensors. Offsets
        # count from the end of the header.
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, piece: Tensor) -> None:
        """Append elements, which have the dtype of the tensor that they belong to."""
        self._left -= piece.numel()
        self._file.write(piece.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()
        assert error is not None or self._left == 0, (
            f"{self.path}: {self._left:,d} elements were not written"
        )
