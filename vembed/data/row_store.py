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
from vembed.files import open_regular

if TYPE_CHECKING:
    from vembed.data.features import Features

log = logging.getLogger("vembed")

_HEADER = struct.Struct("<17s32sII")
"""Magic, the producer's identity, values per row, bytes per value."""
_BLOCK = struct.Struct("<II")
"""Rows, checksum of their keys."""
_CHECKSUM = struct.Struct("<I")
KEY_BYTES = 16
FILE_BITS = 44
"""A place is the number of the file, and so many bits of the position in it."""
NUM_RECENT = 65_536
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


@dataclass(eq=False)
class _File:
    """The file of one process, and the position up to which it was read."""

    path: Path
    descriptor: int
    read_to: int = 0
    is_whole: bool = True
    """False: the file is damaged at `read_to`, and the rest is ignored."""


class _Places:
    """Where the row of each key is. Recent keys are in a dict, the others in sorted arrays of 24 bytes for each."""

    def __init__(self) -> None:
        self._recent: dict[bytes, int] = {}
        self._keys = np.empty(0, f"S{KEY_BYTES}")
        self._places = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._recent) + len(self._keys)

    def add(self, keys: bytes, places: range) -> None:
        """Add the keys of a block."""
        for row, place in enumerate(places):
            self._recent[keys[row * KEY_BYTES : (row + 1) * KEY_BYTES]] = place
        if len(self._recent) > NUM_RECENT + len(self._keys) // 4:
            keys_N = np.concatenate([self._keys, list(self._recent)]).astype("S16")
            places_N = np.concatenate([self._places, list(self._recent.values())])
            self._keys, first = np.unique(keys_N, return_index=True)
            self._places = places_N[first]
            self._recent = {}

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Return the place of each key, -1 where there is none."""
        places_of_keys = np.full(len(keys), -1)
        if len(self._keys) and len(keys):
            wanted = np.array(keys, self._keys.dtype)
            at = np.searchsorted(self._keys, wanted).clip(max=len(self._keys) - 1)
            places_of_keys = np.where(self._keys[at] == wanted, self._places[at], -1)
        places: list[int] = places_of_keys.tolist()
        return [
            self._recent.get(key, place)
            for key, place in zip(keys, places, strict=True)
        ]

    def drop(self, file: int) -> None:
        """Remove the keys of a file."""
        is_other = self._places >> FILE_BITS != file
        self._keys = self._keys[is_other]
        self._places = self._places[is_other]
        for key, place in list(self._recent.items()):
            if place >> FILE_BITS == file:
                del self._recent[key]


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
        self._readable: list[_File] = []
        self._places = _Places()
        self._own: int | None = None
        self._writes = True
        self._look_around()
        with suppress(
            OSError
        ):  # the folder does not exist yet, or belongs to another user
            os.utime(self.folder)  # its modification time is the time of last use

    def __del__(self) -> None:
        self.close()

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
        places = self._find(keys)
        return [position for position, place in enumerate(places) if place < 0]

    def find_rows(self, keys: Sequence[bytes]) -> dict[int, np.ndarray]:
        """Return a map from position in `keys` to the stored row, without the missing ones."""
        rows: dict[int, np.ndarray] = {}
        for position, place in enumerate(self._find(keys)):
            row = None if place < 0 else self._row(place)
            if row is not None:
                rows[position] = row
        self.num_read += len(rows)
        return rows

    def read_rows(self, keys: Sequence[bytes]) -> np.ndarray:
        """Return [N, width] the rows of keys that all have one. Raise UserError if one is damaged."""
        places = self._find(keys)
        assert self._shape is not None, "there are rows"
        width, itemsize = self._shape
        parts = [np.empty((0, width), _DTYPES[itemsize])]
        record = np.dtype([("checksum", "<u4"), ("row", _DTYPES[itemsize], width)])
        begin = 0
        while begin < len(places):
            end = begin + 1
            # Rows that were written one after the other are read at once.
            while (
                end < len(places) and places[end] == places[end - 1] + record.itemsize
            ):
                end += 1
            file, position = self._located(places[begin])
            size = (end - begin) * record.itemsize
            held = np.frombuffer(os.pread(file.descriptor, size, position), record)
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
        self._readable = []
        self._places = _Places()
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
            descriptor = open_regular(path)
        except (OSError, UserError) as error:
            log.warning(
                "%s: %s cannot be read (%s), and is left out",
                self.kind.option,
                path,
                getattr(error, "strerror", error),
            )
            return None
        file = _File(path, descriptor)
        self._readable.append(file)
        return file

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
            start = (self._readable.index(file) << FILE_BITS) + first
            self._places.add(keys, range(start, start + num_rows * stride, stride))
            file.read_to = first + num_rows * stride

    def _find(self, keys: Sequence[bytes]) -> list[int]:
        places = self._places.find(keys)
        if -1 not in places:
            return places
        self._look_around()
        return self._places.find(keys)

    def _located(self, place: int) -> tuple[_File, int]:
        return self._readable[place >> FILE_BITS], place & ((1 << FILE_BITS) - 1)

    def _row(self, place: int) -> np.ndarray | None:
        assert self._shape is not None
        file, position = self._located(place)
        width, itemsize = self._shape
        held = os.pread(file.descriptor, _CHECKSUM.size + width * itemsize, position)
        row = held[_CHECKSUM.size :]
        if (
            len(row) < width * itemsize
            or zlib.crc32(row) != _CHECKSUM.unpack(held[: _CHECKSUM.size])[0]
        ):
            self._give_up(file, f"is damaged at byte {position:,d}")
            self._places.drop(place >> FILE_BITS)
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
