"""All trackers. A new one is one more file, and one more entry here."""

from __future__ import annotations

from vembed.training.trackers.declaration import Tracker
from vembed.training.trackers.mlflow import Mlflow
from vembed.training.trackers.tensorboard import TensorBoard
from vembed.training.trackers.trackio import Trackio
from vembed.training.trackers.wandb import Wandb

_TRACKERS: tuple[type[Tracker], ...] = (TensorBoard, Wandb, Trackio, Mlflow)
TRACKERS: dict[str, type[Tracker]] = {tracker.name: tracker for tracker in _TRACKERS}
