"""Progress of an encoding: a bar with rate and remaining time on a terminal, occasional plain lines elsewhere."""

import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

SECONDS_BETWEEN_LINES = 15.0
Log = Callable[[str], object]
"""Gets lines for the log."""


class ProgressReport:
    """Progress display. Call it with the number of items done and the total; use it as a context manager."""

    def __init__(
        self,
        title: str,
        *,
        active: bool = True,
        console: Console | None = None,
        log: Log | None = None,
    ) -> None:
        """`active: false` shows nothing. Without a console it writes to stderr, so that stdout stays free for
        results. `log` gets plain lines instead of the bar."""
        self.title = title
        self.console = console or Console(stderr=True)
        self.active = active
        self.log = log
        self.bar: Progress | None = None
        self.task: TaskID | None = None
        self.began = self.last_line = time.monotonic()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Show the bar, if there is one."""
        self.began = self.last_line = time.monotonic()
        if self.active and self.log is None and self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns, console=self.console, transient=True)
            self.task = self.bar.add_task(self.title, total=None, rate="")
            self.bar.start()

    def __call__(self, done: int, total: int | None) -> None:
        """Report that `done` items are done. `total: None` if the total is not known."""
        if not self.active:
            return
        current_time = time.monotonic()
        rate = done / max(current_time - self.began, 1e-9)
        if self.bar is not None and self.task is not None:
            self.bar.update(
                self.task, completed=done, total=total, rate=f"{rate:,.0f}/s"
            )
        elif current_time - self.last_line >= SECONDS_BETWEEN_LINES:
            self.last_line = current_time
            line = f"{self.title}: {done:,d}"
            if total is not None:
                left = duration((total - done) / max(rate, 1e-9))
                line += f" of {total:,d} ({done / max(total, 1):.0%}), {left} left"
            line += f", {rate:,.0f}/s"
            if self.log is not None:
                self.log(line)
            else:
                self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def counted(number: int, singular: str, plural: str = "") -> str:
    """Return a number with its noun: 1 query, 2 queries."""
    noun = singular if number == 1 else plural or f"{singular}s"
    return f"{number:,d} {noun}"


def rate_text(value: float) -> str:
    """Format a number per second: 1,234 or 12.3."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Format a duration: 45 s, 3 min 20 s or 2 h 05 min."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
