"""Hooks on evaluations: patience, guards, scores of tasks, the results of each query, and the average of the weights that
is scored (`ema`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vembed.config.schema import Guard
from vembed.errors import RunError, UserError
from vembed.evaluation.dataset import EvalData, RetrievalData, open_eval_data
from vembed.evaluation.query_results import EVALUATIONS_FOLDER, write_queries
from vembed.evaluation.report.record import TABLE, Scores
from vembed.evaluation.scores import evaluate_model
from vembed.models.families.backbones import unwrapped_name
from vembed.parallel.parameters import fsdp1_group, local_tensor, reshard
from vembed.training.hooks.base import Evaluation, Hook, HookState, StepReport

if TYPE_CHECKING:
    from vembed.training.trainer import Trainer

log = logging.getLogger("vembed")

TASK_PREFIX = "task/"
"""Beginning of the names of scores of a task of the data (`homogeneous_batches: task`)."""
GUARD_PREFIX = "guard/"
"""Beginning of the names of a guard's scores."""


@dataclass
class Patience(Hook):
    """Ends a run whose score has stopped rising. Evaluations in the warm-up do not count."""

    name = "patience"
    patience: int
    warmup_steps: int
    _best: float | None = None
    _best_step: int = 0
    _count: int = 0
    """Evaluations since the best score."""

    def on_evaluation(self, evaluation: Evaluation) -> str | None:
        """See Hook."""
        score = evaluation.scores[evaluation.metric]
        if evaluation.step == 0:
            return None
        if self._best is None or score > self._best:
            self._best = score
            self._best_step = evaluation.step
            self._count = 0
        elif evaluation.step > self.warmup_steps:
            self._count += 1
        if self._count < self.patience:
            return None
        return (
            f"patience: {self.patience} evaluations since step {self._best_step:,d} found no {evaluation.metric} above "
            f"{self._best:.4f}"
        )

    def state(self) -> HookState:
        """See Hook."""
        return {"best": self._best, "best_step": self._best_step, "count": self._count}

    def load_state(self, state: HookState) -> None:
        """See Hook."""
        self._best = state["best"]
        self._best_step = state["best_step"]
        self._count = state["count"]


def main_scores(run: Trainer, named_data: Iterable[tuple[str, EvalData]]) -> Scores:
    """Return the main score of each set of evaluation data, as name/metric. Collective."""
    scores = {}
    with run.hooks.evaluation_weights():
        for name, data in named_data:
            measured = evaluate_model(
                run.components.model,
                run.components.featuriser,
                data,
                run.config.evaluation,
                run.session,
                micro_batch_tokens=run.config.batch.micro_batch_tokens,
                dims=[],
            )
            scores[f"{name}/{data.metric}"] = measured[data.metric]
    return scores


class TaskScores(Hook):
    """Main score of each task that has validation data of its own.

    The run's own validation data choose the checkpoint.
    """

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """See Hook."""
        scores = main_scores(self.run, self.run.data.by_task.items())
        for key, score in scores.items():
            log.info(f"task {key.replace('/', ': ')}: {score:.4f}")
            # The same dictionary goes to metrics.jsonl, the report and the model card.
            evaluation.scores[TASK_PREFIX + key] = score


class Guards(Hook):
    """Evaluation data of other abilities, scored with each evaluation.

    A run that loses too much on one of them ends, and `final/` gets the last checkpoint that held.
    """

    name = "guards"

    def on_build(self, run: Trainer) -> None:
        """See Hook."""
        self.run = run
        self._before: Scores = {}
        self._guards: dict[str, Guard] = {}
        """By the key of their scores."""
        self._data: dict[str, EvalData] = {}
        for guard in run.config.evaluation.listed_guards():
            data = open_eval_data(run.config.data, guard.path, run.config.objective)
            self._guards[f"{guard.label}/{data.metric}"] = guard
            self._data[guard.label] = data
            log.info(
                f"guard {guard.label}: {data.summary()}; may fall by {guard.max_drop:g}"
            )

    def on_start(self, run: Trainer) -> None:
        """See Hook."""
        if self._before:
            return
        self._before = main_scores(run, self._data.items())
        # Guards that a resumed run has not had before: they hold at the step that they are measured at.
        state = run.state
        has_checkpoint = (
            state.step > 0 and run.checkpointer.path_of(state.step).is_dir()
        )
        state.guarded_step = state.step if has_checkpoint else None
        of_step = state.scores if state.scored_step == state.step else {}
        of_guards = {GUARD_PREFIX + key: score for key, score in self._before.items()}
        state.guarded_scores = of_step | of_guards

    def on_evaluation(self, evaluation: Evaluation) -> str | None:
        """See Hook."""
        scores = self._before
        if evaluation.step > 0:
            scores = main_scores(self.run, self._data.items())
        drops = []
        for key, guard in self._guards.items():
            score = scores[key]
            before = self._before[key]
            # The same dictionary goes to metrics.jsonl, the report and the model card.
            evaluation.scores[GUARD_PREFIX + key] = score
            log.info(
                f"guard {key}: {score:.4f} ({score - before:+.4f}; may fall by {guard.max_drop:g})"
            )
            if before - score > guard.max_drop:
                drops.append(
                    f"{key} fell from {before:.4f} to {score:.4f}, by more than {guard.max_drop:g}"
                )
        state = self.run.state
        state.guard_message = (
            None  # of a run that was resumed after a guard had ended it
        )
        if drops:
            state.guard_message = (
                f"guard after step {evaluation.step:,d}: {'; '.join(drops)}"
            )
            return state.guard_message
        # The checkpoint that `final/` gets if a guard falls later.
        if evaluation.step > 0 and self.run.checkpoint_is_due():
            state.guarded_step = evaluation.step
            state.guarded_scores = evaluation.scores
        loads_best = self.run.intervals.load_best_model_at_end
        has_both = None not in (state.best_step, state.guarded_step)
        if loads_best and has_both:
            state.guarded_step = state.best_step
            state.guarded_scores = state.best_scores
        return None

    def state(self) -> HookState:
        """See Hook."""
        return {"before": self._before}

    def load_state(self, state: HookState) -> None:
        """See Hook."""
        if state["before"].keys() == self._guards.keys():
            self._before = state["before"]
        else:
            log.info(
                "guards have changed: they are measured against the current weights"
            )

    def on_finish(self, run: Trainer) -> None:
        """See Hook."""
        if run.state.guard_message is not None and run.state.guarded_step is None:
            raise RunError(
                f"{run.state.guard_message}; no checkpoint held before: lower learning_rate, evaluate and save more often "
                "(eval_steps, save_steps), or allow more (max_drop)"
            )


class QueryRecord(Hook):
    """Writes the results of every query of an evaluation, which the report compares before and after. Of rank 0 alone.

    It keeps the evaluations before training, of the best step, of the last one that held all guards, and of the newest one.
    Other steps' files are removed.
    """

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """See Hook."""
        run = self.run
        data = run.data.evaluation
        if not isinstance(data, RetrievalData) or evaluation.queries is None:
            return
        metrics = list(dict.fromkeys((evaluation.metric, *TABLE)))
        try:
            content = evaluation.queries.content(data, metrics)
            write_queries(run.output, evaluation.step, content)
            state = run.state
            recorded = (0, state.best_step, state.guarded_step, evaluation.step)
            for path in (run.output / EVALUATIONS_FOLDER).glob("step-*.json"):
                if int(path.stem.removeprefix("step-")) not in recorded:
                    path.unlink()
        except OSError as error:
            log.warning(
                f"the results of the queries could not be written ({error}); the report lacks them"
            )


# ---- the average of the weights (`ema`) ------------------------------------------


@dataclass
class WeightAverage(Hook):
    """The average of the trained weights. Each rank averages what it holds: its copy or its shards."""

    name = "ema"
    decay: float
    num_updates: int = 0
    _trained: dict[str, Tensor] = field(default_factory=dict)
    _averages: dict[str, Tensor] = field(default_factory=dict)

    def on_build(self, run: Trainer) -> None:
        """See Hook."""
        model = run.components.model
        if fsdp1_group(model) is not None:
            raise UserError(
                f"ema: {self.decay} cannot average the flat parameters of FSDP1: use fsdp_version: 2, or leave ema out"
            )
        self.follow(model)

    def follow(self, model: nn.Module) -> None:
        """Make room for the averages of a model's trained weights, which begin as the weights are."""
        self._model = model
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                key = unwrapped_name(name)
                self._trained[key] = weight
                # float32, since small changes of a 16-bit average would be rounded away.
                self._averages[key] = weight.detach().clone().float()

    def on_step(self, report: StepReport) -> None:
        """See Hook."""
        if not report.outcome.applied:
            return
        self.num_updates += 1
        # A short run must not keep its start for ever: the decay grows with the number of updates.
        short_decay = (1 + self.num_updates) / (10 + self.num_updates)
        decay = min(self.decay, short_decay)
        with torch.no_grad():
            for name, average in self._averages.items():
                local = local_tensor(average)
                # On shards or copies alike: the average of a shard is the shard of the average.
                local.lerp_(
                    local_tensor(self._trained[name]).to(local.dtype), 1 - decay
                )

    def state(self) -> HookState:
        """See Hook."""
        return {"num_updates": self.num_updates}

    def load_state(self, state: HookState) -> None:
        """See Hook."""
        self.num_updates = int(state["num_updates"])

    def tensors(self) -> Mapping[str, Tensor]:
        """See Hook."""
        return self._averages

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """See Hook."""
        trained = {}
        for name, weight in self._trained.items():
            trained[name] = local_tensor(weight).detach().clone()
        self.put(self._averages)
        try:
            yield
        finally:
            self.put(trained)

    def put(self, values: Mapping[str, Tensor]) -> None:
        """Write values, whole or this rank's shards, into the model's trained weights."""
        reshard(self._model)  # what is still gathered would keep the earlier ones
        with torch.no_grad():
            for name, weight in self._trained.items():
                local_tensor(weight).copy_(local_tensor(values[name]))
