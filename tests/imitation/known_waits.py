"""Where the package still waits for the device in a step. A wait that is not listed fails the tests."""

from __future__ import annotations

from typing import NamedTuple

from tests.imitation.recording import Wait
from tests.imitation.runs import Result


class KnownWait(NamedTuple):
    """A place that waits, and why. `place` is the innermost file and function outside torch."""

    stages: tuple[str, ...]
    kind: str
    place: str
    reason: str

    def covers(self, wait: Wait) -> bool:
        """Return True if this is the place of the wait."""
        is_here = wait.stage in self.stages and wait.kind == self.kind
        return is_here and wait.place == self.place


KNOWN: tuple[KnownWait, ...] = ()


def unknown(result: Result) -> list[Wait]:
    """Return the waits of a case that are not listed."""
    return [
        wait
        for wait in result.all_waits()
        if not any(known.covers(wait) for known in KNOWN)
    ]
