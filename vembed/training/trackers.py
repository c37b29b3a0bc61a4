"""Trackers: services and formats that get the metrics of a run. Imports no torch and no service.

The accepted values of `report_to`, the notes on options without effect, the check that a tracker is installed, the
documentation and the contract tests follow from the class variables. The config reads these classes: import the
service inside methods.
"""

from __future__ import annotations

import json
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from vembed.declarations import check_parts
from vembed.errors import UserError


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run at its start."""

    output: Path
    name: str | None
    """The option `run_name`."""
    project: str
    tags: list[str]
    settings: Mapping[str, Any]
    """The options that are not null."""
    first_step: int
    """Steps that were done before; 0 in a new run."""

    @property
    def display_name(self) -> str:
        """`run_name`, or the name of the folder."""
        return self.name or self.output.resolve().name


class Tracker(ABC):
    """Base class of all trackers. One instance follows one run, on rank 0."""

    name: ClassVar[str]
    """Its name: `report_to: NAME`."""
    summary: ClassVar[str]
    """What it is, in one sentence, for the documentation."""
    spellings: ClassVar[str] = ""
    """Other names of it, separated by spaces."""
    package: ClassVar[str]
    """The package to install, and the module to import."""
    options: ClassVar[frozenset[str]] = frozenset()
    """Options that it reads."""
    tracker: Any
    """Accelerate's tracker, set by `start`."""

    @abstractmethod
    def start(self, run: TrackedRun) -> None:
        """Begin to follow a run."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Take the numbers of a step. An OSError disables the tracker."""
        self.tracker.log(values, step=step)

    def finish(self) -> None:
        """End the run."""
        self.tracker.finish()


class TensorBoard(Tracker):
    """Event files in tensorboard/ of the run's folder."""

    name = "tensorboard"
    summary = "Event files in `tensorboard/` of the run's folder; the default."
    spellings = "tb"
    package = "tensorboard"

    @override
    def start(self, run: TrackedRun) -> None:
        """Open an event file, with the options for the page HPARAMS."""
        from accelerate.tracking import TensorBoardTracker

        # TensorBoard names a run by its folder.
        folder = "tensorboard"
        if run.name:
            folder += f"/{run.name.replace('/', '_')}"
        # Drop what was logged after the checkpoint's step; in a new run, everything in the folder.
        purge_step = run.first_step + 1 if run.first_step else 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.tracker = TensorBoardTracker(
                folder, str(run.output), purge_step=purge_step
            )
        self.tracker.start()
        values = {}
        for name, value in run.settings.items():
            is_simple = isinstance(value, bool | int | float | str)
            values[name] = value if is_simple else json.dumps(value)
        # Into the same folder, or they would be a run of their own.
        self.tracker.writer.add_hparams(values, {}, run_name=".")


class Wandb(Tracker):
    """A run of Weights & Biases."""

    name = "wandb"
    summary = "Weights & Biases."
    spellings = "weights_and_biases"
    package = "wandb"
    options = frozenset({"wandb_project", "wandb_tags"})

    @override
    def start(self, run: TrackedRun) -> None:
        from accelerate.tracking import WandBTracker

        self.tracker = WandBTracker(
            run.project, name=run.display_name, tags=run.tags, config=run.settings
        )
        self.tracker.start()


class Trackio(Tracker):
    """A run of Trackio."""

    name = "trackio"
    summary = "Trackio, a local dashboard."
    package = "trackio"
    options = frozenset({"wandb_project"})

    @override
    def start(self, run: TrackedRun) -> None:
        from accelerate.tracking import TrackioTracker

        self.tracker = TrackioTracker(
            run.project, name=run.display_name, config=run.settings
        )
        self.tracker.start()


class Mlflow(Tracker):
    """A run of MLflow."""

    name = "mlflow"
    summary = "MLflow; the project is the experiment."
    package = "mlflow"
    options = frozenset({"wandb_project"})

    @override
    def start(self, run: TrackedRun) -> None:
        from accelerate.tracking import MLflowTracker

        self.tracker = MLflowTracker(run.project, run_name=run.display_name)
        self.tracker.start()
        self.tracker.store_init_configuration(dict(run.settings))


_CLASSES: tuple[type[Tracker], ...] = (TensorBoard, Wandb, Trackio, Mlflow)
check_parts(
    "tracker",
    Tracker,
    _CLASSES,
    lambda tracker: (tracker.name, *tracker.spellings.split()),
    needed=("name", "summary", "package"),
)
TRACKERS: dict[str, type[Tracker]] = {tracker.name: tracker for tracker in _CLASSES}
"""Name, as in the option `report_to` -> its tracker."""


def require_trackers(names: Sequence[str]) -> None:
    """Raise UserError with all of these trackers whose packages are not installed."""
    missing = []
    for name in names:
        package = TRACKERS[name].package
        if package not in sys.modules and find_spec(package) is None:
            missing.append(name)
    if missing:
        packages = " ".join(TRACKERS[name].package for name in missing)
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(
            f"report_to: {' and '.join(missing)} {verb} not installed: install {packages} (pip install {packages}), or "
            "leave out what is missing"
        )
