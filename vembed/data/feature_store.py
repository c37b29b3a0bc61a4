"""FeatureStore: cached features of frozen towers on disk, for later epochs and later runs.

A folder holds the features of one tower. Every process appends to its own file there and reads the files of all, so no
locks are needed. A file is a header, then blocks: the number of rows, a checksum, their keys, and the rows, each after
its own checksum. Truncated, damaged or foreign blocks are ignored, and their features are computed again.
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
from uuid import uuid4

import numpy as np

from vembed.data.cache import stamp
from vembed.data.features import Features

log = logging.getLogger("vembed")

SUFFIX = ".features"
MAGIC = b"vembed features 1"
_HEADER = struct.Struct("<17s32sII")
"""Magic, the tower's identity, values per row, bytes per value."""
_BLOCK = struct.Struct("<II")
"""Rows, checksum of their keys."""
_CHECKSUM = struct.Struct("<I")
_KEY_BYTES = 16


@dataclass
class _File:
    """The file of one process, and the position up to which it was read."""

    path: Path
    descriptor: int
    read_to: int = 0
    is_whole: bool = True
    """False: the file is damaged at `read_to`, and the rest is ignored."""


class FeatureStore:
    """Store of feature rows by key. Errors of the disk are logged and never raised."""

    def __init__(self, folder: Path, identity: str) -> None:
        """`identity`: hash of all that the rows depend on besides their keys; also the name of the subfolder."""
        self.folder = folder / identity
        self.num_read = 0
        self.num_added = 0
        self._identity = identity.encode().ljust(32, b"\0")[:32]
        self._shape: tuple[int, int] | None = None
        self._files: dict[str, _File | None] = {}
        self._places: dict[bytes, tuple[_File, int]] = {}
        self._keys: dict[int, bytes] = {}
        self._own: int | None = None
        self._writes = True
        self._look_around()
        with suppress(OSError):  # the folder does not exist yet, or belongs to another user
            os.utime(self.folder)  # its modification time is the time of last use

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_bytes(self) -> int:
        """Bytes of all readable files on disk."""
        self._look_around()
        return sum(os.fstat(file.descriptor).st_size for file in self._files.values() if file is not None)

    def find(self, features: Sequence[Features]) -> dict[int, np.ndarray]:
        """Return a map from position in `features` to the stored row, without the missing ones."""
        keys = [self._key(one) for one in features]
        if any(key not in self._places for key in keys):
            self._look_around()
        found: dict[int, np.ndarray] = {}
        for position, key in enumerate(keys):
            row = self._row(key)
            if row is not None:
                found[position] = row
        self.num_read += len(found)
        return found

    def add(self, features: Sequence[Features], rows_ND: np.ndarray) -> None:
        """Store one row for each input. If the disk is full, log a warning and store nothing from then on."""
        self.num_added += len(features)
        if not self._writes or not len(features):
            return
        rows_ND = np.ascontiguousarray(rows_ND)
        keys = b"".join(self._key(one) for one in features)
        rows = [row.tobytes() for row in rows_ND]
        pieces = [_BLOCK.pack(len(rows), zlib.crc32(keys)), keys]
        for row in rows:
            pieces += [_CHECKSUM.pack(zlib.crc32(row)), row]
        try:
            if self._own is None:
                self._own = self._open_own(rows_ND.shape[1], rows_ND.itemsize)
            _append(self._own, b"".join(pieces))
        except OSError as error:
            self._writes = False
            log.warning(
                "cache_frozen_features: %s cannot be written (%s): what is computed from now on is not kept, and is "
                "computed again in each epoch; make room there, or set XDG_CACHE_HOME to a folder that has it",
                self.folder, error.strerror,
            )  # fmt: skip

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            if file is not None:
                os.close(file.descriptor)
        if self._own is not None:
            os.close(self._own)
        self._files, self._places, self._own = {}, {}, None

    def _key(self, features: Features) -> bytes:
        if features.key not in self._keys:
            self._keys[features.key] = lasting_key(features)
        return self._keys[features.key]

    def _open_own(self, width: int, itemsize: int) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{uuid4().hex}{SUFFIX}"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        _append(descriptor, _HEADER.pack(MAGIC, self._identity, width, itemsize))
        return descriptor

    # ---- reading ---------------------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        """Read the keys of new blocks, from the files of this process and of others."""
        try:
            names = sorted(entry.name for entry in os.scandir(self.folder) if entry.name.endswith(SUFFIX))
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
            log.warning("cache_frozen_features: %s cannot be read (%s), and is left out", path, error.strerror)
            return None
        return _File(path, descriptor)

    def _read_blocks(self, file: _File) -> None:
        size = os.fstat(file.descriptor).st_size
        if file.read_to == 0:
            if size < _HEADER.size:
                return  # the header is not written yet
            magic, identity, width, itemsize = _HEADER.unpack(os.pread(file.descriptor, _HEADER.size, 0))
            shape = self._shape or (width, itemsize)
            if (magic, identity, width, itemsize) != (MAGIC, self._identity, *shape) or itemsize not in (4, 8):
                self._give_up(file, "does not hold features of this tower")
                return
            self._shape = shape
            file.read_to = _HEADER.size
        assert self._shape is not None
        stride = _CHECKSUM.size + self._shape[0] * self._shape[1]
        while file.read_to + _BLOCK.size <= size:
            num_rows, checksum = _BLOCK.unpack(os.pread(file.descriptor, _BLOCK.size, file.read_to))
            first = file.read_to + _BLOCK.size + num_rows * _KEY_BYTES
            if first + num_rows * stride > size:
                return  # the block is still being written, or was truncated
            keys = os.pread(file.descriptor, num_rows * _KEY_BYTES, file.read_to + _BLOCK.size)
            if not num_rows or zlib.crc32(keys) != checksum:
                self._give_up(file, f"is damaged from byte {file.read_to:,d} on")
                return
            for row in range(num_rows):
                self._places[keys[row * _KEY_BYTES : (row + 1) * _KEY_BYTES]] = (file, first + row * stride)
            file.read_to = first + num_rows * stride

    def _row(self, key: bytes) -> np.ndarray | None:
        if key not in self._places:
            return None
        assert self._shape is not None
        file, place = self._places[key]
        width, itemsize = self._shape
        held = os.pread(file.descriptor, _CHECKSUM.size + width * itemsize, place)
        row = held[_CHECKSUM.size :]
        if len(row) < width * itemsize or zlib.crc32(row) != _CHECKSUM.unpack(held[: _CHECKSUM.size])[0]:
            self._give_up(file, f"is damaged at byte {place:,d}")
            self._places = {key: (other, place) for key, (other, place) in self._places.items() if other is not file}
            with suppress(OSError):
                file.path.unlink()  # else the damaged rows would be found first in the next run too
            return None
        return np.frombuffer(row, dtype=np.float32 if itemsize == 4 else np.float64)

    def _give_up(self, file: _File, reason: str) -> None:
        file.is_whole = False
        log.warning("cache_frozen_features: %s %s: what it held is computed anew", file.path, reason)


def size_of_all(folder: Path) -> tuple[int, int]:
    """Return the number of towers with features in a folder, and their bytes."""
    sizes: dict[Path, int] = {}
    for path in folder.glob(f"*/*{SUFFIX}"):
        with suppress(OSError):  # deleted by another process
            sizes[path.parent] = sizes.get(path.parent, 0) + path.stat().st_size
    return len(sizes), sum(sizes.values())


def lasting_key(features: Features) -> bytes:
    """Return the key of an input that is valid across runs. For image files it includes size and modification time."""
    digest = hashlib.blake2b(features.modality.encode(), digest_size=_KEY_BYTES)
    if features.token_ids is not None:
        digest.update(features.token_ids.tobytes())
    for image in features.images:
        if image.data is not None:
            identity = b"data:" + hashlib.blake2b(image.data).digest()
        else:
            path = Path(str(image.path))
            try:
                identity = repr((str(path.absolute()), stamp(path))).encode()
            except (OSError, ValueError):  # an address
                identity = repr(image.path).encode()
        digest.update(len(identity).to_bytes(8, "little") + identity)
    return digest.digest()


def _append(descriptor: int, data: bytes) -> None:
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
