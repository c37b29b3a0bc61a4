"""The optimizer of a run: parameter groups with learning rate and weight decay, the schedule of the rates, and the update of
the weights (gradient norm, clipping, float16 scale), which is the same on every rank.

The kinds are in `optimizer_kinds.py`. The learning rate is a pure function of the step, so a resumed run needs no state for it.
"""

import logging
import math
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vembed.config.decisions import rate_of
from vembed.config.schema import OptimizerSection
from vembed.errors import UserError
from vembed.losses.batch import LossModule
from vembed.models.embedding_model import EmbeddingModel
from vembed.models.families.backbones import unwrapped_name
from vembed.parallel.parameters import (
    clip_gradients,
    flat_pieces,
    fsdp1_group,
    gradient_norm,
)
from vembed.parallel.session import Session
from vembed.training.optimizer_kinds import OPTIMIZERS, OptimizerInputs

log = logging.getLogger("vembed")

FIRST_SCALE = 2.0**16
GROWTH_STEPS = 2000
"""Good steps after which the scale of float16 gradients doubles."""
BASE_BATCH_SIZE = 32
"""The global batch that the learning rate is for, with `scale_learning_rate`."""


def build_optimizer(
    model: nn.Module,
    loss: nn.Module,
    options: OptimizerSection,
    *,
    seed: int = 0,
) -> torch.optim.Optimizer:
    """Build the optimizer of all trainable parameters of model and loss.

    Call it after wrapping: the optimizer must hold the shards. Each group keeps its peak learning rate under
    "initial_lr", for `Schedule.set`.
    """
    # FSDP1 leaves a flat piece of each parameter. FSDP2's DTensors and plain tensors report their whole shape.
    whole_shapes = {id(piece): shape for piece, shape in flat_pieces(model)}
    head_rate = options.head_learning_rate
    # Beginnings of the names of what it is for.
    heads = ["loss."]
    for module in model.modules():
        if isinstance(module, EmbeddingModel):
            heads += [f"{name}." for name in module.modules_behind_towers()]
    # Parameters with equal settings share a group. Plain tensors and DTensors cannot share one fused call.
    groups: dict[tuple[float, bool, bool], dict[str, Any]] = {}
    dtypes = set()
    device_types = set()
    named = chain(model.named_parameters(), loss.named_parameters(prefix="loss"))
    for wrapped_name, parameter in named:
        if not parameter.requires_grad:
            continue
        name = unwrapped_name(wrapped_name)
        rate = rate_of(options)
        if head_rate is not None and name.startswith(tuple(heads)):
            rate = head_rate
        # The shape before sharding: a flat FSDP1 piece of a matrix has one dimension, but must still decay.
        shape = whole_shapes.get(id(parameter), parameter.shape)
        decays = len(shape) > 1 and not name.endswith("bias")
        group = groups.setdefault(
            (rate, decays, isinstance(parameter, DTensor)),
            {
                "params": [],
                "lr": rate,
                "initial_lr": rate,
                "weight_decay": options.weight_decay if decays else 0.0,
            },
        )
        group["params"].append(parameter)
        dtypes.add(parameter.dtype)
        device_types.add(parameter.device.type)
    inputs = OptimizerInputs(
        groups=list(groups.values()),
        adam_arguments={
            "betas": tuple(options.adam_betas),
            "eps": options.adam_epsilon,
        },
        seed=seed,
        is_sharded=any(is_sharded for _, _, is_sharded in groups),
        is_flat=fsdp1_group(model) is not None,
        is_half=not dtypes.isdisjoint({torch.bfloat16, torch.float16}),
        device_types=frozenset(device_types),
    )
    kind = OPTIMIZERS[options.optim]
    if inputs.is_half and not kind.trains_half:
        raise UserError(
            f"torch_dtype: pure_bfloat16 with optim: {kind.name}: updates of bfloat16 weights vanish in rounding; use "
            "optim: adamw, which rounds them stochastically, or torch_dtype: bfloat16"
        )
    optimizer, description = kind.build(inputs)
    if "adam_betas" in kind.options:
        first, second = options.adam_betas
        description += f", betas ({first:g}, {second:g})"
    log.info(
        f"optimizer: {description}; weight decay {options.weight_decay:g}, none on biases, norms and scalars"
    )
    return optimizer


# ---- schedule ----------------------------------------------------------------


def lr_factor(
    step: int,
    total: int,
    warmup: int,
    kind: str,
) -> float:
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
        total_steps: int,
        examples_per_step: float,
    ) -> None:
        peak = rate_of(options)
        self.head_ratio = (options.head_learning_rate or peak) / peak
        """The learning rate of heads, as a multiple of that of the other parameters."""
        self.kind = options.lr_scheduler_type
        self.total_steps = total_steps
        self.multiplier = 1.0
        derivation = "the same on any number of processes"
        if options.scale_learning_rate != "none":
            self.multiplier = examples_per_step / BASE_BATCH_SIZE
            formula = (
                f"({examples_per_step:,.6g} examples per step / {BASE_BATCH_SIZE})"
            )
            if options.scale_learning_rate == "sqrt":
                self.multiplier = math.sqrt(self.multiplier)
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
        log.info(
            f"learning rate: peak {self.peak:.3g} ({derivation}), after {self.warmup_steps} warm-up steps ({reason}), "
            f"{self.kind} schedule"
        )
        if self.warmup_steps > total_steps:
            log.warning(
                f"warmup_steps: {self.warmup_steps} is more than the {total_steps} steps of this run, so the peak is "
                "not reached"
            )

    def set(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Set every group's learning rate for step number `step`, counted from 0. Return that of parameters without a
        rate of their own."""
        factor = lr_factor(step, self.total_steps, self.warmup_steps, self.kind)
        for group in optimizer.param_groups:
            learning_rate = group["initial_lr"] * (self.multiplier * factor)
            if isinstance(group["lr"], torch.Tensor):
                # In place: a captured or compiled optimizer step reads this tensor.
                group["lr"].fill_(learning_rate)
            else:
                group["lr"] = learning_rate
        return self.peak * factor


# ---- update ------------------------------------------------------------------


@dataclass
class GradientScale:
    """Loss scale that keeps float16 gradients from underflowing. Constant 1 for every other dtype."""

    value: float = 1.0
    good_steps: int = 0
    is_started: bool = False
    """True if the first float16 value was set. A value that overflows reduced to 1 must not be reset."""

    def adapt(self, is_finite: bool) -> None:
        """Halve the scale after an overflow, and double it after many good steps."""
        self.good_steps += 1
        if not is_finite:
            self.value = max(self.value / 2, 1.0)
            self.good_steps = 0
        elif self.good_steps == GROWTH_STEPS:
            self.value *= 2
            self.good_steps = 0


@dataclass(frozen=True)
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


@dataclass
class Update:
    """Gradient norm, clipping and the optimizer step."""

    model: nn.Module
    loss: LossModule
    optimizer: torch.optim.Optimizer
    session: Session
    max_grad_norm: float
    """Larger gradients are scaled down to it. 0: no clipping."""
    scale: GradientScale

    def __post_init__(self) -> None:
        # Copies on every rank, also where the model is sharded.
        self._loss_parameters = list(self.loss.parameters())
        of_loss = set(self._loss_parameters)
        # From the optimizer, not from the modules: sharding exchanges theirs, and each step would have to walk them.
        self._model_parameters = []
        for group in self.optimizer.param_groups:
            self._model_parameters += [
                weight for weight in group["params"] if weight not in of_loss
            ]
        self._parameters = [*self._model_parameters, *self._loss_parameters]
        self._fsdp1_group = fsdp1_group(self.model)
        self.uses_scale = self.session.mixed_precision == "fp16"
        # Unless a checkpoint has restored a later value.
        if self.uses_scale and not self.scale.is_started:
            self.scale.value = FIRST_SCALE
            self.scale.is_started = True

    def apply(self, loss: float) -> Outcome:
        """Take one optimizer step with the current gradients, then clear them. Collective. `loss`: of all ranks."""
        norm_tensor = gradient_norm(
            self._model_parameters, self._fsdp1_group, self._loss_parameters
        )
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
                clip_gradients(self._parameters, factor)
            self.optimizer.step()
            self.loss.project_parameters()
        # Also after a skipped step: its gradients must not be added to those of the next.
        for parameter in self._parameters:
            parameter.grad = None
        # A gradient that overflows with the lowest scale is an error of the run, not of float16.
        is_overflow = (
            self.uses_scale
            and not is_finite
            and math.isfinite(loss)
            and self.scale.value > 1.0
        )
        if self.uses_scale:
            self.scale.adapt(is_finite)
        return Outcome(loss, norm, is_finite, is_overflow)
