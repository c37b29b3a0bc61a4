"""Data files that may change while they are read: what changed since they were opened, and truncated Arrow files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vembed.errors import UserError

CHECKED_EACH_TIME = 16
"""Mapped files of one table that are looked at before each read; of more, only a few times per second."""
SECONDS_BETWEEN_CHECKS = 0.2


@dataclass(frozen=True, slots=True)
class FileStamp:
    """A file as it was when it was opened."""

    path: Path
    size: int
    modified: int
    """In nanoseconds."""
    number: tuple[int, int]
    """Device and inode: another one under the same name is another file."""

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        """Return the stamp of a file."""
        status = path.stat()
        return cls(
            path, status.st_size, status.st_mtime_ns, (status.st_dev, status.st_ino)
        )

    def change(self) -> str | None:
        """Return what happened to the file since, as a sentence; None if nothing did."""
        try:
            now = FileStamp.of(self.path)
        except FileNotFoundError:
            return f"{self.path} has been deleted or moved since the run began; the run goes on with what it has open"
        except OSError as error:
            return f"{self.path} can no longer be read ({error.strerror or error})"
        if now.number != self.number:
            return f"{self.path} has been replaced since the run began; the run goes on with the file that it has open"
        if now.size > self.size:
            return (
                f"{self.path} has grown from {self.size:,d} to {now.size:,d} bytes since the run began; what was added "
                "is not read before the next start"
            )
        if now.size < self.size:
            return f"{self.path} has shrunk from {self.size:,d} to {now.size:,d} bytes since the run began: start again"
        if now.modified != self.modified:
            return f"{self.path} has been written to since the run began: if its records are others now, start again"
        return None


class MappedFiles:
    """Files that are mapped into memory. Reading a page behind the end of a truncated one would end the process."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._stamps = [FileStamp.of(path) for path in paths]
        self._next = 0.0

    def check(self) -> None:
        """Raise UserError if a file is shorter than it was when it was mapped. A file that was deleted or replaced
        stays mapped as it was."""
        if len(self._stamps) > CHECKED_EACH_TIME:
            now = time.monotonic()
            if now < self._next:
                return
            self._next = now + SECONDS_BETWEEN_CHECKS
        for stamp in self._stamps:
            try:
                status = stamp.path.stat()
            except OSError:
                continue
            # Another file under the same name does not matter: the mapping is of the old one.
            if (
                status.st_dev,
                status.st_ino,
            ) == stamp.number and status.st_size < stamp.size:
                raise UserError(
                    f"{stamp.path} has been truncated from {stamp.size:,d} to {status.st_size:,d} bytes since it was "
                    "opened: restore it, and start again"
                )
