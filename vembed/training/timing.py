"""PhaseTimer and Profile: time per phase of a step on each rank, without synchronising the device."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from vembed.config.schema import TrainConfig

log = logging.getLogger("vembed")

PHASES = ("data", "forward", "loss", "backward", "optimizer", "wait")
"""Phases of a step. `wait` is the time in collectives, including the wait for other ranks."""


class PhaseTimer:
    """Seconds per phase: wall clock on CPU; on CUDA, events that are read when the figures are requested."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.seconds: dict[str, float] = defaultdict(float)
        self.events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the time inside the with-block as `phase`."""
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
            self.events[-1][2].synchronize()
            for phase, start, end in self.events:
                self.seconds[phase] += start.elapsed_time(end) / 1000
            self.events.clear()
        taken = {phase: self.seconds[phase] for phase in PHASES}
        self.seconds.clear()
        return taken


class Profile:
    """Profiler that writes the chosen steps of each rank to trace-rank<r>.json, for Perfetto and chrome://tracing."""

    def __init__(self, config: TrainConfig, rank: int, total_steps: int) -> None:
        self.range: tuple[int, int] | None = None
        if config.profile_steps is not None:
            first, last = config.profile_steps
            self.range = first, min(last, total_steps)
            if first > total_steps:
                log.warning("profile_steps: %s is after the run's last step, %d", config.profile_steps, total_steps)
        self.path = Path(config.output_dir) / f"trace-rank{rank}.json"
        self.profiler: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        """Start recording before the first chosen step (steps count from 1), or before the first one left in a
        resumed run."""
        if self.range and self.profiler is None and self.range[0] <= step <= self.range[1]:
            self.range = step, self.range[1]
            self.profiler = torch.profiler.profile(record_shapes=True, with_stack=True)
            self.profiler.start()

    def after(self, step: int) -> None:
        """Stop after the last chosen step and write the trace."""
        if self.range and self.profiler is not None and step == self.range[1]:
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.path))
            self.profiler = None
            log.info("profile: steps %d to %d are in %s", *self.range, self.path)
