"""Metrics of the steps: what the hooks add to each logged line, and metrics.jsonl with its trackers."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vembed.config.schema import TrainConfig
from vembed.config.terms import task_names
from vembed.data.batching.rank_batch import RankBatch
from vembed.errors import UserError
from vembed.evaluation.report.pictures import picture_image, picture_svg
from vembed.evaluation.report.plots import Curve, curve_svg, evaluations_svg
from vembed.evaluation.report.record import RunRecord, metric_name, read_run
from vembed.parallel import collectives
from vembed.parallel.memory import memory_snapshot
from vembed.progress import duration
from vembed.training.hooks.base import Evaluation, Hook, Run, StepReport
from vembed.training.run_log import LineFile
from vembed.training.step import BatchResult

log = logging.getLogger("vembed")

MAX_COLUMNS = 100
"""Length of a step's log line."""
SLOW_RANK = 1.2
"""Ratio of a rank's own working time to the median's from which the log line names it as slow."""


@dataclass
class Window:
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
    """Speed, padding, time per phase and memory of every rank. Time between two steps (evaluation, saving) is not
    counted."""

    def __init__(self) -> None:
        self.window = Window()
        self._began = 0.0

    def on_start(self, run: Run) -> None:
        """Take the device and the timer of the run."""
        self._device, self._timer = run.session.device, run.step.timer

    def before_step(self, step: int) -> None:
        """Start timing a step."""
        del step
        self._began = time.perf_counter()

    def on_step(self, report: StepReport) -> None:
        """Count a step."""
        for rank_batch, result in report.batches:
            self.window.add(rank_batch, result)
        self.window.num_steps += 1
        self.window.seconds += time.perf_counter() - self._began

    def figures(self, report: StepReport) -> dict[str, Any]:
        """Return the figures of all ranks since the last call. Collective; the same on every rank."""
        del report
        window, self.window = self.window, Window()
        seconds = max(window.seconds, 1e-9)
        phases = self._timer.take()
        mine = {
            "seconds": {name: round(value, 6) for name, value in phases.items()},
            "counts": [
                window.num_examples,
                window.num_inputs,
                window.num_distinct,
                window.useful_tokens,
                window.padded_tokens,
            ],
            "forwards": window.num_forwards,
            "memory": memory_snapshot(self._device),
        }
        ranks = collectives.gather_objects_as_json(mine)
        examples, inputs, distinct, useful, padded = (
            sum(rank["counts"][i] for rank in ranks) for i in range(5)
        )
        # Time in collectives is excluded: it includes waiting for the slowest rank, so it would hide which one that is.
        work = [
            sum(rank["seconds"].values()) - rank["seconds"]["wait"] for rank in ranks
        ]
        slowest = max(range(len(work)), key=work.__getitem__)
        return {
            "samples_per_second": examples / seconds,
            "tokens_per_second": useful / seconds,
            "step_seconds": seconds / max(window.num_steps, 1),
            "padding_fraction": 1 - useful / padded if padded else 0.0,
            "duplicate_fraction": 1 - distinct / inputs if inputs else 0.0,
            "seconds": [rank["seconds"] for rank in ranks],
            "tokens": [rank["counts"][3] for rank in ranks],
            "padding": [
                1 - rank["counts"][3] / rank["counts"][4] if rank["counts"][4] else 0.0
                for rank in ranks
            ],
            "forwards": [rank["forwards"] for rank in ranks],
            "skew": max(work) / max(sorted(work)[len(work) // 2], 1e-9),
            "slowest_rank": slowest,
            "memory": [
                {"rank": rank, **entry["memory"]} for rank, entry in enumerate(ranks)
            ],
        }


def log_line(values: dict[str, Any], total_steps: int, seconds_left: float) -> str:
    """Return the log line of one step, of at most 100 columns. All figures are in metrics.jsonl."""
    rate = values["samples_per_second"]
    line = (
        f"step {values['step']:,d}/{total_steps:,d}  loss {values['loss']:.4f}  lr {values['learning_rate']:.1e}  "
        f"grad {values['grad_norm']:.3g}  {f'{rate:,.0f}' if rate >= 100 else f'{rate:.3g}'} samples/s  "
        f"left {duration(seconds_left)}"
    )
    for name, value in values.items():
        part = (
            f"  {name.removeprefix('loss/')} {value:.4f}"
            if name.startswith("loss/")
            else ""
        )
        line += part if len(line + part) <= MAX_COLUMNS else ""
    slow = f"  rank {values['slowest_rank']} slow"
    if (
        len(values["memory"]) > 1
        and values["skew"] > SLOW_RANK
        and len(line + slow) <= MAX_COLUMNS
    ):
        line += slow
    return line


class LossesBySource(Hook):
    """Mean loss of each task since the last log line; of runs with several sources and homogeneous batches. A source is
    a task of its own, unless `homogeneous_batches: task` joins it with others."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def on_start(self, run: Run) -> None:
        """Take the names of the sources."""
        if run.config.data.homogeneous_batches and len(run.data.examples.names) > 1:
            self._names = tuple(task_names(run.config, run.data.examples.names))

    def on_step(self, report: StepReport) -> None:
        """Count the batches of a step."""
        for rank_batch, result in report.batches if self._names else ():
            task = self._names[rank_batch.source]
            before = self._sums.get(task)
            share = result.loss_share.detach().to(torch.float64)
            self._sums[task] = share if before is None else before + share
            self._counts[task] = self._counts.get(task, 0) + 1

    def figures(self, report: StepReport) -> Mapping[str, Any]:
        """Return the mean losses since the last call. Collective; the same on every rank."""
        del report
        # All ranks have had the same tasks, in the same steps.
        tasks = sorted(self._sums)
        if not tasks:
            return {}
        totals = collectives.sum_scalars([float(self._sums[task]) for task in tasks])
        means = {
            f"loss/{task}": total / self._counts[task]
            for task, total in zip(tasks, totals, strict=True)
        }
        self._sums, self._counts = {}, {}
        return means


class LossesByTerm(Hook):
    """Mean of each term of `losses` since the last log line, without its weight; by task where each batch is of one
    task."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._sums: dict[tuple[str, str], Tensor] = {}
        self._counts: dict[tuple[str, str], int] = {}

    def on_start(self, run: Run) -> None:
        """Take the names of the sources."""
        if run.config.data.homogeneous_batches and len(run.data.examples.names) > 1:
            self._names = tuple(task_names(run.config, run.data.examples.names))

    def on_step(self, report: StepReport) -> None:
        """Add the terms of a step."""
        for rank_batch, result in report.batches:
            for name, value in result.terms.items():
                key = (self._names[rank_batch.source] if self._names else "", name)
                share = value.detach().to(torch.float64)
                before = self._sums.get(key)
                self._sums[key] = share if before is None else before + share
                self._counts[key] = self._counts.get(key, 0) + 1

    def figures(self, report: StepReport) -> Mapping[str, Any]:
        """Return the means since the last call. Collective; the same on every rank."""
        del report
        # All ranks have had the same tasks, and so the same terms, in the same order.
        keys = list(self._sums)
        if not keys:
            return {}
        totals = collectives.sum_scalars([float(self._sums[key]) for key in keys])
        means = {
            f"loss/{task}/{name}" if task else f"loss/{name}": total
            / self._counts[task, name]
            for (task, name), total in zip(keys, totals, strict=True)
        }
        self._sums, self._counts = {}, {}
        return means


class AuxiliaryFigures(Hook):
    """Mean of each auxiliary loss since the last log line, by name."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._num = 0

    def on_step(self, report: StepReport) -> None:
        """Add the losses of a step."""
        for _, result in report.batches:
            self._num += 1
            for name, value in result.auxiliary.items():
                self._sums[name] = self._sums.get(name, 0.0) + value

    def figures(self, report: StepReport) -> Mapping[str, float]:
        """Return the means since the last call. They are those of the global batch, the same on every rank."""
        del report
        means = {
            f"loss/{name}": value / self._num for name, value in self._sums.items()
        }
        self._sums, self._num = {}, 0
        return means


class StepCurves(Hook):
    """Figures of the steps since the last logged line, which metrics.jsonl gets with it: the report draws them all."""

    name = "step_curves"

    def __init__(self) -> None:
        self._steps: list[list[float]] = []

    def on_step(self, report: StepReport) -> None:
        """Keep one step."""
        self._steps.append(
            [
                report.step,
                report.outcome.loss,
                report.learning_rate,
                report.outcome.grad_norm,
            ]
        )

    def figures(self, report: StepReport) -> dict[str, Any]:
        """Return [step, loss, learning rate, gradient norm] of each step since the last logged one."""
        del report
        steps, self._steps = self._steps, []
        return {"steps": steps}

    def state(self) -> dict[str, Any]:
        """Return the steps that no line has yet."""
        return {"steps": self._steps} if self._steps else {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over the steps."""
        self._steps = [list(step) for step in state["steps"]]


class Metrics(Hook):
    """metrics.jsonl and the trackers. On ranks other than 0 every call is a no-op."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.trackers: list[Any] = []
        self.file: LineFile | None = None
        self.is_trained = False

    def on_start(self, run: Run) -> None:
        """Open the file and start the trackers."""
        if run.session.is_main:
            self.trackers = [
                _start_tracker(name, self.config, run.state.step)
                for name in self.config.logging.report_to
            ]
            self.file = LineFile(Path(self.config.run.output_dir) / "metrics.jsonl")

    def on_log(self, values: Mapping[str, Any]) -> None:
        """Write one logged step to metrics.jsonl and its numbers to the trackers."""
        line = {**values, "time": _now()}
        self._write(
            line,
            {f"train/{key}": value for key, value in _numbers(values).items()},
            int(values["step"]),
        )

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Write one evaluation."""
        step, scores = evaluation.step, evaluation.scores
        line = {
            "step": step,
            "epoch": evaluation.epoch,
            "eval": dict(scores),
            "time": _now(),
        }
        self._write(
            line,
            {
                f"eval/{key.replace('@', '_at_')}": value
                for key, value in scores.items()
            },
            step,
        )

    def state(self) -> dict[str, Any]:
        """Flush the file to the disk: a checkpoint must not be newer than its lines. There is no state."""
        if self.file is not None:
            self.file.sync()
        return {}

    def on_finish(self, run: Run) -> None:
        """Close the file: the report reads it. The trackers get the report when it is written."""
        del run
        self.is_trained = True
        self._close_file()

    def close(self) -> None:
        """Close the file, send the report of a finished run to the trackers, and end them."""
        self._close_file()
        has_report = (
            self.is_trained
            and (Path(self.config.run.output_dir) / "report.html").is_file()
        )
        for tracker in self.trackers:
            if has_report:
                try:
                    send_report(tracker, self.config.run.output_dir)
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
        self, line: Mapping[str, Any], flat: Mapping[str, float], step: int
    ) -> None:
        if self.file is None:
            return
        # A line without a newline was cut by a crash; resuming drops it.
        self.file.write(json.dumps(_finite(line)))
        for tracker in list(self.trackers):
            try:
                tracker.log(dict(flat), step=step)
            except OSError as error:
                self.trackers.remove(tracker)
                log.warning(
                    "report_to: %s failed and is disabled (%s); metrics.jsonl continues",
                    tracker.name,
                    error,
                )


def require_trackers(config: TrainConfig) -> None:
    """Raise UserError if a tracker of `report_to` is not installed. Called before a model is loaded."""
    for name in config.logging.report_to:
        if name not in sys.modules and find_spec(name) is None:
            raise UserError(
                f"report_to: {name} is not installed: install it (pip install {name}), or leave it out"
            )


def _start_tracker(name: str, config: TrainConfig, first_step: int) -> Any:
    """Start one of Accelerate's trackers with the run's settings."""
    from accelerate import tracking

    run = config.logging.run_name or Path(config.run.output_dir).resolve().name
    settings = {
        key: value for key, value in config.to_dict().items() if value is not None
    }
    try:
        if name == "tensorboard":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                # Purge what was logged after the checkpoint's step; in a new run, everything in the folder.
                purge = first_step + 1 if first_step else 0
                # TensorBoard names a run by its folder.
                folder = "tensorboard" + (
                    f"/{config.logging.run_name.replace('/', '_')}"
                    if config.logging.run_name
                    else ""
                )
                _await_a_new_second(Path(config.run.output_dir) / folder)
                tracker = tracking.TensorBoardTracker(
                    folder, config.run.output_dir, purge_step=purge
                )
        elif name == "wandb":
            tracker = tracking.WandBTracker(
                config.logging.wandb_project,
                name=run,
                tags=config.logging.wandb_tags,
                config=settings,
            )
        elif name == "mlflow":
            tracker = tracking.MLflowTracker(config.logging.wandb_project, run_name=run)
        else:
            tracker = tracking.TrackioTracker(
                config.logging.wandb_project, name=run, config=settings
            )
        tracker.start()
        if name == "tensorboard":
            _write_hyperparameters(tracker.writer, settings)
        elif name == "mlflow":
            tracker.store_init_configuration(settings)
    except ImportError as error:
        raise UserError(
            f"report_to: {name} is not installed ({error}); install it (pip install {name}) or set report_to: none"
        ) from error
    return tracker


def _write_hyperparameters(writer: Any, settings: Mapping[str, Any]) -> None:
    """Write the run's options for TensorBoard's HPARAMS page, into the run's own file."""
    from torch.utils.tensorboard.summary import hparams

    values = {
        key: value if isinstance(value, bool | int | float | str) else json.dumps(value)
        for key, value in settings.items()
    }
    for summary in hparams(values, {}):  # type: ignore[no-untyped-call]
        writer._get_file_writer().add_summary(summary)


def _now() -> float:
    """Return the time of a line, in seconds since 1970."""
    return round(time.time(), 3)


def _await_a_new_second(folder: Path) -> None:
    """Wait for the next clock second. TensorBoard sorts its files by name, which begins with the second of their
    start. With two files of one second the order is undefined, and the older file could hide steps of the newer one."""
    while any(folder.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
        time.sleep(0.05)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    flat: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, bool) or key == "step":
            continue
        if isinstance(value, int | float):
            flat[key] = float(value)
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for rank, entry in enumerate(value):
                flat |= {
                    f"{key}/rank{rank}/{name}": number
                    for name, number in _numbers(entry).items()
                }
        elif isinstance(value, Mapping):
            flat |= {
                f"{key}/{name}": number for name, number in _numbers(value).items()
            }
    return flat


def _finite(value: Any) -> Any:
    """Replace non-finite values by null, since JSON has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    return (
        [_finite(entry) for entry in value]
        if isinstance(value, list | tuple)
        else value
    )


NAME = "report"
PICTURE = "report/picture"


def send_report(tracker: Any, output_dir: str | Path) -> None:
    """Send the report of a run to one of Accelerate's trackers. `tracker.name` says which."""
    folder = Path(output_dir)
    page = folder / "report.html"
    record = read_run(folder)
    picture, step = (
        report_picture(record),
        max((one.step for one in record.evaluations), default=0),
    )
    step = max(step, *(int(line["step"]) for line in record.steps[-1:]), 0)
    if tracker.name == "tensorboard":
        tracker.writer.add_text(
            NAME, (folder / "report.md").read_text(encoding="utf-8"), step
        )
        tracker.writer.add_image(PICTURE, picture, step, dataformats="HWC")
    elif tracker.name == "mlflow":
        from PIL import Image

        tracker.log_artifact(str(page))
        place = folder / "report.png"
        Image.fromarray(picture).save(place)
        tracker.log_artifact(str(place))
        place.unlink()
    elif tracker.name == "wandb":
        import wandb

        tracker.run.log(
            {
                NAME: wandb.Html(page.read_text(encoding="utf-8")),
                PICTURE: wandb.Image(picture),
            },
            step=step,
        )
    else:
        import trackio

        tracker.run.log({PICTURE: trackio.Image(picture)}, step=step)


def report_picture(record: RunRecord) -> np.ndarray:
    """Return [height, width, 3] uint8: the deciding score over the evaluations, and the loss over the steps."""
    key = record.headline
    scores = [
        (one.step, one.scores[key]) for one in record.evaluations if key in one.scores
    ]
    losses = [
        (line["step"], line["loss"])
        for line in record.steps
        if isinstance(line.get("loss"), float)
    ]
    curve = Curve(
        "loss",
        "",
        [step for step, _ in losses],
        [loss for _, loss in losses],
        "{:.3g}".format,
    )
    plots = [picture_svg(curve_svg(curve), "loss")]
    if scores:
        name = metric_name(key)
        svg = evaluations_svg(
            [step for step, _ in scores], [score for _, score in scores], name, None
        )
        plots.insert(0, picture_svg(svg, name))
    return np.concatenate([np.asarray(picture_image(one)) for one in plots], axis=1)
