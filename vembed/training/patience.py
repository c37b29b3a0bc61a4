"""Patience: ends a run whose score has stopped rising (`patience`)."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from vembed.training.hooks import Evaluation, Hook


class Patience(Hook):
    """Counter of the evaluations since the best score. Those in the warm-up do not count."""

    name = "patience"

    def __init__(self, patience: int, warmup_steps: int) -> None:
        self.patience = patience
        self.warmup_steps = warmup_steps
        self._best: float | None = None
        self._best_step = 0
        self._count = 0

    @override
    def on_evaluation(self, evaluation: Evaluation) -> str | None:
        score = evaluation.scores[evaluation.metric]
        if evaluation.step == 0:
            return None
        if self._best is None or score > self._best:
            self._best, self._best_step, self._count = score, evaluation.step, 0
        elif evaluation.step > self.warmup_steps:
            self._count += 1
        if self._count < self.patience:
            return None
        return (
            f"patience: {self.patience} evaluations since step {self._best_step:,d} found no {evaluation.metric} above "
            f"{self._best:.4f}"
        )

    @override
    def state(self) -> dict[str, Any]:
        return {"best": self._best, "best_step": self._best_step, "count": self._count}

    @override
    def load_state(self, state: dict[str, Any]) -> None:
        self._best, self._best_step, self._count = (
            state["best"],
            state["best_step"],
            state["count"],
        )
