"""Outlets: where a run's lines go, and what may fail without ending the run: a closed console, a full disk."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

log = logging.getLogger("vembed")


class LastingStream:
    """A console whose reader may leave (a closed terminal, a pipe into `head`): then lines for it go nowhere."""

    def __init__(self, target: TextIO) -> None:
        self.target = target
        self.encoding = target.encoding
        self.is_deaf = False

    def write(self, text: str) -> int:
        """As the target does, as long as it can."""
        try:
            return self.target.write(text)
        except OSError:
            self._turn_away()
            return len(text)

    def flush(self) -> None:
        """As the target does, as long as it can."""
        try:
            self.target.flush()
        except OSError:
            self._turn_away()

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self.target.isatty()

    def fileno(self) -> int:
        """The system's number of it."""
        return self.target.fileno()

    def _turn_away(self) -> None:
        """Point its number at nothing, so that nothing fails that is still to be flushed, nor Python at its end."""
        self.is_deaf = True
        nothing = os.open(os.devnull, os.O_WRONLY)
        with suppress(OSError, ValueError):
            os.dup2(nothing, self.target.fileno())
        os.close(nothing)


class LogFile(logging.FileHandler):
    """A log file that may meet a full disk: said once, on the console; lines are missing from it then."""

    is_told = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - Python's name
        """What logging calls when a line could not be written."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.is_told:
            self.is_told = True
            log.warning("%s: %s; lines are missing in it until there is room", self.baseFilename, error.strerror)

    def close(self) -> None:
        """Close the file, whatever could not be written."""
        with suppress(OSError):
            super().close()


class LineFile:
    """A file of whole lines. What a full disk does not take is kept, and written when there is room."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: list[bytes] = []
        self._file = path.open("ab", buffering=0)

    def write(self, line: str) -> None:
        """Append a line, and those that wait, to the disk."""
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
                os.ftruncate(self._file.fileno(), size)  # no half a line
            if not was_waiting:
                log.warning("%s: %s; its lines wait in memory until there is room", self.path, error.strerror)
            return
        if was_waiting:
            log.info("%s: %d lines that waited are written", self.path, len(self.waiting))
        self.waiting = []

    def close(self) -> None:
        """End it; lines that still wait are lost, and counted."""
        if self.waiting:
            log.error("%s: %d lines found no room and are lost", self.path, len(self.waiting))
        self._file.close()
