"""RowStore: rows of numbers by key on disk, shared by processes and runs. For what is expensive to compute.

The folder holds the rows of one producer (`identity`). Each process appends to a file of its own, and reads those of all,
so no locks are needed. Each row has its key and a checksum. Rows that were written in part are computed again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from uuid import uuid4

import numpy as np

from vembed.data.examples import ImageRef, input_digest
from vembed.errors import UserError
from vembed.files import open_regular, stamp

if TYPE_CHECKING:
    from vembed.data.features import Features

log = logging.getLogger("vembed")

KEY_BYTES = 16
MAX_ROWS = 2**40
"""Rows of a file at most. A place is the number of the file times this, plus the number of the row."""
_DTYPES = {2: np.uint16, 4: np.float32, 8: np.float64}
"""Type of the values by their bytes. Two bytes are float16 or bfloat16, which numpy does not have."""


@dataclass
class _File:
    """The file of one process."""

    path: Path
    descriptor: int
    record: np.dtype[np.void]
    """A row on disk, with its key and checksum."""
    num_read: int = 0
    """Rows whose keys were read."""


class RowStore:
    """Store of rows by key. Errors of the disk are logged and never raised."""

    def __init__(
        self,
        folder: Path,
        identity: str,
        option: str,
        suffix: str,
    ) -> None:
        """`identity`: hash of all that the rows depend on besides their keys; also the name of the subfolder.
        `option`: named in messages. `suffix`: ending of the files of rows."""
        self.folder = folder / identity
        self.num_read = 0
        self.num_added = 0
        self._option = option
        self._suffix = suffix
        self._seed = zlib.crc32(identity.encode())
        """Start of all checksums."""
        self._files: list[_File] = []
        self._seen: set[Path] = set()
        self._places: dict[bytes, int] = {}
        """Where the row of each key is."""
        self._own: BinaryIO | None = None
        """The file of this process."""
        self._writes = True
        self._look_around()
        # The folder does not exist yet, or belongs to another user.
        with suppress(OSError):
            os.utime(self.folder)  # its modification time is the time of last use

    def __del__(self) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._places)

    def missing(self, keys: Sequence[bytes]) -> list[int]:
        """Return the positions of keys that have no row. Rows are not read."""
        places = self._find(keys)
        return [position for position, place in enumerate(places) if place < 0]

    def find_rows(self, keys: Sequence[bytes]) -> dict[int, np.ndarray]:
        """Return a map from position in `keys` to the stored row, without the missing ones."""
        rows = {
            position: self._read(place, keys[position])
            for position, place in enumerate(self._find(keys))
            if place >= 0
        }
        self.num_read += len(rows)
        return rows

    def read_rows(self, keys: Sequence[bytes]) -> np.ndarray:
        """Return [N, width] the rows of keys that all have one."""
        rows = self.find_rows(keys)
        if len(rows) < len(keys):
            raise UserError(f"{self.folder} lost rows: start again")
        return np.stack(list(rows.values()))

    def add_rows(self, keys: Sequence[bytes], rows_ND: np.ndarray) -> bool:
        """Store one row for each key. If the disk is full, log a warning, store nothing from then on and return False."""
        self.num_added += len(keys)
        if not self._writes or not len(keys):
            return self._writes
        width = rows_ND.shape[1]
        values_ND = np.ascontiguousarray(rows_ND).view(_DTYPES[rows_ND.itemsize])
        records = np.empty(len(keys), _record_of(width, rows_ND.itemsize))
        records["key"] = np.frombuffer(b"".join(keys), f"V{KEY_BYTES}")
        records["row"] = values_ND
        records["checksum"] = list(map(self._checksum, keys, values_ND))
        try:
            if self._own is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                name = f"{uuid4().hex}-{width}x{rows_ND.itemsize}{self._suffix}"
                self._own = (self.folder / name).open("xb")
            self._own.write(records.tobytes())
            self._own.flush()
        except OSError as error:
            self._writes = False
            log.warning(
                f"{self._option}: {self.folder} cannot be written ({error.strerror}): what is computed from now on is not "
                "kept, and is computed again in each epoch; make room there, or set XDG_CACHE_HOME to a folder that has it"
            )
        return self._writes

    def close(self) -> None:
        """Close all files."""
        for file in self._files:
            os.close(file.descriptor)
        if self._own is not None:
            with suppress(OSError):
                self._own.close()
        self._files = []
        self._places = {}
        self._own = None

    def _checksum(self, key: bytes, row: np.ndarray) -> int:
        return zlib.crc32(row.tobytes(), zlib.crc32(key, self._seed))

    def _look_around(self) -> None:
        """Read the keys of new rows, from the files of this process and of others."""
        for path in sorted(self.folder.glob(f"*{self._suffix}")):
            if path not in self._seen:
                self._seen.add(path)
                self._open(path)
        for number, file in enumerate(self._files):
            size = file.record.itemsize
            num_rows = os.fstat(file.descriptor).st_size // size
            for row in range(file.num_read, num_rows):
                key = os.pread(file.descriptor, KEY_BYTES, row * size)
                self._places[key] = number * MAX_ROWS + row
            file.num_read = max(file.num_read, num_rows)

    def _open(self, path: Path) -> None:
        try:
            # NAME-384x2: numbers of a row, and bytes of each.
            _, _, size = path.stem.rpartition("-")
            width, itemsize = map(int, size.split("x"))
            record = _record_of(width, itemsize)
            self._files.append(_File(path, open_regular(path), record))
        except (OSError, UserError, ValueError, KeyError) as error:
            reason = getattr(error, "strerror", error)
            log.warning(
                f"{self._option}: {path} cannot be read ({reason}), and is left out"
            )

    def _find(self, keys: Sequence[bytes]) -> list[int]:
        """Return the place of each key, -1 where there is none."""
        if any(key not in self._places for key in keys):
            self._look_around()
        return [self._places.get(key, -1) for key in keys]

    def _read(self, place: int, key: bytes) -> np.ndarray:
        """Return the row at a place. Raise UserError if it is damaged."""
        number, row = divmod(place, MAX_ROWS)
        file = self._files[number]
        size = file.record.itemsize
        data = os.pread(file.descriptor, size, row * size)
        if len(data) == size:
            record = np.frombuffer(data, file.record)[0]
            values: np.ndarray = record["row"]
            if self._checksum(key, values) == record["checksum"]:
                return values
        raise UserError(
            f"{self._option}: {file.path} is damaged: delete {self.folder} and run again"
        )


def _record_of(width: int, itemsize: int) -> np.dtype[np.void]:
    return np.dtype(
        [
            ("key", f"V{KEY_BYTES}"),
            ("checksum", "<u4"),
            ("row", _DTYPES[itemsize], (width,)),
        ]
    )


# ---- outputs of frozen towers ---------------------------------------------------


def tower_keys(features: Iterable[Features]) -> list[bytes]:
    """Return a key of each input of a frozen tower that is valid across runs. For image files it includes size and
    modification time."""
    return [
        input_digest(
            feature.modality,
            feature.token_ids,
            feature.images,
            num_bytes=KEY_BYTES,
            identity_of=lasting_identity,
        )
        for feature in features
    ]


def lasting_identity(image: ImageRef) -> bytes:
    """Return the identity of an image that is valid across runs."""
    if image.data is not None:
        return b"data:" + hashlib.blake2b(image.data).digest()
    path = Path(str(image.path))
    try:
        identity = (str(path.absolute()), stamp(path))
        return repr(identity).encode()
    except (OSError, ValueError):  # an address
        return repr(image.path).encode()
