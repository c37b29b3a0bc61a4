"""The trackers that vembed has: services and files that get the metrics of a run.

A new tracker needs its class in a file of this folder and its entry in the list below. This module imports no torch,
because the config reads it.
"""

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from vembed.declarations import check_parts, text_of_values
from vembed.errors import UserError
from vembed.training.trackers.accelerate_trackers import (
    Mlflow,
    TensorBoard,
    Trackio,
    Wandb,
)
from vembed.training.trackers.base import Tracker

_CLASSES: tuple[type[Tracker], ...] = (
    TensorBoard,
    Wandb,
    Trackio,
    Mlflow,
)
check_parts(
    "tracker",
    Tracker,
    _CLASSES,
    lambda tracker: (tracker.name, *tracker.spellings.split()),
    needed=("name", "summary"),
    taken_names=("none", "all"),
)
TRACKERS: dict[str, type[Tracker]] = {tracker.name: tracker for tracker in _CLASSES}
"""Name, as in the option `report_to` -> its tracker."""
TRACKER_TEXT = text_of_values(
    "Trackers. `none` for no tracker.",
    {name: tracker.summary for name, tracker in TRACKERS.items()},
)
"""Text of the option `report_to`."""


def require_trackers(names: Sequence[str]) -> None:
    """Raise UserError with all of these trackers whose packages are not installed."""
    missing = []
    for name in names:
        package = TRACKERS[name].package
        if package is None or package in sys.modules:
            continue
        if find_spec(package) is None:
            missing.append(name)
    if missing:
        names = ",".join(missing)
        raise UserError(
            f"report_to names trackers that are not installed: pip install 'vembed[{names}]', or leave out {names}"
        )
