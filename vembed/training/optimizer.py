"""The optimizer of a run: parameter groups with learning rate and weight decay. The kinds are in `optimizers/`."""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from vembed.config.rate import rate_of
from vembed.config.schema import OptimizerSection
from vembed.errors import UserError
from vembed.models.embedding_model import EmbeddingModel
from vembed.models.families.backbones import layers_of
from vembed.models.names import plain_name
from vembed.training.optimizers.declaration import OptimizedWeights
from vembed.training.optimizers.table import OPTIMIZERS

log = logging.getLogger("vembed")

_LAYER = re.compile(r"^(?:.*?\.)?(?:layers?|blocks?|h)\.\d+\.")
"""Layers by their name, where the model's own structure does not tell them."""
_EMBEDDING = re.compile(r"embed|(^|\.)(wte|wpe)\.")


@dataclass(frozen=True, slots=True)
class LearningRates:
    """Peak learning rates of a run."""

    base: float
    heads: float | None = None
    """Of heads, projections and learned scales, where it is another."""

    @classmethod
    def given(cls, options: OptimizerSection) -> LearningRates:
        """Return the rates of a config that gives them as numbers."""
        return cls(rate_of(options), options.head_learning_rate)


@dataclass(frozen=True, slots=True)
class TrainedParameter:
    """A trainable parameter with its optimizer settings."""

    name: str
    """Name in the model before wrapping. A loss parameter's name starts with "loss."."""
    parameter: nn.Parameter
    shape: torch.Size
    """Shape of the whole parameter, not of a shard."""
    learning_rate: float
    decays: bool
    is_head: bool
    """True for parameters of the loss, of heads and of projections."""


def build_optimizer(
    model: nn.Module,
    loss: nn.Module,
    options: OptimizerSection,
    rates: LearningRates | None = None,
    *,
    seed: int = 0,
) -> torch.optim.Optimizer:
    """Build the optimizer of all trainable parameters of model and loss. By default the config gives the rates.

    Call it after wrapping: the optimizer must hold the shards. Each group keeps its peak learning rate under
    "initial_lr", for `Schedule.set`.
    """
    rates = rates or LearningRates.given(options)
    trained = trained_parameters(model, loss, options, rates)
    _check_flattened(trained, options, rates)
    # Parameters with equal settings share a group. Plain tensors and DTensors cannot share one fused call.
    groups: dict[tuple[float, bool, bool], dict[str, Any]] = {}
    for entry in trained:
        is_sharded = isinstance(entry.parameter, DTensor)
        group = groups.setdefault(
            (entry.learning_rate, entry.decays, is_sharded),
            {
                "params": [],
                "lr": entry.learning_rate,
                "initial_lr": entry.learning_rate,
                "weight_decay": options.weight_decay if entry.decays else 0.0,
            },
        )
        group["params"].append(entry.parameter)
    dtypes = {entry.parameter.dtype for entry in trained}
    weights = OptimizedWeights(
        groups=list(groups.values()),
        is_sharded=any(is_sharded for _, _, is_sharded in groups),
        is_flat=bool(FullyShardedDataParallel.fsdp_modules(model)),
        is_half=bool(dtypes & {torch.bfloat16, torch.float16}),
    )
    kind = OPTIMIZERS[options.optim]
    problem = kind.refusal(weights)
    if problem is None and weights.is_half:
        problem = _half_refusal(options.optim)
    if problem is not None:
        raise UserError(problem)
    optimizer, description = kind.build(weights, rates.base, options, seed)
    summary = _summary(options, rates, trained, len(groups))
    log.info("optimizer: %s; %s", description, summary)
    return optimizer


def trained_parameters(
    model: nn.Module, loss: nn.Module, options: OptimizerSection, rates: LearningRates
) -> list[TrainedParameter]:
    """Return every trainable parameter with its learning rate and weight decay, in the order of the model."""
    named: list[tuple[str, nn.Parameter]] = []
    for prefix, module in (("", model), ("loss", loss)):
        for name, parameter in module.named_parameters(prefix=prefix):
            named.append((plain_name(name), parameter))
    depths: Mapping[str, int] = {}
    if options.layer_lr_decay != 1.0:
        depths = _depths([name for name, _ in named], model)
    whole_shapes = _whole_shapes(model)
    heads = head_prefixes(model)
    trained = []
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        # The shape before sharding: a flat FSDP1 piece of a matrix has one dimension, but must still decay.
        shape = whole_shapes.get(id(parameter), parameter.shape)
        is_head = name.startswith(heads)
        if is_head:
            rate = rates.base if rates.heads is None else rates.heads
        else:
            # What belongs to no layer (norms behind the last one) has depth 0: the full rate.
            rate = rates.base * options.layer_lr_decay ** depths.get(name, 0)
        decays = len(shape) > 1 and not name.endswith("bias")
        trained.append(TrainedParameter(name, parameter, shape, rate, decays, is_head))
    if not trained:
        raise UserError(
            "nothing to train: every parameter of model and loss is frozen; take parts out of `freeze`, or set "
            "use_lora: true"
        )
    return trained


def head_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Return the beginnings of the names of parameters of the loss, of heads and of projections."""
    names = ["loss."]
    for module in model.modules():
        if isinstance(module, EmbeddingModel):
            names += [f"{name}." for name in module.head_names()]
    return tuple(names)


def _half_refusal(name: str) -> str | None:
    """Return why updates of bfloat16 weights would vanish in rounding."""
    if OPTIMIZERS[name].trains_half:
        return None
    return (
        f"torch_dtype: pure_bfloat16 with optim: {name}: updates of bfloat16 weights vanish in rounding; use optim: "
        "adamw, which rounds them stochastically, or torch_dtype: bfloat16"
    )


def _check_flattened(
    trained: list[TrainedParameter], options: OptimizerSection, rates: LearningRates
) -> None:
    """Report the effects of FSDP1 without use_orig_params, which flattens a unit's weights and biases into one."""
    if not any(entry.name.endswith("_flat_param") for entry in trained):
        return
    if options.layer_lr_decay != 1.0 or rates.heads is not None:
        raise UserError(
            "layer_lr_decay and head_learning_rate need separate parameters, and fsdp_use_orig_params: "
            "false flattens those of a unit into one: set fsdp_use_orig_params: true or fsdp_version: 2"
        )
    if options.weight_decay:
        log.warning(
            "fsdp_use_orig_params: false flattens the parameters of a unit into one, so weight_decay: %g reaches no "
            "parameter of a unit (biases and norms cannot be left out); fsdp_use_orig_params: true keeps them apart",
            options.weight_decay,
        )


def _whole_shapes(model: nn.Module) -> dict[int, torch.Size]:
    """Return the whole shape of each flat piece that FSDP1 leaves on a rank, keyed by the piece's id.

    FSDP2's DTensors and plain tensors report their whole shape themselves.
    """
    shapes: dict[int, torch.Size] = {}
    for module in FullyShardedDataParallel.fsdp_modules(model):
        flat = module._flat_param
        if flat is not None and flat._params is not None:
            for piece, shape in zip(flat._params, flat._shapes, strict=True):
                shapes[id(piece)] = shape
    return shapes


# ---- layer_lr_decay ----------------------------------------------------------


def _depths(names: Sequence[str], model: nn.Module) -> dict[str, int]:
    """Return the number of layers above each parameter in its tower.

    It is 0 for the last layer and everything after it, and the number of layers for embeddings.
    """
    layer_of = _layers_by_name(names, model)
    num_layers = Counter(stack for stack, _ in set(layer_of.values()))
    if not num_layers:
        log.warning(
            "layer_lr_decay has no effect: no stack of layers was found in this model"
        )
    embeddings = tuple(
        f"{plain_name(name)}."
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    )
    depths = {}
    for name in names:
        if name in layer_of:
            stack, index = layer_of[name]
            depths[name] = num_layers[stack] - 1 - index
        elif _EMBEDDING.search(name) or name.startswith(embeddings):
            depths[name] = _layers_beside(name, num_layers)
    return depths


def _layers_by_name(
    names: Sequence[str], model: nn.Module
) -> dict[str, tuple[str, int]]:
    """Return the stack and the number of the layer that each parameter is in, for those inside layers.

    Layers of one stack have equal names but for the numbers in them, so the stages of a hierarchical tower are one.
    """
    layers = {id(layer) for layer in layers_of(model)}
    # The modules that the model declares as layers; names decide only for what lies outside of them.
    declared = tuple(
        f"{plain_name(name)}."
        for name, module in model.named_modules()
        if id(module) in layers
    )
    prefixes = dict.fromkeys(declared)  # ordered, each once
    for name in names:
        match = _LAYER.search(name)
        if match is not None and not name.startswith(declared):
            prefixes[match[0]] = None
    stacks: defaultdict[str, list[str]] = defaultdict(list)
    for prefix in prefixes:
        stacks[re.sub(r"\.\d+\.", ".#.", prefix)].append(prefix)
    layer_of = {}
    for stack, members in stacks.items():
        for number, prefix in enumerate(members):
            for name in names:
                if name.startswith(prefix):
                    layer_of[name] = (stack, number)
    return layer_of


def _layers_beside(name: str, num_layers: Mapping[str, int]) -> int:
    """Return the layers of the tower that shares the longest path with an embedding; of equals, the largest number."""
    best = (0, 0)
    for tower, count in num_layers.items():
        num_common = 0
        for left, right in zip(name.split("."), tower.split("."), strict=False):
            if left != right:
                break
            num_common += 1
        best = max(best, (num_common, count))
    return best[1]


def _summary(
    options: OptimizerSection,
    rates: LearningRates,
    trained: list[TrainedParameter],
    num_groups: int,
) -> str:
    """Return the log summary: parameters with and without weight decay, and learning rates."""

    def count(members: list[TrainedParameter]) -> str:
        num_values = sum(entry.shape.numel() for entry in members)
        return f"{num_values:,d} in {len(members):,d} tensors"

    decayed = [entry for entry in trained if entry.decays]
    undecayed = [entry for entry in trained if not entry.decays]
    heads = [entry for entry in trained if entry.is_head]
    decay = "all of them"
    if undecayed:
        decay = f"{count(decayed)}, none on {count(undecayed)} (biases, norms, scalars)"
    parts = [
        f"{count(trained)} trained, {num_groups:,d} {'group' if num_groups == 1 else 'groups'}",
        f"weight decay {options.weight_decay:g} on {decay}",
    ]
    if rates.heads is not None:
        parts.append(
            f"head_learning_rate {rates.heads:g} for {count(heads)} (heads, projections, scales)"
        )
    if options.layer_lr_decay != 1.0:
        peaks = [entry.learning_rate for entry in trained if not entry.is_head]
        low = min(peaks, default=0.0)
        high = max(peaks, default=0.0)
        parts.append(
            f"layer_lr_decay {options.layer_lr_decay:g}: peaks from {low:.3g} (lowest) to {high:.3g} (last layer)"
        )
    return "; ".join(parts)
