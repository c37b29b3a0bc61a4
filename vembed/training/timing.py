"""PhaseTimer: time per phase of a step on each rank, without synchronising the device. RunClock: time of the run."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PHASES = ("data", "forward", "loss", "backward", "optimizer", "wait")
"""Phases of a step. `wait` is the time in collectives, including the wait for other ranks."""
RECENT = 6
"""Calls back to which the rate is measured: the first steps of a run are slower than the others."""


class PhaseTimer:
    """Seconds per phase: wall clock on CPU; on CUDA, events that are read when the metrics are requested."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.seconds: dict[str, float] = defaultdict(float)
        self.events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the time inside the with-block as `phase`."""
        # Batches are prepared by the host; the device would show nothing of the time that is waited for them.
        if self.on_cuda and phase != "data":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            try:
                yield
            finally:
                end.record()
                self.events.append((phase, start, end))
            return
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - began

    def take(self) -> dict[str, float]:
        """Return the seconds per phase since the last call. Waits for the device."""
        if self.events:
            # A stream works in order: when the last event has been reached, all have.
            self.events[-1][2].synchronize()
            for phase, start, end in self.events:
                self.seconds[phase] += start.elapsed_time(end) / 1000
            self.events.clear()
        taken = {phase: self.seconds[phase] for phase in PHASES}
        self.seconds.clear()
        return taken


class RunClock:
    """Time of a run: all of it, and what is left."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.earlier_seconds = 0.0
        """Seconds that earlier parts of a resumed run took."""
        self._marks: deque[tuple[float, int]] = deque(maxlen=RECENT)

    def start_loop(self, step: int) -> None:
        """Begin the loop after `step` steps."""
        self._marks.append((time.perf_counter(), step))

    def seconds(self) -> float:
        """Return the seconds of the whole run so far."""
        return self.earlier_seconds + time.perf_counter() - self.began

    def left(self, step: int, total_steps: int) -> float:
        """Return the seconds that the steps after `step` will take at the rate of the last few calls."""
        now = time.perf_counter()
        began, first = self._marks[0]
        self._marks.append((now, step))
        return (now - began) / (step - first) * (total_steps - step)
