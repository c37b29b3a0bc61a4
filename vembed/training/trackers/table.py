"""All trackers. A new one is one more file, and one more entry here."""

from __future__ import annotations

from collections.abc import Sequence

from vembed.errors import UserError
from vembed.training.trackers.declaration import Tracker
from vembed.training.trackers.mlflow import Mlflow
from vembed.training.trackers.tensorboard import TensorBoard
from vembed.training.trackers.trackio import Trackio
from vembed.training.trackers.wandb import Wandb

_TRACKERS: tuple[type[Tracker], ...] = (TensorBoard, Wandb, Trackio, Mlflow)
TRACKERS: dict[str, type[Tracker]] = {tracker.name: tracker for tracker in _TRACKERS}


def require_trackers(names: Sequence[str]) -> None:
    """Raise UserError with all of these trackers whose packages are not installed."""
    missing = [name for name in names if not TRACKERS[name].is_installed()]
    if missing:
        packages = " ".join(TRACKERS[name].package for name in missing)
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(
            f"report_to: {' and '.join(missing)} {verb} not installed: install {packages} (pip install {packages}), or "
            "leave out what is missing"
        )
