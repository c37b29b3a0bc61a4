"""Data files that may change while they are read: what changed since they were opened, and truncated Arrow files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vembed.errors import UserError


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


def refuse_truncated(stamps: Sequence[FileStamp]) -> None:
    """Raise UserError if a file is shorter than it was when it was mapped into memory: reading a page behind its end
    would end the process. A file that was deleted or replaced stays mapped as it was."""
    for stamp in stamps:
        try:
            now = FileStamp.of(stamp.path)
        except OSError:
            continue
        if now.number == stamp.number and now.size < stamp.size:
            raise UserError(
                f"{stamp.path} has been truncated from {stamp.size:,d} to {now.size:,d} bytes since it was "
                "opened: restore it, and start again"
            )
