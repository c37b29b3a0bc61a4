"""Update: from the gradients that a rank has to one step of the optimizer, the same on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from vembed.config.schema import TrainConfig
from vembed.distributed import collectives
from vembed.distributed.fsdp import clip_gradients, global_grad_norm
from vembed.distributed.session import Session
from vembed.losses.batch import EmbeddingLoss

FIRST_SCALE = 2.0**16
GROWTH_STEPS = 2000


@dataclass
class GradientScale:
    """The factor that keeps float16 gradients from vanishing; 1 and constant for every other dtype."""

    value: float = 1.0
    good_steps: int = 0
    is_started: bool = False
    """Whether float16 has its first value: one that overflows have brought down to 1 is not a new one."""

    def start(self) -> None:
        """Take the first value, unless a checkpoint has brought a later one."""
        if not self.is_started:
            self.value, self.is_started = FIRST_SCALE, True

    def after(self, is_finite: bool) -> bool:
        """Halve it after an overflow, double it after many good steps. False where it cannot be halved any more."""
        if not is_finite:
            was_lowest = self.value == 1.0
            self.value, self.good_steps = max(self.value / 2, 1.0), 0
            return not was_lowest
        self.good_steps += 1
        if self.good_steps == GROWTH_STEPS:
            self.value, self.good_steps = self.value * 2, 0
        return True


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one optimizer step did."""

    loss: float
    """L of the global batch."""
    grad_norm: float
    """The global norm before clipping."""
    applied: bool
    """False where a number was not finite and the step was left out."""
    is_overflow: bool = False
    """Whether it was left out because float16 overflowed, with a gradient scale that could be halved."""


def synchronise(model: nn.Module, loss: EmbeddingLoss, session: Session) -> None:
    """After the last backward pass: FSDP has averaged its shards by then; copies and loss parameters do it here."""
    if session.strategy == "ddp":
        collectives.all_reduce_gradients(model.parameters())
    # Each rank holds its own rows' part of these gradients, and L is the sum over the rows.
    collectives.all_reduce_gradients(loss.parameters(), average=False)


class Update:
    """Measures, clips and applies gradients."""

    def __init__(
        self,
        model: nn.Module,
        loss: EmbeddingLoss,
        optimizer: torch.optim.Optimizer,
        session: Session,
        config: TrainConfig,
        scale: GradientScale,
    ) -> None:
        self.model = model
        self.loss = loss
        self.optimizer = optimizer
        self.session = session
        self.max_grad_norm = config.max_grad_norm
        self.scales = session.mixed_precision == "fp16"
        self.scale = scale
        if self.scales:
            scale.start()

    def apply(self, loss_share: torch.Tensor) -> Outcome:
        """One step of the optimizer with the gradients as they stand; then none are left."""
        parameters = [*self.model.parameters(), *self.loss.parameters()]
        norm_tensor = global_grad_norm(self.model, list(self.loss.parameters()))
        loss = collectives.sum_scalars([float(loss_share)])[0]
        norm = float(norm_tensor) / self.scale.value
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        if is_finite:
            factor = 1.0 / self.scale.value
            if self.max_grad_norm and norm > self.max_grad_norm:
                factor *= self.max_grad_norm / (norm + 1e-6)
            if factor != 1.0:
                clip_gradients(parameters, factor)
            self.optimizer.step()
            self.loss.project_parameters()
        self.optimizer.zero_grad(set_to_none=True)
        could_scale = self.scales and self.scale.after(is_finite)
        return Outcome(loss, norm, is_finite, is_overflow=could_scale and not is_finite and math.isfinite(loss))
