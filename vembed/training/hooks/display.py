"""What a run shows while it goes on: five lines on its set-up, a progress bar, a report, a profile."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from typing_extensions import override

from vembed.parallel.parameters import num_parameters
from vembed.training.hooks.base import Hook, StepReport
from vembed.training.run_log import END_OF_SETUP, HEADLINE

if TYPE_CHECKING:
    from vembed.training.trainer import Trainer

log = logging.getLogger("vembed")


class SetupLines(Hook):
    """The five lines: model, data, steps, device, and where the log is."""

    @override
    def on_start(self, run: Trainer) -> None:
        config = run.config
        data = run.data
        session = run.session
        description = run.components.embedder.description
        total = num_parameters(run.components.model)
        trained = num_parameters(run.components.model, trainable_only=True)
        share = "all trained" if trained == total else f"{trained:,d} trained"
        num_sources = len(data.examples.names)
        sources = "1 source" if num_sources == 1 else f"{num_sources:,d} sources"
        evaluation = "no validation data (set val_split: 0.1)"
        if data.evaluation is not None:
            evaluation = data.evaluation.summary()
        epochs = data.epoch_at(data.total_steps)
        epochs_text = "1 epoch" if epochs == 1 else f"{epochs:.3g} epochs"
        # Data smaller than one batch are one batch.
        per_step = min(data.examples_per_step, len(data.examples))
        num_ranks = session.world_size
        processes = "1 process" if num_ranks == 1 else f"{num_ranks} processes"
        strategy: str = session.strategy
        if session.placement.run.strategy.value not in ("auto", strategy):
            strategy += f" ({session.placement.decisions['strategy'].reason})"
        lines = [
            f"model: {config.model.model_name}, {description.family}, {description.embedding_dim:,d} dimensions, "
            f"{total:,d} parameters ({share}), at most {description.max_length:,d} tokens",
            f"data: {len(data.examples):,d} examples of {sources}; {evaluation}",
            f"steps: {data.total_steps:,d} of {per_step:,d} examples ({epochs_text}), learning "
            f"rate {config.optimizer.learning_rate:g}, loss {config.objective.loss}",
            f"device: {session.device}, {processes}, strategy {strategy}, mixed precision {session.mixed_precision}",
        ]
        for line in lines:
            log.info("%s", line, extra=HEADLINE)
        path = run.output / config.logging.log_file
        log.info("log: %s", path, extra=END_OF_SETUP)


class ProgressBar(Hook):
    """Progress bar with rate and remaining time on a terminal. Files and pipes get log lines only."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar: Progress | None = None

    @override
    def on_start(self, run: Trainer) -> None:
        if self.console.is_terminal and not self.console.quiet:
            self.bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self.bar.start()
            self.task = self.bar.add_task("training", total=run.data.total_steps)

    @override
    def on_step(self, report: StepReport) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=report.step)

    @override
    def on_finish(self, run: Trainer) -> None:
        self.close()  # what follows is not training

    @override
    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


class Profile(Hook):
    """Profiler that writes the steps from `first` to `last` of each rank (`profile_steps`).

    The file trace-rank<r>.json is for Perfetto and chrome://tracing.
    """

    def __init__(self, first: int, last: int) -> None:
        self.first = first
        self.last = last
        self.profiler: torch.profiler.profile | None = None
        self.path = Path()
        self._last_recorded: int | None = None

    @override
    def on_start(self, run: Trainer) -> None:
        total_steps = run.data.total_steps
        self.path = run.output / f"trace-rank{run.session.rank}.json"
        if self.first > total_steps:
            log.warning(
                "profile_steps: [%d, %d] is after the run's last step, %d",
                self.first,
                self.last,
                total_steps,
            )
        self.last = min(self.last, total_steps)

    @override
    def before_step(self, step: int) -> None:
        """Start recording before the first chosen step, or before the first one left in a resumed run."""
        if self.profiler is None and self.first <= step <= self.last:
            self.first = step
            self.profiler = torch.profiler.profile(record_shapes=True, with_stack=True)
            self.profiler.start()

    @override
    def on_step(self, report: StepReport) -> None:
        if self.profiler is not None:
            self._last_recorded = report.step
            if report.step == self.last:
                self.close()

    @override
    def on_finish(self, run: Trainer) -> None:
        self.close()  # a run may end before the last chosen step

    @override
    def close(self) -> None:
        """Stop recording and write the steps that there are."""
        profiler = self.profiler
        self.profiler = None
        if profiler is None:
            return
        profiler.stop()
        if self._last_recorded is not None:
            profiler.export_chrome_trace(str(self.path))
            log.info(
                "profile: steps %d to %d are in %s",
                self.first,
                self._last_recorded,
                self.path,
            )
