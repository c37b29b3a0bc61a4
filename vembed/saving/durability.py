"""Files that must survive a power cut: written and flushed to the disk, and what to do when the disk refuses."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
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
    with replaced_file(path) as partial:
        write_durably(partial, text.encode("utf-8", "backslashreplace"))


@contextmanager
def replaced_file(target: Path) -> Iterator[Path]:
    """Yield the path of a new file, which replaces `target` when the block ends without an exception."""
    partial = target.with_name(target.name + ".part")
    try:
        yield partial
        partial.replace(target)
    except OSError as error:
        error.add_note(str(target))  # errors of a full disk name no file
        raise
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


_REFUSALS = {
    errno.ENOSPC: "make room there, or choose another place",
    errno.EDQUOT: "make room there, or choose another place",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or choose another disk",
    errno.EROFS: "choose another place",
    errno.EACCES: "choose another place, or change its permissions",
    errno.EPERM: "choose another place, or change its permissions",
}
"""What to do where the system refuses to write a file."""


def refusal(error: Exception) -> str | None:
    """Return a sentence about a full disk, or a place that this user may not write to; None for other errors."""
    text = str(error)
    if not isinstance(error, OSError) and "os error" not in text:
        return None
    for code, advice in _REFUSALS.items():
        if not _is_about(text, code):
            continue
        path = getattr(error, "filename", None)
        for note in getattr(error, "__notes__", [])[:1]:
            path = note
        is_denied = code in (errno.EACCES, errno.EPERM)
        if path is None and is_denied:
            return None  # of a socket or a process, not of a file
        action = "opened" if is_denied else "written"  # reading may be denied, too
        return (
            f"{path or 'a file'} could not be {action} ({os.strerror(code)}): {advice}"
        )
    return None


def _is_about(problem: str, code: int) -> bool:
    # By the text: errors of safetensors are not OSErrors, and Rust writes their number as "(os error 28)".
    if os.strerror(code) in problem or f"os error {code})" in problem:
        return True
    # numpy names only how much it has written.
    is_cut = re.fullmatch(r"\d+ requested and \d+ written", problem) is not None
    return code == errno.ENOSPC and is_cut


def way_out(problem: str, folder: Path) -> str:
    """Return what to do about an error of the disk: make room, if that is what is missing."""
    is_full = any(_is_about(problem, code) for code in (errno.ENOSPC, errno.EDQUOT))
    return f"make room in {folder}" if is_full else f"check the disk of {folder}"
