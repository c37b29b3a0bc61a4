"""RowStore: rows of numbers by key on disk, shared by processes and runs. For what is expensive to compute.

The folder holds the rows of one producer (`identity`). Each process appends to its own file and reads all files, so no
locks are needed. A file is a header followed by blocks. A block is: number of rows, checksum of the keys, keys, and the
rows, each with its own checksum. Truncated, damaged or foreign data are ignored and computed again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import numpy as np

from vembed.data.cache import stamp
from vembed.data.examples import ImageRef
from vembed.errors import UserError

if TYPE_CHECKING:
    from vembed.data.features import Features

log = logging.getLogger("vembed")

_HEADER = struct.Struct("<17s32sII")
"""Magic, the producer's identity, values per row, bytes per value."""
_BLOCK = struct.Struct("<II")
"""Rows, checksum of their keys."""
_CHECKSUM = struct.Struct("<I")
KEY_BYTES = 16
_DTYPES = {2: np.uint16, 4: np.float32, 8: np.float64}
"""Type of the values by their bytes. Two bytes are float16 or bfloat16, which numpy does not have."""


@dataclass(frozen=True, slots=True)
class StoreKind:
    """Kind of a store's content, for its files and messages."""

    option: str
    """Option that messages name."""
    contents: str
    suffix: str
    magic: bytes
    """17 bytes at most."""


@dataclass
class _File:
    """The file of one process, and the position up to which it was read."""

    path: Path
    descriptor: int
    read_to: int = 0
    is_whole: bool = True
    """False: the file is damaged at `read_to`, and the rest is ignored."""


class RowStore:
    """Store of rows by key. Errors of the disk are logged and never raised."""

    def __init__(self, folder: Path, identity: str, kind: StoreKind) -> None:
        """`identity`: hash of all that the rows depend on besides their keys; also the name of the subfolder."""
        self.folder = folder / identity
        self.kind = kind
        self.num_read = 0
        self.num_added = 0
        self._identity = identity.encode().ljust(32, b"\0")[:32]
        self._shape: tuple[int, int] | None = None
        self._files: dict[str, _File | None] = {}
        self._places: dict[bytes, tuple[_File, int]] = {}
        self._own: int | None = None
        self._writes = True
        self._look_around()
        with suppress(
            OSError
        ):  # the folder does not exist yet, or belongs to another user
            os.utime(self.folder)  # its modification time is the time of last use

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_bytes(self) -> int:
        """Bytes of all readable files on disk."""
        self._look_around()
        return sum(
            os.fstat(file.descriptor).st_size
            for file in self._files.values()
            if file is not None
        )

    @property
    def width(self) -> int | None:
        """Values per row; None as long as there is no row."""
        return None if self._shape is None else self._shape[0]

    def missing(self, keys: Sequence[bytes]) -> list[int]:
        """Return the positions of keys that have no row. Rows are not read."""
        if any(key not in self._places for key in keys):
            self._look_around()
        return [
            position for position, key in enumerate(keys) if key not in self._places
        ]

    def find_rows(self, keys: Sequence[bytes]) -> dict[int, np.ndarray]:
        """Return a map from position in `keys` to the stored row, without the missing ones."""
        if any(key not in self._places for key in keys):
            self._look_around()
        rows: dict[int, np.ndarray] = {}
        for position, key in enumerate(keys):
            row = self._row(key)
            if row is not None:
                rows[position] = row
        self.num_read += len(rows)
        return rows

    def read_rows(self, keys: Sequence[bytes]) -> np.ndarray:
        """Return [N, width] the rows of keys that all have one. Raise UserError if one is damaged."""
        places = [self._places[key] for key in keys]
        assert self._shape is not None, "there are rows"
        width, itemsize = self._shape
        parts = [np.empty((0, width), _DTYPES[itemsize])]
        record = np.dtype([("checksum", "<u4"), ("row", _DTYPES[itemsize], width)])
        begin = 0
        while begin < len(places):
            file, place = places[begin]
            end = begin + 1
            # Rows that were written one after the other are read at once.
            while end < len(places) and places[end][0] is file:
                if places[end][1] != place + (end - begin) * record.itemsize:
                    break
                end += 1
            size = (end - begin) * record.itemsize
            held = np.frombuffer(os.pread(file.descriptor, size, place), record)
            for checksum, row in zip(
                held["checksum"].tolist(), held["row"], strict=True
            ):
                if zlib.crc32(row.tobytes()) != checksum:
                    raise UserError(
                        f"{file.path} is damaged: delete it, and start again"
                    )
            parts.append(held["row"])
            begin = end
        return np.concatenate(parts)

    def add_rows(self, keys: Sequence[bytes], rows_ND: np.ndarray) -> bool:
        """Store one row for each key. If the disk is full, log a warning, store nothing from then on and return False."""
        self.num_added += len(keys)
        if not self._writes or not len(keys):
            return self._writes
        rows_ND = np.ascontiguousarray(rows_ND)
        joined = b"".join(keys)
        rows = [row.tobytes() for row in rows_ND]
        pieces = [_BLOCK.pack(len(rows), zlib.crc32(joined)), joined]
        for row in rows:
            pieces += [_CHECKSUM.pack(zlib.crc32(row)), row]
        try:
            if self._own is None:
                self._own = self._open_own(rows_ND.shape[1], rows_ND.itemsize)
            append(self._own, b"".join(pieces))
        except OSError as error:
            self._writes = False
            log.warning(
                "%s: %s cannot be written (%s): what is computed from now on is not kept, and is computed again in "
                "each epoch; make room there, or set XDG_CACHE_HOME to a folder that has it",
                self.kind.option,
                self.folder,
                error.strerror,
            )
        return self._writes

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            if file is not None:
                os.close(file.descriptor)
        if self._own is not None:
            os.close(self._own)
        self._files = {}
        self._places = {}
        self._own = None

    def _open_own(self, width: int, itemsize: int) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{uuid4().hex}{self.kind.suffix}"
        descriptor = os.open(
            path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644
        )
        append(
            descriptor, _HEADER.pack(self.kind.magic, self._identity, width, itemsize)
        )
        return descriptor

    # ---- reading ---------------------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        """Read the keys of new blocks, from the files of this process and of others."""
        try:
            names = sorted(
                entry.name
                for entry in os.scandir(self.folder)
                if entry.name.endswith(self.kind.suffix)
            )
        except OSError:  # no process has written yet
            return
        for name in names:
            if name not in self._files:
                self._files[name] = self._opened(self.folder / name)
            file = self._files[name]
            if file is not None and file.is_whole:
                self._read_blocks(file)

    def _opened(self, path: Path) -> _File | None:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            log.warning(
                "%s: %s cannot be read (%s), and is left out",
                self.kind.option,
                path,
                error.strerror,
            )
            return None
        return _File(path, descriptor)

    def _read_blocks(self, file: _File) -> None:
        size = os.fstat(file.descriptor).st_size
        if file.read_to == 0:
            if size < _HEADER.size:
                return  # the header is not written yet
            magic, identity, width, itemsize = _HEADER.unpack(
                os.pread(file.descriptor, _HEADER.size, 0)
            )
            shape = self._shape or (width, itemsize)
            wanted = (self.kind.magic.ljust(17, b"\0"), self._identity, *shape)
            if (magic, identity, width, itemsize) != wanted or itemsize not in _DTYPES:
                self._give_up(file, f"does not hold {self.kind.contents}")
                return
            self._shape = shape
            file.read_to = _HEADER.size
        assert self._shape is not None
        stride = _CHECKSUM.size + self._shape[0] * self._shape[1]
        while file.read_to + _BLOCK.size <= size:
            num_rows, checksum = _BLOCK.unpack(
                os.pread(file.descriptor, _BLOCK.size, file.read_to)
            )
            first = file.read_to + _BLOCK.size + num_rows * KEY_BYTES
            if first + num_rows * stride > size:
                return  # the block is still being written, or was truncated
            keys = os.pread(
                file.descriptor, num_rows * KEY_BYTES, file.read_to + _BLOCK.size
            )
            if not num_rows or zlib.crc32(keys) != checksum:
                self._give_up(file, f"is damaged from byte {file.read_to:,d} on")
                return
            for row in range(num_rows):
                self._places[keys[row * KEY_BYTES : (row + 1) * KEY_BYTES]] = (
                    file,
                    first + row * stride,
                )
            file.read_to = first + num_rows * stride

    def _row(self, key: bytes) -> np.ndarray | None:
        if key not in self._places:
            return None
        assert self._shape is not None
        file, place = self._places[key]
        width, itemsize = self._shape
        held = os.pread(file.descriptor, _CHECKSUM.size + width * itemsize, place)
        row = held[_CHECKSUM.size :]
        if (
            len(row) < width * itemsize
            or zlib.crc32(row) != _CHECKSUM.unpack(held[: _CHECKSUM.size])[0]
        ):
            self._give_up(file, f"is damaged at byte {place:,d}")
            self._places = {
                key: (other, place)
                for key, (other, place) in self._places.items()
                if other is not file
            }
            with suppress(OSError):
                file.path.unlink()  # else the damaged rows would be found first in the next run too
            return None
        return np.frombuffer(row, dtype=_DTYPES[itemsize])

    def _give_up(self, file: _File, reason: str) -> None:
        file.is_whole = False
        log.warning(
            "%s: %s %s: what it held is computed anew",
            self.kind.option,
            file.path,
            reason,
        )


def append(descriptor: int, data: bytes) -> None:
    """Append all of the data or nothing: readers stop at an incomplete block."""
    before = os.fstat(descriptor).st_size
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, before)
        raise


# ---- features of frozen towers ---------------------------------------------------

SUFFIX = ".features"
KIND = StoreKind(
    "cache_frozen_features", "features of this tower", SUFFIX, b"vembed features 1"
)


class FeatureStore(RowStore):
    """Store of the feature rows of one tower by input."""

    def __init__(self, folder: Path, identity: str) -> None:
        """`identity`: hash of all that the rows depend on besides their inputs; also the name of the subfolder."""
        super().__init__(folder, identity, KIND)
        self._keys: dict[int, bytes] = {}

    def find(self, features: Sequence[Features]) -> dict[int, np.ndarray]:
        """Return a map from position in `features` to the stored row, without the missing ones."""
        return self.find_rows([self._key(feature) for feature in features])

    def add(self, features: Sequence[Features], rows_ND: np.ndarray) -> None:
        """Store one row for each input. If the disk is full, log a warning and store nothing from then on."""
        self.add_rows([self._key(feature) for feature in features], rows_ND)

    def _key(self, features: Features) -> bytes:
        if features.key not in self._keys:
            self._keys[features.key] = lasting_key(features)
        return self._keys[features.key]


def size_of_all(folder: Path) -> tuple[int, int]:
    """Return the number of towers with features in a folder, and their bytes."""
    sizes: dict[Path, int] = {}
    for path in folder.glob(f"*/*{SUFFIX}"):
        with suppress(OSError):  # deleted by another process
            sizes[path.parent] = sizes.get(path.parent, 0) + path.stat().st_size
    return len(sizes), sum(sizes.values())


def lasting_key(features: Features) -> bytes:
    """Return the key of an input that is valid across runs. For image files it includes size and modification time."""
    digest = hashlib.blake2b(features.modality.encode(), digest_size=KEY_BYTES)
    if features.token_ids is not None:
        digest.update(features.token_ids.tobytes())
    for image in features.images:
        identity = lasting_identity(image)
        digest.update(len(identity).to_bytes(8, "little") + identity)
    return digest.digest()


def lasting_identity(image: ImageRef) -> bytes:
    """Return the identity of an image that is valid across runs."""
    if image.data is not None:
        return b"data:" + hashlib.blake2b(image.data).digest()
    path = Path(str(image.path))
    try:
        return repr((str(path.absolute()), stamp(path))).encode()
    except (OSError, ValueError):  # an address
        return repr(image.path).encode()
