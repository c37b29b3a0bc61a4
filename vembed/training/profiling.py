"""Profile: the chosen steps of each rank in a trace file."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from vembed.config.schema import TrainConfig
from vembed.training.hooks import Hook, StepReport

log = logging.getLogger("vembed")


class Profile(Hook):
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

    def before_step(self, step: int) -> None:
        """Start recording before the first chosen step (steps count from 1), or before the first one left in a
        resumed run."""
        if self.range and self.profiler is None and self.range[0] <= step <= self.range[1]:
            self.range = step, self.range[1]
            self.profiler = torch.profiler.profile(record_shapes=True, with_stack=True)
            self.profiler.start()

    def on_step(self, report: StepReport) -> None:
        """Stop after the last chosen step and write the trace."""
        if self.range and self.profiler is not None and report.step == self.range[1]:
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.path))
            self.profiler = None
            log.info("profile: steps %d to %d are in %s", *self.range, self.path)
