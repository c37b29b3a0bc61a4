"""Checks of a run: non-finite values, a loss that does not fall, collapsed embeddings, changed data files."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from vembed.config.decisions import has_initial_weights
from vembed.config.terms import loss_terms
from vembed.errors import RunError
from vembed.parallel import collectives
from vembed.training.checkpoint.folders import newest_checkpoint
from vembed.training.hooks.base import Hook, StepReport

if TYPE_CHECKING:
    from vembed.training.trainer import Trainer

log = logging.getLogger("vembed")

COLLAPSED_COSINE = 0.99
"""Mean cosine between inputs above which embeddings no longer distinguish them."""
SMALLEST_LOSS = 1e-6
"""Below it a gradient of 0 is that of a loss that has nothing left to separate, in float32."""
CONSTANT_LOSS_STEPS = 200
"""Steps after which a loss still in its initial range causes a warning."""
CONSTANT_LOSS_RANGE = 0.001
MAX_SKIPPED_STEPS = 10
"""Steps in a row that `on_nonfinite: skip` skips before the run ends."""
MAX_NAMED_EXAMPLES = 5
FIRST_LOSS_TOLERANCE = 0.5
"""Share of the logarithm by which the first loss may differ."""


class Watch(Hook):
    """Checks of each step's metrics. Each warning is given once."""

    def __init__(self) -> None:
        self._warned: set[str] = set()
        self._knows_first_loss = False
        self._lowest_loss = math.inf
        self._highest_loss = -math.inf
        self._first_step: int | None = None
        """First step that was looked at; of a resumed run not the first one."""

    @override
    def on_start(self, run: Trainer) -> None:
        self._run = run
        terms = loss_terms(run.config.objective, run.config.model.model_name)
        self._trains_embeddings = any(not term.loss.is_of_model for term in terms)
        self._is_cross_entropy = all(term.loss.is_cross_entropy for term in terms)
        # Initial weights score all candidates alike.
        self._knows_first_loss = (
            has_initial_weights(run.config.model)
            and run.state.step == 0
            and self._is_cross_entropy
        )

    @override
    def on_step(self, report: StepReport) -> None:
        """Stop the run at a non-finite step, or log it. The same on every rank."""
        step = report.step
        outcome = report.outcome
        if self._knows_first_loss:
            self._knows_first_loss = False
            self._compare_first_loss(report)
        if outcome.is_overflow:
            log.info(
                f"step {step}: float16 overflow, gradient scale halved, step skipped"
            )
        elif not outcome.applied:
            self._on_nonfinite(report)
        elif outcome.grad_norm == 0.0 and abs(outcome.loss) > SMALLEST_LOSS:
            # The run would go on and change nothing.
            raise RunError(
                f"step {step}: the loss is {outcome.loss:g} and the gradient norm exactly 0, so nothing is "
                "trained: either all embeddings are the same, or no gradient reaches the weights; check pooling, "
                f"freeze and learning_rate (mean cosines are in metrics.jsonl); {self._checkpoint_note()}"
            )

    def _on_nonfinite(self, report: StepReport) -> None:
        """Raise RunError with the cause, or log it with `on_nonfinite: skip`. Collective."""
        optimizer = self._run.config.optimizer
        step = report.step
        embeddings = report.embeddings
        has_broken_weights = not bool(torch.isfinite(embeddings).all(dim=1).any())
        examples: list[str] = []
        for rank_batch, result in report.batches:
            if not bool(result.is_finite):
                examples += rank_batch.where
        ranks = []
        named = collectives.gather_objects(examples[:MAX_NAMED_EXAMPLES])
        for rank, places in enumerate(named):
            if places:
                ranks.append(f"rank {rank}: {', '.join(places)}")
        if has_broken_weights and step > 1:
            cause = (
                "all embeddings are non-finite, so the weights are: an earlier update with learning_rate: "
                f"{optimizer.learning_rate:g} broke them"
            )
        elif ranks:
            cause = f"non-finite embeddings on {'; '.join(ranks)}"
        else:
            # The embeddings were finite everywhere, so it was the gradient.
            first = ", ".join(report.batches[0][0].where[:2])
            cause = f"non-finite embeddings on no rank (the gradient overflowed; first examples: {first})"
        outcome = report.outcome
        message = f"step {step}: loss {outcome.loss}, gradient norm {outcome.grad_norm}; {cause}"
        if optimizer.on_nonfinite == "stop":
            advice = "Lower learning_rate or max_grad_norm"
            if self._run.session.mixed_precision == "fp16":
                advice += ", use mixed_precision: bf16 instead of fp16"
            if not has_broken_weights:
                advice += ", or set on_nonfinite: skip to skip such steps"
            raise RunError(f"{message}. {advice}; {self._checkpoint_note()}")
        log.warning(f"{message}; step skipped (on_nonfinite: skip)")
        num_skipped = self._run.state.skipped_in_a_row
        if num_skipped >= MAX_SKIPPED_STEPS:
            raise RunError(
                f"{num_skipped} steps in a row were skipped (on_nonfinite: skip), the last one {step}, so the weights "
                "no longer change: lower learning_rate or max_grad_norm, or fix the examples that the log names; "
                f"{self._checkpoint_note()}"
            )

    def _compare_first_loss(self, report: StepReport) -> None:
        """Log how far the loss is from that of equal scores, the logarithm of the candidates. Collective."""
        num_rows = 0
        for rank_batch, _ in report.batches:
            num_rows += len(rank_batch.positive) + len(rank_batch.negative)
        (total,) = collectives.sum_scalars([float(num_rows)])
        num_candidates = total / len(report.batches)
        if num_candidates < 2:
            return
        loss = report.outcome.loss
        expected = math.log(num_candidates)
        comparison = f"step 1: loss {loss:.4g}; log of its {num_candidates:,.0f} candidates is {expected:.4g}"
        if abs(loss - expected) <= FIRST_LOSS_TOLERANCE * expected:
            log.info(f"{comparison} (as of initial weights, which score all alike)")
        elif loss > expected:
            log.warning(
                f"{comparison}: initial weights should score all alike, and these are sure of wrong answers; check "
                "temperature (similarity: dot needs a larger one), and the initial values of the module"
            )
        else:
            log.info(
                f"{comparison} (initial weights tell pairs apart already, as where queries and positives share "
                "words)"
            )

    @override
    def metrics(self, report: StepReport) -> dict[str, float]:
        """Return the mean cosine between this rank's inputs, and log warnings."""
        step = report.step
        loss = report.outcome.loss
        if self._first_step is None:
            self._first_step = step
        num_steps = step - self._first_step + 1
        self._lowest_loss = min(self._lowest_loss, loss)
        self._highest_loss = max(self._highest_loss, loss)
        loss_range = self._highest_loss - self._lowest_loss
        size = max(abs(self._highest_loss), 1e-12)
        cosine = mean_cosine(report.embeddings)
        # Of scores, which have one dimension, every cosine is 1 or -1.
        is_vector = report.embeddings.shape[1] > 1
        if cosine > COLLAPSED_COSINE and self._trains_embeddings and is_vector:
            self._warn_once(
                "collapse",
                f"embeddings collapse: the mean cosine between inputs is {cosine:.3f}; lower learning_rate, check that "
                "pooling fits the model, and that positives are not the same text in every row",
            )
        if loss == 0.0 and self._is_cross_entropy:
            self._warn_once(
                "zero",
                f"the loss of step {step:,d} is exactly 0, so there is no gradient: positives had no negatives to be "
                "compared with, or are separated already; check that positives differ (copies in a batch do not "
                "count as negatives), or add negatives",
            )
        if (
            num_steps >= CONSTANT_LOSS_STEPS
            and loss_range <= CONSTANT_LOSS_RANGE * size
        ):
            self._warn_once(
                "constant",
                f"the loss has stayed at {loss:.4f} for {num_steps:,d} steps; raise learning_rate, and check that "
                "parameters are trained at all (freeze, use_lora)",
            )
        return {"mean_cosine": cosine}

    def _checkpoint_note(self) -> str:
        newest = newest_checkpoint(self._run.output)
        if not newest:
            return "no checkpoint was saved before (save_steps keeps some)"
        return f"{newest} is untouched"

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            log.warning(message)


def mean_cosine(embeddings: Tensor) -> float:
    """Return the mean cosine over all pairs of different rows of `embeddings` [n, D], without a matrix of pairs."""
    num = embeddings.shape[0]
    if num < 2:
        return 0.0
    unit = torch.nn.functional.normalize(embeddings.detach().float(), dim=1)
    # |sum of unit vectors|^2 is the sum of all cosines, the n of each row with itself included.
    total = float(unit.sum(dim=0).square().sum())
    return (total - num) / (num * (num - 1))


class DataWatch(Hook):
    """Reports once per file what happened to the data files. Most changes do no harm: files stay open as they were."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    @override
    def on_start(self, run: Trainer) -> None:
        self._examples = run.data.examples

    @override
    def on_epoch(self, epoch: int) -> None:
        for change in self._examples.changed_files():
            file = change.partition(" has ")[0]
            if file not in self._reported:
                self._reported.add(file)
                log.warning(change)

    @override
    def on_finish(self, run: Trainer) -> None:
        self.on_epoch(0)
