"""Guards: evaluation data of other abilities; a run that loses too much on one ends with the checkpoint that held."""

from __future__ import annotations

import logging
from typing import Any

from typing_extensions import override

from vembed.config.entries import Guard
from vembed.config.schema import TrainConfig
from vembed.errors import RunError
from vembed.evaluation.dataset import EvalData, open_eval_data
from vembed.evaluation.scores import evaluate_model
from vembed.training.hooks import Evaluation, Hook, Run

log = logging.getLogger("vembed")

PREFIX = "guard/"
"""Of the names of a guard's scores."""


class Guards(Hook):
    """All guards of a run, scored with each evaluation."""

    name = "guards"

    def __init__(self, config: TrainConfig) -> None:
        self._data: list[tuple[str, Guard, EvalData]] = [
            (one.label, one, open_eval_data(config, one.path))
            for one in config.evaluation.listed_guards()
        ]
        self._before: dict[str, float] = {}

    @override
    def on_build(self, run: Run) -> None:
        self._run = run
        for name, guard, data in self._data:
            log.info(
                "guard %s: %s; may fall by %g", name, data.summary(), guard.max_drop
            )

    @override
    def on_start(self, run: Run) -> None:
        if not self._before:
            self._before = self._scores()

    @override
    def on_evaluation(self, evaluation: Evaluation) -> str | None:
        found = self._before if evaluation.step == 0 else self._scores()
        # The same dictionary goes to metrics.jsonl, the report and the model card.
        evaluation.scores.update({PREFIX + key: value for key, value in found.items()})
        fallen = []
        for name, guard, data in self._data:
            key = f"{name}/{data.metric}"
            change = found[key] - self._before[key]
            log.info(
                "guard %s: %s %.4f (%+.4f; may fall by %g)",
                name,
                data.metric,
                found[key],
                change,
                guard.max_drop,
            )
            if -change > guard.max_drop:
                fallen.append(
                    f"{key} fell from {self._before[key]:.4f} to {found[key]:.4f}, by more than "
                    f"{guard.max_drop:g}"
                )
        state, rhythm = self._run.state, self._run.rhythm
        if fallen:
            state.fell = f"guard after step {evaluation.step:,d}: {'; '.join(fallen)}"
            return state.fell
        state.fell = None  # of a run that was resumed after a guard had ended it
        is_due = (
            rhythm.save_steps is not None and evaluation.step % rhythm.save_steps == 0
        )
        has_checkpoint = is_due and not state.skipped_in_a_row  # skipped steps get none
        takes_best = rhythm.keeps_best and state.best_step is not None
        if evaluation.step > 0 and has_checkpoint:
            state.held_step, state.held_scores = evaluation.step, evaluation.scores
        if takes_best and state.held_step is not None:
            state.held_step, state.held_scores = state.best_step, state.best_scores
        return None

    @override
    def state(self) -> dict[str, Any]:
        return {"before": self._before}

    @override
    def load_state(self, state: dict[str, Any]) -> None:
        if set(state["before"]) == {
            f"{name}/{data.metric}" for name, _, data in self._data
        }:
            self._before = dict(state["before"])
        else:
            log.info(
                "guards have changed: they are measured against the weights of now"
            )

    @override
    def on_finish(self, run: Run) -> None:
        if run.state.fell is not None and run.state.held_step is None:
            raise RunError(
                f"{run.state.fell}; no checkpoint held before: lower learning_rate, evaluate and save more often "
                "(eval_steps, save_steps), or allow more (max_drop)"
            )

    def _scores(self) -> dict[str, float]:
        run, found = self._run, {}
        with run.hooks.evaluation_weights():
            for name, _, data in self._data:
                scores = evaluate_model(
                    run.parts.model,
                    run.parts.featuriser,
                    data,
                    run.config,
                    run.session,
                    dims=[],
                )
                found[f"{name}/{data.metric}"] = scores[data.metric]
        return found
