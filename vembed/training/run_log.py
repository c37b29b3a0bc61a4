"""Logging of a run: the console, training_log.txt and their failures. Only rank 0 logs, unless debug is on."""

import errno
import io
import logging
import os
import sys
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, Self, TextIO, cast

from rich.console import Console

from vembed.config.schema import LoggingSection
from vembed.errors import UserError, masked
from vembed.evaluation.report.record import Scores, scores_line
from vembed.files import require_regular

log = logging.getLogger("vembed")


@dataclass
class ResilientStream:
    """Console stream that survives its reader (a closed terminal, a pipe into `head`). Later lines are discarded."""

    target: TextIO
    is_closed: bool = False

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

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def _turn_away(self) -> None:
        """Redirect the descriptor to the null device, so that later flushes, and Python's own at exit, do not fail."""
        self.is_closed = True
        nothing = os.open(os.devnull, os.O_WRONLY)
        with suppress(OSError, ValueError):
            os.dup2(nothing, self.target.fileno())
        os.close(nothing)


class LogFile(logging.FileHandler):
    """Log file that survives a full disk. The failure is reported once on the console; the file then lacks lines."""

    is_reported = False

    def __init__(self, path: Path) -> None:
        """Open the file. Raise UserError if it cannot be written to."""
        require_regular(path, "log_file")  # opening a pipe waits for a reader
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            super().__init__(path, encoding="utf-8", errors="backslashreplace")
            self.setFormatter(SafeFormatter(LOG_FILE_LINE, LOG_FILE_TIME))
        except OSError as error:
            raise UserError(
                f"log_file: {path} cannot be written to ({error.strerror}); give a file that every process may write to, "
                "on a disk with room"
            ) from error

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - Python's name
        """Report a line that could not be written. Called by logging."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.is_reported:
            self.is_reported = True
            log.warning(
                f"{self.baseFilename}: {error.strerror}; lines are missing in it until there is room"
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
        """Append a line, after those that wait, in one call of the system."""
        num_waiting = len(self.waiting)
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
            if not num_waiting:
                log.warning(
                    f"{self.path}: {error.strerror}; its lines wait in memory until there is room"
                )
            return
        if num_waiting:
            log.info(f"{self.path}: {num_waiting + 1} lines that waited are written")
        self.waiting = []

    def sync(self) -> None:
        """Flush what is written to the disk."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system without it
                log.warning(f"{self.path}: {error.strerror}")

    def close(self) -> None:
        """Flush the file to the disk and close it. Lines still pending are lost and counted."""
        self.sync()
        if self.waiting:
            log.error(
                f"{self.path}: {len(self.waiting)} lines found no room and are lost"
            )
        self._file.close()


HEADLINE = {"is_headline": True}
"""Extra of records that the console shows during the set-up too."""
END_OF_SETUP = {"is_headline": True, "ends_setup": True}
"""Extra of the last record of the set-up."""
SHOWN_MODULES = frozenset({"checkpointer", "folders", "interrupts"})
"""Modules whose lines tell what happens to earlier results; shown during the set-up too."""
DETAIL_MODULES = frozenset({"devices", "parameters", "sharding"})
"""Modules whose lines only the log file and `console: verbose` have."""
LOG_FILE_LINE = "%(asctime)s %(levelname)s %(message)s"
LOG_FILE_TIME = "%Y-%m-%d %H:%M:%S"
SHORT_FORM = "short_form"
"""Attribute of records with a shorter text for the console."""
STYLES = {
    logging.WARNING: "yellow",
    logging.ERROR: "bold red",
    logging.CRITICAL: "bold red",
}


class ConsoleHandler(logging.Handler):
    """Handler that writes above the progress bar on a terminal, and plain lines into a file or pipe."""

    def __init__(
        self,
        console: Console,
        stream: ResilientStream,
        mode: str,
    ) -> None:
        """`mode`: the option `console`."""
        super().__init__(logging.INFO)
        self.console = console
        self.stream = stream
        self.mode = mode
        self._is_setup = True

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line, if it is shown."""
        fields = vars(record)
        is_verbose = self.mode == "verbose"
        is_warning = record.levelno >= logging.WARNING
        if "ends_setup" in fields:
            self._is_setup = False
        is_headline = "is_headline" in fields or record.module in SHOWN_MODULES
        is_hidden = self.mode == "quiet" or record.module in DETAIL_MODULES
        if self._is_setup and not is_headline:
            is_hidden = True
        if is_hidden and not (is_verbose or is_warning):
            return
        was_closed = self.stream.is_closed
        if not is_verbose and SHORT_FORM in fields:
            record = copy(record)
            record.msg = fields[SHORT_FORM]
            record.args = ()
        line = self.format(record)
        if is_warning:
            line = f"{record.levelname.lower()}: {line}"
        # rich leaves the colours out where the stream is no terminal.
        self.console.print(
            line,
            style=STYLES.get(record.levelno),
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        if self.stream.is_closed and not was_closed:
            log.warning("the console is closed; the run continues and logs to its file")


def log_scores(
    when: str,
    scores: Scores,
    before: Scores,
    metric: str,
    ending: str,
) -> None:
    """Log an evaluation: all main scores in the log file, and the first of them on the console."""
    short = scores_line(when, scores, before, metric, is_short=True) + ending
    line = scores_line(when, scores, before, metric)
    log.info(f"{line}{ending}", extra={SHORT_FORM: short})


class SafeFormatter(logging.Formatter):
    """Formatter that replaces the values of secret environment variables, in messages and tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line with secrets replaced."""
        return masked(super().format(record))


class RunLog:
    """Console, log file and debug file of a run, while the with-block runs. Only rank 0 logs, unless debug is on.

    Until `begin`, the lines of the log file are held in memory: a start that is refused writes nothing.
    """

    def __init__(
        self,
        options: LoggingSection,
        output: Path,
        rank: str,
    ) -> None:
        # Python has no stdout where the caller has closed it.
        self._stream = ResilientStream(sys.stdout or io.StringIO())
        self.console = Console(file=cast(TextIO, self._stream), quiet=rank != "0")
        self._options = options
        self._output = output
        self._rank = rank
        self._held = MemoryHandler(sys.maxsize, sys.maxsize, flushOnClose=False)
        self._before = (log.level, log.propagate)

    def __enter__(self) -> Self:
        options = self._options
        # First, since it may fail. From the beginning on, since it is read when a start hangs.
        if options.debug:
            log.addHandler(LogFile(self._output / f"logs/rank-{self._rank}.log"))
        log.setLevel(logging.DEBUG if options.debug else logging.INFO)
        log.propagate = False
        log.addHandler(logging.NullHandler())
        if self._rank == "0":
            mode = "verbose" if options.debug else options.console
            screen = ConsoleHandler(self.console, self._stream, mode)
            screen.setFormatter(SafeFormatter("%(message)s"))
            log.addHandler(screen)
            log.addHandler(self._held)
        return self

    def __exit__(self, *error: object) -> None:
        for handler in list(log.handlers):
            log.removeHandler(handler)
            handler.close()
        level, log.propagate = self._before
        log.setLevel(level)

    def begin(self) -> None:
        """Write the log file from here on, with the lines so far. Raise UserError if it cannot be written to."""
        if self._rank == "0":
            file = LogFile(self._output / self._options.log_file)
            self._held.setTarget(file)
            self._held.flush()
            log.removeHandler(self._held)
            log.addHandler(file)
