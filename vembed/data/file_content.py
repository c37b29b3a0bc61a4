"""Content of files in digests: whole, or of large files pieces that are spread over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BLOCK = 2**20


def add_content(
    digest: Any, path: Path, *, pieces: int, piece_bytes: int, whole_bytes: int
) -> None:
    """Add a file to a digest of hashlib: whole up to `whole_bytes`, otherwise the first piece, the last one, and those
    at equal distances between them."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= whole_bytes:
            while block := file.read(BLOCK):
                digest.update(block)
            return
        for piece in range(pieces):
            file.seek(piece * (size - piece_bytes) // (pieces - 1))
            digest.update(file.read(piece_bytes))
