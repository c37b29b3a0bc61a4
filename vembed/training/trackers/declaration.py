"""Tracker: a service or a format that gets the metrics of a run. Imports no torch and no service.

A tracker is one class in one file of this folder, listed in `table.py`. The accepted
values of `report_to`, the notes on options without effect, the check that it is
installed, the documentation and the contract tests follow from its class variables.
The config reads these classes: import the service inside methods.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vembed.errors import UserError

if TYPE_CHECKING:
    import numpy as np

REPORT = "report"
REPORT_PICTURE = "report/picture"


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class TrackedReport:
    """The report of a finished run."""

    page: Path
    """report.html; report.md is beside it."""
    picture: np.ndarray
    """[height, width, 3] uint8: the deciding score over the evaluations, and the loss over the steps."""
    step: int


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

    @abstractmethod
    def start(self, run: TrackedRun) -> None:
        """Begin to follow a run."""

    @abstractmethod
    def log(self, values: dict[str, float], step: int) -> None:
        """Take the numbers of a step. An OSError disables the tracker."""

    @abstractmethod
    def send_report(self, report: TrackedReport) -> None:
        """Take the report of a finished run."""

    @abstractmethod
    def finish(self) -> None:
        """End the run."""

    @classmethod
    def is_installed(cls) -> bool:
        """Return whether its package is installed."""
        return cls.package in sys.modules or find_spec(cls.package) is not None

    @classmethod
    def not_installed(cls, reason: str = "") -> UserError:
        """Return the error for a package that is not installed."""
        return UserError(
            f"report_to: {cls.name} is not installed{reason}: install it (pip install {cls.package}), or leave it out"
        )


class AccelerateTracker(Tracker):
    """Base class of trackers that Accelerate has."""

    tracker: Any

    def log(self, values: dict[str, float], step: int) -> None:
        """Take the numbers of a step."""
        self.tracker.log(values, step=step)

    def finish(self) -> None:
        """End the run."""
        self.tracker.finish()
