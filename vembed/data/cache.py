"""Versions of files: what caches were made of, what changed while a run reads them, and copies that appear as a whole."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vembed.errors import UserError


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


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """Yield a path beside the target. What is written there becomes the target when the with-block ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def change_since(path: Path, before: os.stat_result) -> str | None:
    """Return what happened to a data file since it was opened, as a sentence; None if nothing did."""
    try:
        now = path.stat()
    except FileNotFoundError:
        return f"{path} has been deleted or moved since the run began; the run goes on with what it has open"
    except OSError as error:
        return f"{path} can no longer be read ({error.strerror or error})"
    if not os.path.samestat(now, before):
        return f"{path} has been replaced since the run began; the run goes on with the file that it has open"
    if now.st_size == before.st_size and now.st_mtime_ns == before.st_mtime_ns:
        return None
    return (
        f"{path} has been written to since the run began ({before.st_size:,d} bytes then, {now.st_size:,d} now). What "
        "was added is not read before the next start. If other records changed, start again"
    )


def refuse_truncated(files: Mapping[Path, os.stat_result]) -> None:
    """Raise UserError if a file is shorter than it was when it was mapped into memory: reading a page behind its end
    would end the process. A file that was deleted or replaced stays mapped as it was."""
    for path, before in files.items():
        try:
            now = path.stat()
        except OSError:
            continue
        if os.path.samestat(now, before) and now.st_size < before.st_size:
            raise UserError(
                f"{path} has been truncated from {before.st_size:,d} to {now.st_size:,d} bytes since it was opened: "
                "restore it, and start again"
            )
