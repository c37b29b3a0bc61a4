"""Hooks that the config asks for."""

from __future__ import annotations

from vembed.config.schema import TrainConfig
from vembed.training.averaging import WeightAverage
from vembed.training.guards import Guards
from vembed.training.hooks import Hook


def configured_hooks(config: TrainConfig) -> list[Hook]:
    """Return the hooks of the options `ema` and `guards`."""
    hooks: list[Hook] = []
    if config.ema is not None:
        hooks.append(WeightAverage(config.ema))
    if config.guards:
        hooks.append(Guards(config))
    return hooks
