"""Metrics of the steps: what hooks add to each logged line, and metrics.jsonl with the trackers."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from vembed.config.terms import task_names
from vembed.data.batching.rank_batch import RankBatch
from vembed.errors import UserError
from vembed.evaluation.report.pictures import picture_image, picture_svg
from vembed.evaluation.report.plots import Curve, curve_svg, evaluations_svg
from vembed.evaluation.report.record import RunRecord, metric_name, read_run
from vembed.files import require_regular
from vembed.parallel import collectives
from vembed.parallel.memory import memory_snapshot
from vembed.progress import duration
from vembed.training.checkpoint.resume import METRICS
from vembed.training.hooks.base import Evaluation, Hook, Run, StepReport
from vembed.training.run_log import LineFile
from vembed.training.step import BatchResult
from vembed.training.trackers.declaration import TrackedReport, TrackedRun, Tracker
from vembed.training.trackers.table import TRACKERS

log = logging.getLogger("vembed")

LOG_LINE_COLUMNS = 100
SLOW_RANK_RATIO = 1.2
"""Working time of a rank over the median from which the log line names it as slow."""


# ---- speed, padding and memory -----------------------------------------------


@dataclass
class StepCounts:
    """Counts of this rank since the last log line."""

    num_examples: int = 0
    num_inputs: int = 0
    num_distinct: int = 0
    useful_tokens: int = 0
    padded_tokens: int = 0
    num_forwards: int = 0
    num_steps: int = 0
    seconds: float = 0.0

    def add(self, rank_batch: RankBatch, result: BatchResult) -> None:
        """Count one global batch."""
        self.num_examples += rank_batch.num_examples
        self.num_inputs += rank_batch.num_inputs
        self.num_distinct += len(rank_batch.features)
        self.useful_tokens += rank_batch.useful_tokens
        self.padded_tokens += result.padded_tokens
        self.num_forwards += result.num_forwards


class Diagnostics(Hook):
    """Speed, padding, time per phase and memory of every rank.

    Time between two steps (evaluation, saving) is not counted.
    """

    def __init__(self) -> None:
        self.counts = StepCounts()
        self._start = 0.0

    @override
    def on_start(self, run: Run) -> None:
        self._device = run.session.device
        self._timer = run.step.timer

    @override
    def before_step(self, step: int) -> None:
        self._start = time.perf_counter()

    @override
    def on_step(self, report: StepReport) -> None:
        for rank_batch, result in report.batches:
            self.counts.add(rank_batch, result)
        self.counts.num_steps += 1
        self.counts.seconds += time.perf_counter() - self._start

    @override
    def figures(self, report: StepReport) -> dict[str, Any]:
        """Return the metrics of all ranks since the last call. Collective; the same on every rank."""
        counts = self.counts
        self.counts = StepCounts()
        seconds = max(counts.seconds, 1e-9)
        phases = self._timer.take()
        ranks = collectives.gather_objects_as_json(
            {
                "seconds": {name: round(value, 6) for name, value in phases.items()},
                "examples": counts.num_examples,
                "inputs": counts.num_inputs,
                "distinct": counts.num_distinct,
                "useful": counts.useful_tokens,
                "padded": counts.padded_tokens,
                "forwards": counts.num_forwards,
                "memory": memory_snapshot(self._device),
            }
        )
        total = {
            name: sum(entry[name] for entry in ranks)
            for name in ("examples", "inputs", "distinct", "useful", "padded")
        }
        # Time in collectives is excluded: it includes waiting for the slowest rank, so it would hide which one that is.
        work = []
        for entry in ranks:
            work.append(sum(entry["seconds"].values()) - entry["seconds"]["wait"])
        median = max(sorted(work)[len(work) // 2], 1e-9)
        return {
            "samples_per_second": total["examples"] / seconds,
            "tokens_per_second": total["useful"] / seconds,
            "step_seconds": seconds / max(counts.num_steps, 1),
            "padding_fraction": _missing_share(total["useful"], total["padded"]),
            "duplicate_fraction": _missing_share(total["distinct"], total["inputs"]),
            "seconds": [entry["seconds"] for entry in ranks],
            "tokens": [entry["useful"] for entry in ranks],
            "padding": [
                _missing_share(entry["useful"], entry["padded"]) for entry in ranks
            ],
            "forwards": [entry["forwards"] for entry in ranks],
            "skew": max(work) / median,
            "slowest_rank": work.index(max(work)),
            "memory": [
                {"rank": rank, **entry["memory"]} for rank, entry in enumerate(ranks)
            ],
        }


def _missing_share(part: int, whole: int) -> float:
    """Return the share of the whole that is not in the part."""
    return 1 - part / whole if whole else 0.0


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


# ---- losses ------------------------------------------------------------------


class TaskAndTermLosses(Hook):
    """Mean loss of each task, and mean of each term of `losses` without its weight, since the last log line.

    Tasks: of runs with several sources and homogeneous batches. A source is a task, unless `homogeneous_batches: task`
    joins it with others. There, each batch is of one task, and the terms are those of a task.
    """

    def __init__(self) -> None:
        self._tasks: tuple[str, ...] = ()
        """Name of the task of each source; empty if batches are not of one task each."""
        self._losses: dict[str, list[Tensor]] = {}
        """Name in the log -> this rank's shares of the losses."""

    @override
    def on_start(self, run: Run) -> None:
        names = run.data.examples.names
        if run.config.data.homogeneous_batches and len(names) > 1:
            self._tasks = tuple(task_names(run.config.data, names))

    @override
    def on_step(self, report: StepReport) -> None:
        for rank_batch, result in report.batches:
            prefix = "loss/"
            if self._tasks:
                task = self._tasks[rank_batch.source]
                self._losses.setdefault(f"loss/{task}", []).append(result.loss_share)
                prefix = f"loss/{task}/"
            for term, share in result.terms.items():
                self._losses.setdefault(prefix + term, []).append(share)

    @override
    def figures(self, report: StepReport) -> Mapping[str, Any]:
        """Return the means since the last call. Collective; the same on every rank."""
        # All ranks have had the same tasks in the same steps, and so the same names in the same order.
        losses = self._losses
        self._losses = {}
        if not losses:
            return {}
        names = list(losses)
        sums = []
        for name in names:
            shares = [share.detach().to(torch.float64) for share in losses[name]]
            sums.append(float(torch.stack(shares).sum()))
        totals = collectives.sum_scalars(sums)
        return {
            name: total / len(losses[name])
            for name, total in zip(names, totals, strict=True)
        }


class AuxiliaryLossMeans(Hook):
    """Mean of each loss of the model's own since the last log line, by name."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._num_batches = 0

    @override
    def on_step(self, report: StepReport) -> None:
        for _, result in report.batches:
            self._num_batches += 1
            for name, value in result.auxiliary.items():
                self._sums[name] = self._sums.get(name, 0.0) + value

    @override
    def figures(self, report: StepReport) -> Mapping[str, float]:
        """Return the means since the last call. They are those of the global batch, the same on every rank."""
        means = {}
        for name, value in self._sums.items():
            means[f"loss/{name}"] = value / self._num_batches
        self._sums = {}
        self._num_batches = 0
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
    def figures(self, report: StepReport) -> dict[str, Any]:
        steps = self._steps
        self._steps = []
        return {"steps": steps}

    @override
    def state(self) -> dict[str, Any]:
        return {"steps": self._steps} if self._steps else {}

    @override
    def load_state(self, state: dict[str, Any]) -> None:
        self._steps = [list(step) for step in state["steps"]]


# ---- metrics.jsonl and trackers ----------------------------------------------


class MetricsLog(Hook):
    """metrics.jsonl and the trackers. On ranks other than 0 every call is a no-op."""

    name = "metrics"

    def __init__(self) -> None:
        self.trackers: list[Tracker] = []
        self.file: LineFile | None = None
        self._output = Path()
        self._is_trained = False

    @override
    def on_start(self, run: Run) -> None:
        """Open the file and start the trackers."""
        self._output = run.output
        if not run.session.is_main:
            return
        options = run.config.logging
        settings = {
            name: value
            for name, value in run.config.to_dict().items()
            if value is not None
        }
        tracked = TrackedRun(
            run.output,
            options.run_name,
            options.wandb_project,
            options.wandb_tags,
            settings,
            run.state.step,
        )
        for name in options.report_to:
            tracker = TRACKERS[name]()
            try:
                tracker.start(tracked)
            except ImportError as error:
                raise tracker.not_installed(f" ({error})") from error
            self.trackers.append(tracker)
        path = run.output / METRICS
        require_regular(path, "output_dir")
        self.file = LineFile(path)

    @override
    def on_log(self, values: Mapping[str, Any]) -> None:
        """Write one logged step to metrics.jsonl and its numbers to the trackers."""
        numbers = {f"train/{key}": value for key, value in _numbers(values).items()}
        self._write(values, numbers, int(values["step"]))

    @override
    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Write one evaluation."""
        line = {
            "step": evaluation.step,
            "epoch": evaluation.epoch,
            "eval": dict(evaluation.scores),
        }
        numbers = {}
        for key, score in evaluation.scores.items():
            numbers[f"eval/{key.replace('@', '_at_')}"] = score
        self._write(line, numbers, evaluation.step)

    @override
    def state(self) -> dict[str, Any]:
        """Flush the file to the disk: a checkpoint must not be newer than its lines. Return the file's length."""
        if self.file is None:
            return {}
        self.file.sync()
        return {"bytes": self.file.num_bytes}

    @override
    def on_finish(self, run: Run) -> None:
        """Close the file: the report reads it. The trackers get the report when it is written."""
        self._is_trained = True
        self._close_file()

    @override
    def close(self) -> None:
        """Close the file, send the report of a finished run to the trackers, and end them."""
        self._close_file()
        has_report = self._is_trained and (self._output / "report.html").is_file()
        for tracker in self.trackers:
            if has_report:
                try:
                    tracker.send_report(tracked_report(self._output))
                except (OSError, UserError) as error:
                    log.warning(
                        "report_to: %s did not take the report (%s)",
                        tracker.name,
                        error,
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
        text = json.dumps(_without_nan({**line, "time": round(time.time(), 3)}))
        self.file.write(text)
        for tracker in list(self.trackers):
            try:
                tracker.log(numbers, step)
            except OSError as error:
                self.trackers.remove(tracker)
                log.warning(
                    "report_to: %s failed and is disabled (%s); metrics.jsonl continues",
                    tracker.name,
                    error,
                )


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in nested values, with one name each."""
    numbers: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, bool) or key == "step":
            continue
        nested: dict[str, Any] = {}
        if isinstance(value, int | float):
            numbers[key] = float(value)
        elif isinstance(value, Mapping):
            nested = {key: value}
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            nested = {f"{key}/rank{rank}": entry for rank, entry in enumerate(value)}
        for prefix, entry in nested.items():
            for name, number in _numbers(entry).items():
                numbers[f"{prefix}/{name}"] = number
    return numbers


def _without_nan(value: Any) -> Any:
    """Replace non-finite values by null, since JSON has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in value]
    return value


def tracked_report(output: Path) -> TrackedReport:
    """Return the report of a finished run, for trackers."""
    record = read_run(output)
    steps = [evaluation.step for evaluation in record.evaluations]
    if record.steps:
        steps.append(int(record.steps[-1]["step"]))
    return TrackedReport(
        output / "report.html", report_picture(record), max(steps, default=0)
    )


def report_picture(record: RunRecord) -> np.ndarray:
    """Return [height, width, 3] uint8: the deciding score over the evaluations, and the loss over the steps."""
    lines = [line for line in record.steps if isinstance(line.get("loss"), float)]
    curve = Curve(
        "loss",
        "",
        [line["step"] for line in lines],
        [line["loss"] for line in lines],
        "{:.3g}".format,
    )
    pictures = [picture_svg(curve_svg(curve), "loss")]
    key = record.headline
    scored = [entry for entry in record.evaluations if key in entry.scores]
    if scored:
        name = metric_name(key)
        svg = evaluations_svg(
            [entry.step for entry in scored],
            [entry.scores[key] for entry in scored],
            name,
            None,
        )
        pictures.insert(0, picture_svg(svg, name))
    images = [np.asarray(picture_image(picture)) for picture in pictures]
    return np.concatenate(images, axis=1)
