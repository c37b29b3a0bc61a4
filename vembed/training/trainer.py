"""Trainer: one training run on one process of the group. Its loop is `fit`; read this file first.

The state between two steps is `LoopState` and the state of model, loss and optimizer; a checkpoint holds exactly that.
Data order, dropout and learning rate are pure functions of the step. What watches the loop or adds to it is a `Hook`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vembed.config.loading import save_config
from vembed.config.schema import TrainConfig
from vembed.data.batching.rank_batch import RankBatch
from vembed.errors import Stopped
from vembed.evaluation.dataset import RetrievalData
from vembed.evaluation.query_results import QueryResults
from vembed.evaluation.scores import deciding_metric, evaluate_model
from vembed.parallel.memory import fsdp_print_memory_usage
from vembed.parallel.parameters import log_parameter_summary
from vembed.parallel.session import Session
from vembed.progress import duration
from vembed.training.auxiliary_losses import AuxiliaryLosses
from vembed.training.budget import MemoryGuard, OutOfMemory, find_budget
from vembed.training.checkpoint.checkpointer import Checkpointer, whole_model_writer
from vembed.training.final import check_embeddings, save_final
from vembed.training.frozen import log_use
from vembed.training.hooks.base import Evaluation, Hook, Hooks, StepReport
from vembed.training.hooks.checks import DataWatch, Watch
from vembed.training.hooks.configured import configured_hooks
from vembed.training.hooks.display import Profile, ProgressBar, SetupLines
from vembed.training.hooks.evaluations import QueryRecord, TaskScores
from vembed.training.hooks.metrics import (
    AuxiliaryFigures,
    Diagnostics,
    LossesBySource,
    LossesByTerm,
    Metrics,
    StepCurves,
    log_line,
)
from vembed.training.identity import identity_of, require_same_data
from vembed.training.interrupts import EvaluationStopped, Interrupts
from vembed.training.run_log import Outlets, log_scores
from vembed.training.schedule import Schedule
from vembed.training.setup import (
    build_parts,
    decide_rhythm,
    learned,
    log_cut_texts,
    open_data,
    open_stream,
)
from vembed.training.step import ContrastiveStep
from vembed.training.timing import RunClock
from vembed.training.update import LoopState, Update, synchronise

log = logging.getLogger("vembed")


@dataclass(frozen=True)
class TrainResult:
    """Result of a finished run."""

    model_dir: Path
    output_dir: Path
    metrics: dict[str, float]
    """Scores of the saved model. Those before training have the prefix "before/"."""
    steps: int


@dataclass(frozen=True, slots=True)
class Runtime:
    """Process group, checkpoints, signals and console of a run."""

    session: Session
    checkpointer: Checkpointer
    interrupts: Interrupts
    outlets: Outlets


class Trainer:
    """One training run. Every process makes one with the same config and calls `run`."""

    def __init__(
        self, config: TrainConfig, runtime: Runtime, hooks: Sequence[Hook] = ()
    ) -> None:
        """Read the data, build the model and restore the checkpoint to resume from, if there is one. Collective."""
        self.clock = RunClock()
        self.config = config
        self.session = session = runtime.session
        self.checkpointer, self.interrupts, self.outlets = (
            runtime.checkpointer,
            runtime.interrupts,
            runtime.outlets,
        )
        # Also refuses a folder that is not writable or holds another run.
        self.resume_from = resume_from = self.checkpointer.find()
        self.config = config = self.checkpointer.continued(resume_from)
        self.data = open_data(config, session)
        # Before the model is built, which may take minutes.
        identity = identity_of(config, self.data)
        require_same_data(identity, self.data)
        self.checkpointer.check(resume_from, identity)
        self.checkpointer.require_steps_left(resume_from, self.data.total_steps)
        self.parts = parts = build_parts(config, self.data, session)
        self.rhythm = decide_rhythm(self.data, parts)
        self.config = config = self.rhythm.applied(parts.config, self.data.epochs)
        self.checkpointer.config = config
        self.schedule = Schedule(
            config, self.data.total_steps, self.data.examples_per_step
        )
        log_parameter_summary(parts.model)
        own: list[Hook] = [
            *configured_hooks(
                config, self.rhythm, self.schedule
            ),  # before those that write the scores
            ProgressBar(runtime.outlets.console),
            Profile(config, session.rank, self.data.total_steps),
            Diagnostics(),
            LossesBySource(),
            LossesByTerm(),
            TaskScores(),
            DataWatch(),
            AuxiliaryFigures(),
            StepCurves(),
            QueryRecord(),
            SetupLines(),
            Watch(config),
            Metrics(config),
        ]
        self.hooks = Hooks([*own, *hooks])
        self.hooks.on_build(self)
        # After `on_build`, in which hooks allocate the tensors that the checkpoint fills.
        self.state = self._restored(resume_from)
        self.whole_model = whole_model_writer(
            config, session, parts.embedder, parts.model, parts.loss
        )
        self.stream = open_stream(config, self.data, parts.featuriser, session)
        sample = self.stream.sample()
        log_cut_texts(sample, parts.featuriser.description)
        self.guard = MemoryGuard(session)
        # After the checkpoint: optimizer state that is restored takes memory already, and is not added to the estimate.
        budget = find_budget(
            config, parts.model, parts.featuriser, session, sample, parts.optimizer
        )
        self.step = ContrastiveStep(
            parts.model,
            parts.loss,
            parts.source,
            session,
            budget,
            self.guard,
            config.run.seed,
            parts.teachers,
            AuxiliaryLosses(config) if parts.embedder.has_auxiliary() else None,
        )
        self.update = Update(
            parts.model, parts.loss, parts.optimizer, session, config, self.state.scale
        )

    def run(self) -> TrainResult:
        """Train, save and report. Collective."""
        with closing(self.hooks):
            self.start()
            self.fit()
            return self.finish()

    def start(self) -> None:
        """Start the hooks and evaluate the weights before the first step."""
        state, config, total_steps = self.state, self.config, self.data.total_steps
        # All checks have passed and the model is there: only from here on the folder is changed.
        self.checkpointer.begin(self.resume_from)
        self.outlets.begin()
        if self.session.is_main:
            save_config(config, Path(config.run.output_dir) / "config.yaml")
        self.restart_stream()
        self.hooks.on_start(self)
        if config.evaluation.eval_before and state.step == 0:
            self.evaluate()
            state.before = state.scores
        if state.step and _is_due(state.step, self.rhythm.eval_steps):
            self.evaluate()  # only if the run was stopped during this evaluation
        fsdp_print_memory_usage("before the first step")
        if state.step >= total_steps:
            done, asked = f"{state.step:,d}", f"{total_steps:,d}"
            log.info(
                "nothing is left to train: step %s is done, and epochs or max_steps ask for %s",
                done,
                asked,
            )
        took = duration(self.clock.seconds() - state.seconds)
        log.info("set-up took %s; training %s steps", took, f"{total_steps:,d}")
        self.clock.start_loop(state.step)

    def fit(self) -> None:
        """Train to the last step, or until a hook or the time limit ends the run. The loop."""
        state, data = self.state, self.data
        group: list[RankBatch] = []
        while state.step < data.total_steps and not self.interrupts.ends_early:
            self.session.heartbeats.step = state.step + 1
            if not group:  # otherwise the step is replayed after it ran out of memory
                self._before_step()
                with self.step.timer("data"):
                    group = [next(self.batches) for _ in range(data.batches_per_step)]
            report = StepReport(state.step + 1, data.epoch_at(state.step + 1))
            try:
                for part, rank_batch in enumerate(group):
                    number, is_last = (
                        state.step * data.batches_per_step + part,
                        part == data.batches_per_step - 1,
                    )
                    # Gradients add up over the parts, so each counts by its weight: L is the mean over the parts.
                    result = self.step.accumulate(
                        rank_batch,
                        number,
                        weight=1 / data.batches_per_step,
                        last=is_last,
                        scale=state.scale.value,
                    )
                    report.add(rank_batch, result)
                is_short = False
            except OutOfMemory:
                is_short = True
            if is_short:  # not in the handler: the exception holds the attempt's outputs, which must be freed first
                self._shrink_budget()
                continue
            self._update_weights(report)
            group = []
            if self.hooks.on_step(report):
                self.interrupts.request_end()
            # The ranks agree once per step, so that all stop at the same one.
            stops = self.interrupts.agree(self.checkpointer.save_seconds)
            ends = stops or self.interrupts.ends_early or state.step == data.total_steps
            if (
                ends
                or state.step == 1
                or _is_due(state.step, self.rhythm.logging_steps)
            ):
                self.log(report)
            if _is_due(state.step, self.rhythm.eval_steps):
                self.evaluate()
            if stops:
                raise self.stopped()
            # After the evaluation, so that the checkpoint holds its scores.
            if self._is_saved():
                self.save()
        self.evaluate()

    def log(self, report: StepReport) -> None:
        """Log a step. Collective: the figures are those of all ranks."""
        outcome = report.outcome
        values: dict[str, Any] = {
            "step": report.step,
            "epoch": report.epoch,
            "loss": outcome.loss,
            "learning_rate": report.learning_rate,
            "grad_norm": outcome.grad_norm,
            **learned(self.parts.loss),
            **self.hooks.figures(report),
        }
        self.hooks.on_log(values)
        total_steps = self.data.total_steps
        log.info(
            log_line(values, total_steps, self.clock.left(report.step, total_steps))
        )

    def evaluate(self) -> None:
        """Score the current weights, unless this step is scored already, and update the best score. Collective."""
        state, config, data = self.state, self.config, self.data.evaluation
        if data is None or state.scored_step == state.step:
            return
        began = self.clock.seconds()
        towers, queries = self.parts.source.towers, QueryResults()
        try:
            with self.hooks.evaluation_weights():
                scores = evaluate_model(
                    self.parts.model,
                    self.parts.featuriser,
                    data,
                    config,
                    self.session,
                    say=log.info,
                    between=self.interrupts.check,
                    kept=towers if towers.stores else None,
                    queries=queries,
                    compressed=config.objective.quantize_embeddings is not None
                    and isinstance(data, RetrievalData),
                )
        except EvaluationStopped:
            raise self.stopped() from None
        state.scores, state.scored_step = scores, state.step
        metric = deciding_metric(config, data, scores)
        when = f"after step {state.step:,d}" if state.step else "before training"
        took = duration(self.clock.seconds() - began)
        log_scores(when, scores, state.before, metric, f"; took {took}")
        # The best step must be recoverable: it has a checkpoint, or it is the last one.
        is_kept = self.rhythm.save_steps is None or self._is_saved() or self._is_last()
        is_best = (
            state.step > 0
            and is_kept
            and (state.best is None or scores[metric] > state.best)
        )
        if is_best:
            state.best, state.best_step, state.best_scores = (
                scores[metric],
                state.step,
                scores,
            )
        evaluation = Evaluation(
            state.step, self.data.epoch_at(state.step), scores, metric, is_best, queries
        )
        if self.hooks.on_evaluation(evaluation):
            self.interrupts.request_end()
        self.interrupts.agree_to_end()

    def save(self) -> None:
        """Write a checkpoint of the current step, unless there is one. Collective."""
        self.state.hooks = self.hooks.states()
        parts = self.parts
        self.checkpointer.save(
            asdict(self.state),
            parts.model,
            parts.loss,
            parts.optimizer,
            self.whole_model,
            self.hooks.tensors(),
        )

    def stopped(self) -> Stopped:
        """Save the state of the run; return the exception to raise. Collective."""
        self.save()
        self.checkpointer.wait()
        step = self.state.step
        is_saved = self.checkpointer.has_saved(step)
        return self.interrupts.stopped(
            step, self.checkpointer.path_of(step) if is_saved else None
        )

    def finish(self) -> TrainResult:
        """Write final/ and the report. Collective."""
        state, config, parts = self.state, self.config, self.parts
        # Hooks first: they are promised the weights of the last step, and below those of a better checkpoint may be
        # loaded.
        self.hooks.on_finish(self)
        self.interrupts.training_is_over()
        log_use(parts.source.towers.stores)
        parts.teachers.log_use()
        self.checkpointer.wait()
        what, chosen, scores = "the best checkpoint", state.best_step, state.best_scores
        if state.fell is not None:
            what, chosen, scores = (
                "the last checkpoint that held",
                state.held_step,
                state.held_scores,
            )
        folder = self.checkpointer.earlier.place(chosen or 0)
        wants_earlier = (self.rhythm.keeps_best or state.fell) and chosen not in (
            None,
            state.step,
        )
        if wants_earlier and self.checkpointer.load_weights(
            folder, parts.model, parts.loss, self.hooks.tensors()
        ):
            log.info("final/ gets %s, %s", what, folder.name)
            state.scores, state.scored_step = scores, chosen
        fsdp_print_memory_usage("after the last step")
        with self.hooks.evaluation_weights():
            check_embeddings(config, self.session, parts)
            model_dir = save_final(config, self.session, self.data, parts, state)
        return TrainResult(
            model_dir=model_dir,
            output_dir=Path(config.run.output_dir),
            metrics={
                **{f"before/{name}": value for name, value in state.before.items()},
                **state.scores,
            },
            steps=min(state.step, self.data.total_steps),
        )

    def restart_stream(self) -> None:
        """Read the batches from the current step on. Those prepared ahead are dropped."""
        per_step = self.data.batches_per_step
        self.batches: Iterator[RankBatch] = self.stream.from_batch(
            self.state.step * per_step, self.data.total_steps * per_step
        )

    # ---- parts of a step ---------------------------------------------------------------------------------------

    def _before_step(self) -> None:
        """Let the hooks prepare the next step. A mining that is stopped is done again by the run that resumes."""
        try:
            self.hooks.before_step(self.state.step + 1, self._new_epoch())
        except EvaluationStopped:
            raise self.stopped() from None

    def _update_weights(self, report: StepReport) -> None:
        """Synchronise the gradients that are not reduced yet, take the optimizer step and count it. Collective."""
        state, timer, parts = self.state, self.step.timer, self.parts
        with timer("wait"):
            synchronise(parts.model, parts.loss, self.session)
        with timer("optimizer"):
            report.learning_rate = self.schedule.set(parts.optimizer, state.step)
            report.outcome = self.update.apply(report.loss_share)
        state.step += 1
        state.num_skipped += not report.outcome.applied
        if report.outcome.applied:
            state.skipped_in_a_row = 0
        elif not report.outcome.is_overflow:
            state.skipped_in_a_row += 1
        state.seconds = self.clock.seconds()

    def _shrink_budget(self) -> None:
        """Take a smaller budget after a shortage of memory, and drop what the failed attempt has added."""
        self.step.budget = self.guard.smaller(self.step.budget)
        self.parts.clear_gradients()

    def _new_epoch(self) -> int | None:
        """Return the number of the epoch that begins with the next step, or None if none does."""
        steps_per_epoch, per_step = (
            self.data.batch_schedule.steps_per_epoch,
            self.data.batches_per_step,
        )
        # Batches, not steps: with gradient accumulation an epoch may begin inside a step, and counts from the next step
        # on.
        first = self.state.step * per_step
        epoch = first // steps_per_epoch
        is_new = first == 0 or (first - per_step) // steps_per_epoch < epoch
        return epoch if is_new else None

    def _is_saved(self) -> bool:
        """Return whether this step gets a checkpoint. None in a row of skipped steps does: weights that may be broken
        would take the place of good ones."""
        return (
            _is_due(self.state.step, self.rhythm.save_steps)
            and not self.state.skipped_in_a_row
        )

    def _is_last(self) -> bool:
        return self.state.step == self.data.total_steps or self.interrupts.ends_early

    def _restored(self, resume_from: Path | None) -> LoopState:
        """Return the state to begin with, and restore weights, optimizer and hooks."""
        if resume_from is None:
            return LoopState()
        parts, tensors = self.parts, self.hooks.tensors()
        state = LoopState.restored(
            self.checkpointer.load(
                resume_from, parts.model, parts.loss, parts.optimizer, tensors
            )
        )
        data, is_scored = (
            self.data.evaluation,
            state.step > 0 and state.scored_step == state.step,
        )
        if data is not None and is_scored and state.best is None:
            # It was reset, or this step was no candidate when it was scored; now there is a checkpoint of it.
            metric = deciding_metric(self.config, data, state.scores)
            state.best, state.best_step, state.best_scores = (
                state.scores[metric],
                state.step,
                state.scores,
            )
        if (
            not self.config.evaluation.guards
        ):  # the guard that ended the run is no longer asked for
            state.fell = None
        self.hooks.load_states(state.hooks)
        self.clock.resume(state.seconds)
        return state


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and every > 0 and step % every == 0
