"""What a tracker is, and what it is told of a run. Imports no torch and no service.

The accepted values of `report_to`, the notes on options without effect, the check that a tracker is installed and the
contract tests follow from the class variables. The config reads these classes: import the service inside methods.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar


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
    """What it is, in one sentence."""
    spellings: ClassVar[str] = ""
    """Other names of it, separated by spaces."""
    package: ClassVar[str | None] = None
    """The module to import, which the extra of the tracker's name installs. None: nothing to install."""
    options: ClassVar[frozenset[str]] = frozenset()
    """Options that it reads."""

    @abstractmethod
    def start(self, run: TrackedRun) -> None:
        """Begin to follow a run."""

    @abstractmethod
    def log(self, values: dict[str, float], step: int) -> None:
        """Take the numbers of a step ("train/loss") or of an evaluation ("eval/ndcg@10"). Their names may differ from call
        to call. An OSError disables the tracker."""

    @abstractmethod
    def finish(self) -> None:
        """End the run."""
