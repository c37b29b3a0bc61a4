"""Where the host is known to wait for the device in a step (`known_waits.txt`). Any other wait fails the tests."""

from pathlib import Path
from typing import NamedTuple

STAGES_OF = {"forward": ("encode", "backward")}
"""Gradient Cache and checkpointing repeat the forward pass in the backward pass."""
PATH = Path(__file__).with_name("known_waits.txt")


class KnownWait(NamedTuple):
    """A place that waits, and why."""

    stage: str
    kind: str
    place: str
    """File and function, the innermost one outside torch."""
    reason: str

    def covers(self, wait):
        """Return True if this is the place of the wait."""
        is_stage = wait.stage in STAGES_OF.get(self.stage, (self.stage,))
        return is_stage and (self.kind, self.place) == (wait.kind, wait.place)


def read_known():
    """Return the lines of the file."""
    return [
        KnownWait(*(cell.strip() for cell in line.split("|")))
        for line in PATH.read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]


def unknown(result):
    """Return the waits of a case that are not in the file."""
    known = read_known()
    return [
        wait
        for wait in result.all_waits()
        if not any(entry.covers(wait) for entry in known)
    ]
