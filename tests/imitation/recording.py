"""What the imitation device saw: kernels, waits of the host and copies, by stage of the step."""

import sys
import sysconfig
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
LIBRARIES = Path(sysconfig.get_paths()["purelib"])
BETWEEN = "between"
"""The stage of everything that no stage of the step contains: the data, the update, logging."""


class Wait(NamedTuple):
    """A place where the host waits for the device."""

    stage: str
    kind: str
    """The operator or the kind of copy."""
    place: str
    """File and function, the innermost one outside torch."""
    caller: str
    """File and function, the innermost one of vembed."""
    line: int
    """Line of `caller`, which is shown and not compared."""


@dataclass
class Recording:
    """Counts since the last `clear`."""

    kernels: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By stage and operator."""
    waits: Counter[Wait] = field(default_factory=Counter)
    pinned_copies: Counter[str] = field(default_factory=Counter)
    """Copies to the device that the host does not wait for, by stage."""
    stage: str = BETWEEN

    def clear(self):
        """Begin again, in the same stage."""
        self.kernels.clear()
        self.waits.clear()
        self.pinned_copies.clear()

    @contextmanager
    def during(self, stage):
        """Count what happens inside the with-block under this stage."""
        outer = self.stage
        self.stage = stage
        try:
            yield
        finally:
            self.stage = outer

    def kernel(self, operator):
        """Count a kernel."""
        self.kernels[self.stage, operator] += 1

    def wait(self, kind):
        """Count a wait of the host, with the place that asked for it."""
        place = caller = None
        line = 0
        frame = sys._getframe(1)
        while frame is not None and caller is None:
            file = readable(frame.f_code.co_filename)
            if file is not None:
                name = f"{file} {frame.f_code.co_name}"
                place = place or name
                if file.startswith("vembed/"):
                    caller = name
                    line = frame.f_lineno
            frame = frame.f_back
        self.waits[Wait(self.stage, kind, place or "?", caller or "?", line)] += 1


@cache
def readable(filename):
    """Return a path from the root of the repository or of the libraries; None for torch and for the harness."""
    path = Path(filename)
    for root in (LIBRARIES, ROOT):
        if path.is_relative_to(root):
            name = path.relative_to(root).as_posix()
            return None if name.startswith(("torch/", "tests/imitation/")) else name
    return None
