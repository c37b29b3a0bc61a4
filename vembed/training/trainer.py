"""One training run on one process of the group: `train_run`, and the Trainer with its loop, `fit`. Read this file first.

Each part of the set-up needs the ones before it:

    checkpoint to resume from -> data and number of steps -> model, loss, optimizer -> intervals -> hooks ->
    TrainingStep -> restored state

A checkpoint holds the weights of model and loss, the optimizer's state, the tensors of hooks, and `LoopState`. Data
order, dropout and learning rate are pure functions of the step, so nothing else is needed to resume. What watches the
loop or adds to it is a `Hook`.

A run that ends early (a hook asks for it) is evaluated and writes final/. A run that stops (a signal, the time limit)
writes a checkpoint and raises `Stopped`; `resume` goes on.
"""

import gc
import logging
import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from vembed.config.decisions import ResolvedRun
from vembed.config.loading import require_earlier_stage, save_config
from vembed.config.rules import require_paths
from vembed.config.schema import FILE_OPTIONS, TrainConfig
from vembed.data.batching.rank_batch import RankBatch
from vembed.errors import RunError, UserError
from vembed.evaluation.dataset import RetrievalData
from vembed.evaluation.query_results import QueryResults
from vembed.evaluation.report.record import Scores
from vembed.evaluation.scores import evaluate_model
from vembed.parallel.devices import fsdp_print_memory_usage
from vembed.parallel.environment import RankInfo
from vembed.parallel.parameters import log_parameter_summary
from vembed.parallel.session import Session, start_session
from vembed.parallel.step_memory import OutOfMemory, find_budget, halved
from vembed.progress import duration
from vembed.saving.publication import Hub, publication
from vembed.training.checkpoint.checkpointer import (
    Checkpointer,
    ResumePoint,
    TrainedState,
)
from vembed.training.checkpoint.folders import (
    NothingToTrain,
    OutputLock,
    fingerprint_of_option,
    kept_decisions,
    require_output_folder,
)
from vembed.training.final import save_final, write_whole_model
from vembed.training.frozen import log_store_use
from vembed.training.hooks.base import Evaluation, Hook, Hooks, StepReport
from vembed.training.hooks.metrics import log_line, log_setup
from vembed.training.interrupts import Interrupts, StopRequested
from vembed.training.optimizer import GradientScale, Schedule, Update
from vembed.training.run_log import HEADLINE, RunLog, log_scores
from vembed.training.setup import (
    build_components,
    configured_hooks,
    decide_intervals,
    identity_of,
    log_truncated_texts,
    open_data,
    open_stream,
    require_same_data,
)
from vembed.training.step import TrainingStep
from vembed.training.trackers.table import require_trackers

log = logging.getLogger("vembed")


MAY_DIFFER = {
    "output_dir": "machines may mount the shared folder under other names; all must see there what rank 0 writes",
    "image_root": "machines may keep the images in other folders",
    "accelerate_config": "the settings in the file are compared, not its place",
    "num_processes": "each launcher counts for its own machine; the number of processes of the whole run is compared",
    "num_workers": "threads of each process, by the cores of its machine",
    "console": "the console of rank 0 alone shows the run",
    "log_file": "rank 0 alone writes it",
    "report_to": "rank 0 alone starts trackers",
    "run_name": "rank 0 alone starts trackers",
    "wandb_project": "rank 0 alone starts trackers",
    "wandb_tags": "rank 0 alone starts trackers",
}
"""Option -> the reason why ranks may have different values of it."""


@dataclass(frozen=True)
class TrainResult:
    """Result of a finished run."""

    model_dir: Path
    output_dir: Path
    metrics: Scores
    """Scores of the saved model. Those before training have the prefix "before/"."""
    steps: int


def train_run(resolved: ResolvedRun, hooks: Sequence[Hook] = ()) -> TrainResult:
    """Train on this process of the group; return the model's folder and its scores.

    `hooks`: additions to the loop (`vembed/training/hooks/base.py`).
    """
    config = resolved.config
    require_output_folder(config.run.output_dir)
    output = Path(config.run.output_dir)
    require_earlier_stage(resolved)
    require_trackers(config.logging.report_to)
    hub = None
    if config.logging.push_to_hub is not None:
        hub = Hub(config.logging.push_to_hub)
    lock = OutputLock(output)
    rank = os.environ.get("RANK") or "0"  # as the launcher has set it

    def prepare_launch(rank_info: RankInfo) -> dict[str, Any]:
        """Before devices are chosen: check the paths, lock output_dir and open the Hub repository. Return the facts that all
        ranks compare."""
        if rank_info.rank == 0:
            # A wrong path is refused before minutes of reading.
            require_paths(resolved)
            # Entering the with-block below does not take the lock. Rank 0 takes it here, before anything is read.
            lock.take()
            if hub is not None:
                hub.open()
        return facts_of(resolved) if rank_info.world_size > 1 else {}

    with (
        # The contexts close in reverse order: the newest checkpoint is on disk before the group of processes ends, and
        # another run may write here only after all of them.
        lock,
        RunLog(config.logging, output, rank) as run_log,
        Interrupts(config.run.max_train_minutes) as interrupts,
        start_session(resolved, prepare_launch) as session,
        Checkpointer(config.run, session) as checkpointer,
    ):
        for line in resolved.notes:
            log.info(f"note: {line}", extra=HEADLINE)
        try:
            trainer = Trainer(config, session, checkpointer, interrupts, run_log, hooks)
            result = trainer.run()
        except NothingToTrain as end:
            log.info(str(end), extra=HEADLINE)
            done = end.run
            return TrainResult(done.model_dir, done.folder, done.scores(), done.step)
        if session.is_main and hub is not None:
            try:
                hub.push(publication(str(output)), "Trained by vembed")
            except (RunError, UserError) as error:
                command = f"vembed push {output} {hub.repository}"
                raise RunError(
                    f"{error}; the model is in {output}/final: `{command}`"
                ) from error
            log.info(f"push_to_hub: {hub.repository} has the model of final/")
        return result


def facts_of(resolved: ResolvedRun) -> dict[str, Any]:
    """Return what must be equal on all ranks, by name: the options, the decisions behind them, and their files."""
    config = resolved.config
    facts = {}
    for name, value in config.to_dict().items():
        if name == "resume":
            # Rank 0 chooses the checkpoint; the ranks compare it when they have found it.
            is_switch = isinstance(value, bool) or value in ("auto", "force")
            facts[name] = value if is_switch else "a path"
        elif name in FILE_OPTIONS:
            facts[name] = fingerprint_of_option(
                name, value, config.model.model_revision
            )
        elif name not in MAY_DIFFER:
            facts[name] = value
    # What follows from options, files and the environment together.
    facts |= {
        "strategy (decided)": resolved.strategy.value,
        "gradient checkpointing (decided)": resolved.recomputation.value,
        "mixed precision (decided)": resolved.precision.value,
        "dist_timeout_minutes (decided)": resolved.timeout_minutes.value,
    }
    if resolved.fsdp is not None:
        for name, value in asdict(resolved.fsdp).items():
            if name != "origin":
                facts[f"fsdp {name} (decided)"] = str(value)
    return facts


@dataclass
class LoopState:
    """State of the loop. Every rank holds the same. Checkpoints hold it as JSON."""

    step: int = 0
    """Number of optimizer steps taken."""
    num_skipped: int = 0
    """Number of steps skipped because of non-finite values."""
    skipped_in_a_row: int = 0
    """Number of consecutive skipped steps that end with the newest. Float16 overflows do not count."""
    best: float | None = None
    """Best value of the deciding metric so far."""
    best_step: int | None = None
    """Step of `best`. Its checkpoint is kept."""
    best_scores: Scores = field(default_factory=dict)
    """All scores at `best_step`."""
    guarded_step: int | None = None
    """If a guard ends the run, `final/` gets the checkpoint of this step: the last at which every guard held. With
    load_best_model_at_end it is the best of these."""
    guarded_scores: Scores = field(default_factory=dict)
    """All scores at `guarded_step`."""
    guard_message: str | None = None
    """Sentence that names the guards that ended the run, with their scores. None if no guard did."""
    scale: GradientScale = field(default_factory=GradientScale)
    """Factor of the gradients of a float16 run, 1 in others. Not the learned scale of the logits."""
    before: Scores = field(default_factory=dict)
    """Scores before the first step."""
    scores: Scores = field(default_factory=dict)
    """Newest scores."""
    scored_step: int | None = None
    """Step at which `scores` were measured."""
    seconds: float = 0.0
    """`Trainer.elapsed_seconds` at the end of the last step. A resumed run counts on from it."""
    hooks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """State of each hook that has one, by its name. Written when the state is saved."""

    def set_best(self, metric: str) -> None:
        """Take the newest scores as the best."""
        self.best = self.scores[metric]
        self.best_step = self.step
        self.best_scores = self.scores

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> "LoopState":
        """Return the state that a checkpoint holds."""
        return cls(**{**saved, "scale": GradientScale(**saved["scale"])})


class Trainer:
    """One training run. Every process makes one with the same config and calls `run`."""

    def __init__(
        self,
        user_config: TrainConfig,
        session: Session,
        checkpointer: Checkpointer,
        interrupts: Interrupts,
        run_log: RunLog,
        hooks: Sequence[Hook] = (),
    ) -> None:
        """Read the data, build the model and restore the checkpoint to resume from, if there is one. Collective.

        The config is completed in three steps. `user_config` is what the user has set, `config_after_resume` also has what the run
        to resume from had decided, and `config_after_build` has learning rates and temperature in place of `auto`.
        `self.config` also has the decided intervals. It is final.
        """
        self._began = time.perf_counter()
        self._earlier_seconds = 0.0
        """Seconds that earlier parts of a resumed run took."""
        self.session = session
        self.checkpointer = checkpointer
        self.interrupts = interrupts
        self.run_log = run_log
        self.output = Path(user_config.run.output_dir)

        # The checkpoint. `find` also refuses a folder that is not writable or holds another run.
        resume_point = checkpointer.find(user_config.model)
        self.resume_point = resume_point
        config_after_resume = user_config
        if resume_point is not None:
            # Decisions of the run that is resumed stay.
            kept_options = kept_decisions(
                user_config, resume_point.state, session.world_size
            )
            config_after_resume = user_config.changed(**kept_options)

        # The data, and whether they are those of the checkpoint: before the model is built, which may take minutes.
        data = open_data(config_after_resume, session)
        self.data = data
        options = config_after_resume.to_dict()
        identity = identity_of(options, config_after_resume.data.sources(), data)
        if session.world_size > 1:
            require_same_data(identity, data)
        checkpointer.check(resume_point, options, identity)
        checkpointer.require_steps_left(resume_point, data.total_steps)

        # The model, and everything that was left to `auto`.
        self.components, config_after_build = build_components(
            config_after_resume, data, session
        )
        self.intervals = decide_intervals(
            config_after_build.evaluation,
            config_after_build.run,
            config_after_build.logging.logging_steps,
            data,
            self.components.model,
            # Of the user's config: that of a resumed run has the epochs that it had decided.
            is_length_given=user_config.optimizer.sets_length(),
        )
        intervals = asdict(self.intervals)
        if config_after_build.optimizer.max_steps is None:
            intervals["epochs"] = data.epochs
        # The fields of RunIntervals are named as their options. Fully resolved: a training with this config repeats the run.
        self.config = config_after_build.changed(**intervals)
        self.metric = self.config.evaluation.eval_metric
        """Key of the score that decides which checkpoint is best. Empty without evaluation data."""
        if data.evaluation is None:
            self.metric = ""
        elif self.metric == "auto":
            self.metric = data.evaluation.metric
        checkpointer.options = self.config.to_dict()
        user_options = user_config.to_dict()
        self.decided_options = [
            name
            for name, value in checkpointer.options.items()
            if (name, value) not in user_options.items()
        ]
        self.schedule = Schedule(
            self.config.optimizer, data.total_steps, data.mean_examples_per_step
        )
        log_parameter_summary(self.components.model)
        self.hooks = Hooks([*configured_hooks(self), *hooks])
        for hook in self.hooks:
            hook.on_build(self)

        self._build_training_step()
        # All state of the loop. After `on_build`, in which hooks allocate the tensors that the checkpoint fills.
        self.state = (
            LoopState() if resume_point is None else self._restore(resume_point)
        )
        self.update = Update(
            self.components.model,
            self.components.loss,
            self.components.optimizer,
            session,
            self.config.optimizer.max_grad_norm,
            self.state.scale,
        )

    def _build_training_step(self) -> None:
        """Open the stream of batches, and build the TrainingStep.

        Before a checkpoint is restored, because `find_budget` needs the optimizer without its state: it measures the free
        memory and reserves the bytes of the state itself.
        """
        config = self.config
        session = self.session
        components = self.components
        self.stream = open_stream(
            config.data,
            self.data,
            components.featuriser,
            session,
        )
        # Empty until `start`, which knows the first batch.
        self.batches = self.stream.from_batch(0, 0)
        sample = self.stream.sample()
        log_truncated_texts(sample, components.featuriser.description)
        budget = find_budget(
            config.batch,
            components.model,
            components.featuriser,
            session,
            sample,
        )
        self.stream.micro_batch_tokens = budget.micro_batch_tokens
        self.training_step = TrainingStep(
            components.model,
            components.loss,
            components.input_builder,
            session,
            budget,
            config.run.seed,
            components.teachers,
            config.objective if components.embedding_model.has_auxiliary else None,
        )

    def run(self) -> TrainResult:
        """Train, save and report. Collective."""
        with closing(self.hooks):
            try:
                self.start()
                self.fit()
            except StopRequested:
                self.save()
                self.checkpointer.wait()  # with async_save, until it is on disk
                step = self.state.step
                path = self.checkpointer.path_of(step)
                resumes = self.config.run.resume in (True, "auto", "force")
                raise self.interrupts.stopped(step, path, resumes=resumes) from None
            finally:
                self.batches.close()
            return self.finish()

    def start(self) -> None:
        """Start the hooks and evaluate the weights before the first step."""
        state = self.state
        # All checks have passed and the model is there: only from here on the folder is changed.
        self.checkpointer.begin(self.resume_point)
        self.run_log.begin()
        if self.session.is_main:
            # It repeats the run in another folder, and neither resumes it nor replaces it.
            repeated = self.config.changed(resume=False, overwrite=False)
            save_config(repeated, self.output / "config.yaml")
        self.restart_stream()
        for hook in self.hooks:
            hook.on_start(self)
        log_setup(self)
        set_up_seconds = self.elapsed_seconds() - state.seconds
        if self.config.evaluation.eval_before and state.step == 0:
            self.evaluate()
            state.before = state.scores
        # A run that was stopped during this step's evaluation repeats it now. If the checkpoint has the scores,
        # `evaluate` returns at once.
        if state.step > 0 and _is_due(state.step, self.intervals.eval_steps):
            self.evaluate()
        fsdp_print_memory_usage("before the first step")
        log.info(
            f"set-up took {duration(set_up_seconds)}; steps done: {state.step:,d} of {self.data.total_steps:,d}"
        )
        self._steps_before_loop = state.step
        self._loop_began = time.perf_counter()

    def fit(self) -> None:
        """Train to the last step, or until a hook ends the run or an interrupt stops it.

        One iteration of the loop is one optimizer step: its global batches, the update, the hooks, log, evaluation,
        checkpoint. `TrainingStep` adds the gradients of each global batch, `Update` changes the weights.
        """
        state = self.state
        interrupts = self.interrupts
        training_step = self.training_step
        num_batches = self.data.batches_per_step
        step_batches: list[RankBatch] = []
        while state.step < self.data.total_steps and not interrupts.has_agreed_end:
            if self.session.heartbeats is not None:
                self.session.heartbeats.step = state.step + 1
            # Where memory ran out, the step is repeated with the batches that it has already.
            if not step_batches:
                self._before_step()
                with training_step.timer("data"):
                    step_batches = [next(self.batches) for _ in range(num_batches)]
            report = StepReport(state.step + 1, self.data.epoch_at(state.step + 1))
            loss = self._add_gradients(step_batches, report)
            if loss is None:
                continue
            step_batches = []
            with training_step.timer("optimizer"):
                rate = self.schedule.set(self.components.optimizer, state.step)
                report.learning_rate = rate
                report.outcome = self.update.apply(loss)
            state.step += 1
            if report.outcome.applied:
                state.skipped_in_a_row = 0
            else:
                state.num_skipped += 1
                if not report.outcome.is_overflow:
                    state.skipped_in_a_row += 1
            state.seconds = self.elapsed_seconds()
            interrupts.wants_early_end |= self.hooks.on_step(report)
            # All ranks decide here, so that they stop after the same step. It comes after `on_step`, because the same
            # collective shares a hook's request to end the run. The time limit leaves room for a checkpoint.
            must_stop = interrupts.agree_to_stop(self.checkpointer.save_seconds)
            is_logged = _is_due(state.step, self.intervals.logging_steps)
            if must_stop or is_logged or state.step == 1 or self._is_last_step():
                self.log(report)
            if _is_due(state.step, self.intervals.eval_steps):
                self.evaluate()
            # After the evaluation, so that the checkpoint holds its scores. `run` writes the checkpoint of a stopped run.
            if must_stop:
                raise StopRequested
            if self.checkpoint_is_due():
                self.save()
        # The last step. Returns at once if it is scored.
        self.evaluate()

    def _add_gradients(
        self,
        step_batches: Sequence[RankBatch],
        report: StepReport,
    ) -> float | None:
        """Add up the gradients of a step's batches, and return its loss. Collective.

        None: memory ran out. The gradients are cleared, and the budget of micro-batches is halved.
        """
        training_step = self.training_step
        num_batches = len(step_batches)
        first_batch = self.state.step * num_batches
        try:
            for index, rank_batch in enumerate(step_batches):
                # The loss of the step is the mean over its batches, so each has the weight 1 / num_batches.
                result = training_step.accumulate(
                    rank_batch,
                    first_batch + index,
                    weight=1 / num_batches,
                    is_last_batch=index == num_batches - 1,
                    float16_scale=self.state.scale.value,
                )
                report.add(rank_batch, result)
            with training_step.timer("wait"):
                return training_step.synchronise(report.loss_share)
        except OutOfMemory:
            pass
        # Not in the handler: the exception holds the attempt's outputs, which must be freed first. From Python 3.12 on, a cycle
        # of references holds them too.
        gc.collect()
        budget = halved(self.session, training_step.budget)
        training_step.budget = budget
        self.stream.micro_batch_tokens = budget.micro_batch_tokens
        self.components.model.zero_grad(set_to_none=True)
        self.components.loss.zero_grad(set_to_none=True)
        return None

    def log(self, report: StepReport) -> None:
        """Log a step. Collective: the metrics are those of all ranks."""
        values: dict[str, Any] = {
            "step": report.step,
            "epoch": report.epoch,
            "loss": report.outcome.loss,
            "learning_rate": report.learning_rate,
            "grad_norm": report.outcome.grad_norm,
        }
        learned = self.components.loss.logit_scale_and_bias()
        if learned is not None:
            values["scale"], values["bias"] = learned
        for hook in self.hooks:
            values |= hook.metrics(report)
        for hook in self.hooks:
            hook.on_log(values)
        total_steps = self.data.total_steps
        # At the rate so far, with evaluations and checkpoints.
        seconds_per_step = time.perf_counter() - self._loop_began
        seconds_per_step /= report.step - self._steps_before_loop
        seconds_left = seconds_per_step * (total_steps - report.step)
        head_rate = report.learning_rate * self.schedule.head_ratio
        log.info(log_line(values, total_steps, seconds_left, head_rate))

    def evaluate(self) -> None:
        """Score the current weights, unless this step is scored already, and update the best score. Collective."""
        state = self.state
        config = self.config
        components = self.components
        data = self.data.evaluation
        is_scored = state.scored_step == state.step and self.metric in state.scores
        if data is None or is_scored:
            return
        start = self.elapsed_seconds()
        query_results = QueryResults()
        builder = components.input_builder
        is_quantized = config.objective.quantize_embeddings is not None
        with self.hooks.evaluation_weights():
            scores = evaluate_model(
                components.model,
                components.featuriser,
                data,
                config.evaluation,
                self.session,
                micro_batch_tokens=config.batch.micro_batch_tokens,
                log=log.info,
                check_interrupt=self.interrupts.check,
                input_builder=builder if builder.stores else None,
                query_results=query_results,
                compressed=is_quantized and isinstance(data, RetrievalData),
            )
        state.scores = scores
        state.scored_step = state.step
        metric = self.metric
        when = f"after step {state.step:,d}" if state.step else "before training"
        seconds = self.elapsed_seconds() - start
        log_scores(when, scores, state.before, metric, f"; took {duration(seconds)}")
        # A step can be the best only if its weights can be loaded later: it gets a checkpoint, or it is the last. A run
        # without checkpoints only reports its best step.
        can_be_best = self.checkpoint_is_due() or self._is_last_step()
        can_be_best |= self.intervals.save_steps is None
        is_better = state.step > 0
        if state.best is not None:
            is_better = scores[metric] > state.best
        if is_better and can_be_best:
            state.set_best(metric)
        epoch = self.data.epoch_at(state.step)
        evaluation = Evaluation(state.step, epoch, scores, metric, query_results)
        self.interrupts.wants_early_end |= self.hooks.on_evaluation(evaluation)
        self.interrupts.share_early_end()
        if is_better and self._is_last_step():
            # Asked again, as a hook may have ended the run just now: the last step needs no checkpoint to be loaded later.
            state.set_best(metric)

    def save(self) -> None:
        """Write a checkpoint of the current step, unless there is one. Collective."""
        self.state.hooks = self.hooks.states()
        self.checkpointer.save(
            asdict(self.state), self._trained_state(), partial(write_whole_model, self)
        )

    def finish(self) -> TrainResult:
        """Write final/ and the report. Collective."""
        state = self.state
        components = self.components
        # Hooks first: `on_finish` promises them the weights of the last step. Below, those of a better checkpoint may be loaded.
        for hook in self.hooks:
            hook.on_finish(self)
        self.interrupts.ignores_signals = True
        log_store_use(components.input_builder.stores)
        self.checkpointer.wait()

        # The weights that final/ gets are those of the checkpoint of `step`. None: those that are in the model.
        step = None
        if state.guard_message is not None:
            # Not None: where no step held, the guards' on_finish has ended the run above.
            reason = "the last checkpoint at which every guard held"
            step = state.guarded_step
            scores = state.guarded_scores
        elif self.intervals.load_best_model_at_end:
            reason = "the best checkpoint"
            step = state.best_step
            scores = state.best_scores
        elif state.best_step is not None and state.best_step < state.step:
            log.info(
                f"final/ gets the last step; step {state.best_step:,d} had the best score, which load_best_model_at_end: true "
                "would load",
                extra=HEADLINE,
            )
        if step is not None and step != state.step:
            folder = self.checkpointer.path_of(step)
            if self.checkpointer.load_weights(folder, self._trained_state()):
                log.info(f"final/ gets {reason}, {folder.name}")
                state.scores = scores
                state.scored_step = step
            elif state.guard_message is not None:
                raise RunError(
                    f"{state.guard_message}; {folder} is damaged, so no weights are left for final/: train again"
                )
            else:
                log.warning("final/ gets the last step")
        fsdp_print_memory_usage("after the last step")
        with self.hooks.evaluation_weights():
            model_dir = save_final(self)
        before = {f"before/{name}": score for name, score in state.before.items()}
        return TrainResult(
            model_dir=model_dir,
            output_dir=self.output,
            metrics={**before, **state.scores},
            steps=min(state.step, self.data.total_steps),
        )

    def elapsed_seconds(self) -> float:
        """Return the seconds of the run up to now, with set-up and evaluations, and with the earlier parts of a resumed run."""
        return self._earlier_seconds + time.perf_counter() - self._began

    def restart_stream(self) -> None:
        """Read the batches from the current step on. Those prepared ahead are dropped."""
        num_batches = self.data.batches_per_step
        first_batch = self.state.step * num_batches
        end = self.data.total_steps * num_batches
        self.batches.close()
        self.batches = self.stream.from_batch(first_batch, end)

    # ---- parts of the loop ---------------------------------------------------

    def _restore(self, point: ResumePoint) -> LoopState:
        """Return the state to begin with, and restore weights, optimizer and hooks."""
        state = LoopState.restored(self.checkpointer.load(point, self._trained_state()))
        is_scored = state.step > 0 and state.scored_step == state.step
        # An eval_metric that is new may have a cut-off that was not scored.
        is_scored &= self.metric in state.scores
        has_checkpoint = self.checkpointer.path_of(state.step).is_dir()
        if is_scored and has_checkpoint and state.best is None:
            # No best step is known: the options have changed, or this step was scored before it had a checkpoint. It has one
            # now, so it becomes the best. A best step that is known stays.
            state.set_best(self.metric)
        if not self.config.evaluation.guards:
            # The guard that ended the run is no longer asked for.
            state.guard_message = None
        self.hooks.load_states(state.hooks)
        self._earlier_seconds = state.seconds
        return state

    def _trained_state(self) -> TrainedState:
        components = self.components
        return TrainedState(
            components.model,
            components.loss,
            components.optimizer,
            self.hooks.tensors(),
        )

    def _before_step(self) -> None:
        """Let the hooks prepare the next step, and before it a new epoch."""
        # Counted in batches. If an epoch begins with a batch inside of a step, the hooks prepare it before the next step.
        num_batches = self.data.batches_per_step
        batches_per_epoch = self.data.batch_schedule.batches_per_epoch
        first_batch = self.state.step * num_batches
        epoch = first_batch // batches_per_epoch
        epoch_before = (first_batch - num_batches) // batches_per_epoch
        # A step may be longer than an epoch, and begin several. Nothing is before epoch 0.
        for begun in range(max(epoch_before, -1) + 1, epoch + 1):
            for hook in self.hooks:
                hook.on_epoch(begun)
        for hook in self.hooks:
            hook.before_step(self.state.step + 1)

    def checkpoint_is_due(self) -> bool:
        """Return whether this step gets a checkpoint by `save_steps`. A run that is stopped writes one at any step.

        A step that was skipped because of non-finite values gets none. Its weights may be broken, and must not replace the
        good ones of earlier checkpoints.
        """
        step = self.state.step
        is_due = _is_due(step, self.intervals.save_steps)
        point = self.resume_point
        # The step that a resumed run begins with has its checkpoint already. It counts only in this run's folder.
        if point is not None and point.step == step:
            is_due &= self.checkpointer.path_of(step).is_dir()
        return is_due and not self.state.skipped_in_a_row

    def _is_last_step(self) -> bool:
        is_end = self.state.step == self.data.total_steps
        return is_end or self.interrupts.has_agreed_end


def _is_due(step: int, interval: int | None) -> bool:
    return interval is not None and interval > 0 and step % interval == 0
