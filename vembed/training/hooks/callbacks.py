"""Callbacks: functions of the caller that are told of each step and each evaluation, as a hook of the loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vembed.errors import UserError
from vembed.training.hooks.base import Evaluation, Hook, StepReport

STOP = "stop"
"""Return value of a callback that ends the run after this step, with its model and its report."""


@dataclass(frozen=True)
class StepInfo:
    """Result of one optimizer step, as callbacks see it. The same on every rank."""

    step: int
    epoch: float
    loss: float
    learning_rate: float
    grad_norm: float


OnStep = Callable[[StepInfo], str | None]
OnEvaluation = Callable[[Evaluation], str | None]


class Callbacks(Hook):
    """The hook that calls a caller's functions."""

    def __init__(
        self, on_step: OnStep | None = None, on_evaluation: OnEvaluation | None = None
    ) -> None:
        self._on_step = on_step
        self._on_evaluation = on_evaluation

    def on_step(self, report: StepReport) -> str | None:
        """Call the function for steps."""
        if self._on_step is None:
            return None
        outcome = report.outcome
        info = StepInfo(
            report.step,
            report.epoch,
            outcome.loss,
            report.learning_rate,
            outcome.grad_norm,
        )
        return _reason("on_step", self._on_step(info))

    def on_evaluation(self, evaluation: Evaluation) -> str | None:
        """Call the function for evaluations."""
        if self._on_evaluation is None:
            return None
        return _reason("on_evaluation", self._on_evaluation(evaluation))


def _reason(name: str, answer: str | None) -> str | None:
    if answer not in (None, STOP):
        raise UserError(
            f"{name} returned {answer!r}: return {STOP!r} to end the run, or nothing"
        )
    return f"{name} returned {STOP!r}" if answer == STOP else None
