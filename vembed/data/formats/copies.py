"""Local copies of data that cannot be read from any place: packed files, and addresses such as s3://bucket/file."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from vembed.data.cache import short_hash, stamp, written_aside
from vembed.data.messages import ROOM
from vembed.errors import UserError
from vembed.files import is_pattern
from vembed.progress import ProgressReport

log = logging.getLogger("vembed")

CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
"""Endings of packed files, and pyarrow's names of their codecs."""
VERSION_FACTS = ("size", "ETag", "etag", "md5", "mtime", "LastModified", "created")
PIECE_BYTES = 4 * 2**20


def unpacked_copy(path: Path, cache: Path) -> Path:
    """Return a file without gzip, zstd or bzip2, in the cache folder; unpacked once for each version of it."""
    version = f"{short_hash(str(path.absolute()))}-{short_hash(stamp(path))}"
    target = cache / "unpacked" / version / path.with_suffix("").name
    if target.exists():
        return target
    codec = CODECS[path.suffix.lower()]
    try:
        with pa.CompressedInputStream(pa.OSFile(str(path)), codec) as source:
            _copy(source, target, str(path))
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} cannot be unpacked as {codec}: {reason}") from error
    return target


def fetched_copies(address: str, cache: Path) -> list[tuple[str, Path]]:
    """Return the addresses that an address (or a pattern with `*`) names, each with its copy in the cache folder."""
    import fsspec  # takes a tenth of a second, which local files need not wait for

    copies = []
    try:
        files, pattern = fsspec.core.url_to_fs(address)
        paths = [pattern]
        if is_pattern(pattern):
            paths = sorted(files.glob(pattern))
        for path in paths:
            name = files.unstrip_protocol(path)
            facts = files.info(path)
            if facts["type"] != "file":
                raise UserError(
                    f"{name} is a folder: name its files, as in .../*.jsonl"
                )
            # What tells versions apart depends on the store: an entity tag, a time, or the size alone.
            known = [str(facts.get(fact)) for fact in VERSION_FACTS]
            version = f"{short_hash(name)}-{short_hash(known)}"
            target = cache / "fetched" / version / Path(path).name
            if not target.exists():
                with files.open(path, "rb") as source:
                    _copy(source, target, name)
            copies.append((name, target))
    except ImportError as error:
        scheme = address.partition("://")[0]
        raise UserError(
            f"{address} cannot be opened: {error} (a package for {scheme}:// is missing)"
        ) from error
    except (OSError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise UserError(
            f"{address} cannot be read: {reason.splitlines()[0]}"
        ) from error
    if not copies:
        raise UserError(f"{address} names no file")
    return copies


def _copy(source: Any, target: Path, name: str) -> None:
    """Copy an open file."""
    num_bytes = 0
    with (
        new_copy(target, name) as partial,
        ProgressReport(f"copying {name}", log=log.info) as progress,
        partial.open("wb") as file,
    ):
        while piece := source.read(PIECE_BYTES):
            file.write(piece)
            num_bytes += len(piece)
            progress(num_bytes, None)


@contextmanager
def new_copy(target: Path, name: str) -> Iterator[Path]:
    """Yield a path where a copy is written, and remove those of earlier versions. Raise UserError for a full disk."""
    try:
        with written_aside(target) as partial:
            yield partial
    except OSError as error:
        if error.errno is None:  # of the source, not of this disk
            raise
        raise UserError(
            f"{name} could not be copied into {target.parent} ({error.strerror or error}): {ROOM}"
        ) from error
    for older in target.parent.parent.glob(f"{target.parent.name.partition('-')[0]}-*"):
        if older != target.parent:
            shutil.rmtree(older, ignore_errors=True)
