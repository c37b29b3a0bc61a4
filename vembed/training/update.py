"""Optimizer updates: gradient synchronisation, norm, clipping and the float16 gradient scale. The same on every
rank."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vembed.losses.batch import EmbeddingLoss
from vembed.parallel import collectives
from vembed.parallel.parameters import clip_gradients, global_grad_norm
from vembed.parallel.session import Session

FIRST_SCALE = 2.0**16
GROWTH_STEPS = 2000


@dataclass
class GradientScale:
    """Loss scale that keeps float16 gradients from underflowing. Constant 1 for every other dtype."""

    value: float = 1.0
    good_steps: int = 0
    is_started: bool = False
    """True if the first float16 value was set. A value that overflows reduced to 1 must not be reset."""

    def start(self) -> None:
        """Set the first value, unless a checkpoint has restored a later one."""
        if not self.is_started:
            self.value = FIRST_SCALE
            self.is_started = True

    def after(self, is_finite: bool) -> bool:
        """Halve the scale after an overflow, double it after many good steps. Return False if it cannot be halved
        any more."""
        if not is_finite:
            was_lowest = self.value == 1.0
            self.value = max(self.value / 2, 1.0)
            self.good_steps = 0
            return not was_lowest
        self.good_steps += 1
        if self.good_steps == GROWTH_STEPS:
            self.value *= 2
            self.good_steps = 0
        return True


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one optimizer step."""

    loss: float
    """L of the global batch."""
    grad_norm: float
    """Global gradient norm before clipping."""
    applied: bool
    """False if the step was skipped because of non-finite values."""
    is_overflow: bool = False
    """True if the step was skipped because of a float16 overflow, and the scale could be halved."""


def synchronise(model: nn.Module, loss: EmbeddingLoss, session: Session) -> None:
    """Synchronise gradients that FSDP did not reduce: replicas under DDP, and loss parameters. Call it after the
    last backward."""
    if session.strategy == "ddp":
        collectives.all_reduce_gradients(model.parameters())
    # Each rank's gradient of a loss parameter comes from its own rows, and L is the sum over the rows: sum, not mean.
    collectives.all_reduce_gradients(loss.parameters(), average=False)


class Update:
    """Gradient norm, clipping and the optimizer step."""

    def __init__(
        self,
        model: nn.Module,
        loss: EmbeddingLoss,
        optimizer: torch.optim.Optimizer,
        session: Session,
        max_grad_norm: float,
        scale: GradientScale,
    ) -> None:
        """`max_grad_norm`: larger gradients are scaled down to it. 0: no clipping."""
        self.model = model
        self.loss = loss
        self.optimizer = optimizer
        self.session = session
        self.max_grad_norm = max_grad_norm
        self.scales = session.mixed_precision == "fp16"
        self.scale = scale
        if self.scales:
            scale.start()

    def apply(self, loss_share: torch.Tensor) -> Outcome:
        """Take one optimizer step with the current gradients, then clear them. Collective."""
        parameters = [*self.model.parameters(), *self.loss.parameters()]
        # The loss's parameters are copies on every rank, also where the model is sharded.
        norm_tensor = global_grad_norm(self.model, list(self.loss.parameters()))
        loss = collectives.sum_scalars([float(loss_share)])[0]
        # The norm is measured on scaled gradients and divided afterwards. Unscaling and clipping then share one
        # multiplication below.
        norm = float(norm_tensor) / self.scale.value
        # Both values are sums over all ranks, so every rank takes the same branch.
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        if is_finite:
            factor = 1.0 / self.scale.value
            if self.max_grad_norm and norm > self.max_grad_norm:
                # 1e-6 as in torch.nn.utils.clip_grad_norm_.
                factor *= self.max_grad_norm / (norm + 1e-6)
            if factor != 1.0:
                clip_gradients(parameters, factor)
            self.optimizer.step()
            self.loss.project_parameters()
        # Also after a skipped step: its gradients must not be added to those of the next.
        self.optimizer.zero_grad(set_to_none=True)
        could_scale = self.scales and self.scale.after(is_finite)
        return Outcome(
            loss,
            norm,
            is_finite,
            is_overflow=could_scale and not is_finite and math.isfinite(loss),
        )


@dataclass
class LoopState:
    """State of the loop. Every rank holds the same."""

    step: int = 0
    """Number of optimizer steps taken."""
    num_skipped: int = 0
    """Number of steps skipped because of non-finite values."""
    skipped_in_a_row: int = 0
    """Number of the last steps that were skipped, float16 overflows aside."""
    best: float | None = None
    best_step: int | None = None
    best_scores: dict[str, float] = field(default_factory=dict)
    held_step: int | None = None
    """Step whose checkpoint `final/` gets if a guard falls, and its scores."""
    held_scores: dict[str, float] = field(default_factory=dict)
    fell: str | None = None
    """Reason why a guard ended the run."""
    scale: GradientScale = field(default_factory=GradientScale)
    before: dict[str, float] = field(default_factory=dict)
    """Scores before the first step."""
    scores: dict[str, float] = field(default_factory=dict)
    """Newest scores, and the step at which they were measured."""
    scored_step: int | None = None
    seconds: float = 0.0
    """Training time so far, over all resumed parts."""
    hooks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """State of each hook that has one, by its name. Written when the state is saved."""

    def count_step(self, outcome: Outcome) -> None:
        """Count an optimizer step, taken or skipped."""
        self.step += 1
        if outcome.applied:
            self.skipped_in_a_row = 0
            return
        self.num_skipped += 1
        if not outcome.is_overflow:
            self.skipped_in_a_row += 1

    def set_best(self, metric: str) -> None:
        """Take the newest scores as the best."""
        self.best = self.scores[metric]
        self.best_step = self.step
        self.best_scores = self.scores

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> LoopState:
        """Return the state that a checkpoint holds."""
        return cls(**{**saved, "scale": GradientScale(**saved["scale"])})
