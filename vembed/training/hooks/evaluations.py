"""Hooks on evaluations: patience, guards, scores of tasks, and the results of each query."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from typing_extensions import override

from vembed.config.entries import Guard
from vembed.config.schema import TrainConfig
from vembed.errors import RunError
from vembed.evaluation.dataset import EvalData, RetrievalData, open_eval_data
from vembed.evaluation.query_results import EMBEDDED, named, write_content
from vembed.evaluation.report.query_changes import (
    FOLDER,
    compare_results,
    path_of,
    read_queries,
)
from vembed.evaluation.report.record import TABLE
from vembed.evaluation.report.thumbnails import thumbnail_of
from vembed.evaluation.scores import evaluate_model
from vembed.training.hooks.base import Evaluation, Hook, Run

log = logging.getLogger("vembed")


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


GUARD_PREFIX = "guard/"
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
        evaluation.scores.update(
            {GUARD_PREFIX + key: value for key, value in found.items()}
        )
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


TASK_PREFIX = "task/"
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
                found[f"{TASK_PREFIX}{name}/{data.metric}"] = scores[data.metric]
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


class QueryRecord(Hook):
    """Files of the evaluations before training, of the best step and of the newest one. Other steps' are removed."""

    def on_start(self, run: Run) -> None:
        """Take the run's data, and remove the files of steps that a resumed run repeats."""
        self._data = run.data.evaluation if run.session.is_main else None
        self._output, self._best = Path(run.config.run.output_dir), run.state.best_step
        if run.session.is_main:
            for path in (self._output / FOLDER).glob("step-*.json"):
                if int(path.stem.removeprefix("step-")) > run.state.step:
                    path.unlink()

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Write one evaluation."""
        if evaluation.is_best:
            self._best = evaluation.step
        if not isinstance(self._data, RetrievalData) or evaluation.queries is None:
            return
        kept = {
            path_of(self._output, step)
            for step in (0, self._best, evaluation.step)
            if step is not None
        }
        try:
            metrics = dict.fromkeys((evaluation.metric, *TABLE))
            content = evaluation.queries.content(self._data, list(metrics))
            content["pictures"] = self._pictures(content, evaluation.metric)
            write_content(path_of(self._output, evaluation.step), content)
            for path in (self._output / FOLDER).glob("step-*.json"):
                if path not in kept:
                    path.unlink()
        except OSError as error:
            log.warning(
                "the results of the queries could not be written (%s); the report lacks them",
                error,
            )

    def _pictures(self, content: dict[str, Any], metric: str) -> dict[str, str]:
        """Return thumbnails of the images that the data hold themselves, of the queries that changed most. The report
        is written from the run's folder, where only images with paths can be read again."""
        assert isinstance(self._data, RetrievalData)
        before = read_queries(path_of(self._output, 0))
        found = None if before is None else compare_results(before, content, metric)
        pictures: dict[str, str] = {}
        for one in (*found.better, *found.worse) if found is not None else ():
            cells = (
                one.query,
                *one.relevant[:1],
                *(item for item, _ in (*one.found_before[:1], *one.found_after[:1])),
            )
            for name in (
                name
                for cell in cells
                for name in cell["images"]
                if name.startswith(EMBEDDED)
            ):
                image = next(
                    (
                        one
                        for one in named(self._data, name).images
                        if one.data is not None
                    ),
                    None,
                )
                address = None if image is None else thumbnail_of(image)
                if address is not None:
                    pictures[name] = address
        return pictures
