"""Logging of a run: console, training_log.txt, metrics.jsonl, trackers. Only rank 0 logs, unless debug is on."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from vembed.config.schema import TrainConfig
from vembed.errors import UserError
from vembed.training.console import ConsoleHandler, config_console
from vembed.training.hooks import Evaluation, Hook, Run, StepReport
from vembed.training.outlets import LineFile, LogFile, ResilientStream
from vembed.training.tracker_report import send_report

log = logging.getLogger("vembed")
SECRET_MARKS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "CREDENTIAL")
"""Substrings of environment variable names. The values of matching variables are never logged."""
MIN_SECRET_LENGTH = 8


class SafeFormatter(logging.Formatter):
    """Formatter that replaces the values of secret environment variables, in messages and tracebacks."""

    def __init__(self, pattern: str) -> None:
        super().__init__(pattern, "%Y-%m-%d %H:%M:%S")
        self.secrets = [
            value
            for name, value in os.environ.items()  # what is secret is known by the variable that holds it
            if any(mark in name.upper() for mark in SECRET_MARKS)
            and len(value) >= MIN_SECRET_LENGTH
        ]

    def format(self, record: logging.LogRecord) -> str:
        """Return the line with secrets replaced."""
        line = super().format(record)
        for secret in self.secrets:
            line = line.replace(secret, "***")
        return line


@dataclass(frozen=True, slots=True)
class Outlets:
    """Console and log file of a run."""

    console: Console
    file: LogFile | None
    """The log file, on rank 0."""

    def begin(self) -> None:
        """Write the log file from here on, with the lines so far. Raise UserError if it cannot be written to."""
        if self.file is not None:
            _begin(self.file)


@contextmanager
def run_logging(config: TrainConfig, rank: int) -> Iterator[Outlets]:
    """Send the lines of logger "vembed" to the console and the run's files while the with-block runs."""
    output = Path(config.run.output_dir)
    plain = SafeFormatter("%(asctime)s %(levelname)s %(message)s")
    handlers: list[logging.Handler] = []
    file: LogFile | None = None
    # Python has no stdout where the caller has closed it.
    stream = ResilientStream(sys.stdout or io.StringIO())
    console = Console(file=cast(TextIO, stream), quiet=rank != 0)
    if rank == 0:
        screen = ConsoleHandler(console, stream, config_console(config))
        screen.setFormatter(SafeFormatter("%(message)s"))
        screen.setLevel(logging.INFO)
        file = LogFile(output / config.logging.log_file)
        file.setFormatter(plain)
        file.setLevel(logging.DEBUG if config.logging.debug else logging.INFO)
        handlers += [screen, file]
    if config.logging.debug:
        own = LogFile(output / "logs" / f"rank-{rank}.log")
        own.setFormatter(plain)
        _begin(own)  # it is read when a start hangs
        handlers.append(own)
    before = log.level, log.propagate
    log.setLevel(logging.DEBUG if config.logging.debug else logging.INFO)
    log.propagate = False
    for handler in handlers:
        log.addHandler(handler)
    if not handlers:
        log.addHandler(logging.NullHandler())
    try:
        yield Outlets(console, file)
    finally:
        for handler in list(log.handlers):
            log.removeHandler(handler)
            handler.close()
        log.setLevel(before[0])
        log.propagate = before[1]


def _begin(file: LogFile) -> None:
    path = Path(file.baseFilename)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file.begin()
    except OSError as error:
        raise UserError(
            f"output_dir: {path} cannot be written to ({error.strerror}); give a folder that every process may write "
            "to, on a disk with room"
        ) from error


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
