"""Log outputs whose failure does not end the run: a closed console, a full disk."""

from __future__ import annotations

import errno
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

log = logging.getLogger("vembed")


class ResilientStream:
    """Console stream that survives its reader (a closed terminal, a pipe into `head`). Later lines are discarded."""

    def __init__(self, target: TextIO) -> None:
        self.target = target
        self.encoding = target.encoding
        self.is_closed = False

    def write(self, text: str) -> int:
        """Write to the target, or discard the text once the target is closed."""
        try:
            return self.target.write(text)
        except OSError:
            self._turn_away()
            return len(text)

    def flush(self) -> None:
        """Flush the target, unless it is closed."""
        try:
            self.target.flush()
        except OSError:
            self._turn_away()

    def isatty(self) -> bool:
        """Return whether the target is a terminal."""
        return self.target.isatty()

    def fileno(self) -> int:
        """Return the target's file descriptor."""
        return self.target.fileno()

    def _turn_away(self) -> None:
        """Redirect the descriptor to the null device, so that later flushes, and Python's own at exit, do not fail."""
        self.is_closed = True
        nothing = os.open(os.devnull, os.O_WRONLY)
        with suppress(OSError, ValueError):
            os.dup2(nothing, self.target.fileno())
        os.close(nothing)


class LogFile(logging.FileHandler):
    """Log file that survives a full disk. The failure is reported once on the console; the file then lacks lines.

    Until `begin`, lines are held in memory: a start that is refused writes nothing.
    """

    is_told = False

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace", delay=True)
        self._held: list[str] | None = []

    def begin(self) -> None:
        """Open the file and write the lines so far."""
        self.acquire()
        try:
            held, self._held = self._held, None
            if held is not None:
                self.stream = self._open()
                self.stream.write("".join(f"{line}\n" for line in held))
                self.stream.flush()
        finally:
            self.release()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or hold it."""
        if self._held is None:
            super().emit(record)
        else:
            self._held.append(self.format(record))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - Python's name
        """Report a line that could not be written. Called by logging."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.is_told:
            self.is_told = True
            log.warning(
                "%s: %s; lines are missing in it until there is room",
                self.baseFilename,
                error.strerror,
            )

    def close(self) -> None:
        """Close the file, even if buffered lines could not be written."""
        with suppress(OSError):
            super().close()


class LineFile:
    """File of complete lines. Lines that do not fit on a full disk are kept and written when there is room."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: list[bytes] = []
        self._file = path.open("ab", buffering=0)

    def write(self, line: str) -> None:
        """Append a line, after any pending ones, and flush them to disk."""
        was_waiting = bool(self.waiting)
        self.waiting.append(line.encode() + b"\n")
        data = b"".join(self.waiting)
        size = os.fstat(self._file.fileno()).st_size
        try:
            written = 0
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file.fileno(), size)  # remove the incomplete line
            if not was_waiting:
                log.warning(
                    "%s: %s; its lines wait in memory until there is room",
                    self.path,
                    error.strerror,
                )
            return
        if was_waiting:
            log.info(
                "%s: %d lines that waited are written", self.path, len(self.waiting)
            )
        self.waiting = []

    def sync(self) -> None:
        """Flush what is written to the disk."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system without it
                log.warning("%s: %s", self.path, error.strerror)

    def close(self) -> None:
        """Flush the file to the disk and close it. Lines still pending are lost and counted."""
        self.sync()
        if self.waiting:
            log.error(
                "%s: %d lines found no room and are lost", self.path, len(self.waiting)
            )
        self._file.close()
