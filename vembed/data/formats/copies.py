"""Local copies of data that cannot be read from any place: packed files, and addresses such as s3://bucket/file."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from vembed.data.cache import short_hash, stamp
from vembed.data.messages import ROOM
from vembed.errors import UserError
from vembed.progress import ProgressReport

log = logging.getLogger("vembed")

CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
"""Endings of packed files, and pyarrow's names of their codecs."""
VERSION_FACTS = ("size", "ETag", "etag", "md5", "mtime", "LastModified", "created")
PIECE = 4 * 2**20
MOST = 2**30
MOST_TIMES = 200
"""A file that unpacks to more than MOST bytes and so many times its size is no text."""


def is_address(path: str) -> bool:
    """Return whether a path is an address that fsspec opens, such as s3://bucket/file or memory://file."""
    scheme, colon, _ = path.partition("://")
    return bool(colon) and scheme.replace("+", "").isalnum()


def unpacked_copy(path: Path, cache: Path) -> Path:
    """Return a file without gzip, zstd or bzip2, in the cache folder; unpacked once for each version of it."""
    version = f"{short_hash(str(path.absolute()))}-{short_hash(stamp(path))}"
    target = cache / "unpacked" / version / path.with_suffix("").name
    codec = CODECS[path.suffix.lower()]
    most = max(MOST, MOST_TIMES * path.stat().st_size)
    try:
        if not target.exists():
            with pa.CompressedInputStream(pa.OSFile(str(path)), codec) as source:
                _copy(source, target, str(path), most)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} cannot be unpacked as {codec}: {reason}") from error
    return target


def fetched_copies(address: str, cache: Path) -> list[tuple[str, Path]]:
    """Return the addresses that an address (or a pattern with `*`) names, each with its copy in the cache folder."""
    import fsspec  # takes a tenth of a second, which local files need not wait for

    try:
        files, place = fsspec.core.url_to_fs(address)
        places = sorted(files.glob(place)) if is_pattern(place) else [place]
        if not places:
            raise UserError(f"{address} names no file")
        copies = []
        for file_place in places:
            name = files.unstrip_protocol(file_place)
            copies.append((name, _fetched(files, file_place, name, cache)))
        return copies
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


def _fetched(files: Any, place: str, address: str, cache: Path) -> Path:
    facts = files.info(place)
    if facts["type"] != "file":
        raise UserError(f"{address} is a folder: name its files, as in .../*.jsonl")
    # What tells versions apart depends on the store: an entity tag, a time, or the size alone.
    known = [str(facts.get(fact)) for fact in VERSION_FACTS]
    version = f"{short_hash(address)}-{short_hash(known)}"
    target = cache / "fetched" / version / Path(place).name
    if not target.exists():
        with files.open(place, "rb") as source:
            _copy(source, target, address, None)
    return target


def is_pattern(path: str) -> bool:
    """Return whether a path that does not exist is a pattern of several files."""
    return any(character in path for character in "*?[")


def _copy(source: Any, target: Path, name: str, most: int | None) -> None:
    """Copy an open file, and remove the copies of its earlier versions."""
    done = 0
    with (
        partial_copy(target, name) as partial,
        ProgressReport(f"copying {name}", log=log.info) as progress,
        partial.open("wb") as file,
    ):
        while piece := source.read(PIECE):
            file.write(piece)
            done += len(piece)
            if most is not None and done > most:
                raise UserError(
                    f"{name} unpacks to more than {most:,d} bytes, which no texts do"
                )
            progress(done, None)
    remove_older(target)


@contextmanager
def partial_copy(target: Path, name: str) -> Iterator[Path]:
    """Yield a file beside the target that becomes the target when the with-block ends well."""
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(target)
    except OSError as error:
        if error.errno is None:  # of the source, not of this disk
            raise
        raise UserError(
            f"{name} could not be copied into {target.parent} ({error.strerror or error}): {ROOM}"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def remove_older(target: Path) -> None:
    """Remove the copies of earlier versions."""
    folder = target.parent
    for older in folder.parent.glob(f"{folder.name.partition('-')[0]}-*"):
        if older != folder:
            shutil.rmtree(older, ignore_errors=True)
