"""Learning rate schedules. The learning rate is a pure function of the step, so a resumed run needs no state for it."""

from __future__ import annotations

import logging
import math

import torch

from vembed.config.schema import OptimizerSection

log = logging.getLogger("vembed")

BASE_BATCH_SIZE = 32
"""The global batch that the learning rate is for, with `scale_learning_rate`."""


def lr_factor(step: int, total: int, warmup: int, kind: str) -> float:
    """Return the fraction of the peak learning rate in step number `step`, counted from 0, of `total`.

    It rises linearly to 1 in the last of `warmup` steps, then falls so that it would reach 0 in the step after the
    last. No step has a learning rate of 0, neither the first nor the last.
    """
    if step < warmup:
        return (step + 1) / warmup
    peak_step = max(warmup - 1, 0)
    progress = 1.0
    if total > peak_step:
        progress = min((step - peak_step) / (total - peak_step), 1.0)
    if kind == "linear":
        return 1.0 - progress
    if kind == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0


class Schedule:
    """Learning rates of a run, set before every optimizer step."""

    def __init__(
        self,
        options: OptimizerSection,
        peak: float,
        total_steps: int,
        examples_per_step: int,
    ) -> None:
        """`peak`: the learning rate, before `scale_learning_rate` multiplies it."""
        self.kind = options.lr_scheduler_type
        self.total_steps = total_steps
        self.multiplier = 1.0
        derivation = "the same on any number of processes"
        if options.scale_learning_rate != "none":
            ratio = examples_per_step / BASE_BATCH_SIZE
            formula = f"({examples_per_step:,d} examples per step / {BASE_BATCH_SIZE})"
            self.multiplier = ratio
            if options.scale_learning_rate == "sqrt":
                self.multiplier = math.sqrt(ratio)
                formula = f"sqrt{formula}"
            derivation = f"{peak:g} * {formula}"
        self.peak = peak * self.multiplier
        warmup = options.warmup_steps
        if isinstance(warmup, int):
            self.warmup_steps = warmup
            reason = "warmup_steps"
        else:
            # Rounded up, so that a share above 0 warms up in short runs too.
            self.warmup_steps = math.ceil(warmup * total_steps)
            reason = f"warmup_steps {warmup:g} of {total_steps:,d} steps"
        decay = f"then falls by the {self.kind} schedule"
        if self.kind == "constant":
            decay = "stays there"
        log.info(
            "learning rate: peak %.3g (%s), after %d warm-up steps (%s), %s",
            self.peak,
            derivation,
            self.warmup_steps,
            reason,
            decay,
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
            learning_rate = group["initial_lr"] * factor
            if isinstance(group["lr"], torch.Tensor):
                # In place: a captured or compiled optimizer step reads this tensor.
                group["lr"].fill_(learning_rate)
            else:
                group["lr"] = learning_rate
        return self.value(step)
