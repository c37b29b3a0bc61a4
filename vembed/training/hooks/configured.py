"""All hooks of a run: those that every run has, and those that the config asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from vembed.training.hooks.averaging import WeightAverage
from vembed.training.hooks.base import Hook
from vembed.training.hooks.checks import DataWatch, Watch
from vembed.training.hooks.display import (
    Profile,
    ProgressBar,
    SetupLines,
)
from vembed.training.hooks.evaluations import Guards, Patience, QueryRecord, TaskScores
from vembed.training.hooks.metrics import (
    Diagnostics,
    LossMeans,
    MetricsLog,
    StepCurves,
)
from vembed.training.hooks.mining import EpochMiner
from vembed.training.hooks.publishing import PushBest

if TYPE_CHECKING:
    from vembed.training.trainer import Trainer


def configured_hooks(run: Trainer, warmup_steps: int, console: Console) -> list[Hook]:
    """Return the hooks of a run, in the order of their calls."""
    config = run.config
    hooks: list[Hook] = []
    # Before those that write the scores, since some of these add scores.
    if config.optimizer.ema is not None:
        hooks.append(WeightAverage(config.optimizer.ema))
    if config.evaluation.guards:
        hooks.append(Guards())
    if config.data.mine is not None:
        hooks.append(EpochMiner(config.data.mine))
    if run.intervals.patience is not None:
        hooks.append(Patience(run.intervals.patience, warmup_steps))
    if config.logging.push_to_hub is not None:
        hooks.append(PushBest())  # after the guards, whose scores are in the card
    hooks.append(ProgressBar(console))
    if config.logging.profile_steps is not None:
        hooks.append(Profile(*config.logging.profile_steps))
    if run.data.by_task:
        hooks.append(TaskScores())
    if run.data.evaluation is not None:
        hooks.append(QueryRecord())
    hooks += [Diagnostics(), LossMeans(), DataWatch()]
    hooks += [StepCurves(), SetupLines(), Watch(), MetricsLog()]
    return hooks
