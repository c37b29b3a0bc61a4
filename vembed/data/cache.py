"""Hashes of values and files, by which caches know what they were made of."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def stamp(path: Path) -> list[int]:
    """Return size, modification time and inode of a file, to detect changes."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def short_hash(*values: Any) -> str:
    """Return a short hash of JSON values."""
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=12).hexdigest()


def add_content(
    digest: Any, path: Path, *, pieces: int, piece_bytes: int, whole_bytes: int
) -> None:
    """Add a file to a digest of hashlib: whole up to `whole_bytes`, otherwise the first piece, the last one, and those
    at equal distances between them."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= whole_bytes:
            while block := file.read(2**20):
                digest.update(block)
            return
        for piece in range(pieces):
            file.seek(piece * (size - piece_bytes) // (pieces - 1))
            digest.update(file.read(piece_bytes))
