"""Profile: the chosen steps of each rank in a trace file."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from vembed.config.schema import TrainConfig
from vembed.training.hooks import Hook, Run, StepReport

log = logging.getLogger("vembed")


class Profile(Hook):
    """Profiler that writes the chosen steps of each rank to trace-rank<r>.json, for Perfetto and chrome://tracing."""

    def __init__(self, config: TrainConfig, rank: int, total_steps: int) -> None:
        self.range: tuple[int, int] | None = None
        if config.logging.profile_steps is not None:
            first, last = config.logging.profile_steps
            self.range = first, min(last, total_steps)
            if first > total_steps:
                log.warning(
                    "profile_steps: %s is after the run's last step, %d",
                    config.logging.profile_steps,
                    total_steps,
                )
        self.path = Path(config.run.output_dir) / f"trace-rank{rank}.json"
        self.profiler: torch.profiler.profile | None = None
        self._last: int | None = None
        """Last step that was recorded."""

    def before_step(self, step: int) -> None:
        """Start recording before the first chosen step (steps count from 1), or before the first one left in a
        resumed run."""
        if (
            self.range
            and self.profiler is None
            and self.range[0] <= step <= self.range[1]
        ):
            self.range = step, self.range[1]
            self.profiler = torch.profiler.profile(record_shapes=True, with_stack=True)
            self.profiler.start()

    def on_step(self, report: StepReport) -> None:
        """Write the trace after the last chosen step."""
        if self.range and self.profiler is not None:
            self._last = report.step
            if report.step == self.range[1]:
                self.close()

    def on_finish(self, run: Run) -> None:
        """Write the trace of a run that has ended before the last chosen step."""
        del run
        self.close()

    def close(self) -> None:
        """Stop recording and write the steps that there are."""
        profiler, self.profiler = self.profiler, None
        if self.range is None or profiler is None:
            return
        profiler.stop()
        if self._last is not None:
            profiler.export_chrome_trace(str(self.path))
            log.info(
                "profile: steps %d to %d are in %s",
                self.range[0],
                self._last,
                self.path,
            )
