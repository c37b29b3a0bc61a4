"""Hooks that the config asks for."""

from __future__ import annotations

from vembed.config.rhythm import Rhythm, starts_from_nothing
from vembed.config.schema import TrainConfig
from vembed.training.hooks.averaging import WeightAverage
from vembed.training.hooks.base import Hook
from vembed.training.hooks.checks import FirstLoss
from vembed.training.hooks.display import RunningReport
from vembed.training.hooks.evaluations import Guards, Patience
from vembed.training.hooks.mining import EpochMiner
from vembed.training.hooks.publishing import PushBest
from vembed.training.schedule import Schedule


def configured_hooks(
    config: TrainConfig, rhythm: Rhythm, schedule: Schedule
) -> list[Hook]:
    """Return the hooks of `ema`, `guards`, `mine`, `patience`, `report_every`, `push_to_hub` and `from_scratch`."""
    hooks: list[Hook] = []
    if starts_from_nothing(config):
        hooks.append(FirstLoss())
    if config.optimizer.ema is not None:
        hooks.append(WeightAverage(config.optimizer.ema))
    if config.evaluation.guards:
        hooks.append(Guards(config))
    if config.data.mine is not None:
        hooks.append(EpochMiner(config.data.mine))
    if rhythm.patience is not None:
        hooks.append(Patience(rhythm.patience, schedule.warmup_steps))
    if config.logging.report_every is not None:
        hooks.append(RunningReport(config.logging.report_every))
    if config.logging.push_to_hub is not None:
        hooks.append(PushBest(config))  # after the guards, whose scores are in the card
    return hooks
