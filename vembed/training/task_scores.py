"""Scores of single tasks: the validation data of each task, scored with each evaluation."""

from __future__ import annotations

import logging

from typing_extensions import override

from vembed.evaluation.scores import evaluate_model
from vembed.training.hooks import Evaluation, Hook, Run

log = logging.getLogger("vembed")

PREFIX = "task/"
"""Of the names of a task's scores."""


class TaskScores(Hook):
    """Main score of each task that has validation data of its own. The run's own validation data choose the
    checkpoint."""

    @override
    def on_build(self, run: Run) -> None:
        self._run = run
        self._before: dict[str, float] = {}

    @override
    def on_evaluation(self, evaluation: Evaluation) -> str | None:
        run = self._run
        if not run.data.by_task:
            return None
        found: dict[str, float] = {}
        with run.hooks.evaluation_weights():
            for name, data in run.data.by_task.items():
                scores = evaluate_model(
                    run.parts.model,
                    run.parts.featuriser,
                    data,
                    run.config,
                    run.session,
                    dims=[],
                )
                found[f"{PREFIX}{name}/{data.metric}"] = scores[data.metric]
        if evaluation.step == 0:
            self._before = found
        for key, score in found.items():
            change = (
                f" ({score - self._before[key]:+.4f})"
                if evaluation.step and key in self._before
                else ""
            )
            log.info(
                "%s: %.4f%s", key.replace("/", " ", 1).replace("/", ": "), score, change
            )
        # The same dictionary goes to metrics.jsonl, the report and the model card.
        evaluation.scores.update(found)
        return None
