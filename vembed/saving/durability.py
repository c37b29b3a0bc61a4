"""Files that must survive a power cut: written and flushed to the disk, and what to do when the disk refuses."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_NO_FOLDER_SYNC = (errno.EINVAL, errno.EACCES, errno.ENOTSUP)
"""Answers of file systems that cannot flush folders."""


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file and flush it to disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """Write a text file as a whole or not at all: a full disk leaves the earlier one. What UTF-8 cannot hold (lone
    surrogates, as in paths under LANG=C) is escaped."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        write_durably(partial, text.encode("utf-8", "backslashreplace"))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's directory entries, to disk. Some file systems cannot flush folders."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno not in _NO_FOLDER_SYNC:
            raise


def sync_folder(folder: Path) -> None:
    """Flush all files and folders of a folder to disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def way_out(problem: str, folder: Path) -> str:
    """Return what to do about an error of the disk: make room, if that is what is missing."""
    # By the text: errors of safetensors are not OSErrors, and Rust writes their number as "(os error 28)".
    is_full = any(
        os.strerror(code) in problem or f"os error {code})" in problem for code in (errno.ENOSPC, errno.EDQUOT)
    )
    return f"make room in {folder}" if is_full else f"check the disk of {folder}"
