"""What a run shows and records: metrics of the steps, metrics.jsonl, trackers, set-up lines, progress bar, profile."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from typing_extensions import override

from vembed.config.terms import task_names
from vembed.errors import UserError
from vembed.evaluation.report.plots import Curve, plot_curve, plot_evaluations
from vembed.evaluation.report.record import metric_name, read_run
from vembed.parallel import collectives
from vembed.parallel.devices import memory_snapshot
from vembed.parallel.parameters import num_parameters
from vembed.progress import ProgressReport, duration
from vembed.training.checkpoint.folders import METRICS
from vembed.training.hooks.base import Evaluation, Hook, StepReport
from vembed.training.run_log import END_OF_SETUP, HEADLINE, LineFile
from vembed.training.trackers import TRACKERS, TrackedReport, TrackedRun, Tracker

if TYPE_CHECKING:
    from vembed.training.trainer import Trainer

log = logging.getLogger("vembed")

LOG_LINE_COLUMNS = 100
SLOW_RANK_RATIO = 1.2
"""Working time of a rank over the median from which the log line names it as slow."""


class Diagnostics(Hook):
    """Speed, padding, time per phase and memory of every rank.

    Time between two steps (evaluation, saving) is not counted.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        """Of this rank, since the last log line."""
        self._num_steps = 0
        self._seconds = 0.0

    @override
    def on_start(self, run: Trainer) -> None:
        self._device = run.session.device
        self._timer = run.contrastive_step.timer

    @override
    def before_step(self, step: int) -> None:
        self._start = time.perf_counter()

    @override
    def on_step(self, report: StepReport) -> None:
        for rank_batch, result in report.batches:
            self._counts.update(
                examples=len(rank_batch.where),
                inputs=rank_batch.num_inputs,
                distinct=len(rank_batch.features),
                useful=rank_batch.useful_tokens,
                padded=result.padded_tokens,
                forwards=result.num_forwards,
            )
        self._num_steps += 1
        self._seconds += time.perf_counter() - self._start

    @override
    def metrics(self, report: StepReport) -> dict[str, Any]:
        """Return the metrics of all ranks since the last call. Collective; the same on every rank."""
        phases = self._timer.take()
        of_rank = {
            "counts": dict(self._counts),
            "seconds": {name: round(value, 6) for name, value in phases.items()},
            "memory": memory_snapshot(self._device),
        }
        ranks = collectives.gather_objects(of_rank)
        total: Counter[str] = Counter()
        work = []
        padding = []
        memory = []
        for rank, entry in enumerate(ranks):
            counts = entry["counts"]
            total.update(counts)
            padding.append(1 - counts["useful"] / max(counts["padded"], 1))
            # Without the time in collectives: it includes waiting for the slowest rank, so it would hide which one that
            # is.
            work.append(sum(entry["seconds"].values()) - entry["seconds"]["wait"])
            memory.append({"rank": rank, **entry["memory"]})
        seconds = max(self._seconds, 1e-9)
        values = {
            "samples_per_second": total["examples"] / seconds,
            "tokens_per_second": total["useful"] / seconds,
            "step_seconds": seconds / max(self._num_steps, 1),
            "padding_fraction": 1 - total["useful"] / max(total["padded"], 1),
            "duplicate_fraction": 1 - total["distinct"] / max(total["inputs"], 1),
            "seconds": [entry["seconds"] for entry in ranks],
            "tokens": [entry["counts"]["useful"] for entry in ranks],
            "padding": padding,
            "forwards": [entry["counts"]["forwards"] for entry in ranks],
            "skew": max(work) / max(sorted(work)[len(work) // 2], 1e-9),
            "slowest_rank": work.index(max(work)),
            "memory": memory,
        }
        self._counts.clear()
        self._num_steps = 0
        self._seconds = 0.0
        return values


def log_line(values: dict[str, Any], total_steps: int, seconds_left: float) -> str:
    """Return the log line of one step, of at most 100 columns. All metrics are in metrics.jsonl."""
    rate = values["samples_per_second"]
    rate_text = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
    line = (
        f"step {values['step']:,d}/{total_steps:,d}  loss {values['loss']:.4f}  lr {values['learning_rate']:.1e}  "
        f"grad {values['grad_norm']:.3g}  {rate_text} samples/s  left {duration(seconds_left)}"
    )
    additions = []
    for name, value in values.items():
        if name.startswith("loss/"):
            additions.append(f"  {name.removeprefix('loss/')} {value:.4f}")
    if len(values["memory"]) > 1 and values["skew"] > SLOW_RANK_RATIO:
        additions.append(f"  rank {values['slowest_rank']} slow")
    for addition in additions:
        if len(line + addition) <= LOG_LINE_COLUMNS:
            line += addition
    return line


class LossMeans(Hook):
    """Means since the last log line: of each task, of each term of `losses` without its weight, and of the model's own
    losses.

    Tasks: of runs with several sources and homogeneous batches. A source is a task, unless `homogeneous_batches: task`
    joins it with others. There, each batch is of one task, and the terms are those of a task.
    """

    def __init__(self) -> None:
        self._tasks: list[str] = []
        """Name of the task of each source; empty if batches are not of one task each."""
        self._shares: defaultdict[str, list[Tensor]] = defaultdict(list)
        """Name in the log -> this rank's shares of the losses."""
        self._of_model: defaultdict[str, list[float]] = defaultdict(list)
        """Name in the log -> losses of the global batches, the same on every rank."""

    @override
    def on_start(self, run: Trainer) -> None:
        names = run.data.examples.names
        if run.config.data.homogeneous_batches and len(names) > 1:
            self._tasks = task_names(run.config.data, names)

    @override
    def on_step(self, report: StepReport) -> None:
        for rank_batch, result in report.batches:
            prefix = "loss/"
            if self._tasks:
                task = self._tasks[rank_batch.source]
                self._shares[f"loss/{task}"].append(result.loss_share)
                prefix = f"loss/{task}/"
            for term, share in result.terms.items():
                self._shares[prefix + term].append(share.detach())
            for name, value in result.auxiliary.items():
                self._of_model[f"loss/{name}"].append(value)

    @override
    def metrics(self, report: StepReport) -> Mapping[str, Any]:
        """Return the means since the last call. Collective; the same on every rank."""
        # All ranks have had the same tasks in the same steps, and so the same names in the same order.
        sums = []
        for shares in self._shares.values():
            sums.append(float(torch.stack(shares).to(torch.float64).sum()))
        totals = collectives.sum_scalars(sums) if sums else []
        means = {}
        for (name, shares), total in zip(self._shares.items(), totals, strict=True):
            means[name] = total / len(shares)
        for name, values in self._of_model.items():
            means[name] = sum(values) / len(values)
        self._shares.clear()
        self._of_model.clear()
        return means


class StepCurves(Hook):
    """Buffers [step, loss, learning rate, gradient norm] of every step until the next logged line, for the report."""

    name = "step_curves"

    def __init__(self) -> None:
        self._steps: list[list[float]] = []

    @override
    def on_step(self, report: StepReport) -> None:
        outcome = report.outcome
        self._steps.append(
            [report.step, outcome.loss, report.learning_rate, outcome.grad_norm]
        )

    @override
    def metrics(self, report: StepReport) -> dict[str, Any]:
        steps = self._steps
        self._steps = []
        return {"steps": steps}

    @override
    def state(self) -> dict[str, Any]:
        return {"steps": self._steps} if self._steps else {}

    @override
    def load_state(self, state: dict[str, Any]) -> None:
        self._steps = [list(step) for step in state["steps"]]


class MetricsLog(Hook):
    """metrics.jsonl and the trackers. On ranks other than 0 every call is a no-op."""

    name = "metrics"

    def __init__(self) -> None:
        self.trackers: list[Tracker] = []
        self.file: LineFile | None = None
        self._is_trained = False

    @override
    def on_start(self, run: Trainer) -> None:
        """Open the file and start the trackers."""
        self._output = run.output
        if not run.session.is_main:
            return
        options = run.config.logging
        settings = run.config.to_dict()
        tracked = TrackedRun(
            run.output,
            options.run_name,
            options.wandb_project,
            options.wandb_tags,
            {name: value for name, value in settings.items() if value is not None},
            run.state.step,
        )
        for name in options.report_to:
            tracker = TRACKERS[name]()
            try:
                tracker.start(tracked)
            except ImportError as error:
                raise UserError(
                    f"report_to: {name} is not installed ({error}): install it (pip install {tracker.package}), or leave "
                    "it out"
                ) from error
            self.trackers.append(tracker)
        self.file = LineFile(run.output / METRICS)

    @override
    def on_log(self, values: Mapping[str, Any]) -> None:
        """Write one logged step to metrics.jsonl and its numbers to the trackers."""
        numbers = {f"train/{key}": value for key, value in _numbers(values).items()}
        self._write(values, numbers, int(values["step"]))

    @override
    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Write one evaluation."""
        numbers = {}
        for key, score in evaluation.scores.items():
            numbers[f"eval/{key.replace('@', '_at_')}"] = score
        line = {
            "step": evaluation.step,
            "epoch": evaluation.epoch,
            "eval": evaluation.scores,
        }
        self._write(line, numbers, evaluation.step)

    @override
    def state(self) -> dict[str, Any]:
        """Flush the file to the disk: a checkpoint must not be newer than its lines. Return the file's length."""
        if self.file is None:
            return {}
        self.file.sync()
        return {"bytes": self.file.path.stat().st_size}

    @override
    def on_finish(self, run: Trainer) -> None:
        """Close the file: the report reads it. The trackers get the report when it is written."""
        self._is_trained = True
        self._close_file()

    @override
    def close(self) -> None:
        """Close the file, send the report of a finished run to the trackers, and end them."""
        self._close_file()
        for tracker in self.trackers:
            if self._is_trained and (self._output / "report.html").is_file():
                try:
                    tracker.send_report(_tracked_report(self._output))
                except (OSError, UserError) as error:
                    log.warning(
                        f"report_to: {tracker.name} did not take the report ({error})"
                    )
            with suppress(OSError):
                tracker.finish()
        self.trackers = []

    def _close_file(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def _write(
        self, line: Mapping[str, Any], numbers: dict[str, float], step: int
    ) -> None:
        if self.file is None:
            return
        # A line without a newline was cut by a crash; resuming drops it.
        text = json.dumps({**line, "time": round(time.time(), 3)})
        # JSON has no NaN and no infinity: they become null.
        values = json.loads(text, parse_constant=lambda _: None)
        self.file.write(json.dumps(values))
        for tracker in list(self.trackers):
            try:
                tracker.log(numbers, step)
            except OSError as error:
                self.trackers.remove(tracker)
                log.warning(
                    f"report_to: {tracker.name} failed and is disabled ({error}); metrics.jsonl continues"
                )


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in values, with one name each. A list of mappings has one entry per rank."""
    numbers: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, int | float) and key != "step":
            numbers[key] = float(value)
        elif isinstance(value, list):
            for rank, entry in enumerate(value):
                if isinstance(entry, Mapping):
                    for name, number in _numbers(entry).items():
                        numbers[f"{key}/rank{rank}/{name}"] = number
    return numbers


def _tracked_report(output: Path) -> TrackedReport:
    """Return the report of a finished run. Its picture: the deciding score over the evaluations, and the loss."""
    record = read_run(output)
    name = metric_name(record.headline)
    steps, scores = record.scores_over_steps(record.headline)
    plots = []
    if steps:
        plots.append((name, plot_evaluations(steps, scores, name, None)))
    lines = [line for line in record.steps if isinstance(line.get("loss"), float)]
    steps = [line["step"] for line in lines]
    losses = [line["loss"] for line in lines]
    curve = Curve("loss", "", steps, losses, "{:.3g}".format)
    plots.append(("loss", plot_curve(curve)))
    images = [np.asarray(plot.image(title)) for title, plot in plots]
    picture = np.concatenate(images, axis=1)
    return TrackedReport(output / "report.html", picture, record.last_step)


# ---- what a terminal shows ----------------------------------------------------


def log_setup(run: Trainer) -> None:
    """Log the five lines on the set-up: model, data, steps, device, and where the log is."""
    config = run.config
    data = run.data
    session = run.session
    description = run.components.embedder.description
    total = num_parameters(run.components.model)
    trained = num_parameters(run.components.model, trainable_only=True)
    share = "all trained" if trained == total else f"{trained:,d} trained"
    evaluation = "no validation data (set val_split: 0.1)"
    if data.evaluation is not None:
        evaluation = data.evaluation.summary()
    # Data smaller than one batch are one batch.
    per_step = min(data.examples_per_step, len(data.examples))
    strategy: str = session.strategy
    if session.placement.run.strategy.value not in ("auto", strategy):
        strategy += f" ({session.placement.decisions['strategy'].reason})"
    num_sources = len(data.examples.names)
    sources = "1 source" if num_sources == 1 else f"{num_sources:,d} sources"
    num_ranks = session.world_size
    processes = "1 process" if num_ranks == 1 else f"{num_ranks} processes"
    epochs = data.epoch_at(data.total_steps)
    epochs_text = "1 epoch" if epochs == 1 else f"{epochs:.3g} epochs"
    lines = [
        f"model: {config.model.model_name}, {description.family}, {description.embedding_dim:,d} dimensions, "
        f"{total:,d} parameters ({share}), at most {description.max_length:,d} tokens",
        f"data: {len(data.examples):,d} examples of {sources}; {evaluation}",
        f"steps: {data.total_steps:,d} of {per_step:,d} examples ({epochs_text}), "
        f"learning rate {config.optimizer.learning_rate:g}, loss {config.objective.loss}",
        f"device: {session.device}, {processes}, strategy {strategy}, mixed precision "
        f"{session.mixed_precision}",
    ]
    for line in lines:
        log.info(line, extra=HEADLINE)
    path = run.output / config.logging.log_file
    log.info(f"log: {path}", extra=END_OF_SETUP)


class ProgressBar(Hook):
    """Progress bar with rate and remaining time on a terminal. Files and pipes get log lines only."""

    def __init__(self, console: Console) -> None:
        is_shown = console.is_terminal and not console.quiet
        self.progress = ProgressReport("training", active=is_shown, console=console)

    @override
    def on_start(self, run: Trainer) -> None:
        self.total_steps = run.data.total_steps
        self.progress.start()

    @override
    def on_step(self, report: StepReport) -> None:
        self.progress(report.step, self.total_steps)

    @override
    def on_finish(self, run: Trainer) -> None:
        self.close()  # what follows is not training

    @override
    def close(self) -> None:
        self.progress.stop()


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
                f"profile_steps: [{self.first}, {self.last}] is after the run's last step, {total_steps}"
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
                f"profile: steps {self.first} to {self._last_recorded} are in {self.path}"
            )
