"""What a run shows while it goes on: five lines on its set-up, a progress bar, a report, a profile."""

from __future__ import annotations

import logging
from pathlib import Path

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

from vembed.config.schema import TrainConfig
from vembed.errors import UserError
from vembed.evaluation.report.report import write_report
from vembed.parallel.parameters import num_parameters
from vembed.training.hooks.base import Hook, Run, StepReport
from vembed.training.run_log import HEADLINE, TRAINING

log = logging.getLogger("vembed")


class ProgressBar(Hook):
    """Progress bar with rate and remaining time on a terminal. Files and pipes get log lines only."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar: Progress | None = None

    def on_start(self, run: Run) -> None:
        """Show the bar."""
        if self.console.is_terminal and not self.console.quiet:
            columns = (
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns, console=self.console, transient=True)
            self.bar.start()
            self.task = self.bar.add_task("training", total=run.data.total_steps)

    def on_step(self, report: StepReport) -> None:
        """Advance."""
        if self.bar is not None:
            self.bar.update(self.task, completed=report.step)

    def on_finish(self, run: Run) -> None:
        """Remove the bar: what follows is not training."""
        del run
        self.close()

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


class SetupLines(Hook):
    """The five lines: model, data, steps, device, and where the log is."""

    def on_start(self, run: Run) -> None:
        """Log the lines."""
        for line in setup_lines(run):
            log.info("%s", line, extra=HEADLINE)
        log.info(
            "log: %s",
            Path(run.config.run.output_dir, run.config.logging.log_file),
            extra=TRAINING,
        )


def setup_lines(run: Run) -> list[str]:
    """Return the lines but the last."""
    config, data, session = run.config, run.data, run.session
    description = run.parts.embedder.description
    total = num_parameters(run.parts.model)
    trained = num_parameters(run.parts.model, trainable_only=True)
    share = "all trained" if trained == total else f"{trained:,d} trained"
    sources = len(data.examples.names)
    evaluation = (
        data.evaluation.summary()
        if data.evaluation is not None
        else "no validation data (set val_split: 0.1)"
    )
    epochs = data.epoch_at(data.total_steps)
    asked = session.placement.run.strategy.value
    why = (
        ""
        if asked in ("auto", session.strategy)
        else f" ({session.placement.decisions['strategy'].reason})"
    )
    per_step = min(
        data.examples_per_step, len(data.examples)
    )  # data smaller than one batch are one batch
    return [
        f"model: {config.model.model_name}, {description.family}, {description.embedding_dim:,d} dimensions, {total:,d} "
        f"parameters ({share}), at most {description.max_length:,d} tokens",
        f"data: {len(data.examples):,d} examples of {sources:,d} source{'s' if sources > 1 else ''}; {evaluation}",
        f"steps: {data.total_steps:,d} of {per_step:,d} examples ({epochs:.3g} epoch{'' if epochs == 1 else 's'}), learning rate "
        f"{config.optimizer.learning_rate:g}, loss {config.objective.loss}",
        f"device: {session.device}, {session.world_size} process{'es' if session.world_size > 1 else ''}, strategy "
        f"{session.strategy}{why}, mixed precision {session.mixed_precision}",
    ]


class RunningReport(Hook):
    """Writes the report after so many steps. A report that cannot be written is a line in the log."""

    def __init__(self, every: int) -> None:
        self.every = every

    @override
    def on_start(self, run: Run) -> None:
        self.folder = run.config.run.output_dir if run.session.is_main else None

    @override
    def on_step(self, report: StepReport) -> None:
        if self.folder is None or report.step % self.every:
            return
        try:
            path = write_report(self.folder)
        except (OSError, UserError) as error:
            log.warning(
                "report_every: the report of step %d was not written (%s)",
                report.step,
                error,
            )
        else:
            log.debug("report_every: %s", path)


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
