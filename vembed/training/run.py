"""Main loop: train(config) reads, builds, prepares, loops, saves and reports. Read this file first.

The state between two steps is `LoopState` and the state of model, loss and optimizer; a checkpoint holds exactly that.
Data order, dropout and learning rate are pure functions of the step.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from vembed.config.loading import Source, require_earlier_stage, resolve_run, save_config
from vembed.config.resolved import ResolvedRun
from vembed.config.schema import TrainConfig
from vembed.data.features import Featuriser
from vembed.data.rank_batch import RankBatch, RankBatchStream
from vembed.data.sources import open_examples
from vembed.distributed.memory import fsdp_print_memory_usage
from vembed.distributed.parameters import log_parameter_summary
from vembed.distributed.session import Session, start_session
from vembed.errors import Stopped
from vembed.evaluation.dataset import open_eval_data
from vembed.evaluation.scores import deciding_metric, evaluate_model
from vembed.families.decisions import describe
from vembed.losses.build import build_loss
from vembed.models.embedding_model import build_model
from vembed.progress import duration
from vembed.report.record import scores_line
from vembed.training.budget import find_budget
from vembed.training.checkpoint import Checkpointer
from vembed.training.diagnostics import Window, log_line
from vembed.training.finish import save_final
from vembed.training.frozen import log_use, open_stores
from vembed.training.interrupts import EvaluationStopped, Interrupts
from vembed.training.logs import Metrics, run_logging, show_progress
from vembed.training.optim import build_optimizer
from vembed.training.schedule import Schedule
from vembed.training.setup import (
    learned,
    log_cut_texts,
    main_first,
    make_output_folder,
    num_workers,
    schedule_batches,
    start_head,
)
from vembed.training.shortage import MemoryGuard, OutOfMemory
from vembed.training.step import ContrastiveStep
from vembed.training.timing import PhaseTimer, Profile
from vembed.training.update import GradientScale, Update, synchronise
from vembed.training.watch import Watch
from vembed.training.whole_model import whole_model_writer

log = logging.getLogger("vembed")


@dataclass(frozen=True)
class TrainResult:
    """Result of a finished run."""

    model_dir: Path
    output_dir: Path
    metrics: dict[str, float]
    """Scores of the saved model. Those before training have the prefix "before/"."""
    steps: int


@dataclass
class LoopState:
    """State of the loop."""

    step: int = 0
    """Number of optimizer steps taken."""
    num_skipped: int = 0
    """Number of steps skipped because of non-finite values."""
    best: float | None = None
    best_step: int | None = None
    best_scores: dict[str, float] = field(default_factory=dict)
    scale: GradientScale = field(default_factory=GradientScale)
    before: dict[str, float] = field(default_factory=dict)
    """Scores before the first step."""
    scores: dict[str, float] = field(default_factory=dict)
    """Newest scores, and the step at which they were measured."""
    scored_step: int | None = None
    seconds: float = 0.0
    """Training time so far, over all resumed parts."""

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> LoopState:
        """Return the state that a checkpoint holds."""
        return cls(**{**saved, "scale": GradientScale(**saved["scale"])})


def train(config: Source | ResolvedRun, overrides: Sequence[str] = ()) -> TrainResult:
    """Train as the config says (a path, a dict or a TrainConfig); return the model's folder and its scores."""
    resolved = resolve_run(config, overrides)
    settings = resolved.config
    require_earlier_stage(resolved)
    make_output_folder(settings)
    with (
        run_logging(settings, rank=int(os.environ.get("RANK", "0"))) as console,
        Interrupts(settings) as interrupts,
        start_session(resolved) as session,
        Checkpointer(settings, session) as checkpointer,
    ):
        for line in (*resolved.translated, *resolved.notes):
            log.info(line)
        return run(settings, session, checkpointer, interrupts, console)


def run(
    config: TrainConfig, session: Session, checkpointer: Checkpointer, interrupts: Interrupts, console: Console
) -> TrainResult:
    """Run the training on one process of the group. Every process calls this with the same config."""
    began = time.perf_counter()
    resume_from = checkpointer.find()  # also refuses a folder that is not writable or holds another run
    if session.is_main:
        save_config(config, Path(config.output_dir) / "config.yaml")

    # Data: the examples, the batch size, the order.
    with main_first(session):
        store = open_examples(config, config.data_path)
    for line in store.summary():
        log.info(line)
    eval_data = open_eval_data(config, config.val_data_path) if config.val_data_path else None
    if eval_data:
        log.info(eval_data.summary())
    batch_schedule, total_steps = schedule_batches(config, store, session)
    examples_per_step = batch_schedule.global_batch_size * config.gradient_accumulation_steps
    checkpointer.check(resume_from, {"data": store.fingerprint, "global_batch_size": examples_per_step})

    # Model: description, weights, replicas or shards. The loss and the optimizer must see what prepare() returns.
    torch.manual_seed(config.seed)
    torch.use_deterministic_algorithms(config.deterministic)
    description = describe(config)
    log.info("model: %s", description.summary())
    featuriser = Featuriser(description)
    embedder = build_model(
        config,
        description,
        device=session.model_device,
        computes_on=session.device,
        compute_dtype=session.placement.compute_dtype,
        recompute=session.placement.run.recomputation.value,
        meta=session.builds_empty,
    )
    start_head(config, embedder, featuriser, store, session)
    frozen, images, packs = embedder.frozen_modalities(), embedder.bytes_of_frozen_images(), embedder.packs_texts()
    stores = open_stores(config, session, embedder)
    model = session.prepare(embedder, description.layer_classes)
    scale, bias = embedder.initial_scale_and_bias() or (None, None)
    loss = build_loss(config, mrl_dims=description.mrl_dims, start_scale=scale, start_bias=bias).to(session.device)
    optimizer = build_optimizer(model, loss, config)
    schedule = Schedule(config, total_steps, examples_per_step)
    log_parameter_summary(model)

    # Restore the state of the run.
    state = LoopState()
    if resume_from is not None:
        state = LoopState.restored(checkpointer.load(resume_from, model, loss, optimizer))
    whole_model = whole_model_writer(config, session, embedder, model, loss)
    accumulation = config.gradient_accumulation_steps
    stream = RankBatchStream(
        store, batch_schedule, featuriser, session.rank, session.world_size, num_workers(config, description)
    )
    sample = stream.sample()
    log_cut_texts(sample, description)
    budget = find_budget(config, model, featuriser, session, sample)
    guard = MemoryGuard(session)
    timer, profile = PhaseTimer(session.device), Profile(config, session.rank, total_steps)
    step = ContrastiveStep(
        model, loss, featuriser, session, budget, timer, guard, config.seed, frozen, stores, images, packs_texts=packs
    )
    kept = step.frozen if stores else None
    update = Update(model, loss, optimizer, session, config, state.scale)
    watch, window = Watch(config), Window()
    earlier = state.seconds

    with Metrics(config, session.rank, state.step) as metrics, show_progress(console, total_steps) as progress:

        def stop() -> Stopped:
            """Save the state of the run; return the exception to raise."""
            checkpointer.save(asdict(state), model, loss, optimizer, whole_model)
            checkpointer.wait()
            is_saved = checkpointer.has_saved(state.step)
            return interrupts.stopped(state.step, checkpointer.path_of(state.step) if is_saved else None)

        def evaluate() -> None:
            """Score the current weights on all ranks, and update the best score. Collective."""
            if eval_data is None or state.scored_step == state.step:
                return
            between, evaluation_began = interrupts.check, time.perf_counter()
            try:
                scores = evaluate_model(
                    model, featuriser, eval_data, config, session, say=log.info, between=between, kept=kept
                )
            except EvaluationStopped:
                raise stop() from None
            state.scores = scores
            state.scored_step = state.step
            metric = deciding_metric(config, eval_data, state.scores)
            score = state.scores[metric]
            when = f"after step {state.step:,d}" if state.step else "before training"
            took = duration(time.perf_counter() - evaluation_began)
            log.info("%s; took %s", scores_line(when, scores, state.before, metric), took)
            # The best step must be recoverable: it has a checkpoint, or it is the last one.
            is_kept = config.save_steps is None or state.step % config.save_steps == 0 or state.step == total_steps
            if state.step > 0 and is_kept and (state.best is None or score > state.best):
                state.best, state.best_step, state.best_scores = score, state.step, state.scores
            metrics.evaluation(state.step, state.step * accumulation / batch_schedule.steps_per_epoch, state.scores)

        if config.eval_before and state.step == 0:
            evaluate()
            state.before = state.scores
        if state.step and config.eval_steps and state.step % config.eval_steps == 0:
            evaluate()  # only if the run was stopped during this evaluation
        fsdp_print_memory_usage("before the first step")
        if state.step >= total_steps:
            done, asked = f"{state.step:,d}", f"{total_steps:,d}"
            log.info("nothing is left to train: step %s is done, and epochs or max_steps ask for %s", done, asked)
        log.info("set-up took %s; training %s steps", duration(time.perf_counter() - began), f"{total_steps:,d}")
        first_step, loop_began = state.step, time.perf_counter()
        rank_batches = stream.from_batch(state.step * accumulation, total_steps * accumulation)
        group: list[RankBatch] = []

        while state.step < total_steps:
            window.begin()
            profile.before(state.step + 1)
            loss_share = torch.zeros((), dtype=torch.float64, device=session.device)
            parts: list[tuple[RankBatch, torch.Tensor]] = []
            with timer("data"):
                group = group or [next(rank_batches) for _ in range(accumulation)]
            try:
                for part, rank_batch in enumerate(group):
                    batch, last = state.step * accumulation + part, part == accumulation - 1
                    result = step.accumulate(
                        rank_batch, batch, weight=1 / accumulation, last=last, scale=state.scale.value
                    )
                    loss_share += result.loss_share / accumulation
                    window.add(rank_batch, result)
                    parts.append((rank_batch, torch.isfinite(result.embeddings).all()))
            except OutOfMemory:
                step.budget = guard.smaller(step.budget)
                for module in (model, loss):
                    module.zero_grad(set_to_none=True)
                continue
            with timer("wait"):
                synchronise(model, loss, session)
            with timer("optimizer"):
                learning_rate = schedule.set(optimizer, state.step)
                outcome = update.apply(loss_share)
            state.step += 1
            state.seconds = earlier + time.perf_counter() - began
            if not watch.finite(state.step, outcome, parts):
                state.num_skipped += 1
            group = []
            stopping = interrupts.agree(checkpointer.save_seconds)
            profile.after(state.step)
            progress(state.step)
            window.end()

            if state.step % config.logging_steps == 0 or state.step in (1, total_steps) or stopping:
                values = {
                    "step": state.step,
                    "epoch": state.step * accumulation / batch_schedule.steps_per_epoch,
                    "loss": outcome.loss,
                    "learning_rate": learning_rate,
                    "grad_norm": outcome.grad_norm,
                    **learned(loss),
                    **window.figures(session, timer),
                    **watch.figures(state.step, outcome.loss, result.embeddings),
                }
                metrics.step(values)
                rate = (time.perf_counter() - loop_began) / (state.step - first_step)
                log.info(log_line(values, total_steps, rate * (total_steps - state.step)))
                window = Window()
            if config.eval_steps and state.step % config.eval_steps == 0:
                evaluate()
            if stopping:
                raise stop()
            if config.save_steps and state.step % config.save_steps == 0:
                checkpointer.save(asdict(state), model, loss, optimizer, whole_model)

        evaluate()
    interrupts.training_is_over()
    log_use(stores)
    checkpointer.wait()
    best = checkpointer.path_of(state.best_step or 0)
    wants_best = config.load_best_model_at_end and state.best_step not in (None, state.step)
    if wants_best and checkpointer.load_weights(best, model, loss):
        log.info("final/ gets the best checkpoint, %s", best.name)
        state.scores, state.scored_step = state.best_scores, state.best_step
    fsdp_print_memory_usage("after the last step")
    model_dir = save_final(config, session, embedder, model, loss, store, eval_data, state)
    return TrainResult(
        model_dir=model_dir,
        output_dir=Path(config.output_dir),
        metrics={**{f"before/{name}": value for name, value in state.before.items()}, **state.scores},
        steps=total_steps,
    )
