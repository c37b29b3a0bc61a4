"""Learning rate schedules. The learning rate is a pure function of the step, so a resumed run needs no state for it."""

from __future__ import annotations

import logging
import math
from typing import Literal

import torch

from vembed.config.rate import rate_of
from vembed.config.schema import TrainConfig

log = logging.getLogger("vembed")

Kind = Literal["linear", "cosine", "constant"]


def lr_factor(step: int, total: int, warmup: int, kind: Kind) -> float:
    """Return the fraction of the peak learning rate in step number `step`, counted from 0, of `total`.

    It rises linearly to 1 in the last of `warmup` steps, then falls so that it would reach 0 in the step after the
    last. No step has a learning rate of 0, neither the first nor the last.
    """
    if step < warmup:
        return (step + 1) / warmup
    peak = max(warmup - 1, 0)
    fallen = min((step - peak) / (total - peak), 1.0) if total > peak else 1.0
    if kind == "linear":
        return 1.0 - fallen
    if kind == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * fallen))
    return 1.0


def lr_multiplier(config: TrainConfig, examples_per_step: int) -> float:
    """Return the factor that `scale_learning_rate` applies to every learning rate."""
    ratio = examples_per_step / config.optimizer.base_batch_size
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[
        config.optimizer.scale_learning_rate
    ]


class Schedule:
    """Learning rates of a run, set before every optimizer step."""

    def __init__(
        self, config: TrainConfig, total_steps: int, examples_per_step: int
    ) -> None:
        self.kind: Kind = config.optimizer.lr_scheduler_type
        self.total_steps = total_steps
        self.multiplier = lr_multiplier(config, examples_per_step)
        self.peak = rate_of(config) * self.multiplier
        warmup = config.optimizer.warmup_steps
        if isinstance(warmup, int):
            self.warmup_steps = warmup
            why = "warmup_steps"
        else:
            # Rounded up, so that a share above 0 warms up in short runs too.
            self.warmup_steps = math.ceil(warmup * total_steps)
            why = f"warmup_steps {warmup:g} of {total_steps:,d} steps"
        fall = (
            "stays there"
            if self.kind == "constant"
            else f"then falls by the {self.kind} schedule"
        )
        log.info(
            "learning rate: peak %.3g (%s), after %d warm-up steps (%s), %s",
            self.peak,
            self._derivation(config, examples_per_step),
            self.warmup_steps,
            why,
            fall,
        )
        if self.warmup_steps > total_steps:
            log.warning(
                "warmup_steps: %d is more than the %d steps of this run: the learning rate only gets to %.3g",
                self.warmup_steps,
                total_steps,
                self.value(total_steps - 1),
            )

    def factor(self, step: int) -> float:
        """Return the fraction of the peak in step number `step`, counted from 0."""
        return lr_factor(step, self.total_steps, self.warmup_steps, self.kind)

    def value(self, step: int) -> float:
        """Return the learning rate of parameters without one of their own."""
        return self.peak * self.factor(step)

    def set(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Set every parameter group's learning rate for step number `step`; return `value(step)`."""
        factor = self.multiplier * self.factor(step)
        for group in optimizer.param_groups:
            value = group["initial_lr"] * factor
            if isinstance(group["lr"], torch.Tensor):
                # In place: a captured or compiled optimizer step reads this tensor.
                group["lr"].fill_(value)
            else:
                group["lr"] = value
        return self.value(step)

    def _derivation(self, config: TrainConfig, examples_per_step: int) -> str:
        if config.optimizer.scale_learning_rate == "none":
            return "the same on any number of processes"
        ratio = f"{examples_per_step:,d} examples per step / base_batch_size {config.optimizer.base_batch_size:,d}"
        ratio = (
            f"sqrt({ratio})"
            if config.optimizer.scale_learning_rate == "sqrt"
            else f"({ratio})"
        )
        return f"{rate_of(config):g} * {ratio}"
