"""The optimizer: parameter groups with learning rate and weight decay, and the choice of implementation."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard

from vembed.config.rate import rate_of
from vembed.config.schema import TrainConfig
from vembed.errors import UserError
from vembed.models.embedding_model import EmbeddingModel
from vembed.models.families.backbones import layers_of
from vembed.models.names import plain_name
from vembed.models.quantized import quieten_bitsandbytes
from vembed.training.rounding import RoundedAdamW

log = logging.getLogger("vembed")

_LAYER = re.compile(r"^(?:.*?\.)?(?:layers?|blocks?|h)\.\d+\.")
"""Layers by their name, where the model's own structure does not tell them."""
_EMBEDDING = re.compile(r"embed|(^|\.)(wte|wpe)\.")
_FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps")


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


@dataclass(frozen=True, slots=True)
class GroupKey:
    """Key of a parameter group: parameters with equal keys share a group."""

    learning_rate: float
    decays: bool
    is_sharded: bool
    """True if the parameter is a DTensor. Plain tensors and DTensors cannot share one fused call."""


def build_optimizer(
    model: nn.Module, loss: nn.Module, config: TrainConfig
) -> torch.optim.Optimizer:
    """Build the optimizer of all trainable parameters of model and loss. Call it after wrapping: the optimizer must
    hold the shards. Each group keeps its peak learning rate under "initial_lr", for `Schedule.set`."""
    trained = trained_parameters(model, loss, config)
    groups: defaultdict[GroupKey, list[TrainedParameter]] = defaultdict(list)
    for one in trained:
        groups[
            GroupKey(one.learning_rate, one.decays, isinstance(one.parameter, DTensor))
        ].append(one)
    param_groups = [
        {
            "params": [one.parameter for one in members],
            "lr": key.learning_rate,
            "initial_lr": key.learning_rate,
            "weight_decay": config.optimizer.weight_decay if key.decays else 0.0,
        }
        for key, members in groups.items()
    ]
    optimizer, description = _create(
        config,
        param_groups,
        is_fsdp1=bool(FullyShardedDataParallel.fsdp_modules(model)),
    )
    log.info("optimizer: %s; %s", description, _summary(config, trained, len(groups)))
    return optimizer


def trained_parameters(
    model: nn.Module, loss: nn.Module, config: TrainConfig
) -> list[TrainedParameter]:
    """Return every trainable parameter with its learning rate and weight decay, in the order of the model."""
    shapes = _whole_shapes(model)
    named = [
        (plain_name(name), parameter)
        for prefix, module in (("", model), ("loss.", loss))
        for name, parameter in module.named_parameters(prefix=prefix.rstrip("."))
    ]
    depths = (
        _depths([name for name, _ in named], model)
        if config.optimizer.layer_lr_decay != 1.0
        else {}
    )
    peak = rate_of(config)
    head_rate = (
        peak
        if config.optimizer.head_learning_rate is None
        else config.optimizer.head_learning_rate
    )
    heads = head_prefixes(model)
    trained = []
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        # The shape before sharding: a flat FSDP1 piece of a matrix has one dimension, but must still decay.
        shape = shapes.get(id(parameter), parameter.shape)
        is_head = name.startswith(heads)
        if is_head:
            rate = head_rate
        else:
            # What belongs to no layer (norms behind the last one) has depth 0: the full rate.
            rate = peak * config.optimizer.layer_lr_decay ** depths.get(name, 0)
        trained.append(
            TrainedParameter(
                name,
                parameter,
                shape,
                rate,
                decays=len(shape) > 1 and not name.endswith("bias"),
                is_head=is_head,
            )
        )
    if not trained:
        raise UserError(
            "nothing to train: every parameter of model and loss is frozen; take parts out of `freeze`, or set "
            "use_lora: true"
        )
    _check_flattened(trained, config)
    return trained


def head_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Return the beginnings of the names of parameters of the loss, of heads and of projections."""
    names = ["loss."]
    for module in model.modules():
        if isinstance(module, EmbeddingModel):
            names += [f"{name}." for name in module.head_names()]
    return tuple(names)


def _depths(names: Sequence[str], model: nn.Module) -> dict[str, int]:
    """Return the number of layers above each parameter in its tower: 0 for the last layer and everything after it,
    the number of layers for embeddings."""
    places = _layers_by_name(names, model)
    num_layers = Counter(stack for stack, _ in set(places.values()))
    if not num_layers:
        log.warning(
            "layer_lr_decay has no effect: no stack of layers was found in this model"
        )
    inputs = {
        f"{plain_name(name)}."
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    depths = {}
    for name in names:
        if name in places:
            stack, index = places[name]
            depths[name] = num_layers[stack] - 1 - index
        elif _EMBEDDING.search(name) or name.startswith(tuple(inputs)):
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
    prefixes = {
        f"{plain_name(name)}.": None
        for name, module in model.named_modules()
        if id(module) in layers
    }
    known = tuple(prefixes)
    for name in names:
        found = None if known and name.startswith(known) else _LAYER.search(name)
        if found is not None:
            prefixes[found.group(0)] = None
    stacks: defaultdict[str, list[str]] = defaultdict(list)
    for prefix in prefixes:
        stacks[re.sub(r"\.\d+\.", ".#.", prefix)].append(prefix)
    numbered = {
        prefix: (stack, number)
        for stack, own in stacks.items()
        for number, prefix in enumerate(own)
    }
    return {
        name: numbered[prefix]
        for name in names
        for prefix in prefixes
        if name.startswith(prefix)
    }


def _layers_beside(name: str, num_layers: Mapping[str, int]) -> int:
    """Return the layer count of the tower that shares the longest path prefix with an embedding; of equals, the
    largest."""

    def common(tower: str) -> int:
        parts = 0
        for own, other in zip(name.split("."), tower.split("."), strict=False):
            if own != other:
                break
            parts += 1
        return parts

    return max(
        ((common(tower), count) for tower, count in num_layers.items()), default=(0, 0)
    )[1]


def _whole_shapes(model: nn.Module) -> dict[int, torch.Size]:
    """Return the whole shape of each flat piece that FSDP1 leaves on a rank, keyed by the piece's id.

    FSDP2's DTensors and plain tensors report their whole shape themselves.
    """
    shapes: dict[int, torch.Size] = {}
    for module in FullyShardedDataParallel.fsdp_modules(model):
        flat = module._flat_param
        if flat is not None and flat._params is not None:
            shapes |= {
                id(one): shape
                for one, shape in zip(flat._params, flat._shapes, strict=True)
            }
    return shapes


def _check_flattened(trained: list[TrainedParameter], config: TrainConfig) -> None:
    """Report the effects of FSDP1 without use_orig_params, which flattens weights and biases of a unit into one
    parameter."""
    if not any(one.name.endswith("_flat_param") for one in trained):
        return
    if (
        config.optimizer.layer_lr_decay != 1.0
        or config.optimizer.head_learning_rate is not None
    ):
        raise UserError(
            "layer_lr_decay and head_learning_rate need separate parameters, and fsdp_use_orig_params: "
            "false flattens those of a unit into one: set fsdp_use_orig_params: true or fsdp_version: 2"
        )
    if config.optimizer.weight_decay:
        log.warning(
            "fsdp_use_orig_params: false flattens the parameters of a unit into one, so weight_decay: %g reaches no "
            "parameter of a unit (biases and norms cannot be left out); fsdp_use_orig_params: true keeps them apart",
            config.optimizer.weight_decay,
        )


def _create(
    config: TrainConfig, groups: list[dict[str, Any]], *, is_fsdp1: bool
) -> tuple[torch.optim.Optimizer, str]:
    """Return the optimizer and its description for the log."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    is_sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
    adam: dict[str, Any] = {
        "lr": rate_of(config),
        "betas": (config.optimizer.adam_beta1, config.optimizer.adam_beta2),
        "eps": config.optimizer.adam_epsilon,
    }
    said = f"betas ({config.optimizer.adam_beta1:g}, {config.optimizer.adam_beta2:g})"
    if config.optimizer.optim == "adafactor" and (is_fsdp1 or is_sharded):
        raise UserError(
            "optim: adafactor takes means over whole rows and columns, and torch's does not run on sharded parameters: "
            "use optim: adamw_8bit with fsdp_version: 2, or strategy: ddp"
        )
    if is_fsdp1 and config.optimizer.optim in ("adamw_8bit", "paged_adamw_8bit"):
        raise UserError(
            f"optim: {config.optimizer.optim} holds blocks of whole parameters, and fsdp_version: 1 leaves each process a flat "
            "piece of them: use fsdp_version: 2, or optim: adamw"
        )
    # Before the choice by name: an update of a weight held in 16 bits alone needs an optimizer of its own.
    if _is_half(parameters):
        _check_half(config, parameters)
        return RoundedAdamW(groups, **adam, seed=config.run.seed), (
            f"AdamW with stochastic rounding (the weights are bfloat16 alone), {said}"
        )
    match config.optimizer.optim:
        case "adamw":
            # On two CPU cores the fused step takes a third of the plain one's time. It supports DTensors.
            fused = all(
                one.is_floating_point() and one.device.type in _FUSED_DEVICES
                for one in parameters
            )
            return torch.optim.AdamW(
                groups, **adam, fused=fused
            ), f"AdamW{' (fused)' if fused else ''}, {said}"
        case "adamw_8bit" | "paged_adamw_8bit":
            paged = config.optimizer.optim == "paged_adamw_8bit"
            if is_sharded:
                return _torchao_adamw(
                    groups, adam, config.optimizer.optim
                ), f"AdamW8bit of torchao (sharded parameters), {said}"
            on_gpu = all(parameter.is_cuda for parameter in parameters)
            if paged and not on_gpu:
                log.warning(
                    "optim: paged_adamw_8bit needs a GPU to page from; without one it is adamw_8bit"
                )
            return _bitsandbytes_adamw(
                groups, adam, config.optimizer.optim, paged=paged and on_gpu
            ), (
                f"{'PagedAdamW8bit' if paged and on_gpu else 'AdamW8bit'} of bitsandbytes, {said}"
            )
        case "adafactor":
            return torch.optim.Adafactor(groups, lr=rate_of(config)), "Adafactor"
        case "sgd":
            # Without momentum the coupled decay of torch is the decoupled one: p - lr (g + d p) = (1 - lr d) p - lr g.
            return torch.optim.SGD(groups, lr=rate_of(config)), "SGD without momentum"


def _is_half(parameters: Sequence[torch.Tensor]) -> bool:
    return any(one.dtype in (torch.bfloat16, torch.float16) for one in parameters)


def _check_half(config: TrainConfig, parameters: Sequence[torch.Tensor]) -> None:
    """Raise UserError where updates of 16-bit weights would vanish in rounding."""
    if any(one.dtype == torch.float16 for one in parameters):
        raise UserError(
            "pure_dtype: true with float16 weights: most updates are too small for a weight of 11 bits, and gradients "
            "underflow; use torch_dtype: bfloat16, whose updates are rounded stochastically, or leave pure_dtype out"
        )
    if config.optimizer.optim != "adamw":
        raise UserError(
            f"pure_dtype: true with optim: {config.optimizer.optim}: updates of bfloat16 weights vanish in rounding; use optim: "
            "adamw, which rounds them stochastically, or leave pure_dtype out"
        )


def _bitsandbytes_adamw(
    groups: list[dict[str, Any]], adam: dict[str, Any], name: str, *, paged: bool
) -> torch.optim.Optimizer:
    quieten_bitsandbytes()
    try:
        from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit
    except ImportError as error:
        raise UserError(
            f"optim: {name} needs bitsandbytes ({error}): pip install 'vembed[gpu]'"
        ) from error
    kind = PagedAdamW8bit if paged else AdamW8bit
    optimizer: torch.optim.Optimizer = kind(groups, **adam)
    return optimizer


def _torchao_adamw(
    groups: list[dict[str, Any]], adam: dict[str, Any], name: str
) -> torch.optim.Optimizer:
    """Return torchao's 8-bit AdamW. It supports DTensors, which bitsandbytes' kernels do not."""
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise UserError(
            f"optim: {name} needs torchao on sharded parameters ({error}): pip install 'vembed[fsdp]', or use "
            "optim: adamw"
        ) from error
    for group in groups:
        for parameter in group["params"]:
            if (
                isinstance(parameter, DTensor)
                and parameter.device.type == "cpu"
                and _leaves_a_rank_empty(parameter)
            ):
                # torchao 0.18 on torch 2.13 aborts the process without a message here.
                raise UserError(
                    f"optim: {name} of torchao crashes on the CPU where a process holds nothing of a parameter, and "
                    f"one of shape {list(parameter.shape)} has too few rows for all: use optim: adamw, or fewer "
                    "processes"
                )
    optimizer: torch.optim.Optimizer = AdamW8bit(groups, **adam)
    return optimizer


def _leaves_a_rank_empty(parameter: DTensor) -> bool:
    """Return whether some rank's shard of the parameter has no rows. The same on every rank."""
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            num_shards, num_rows = (
                parameter.device_mesh.size(axis),
                parameter.shape[placement.dim],
            )
            # torch.chunk semantics: shards of ceil(rows / shards) rows, so the last ranks may get none (5 rows on 4
            # ranks: 2, 2, 1, 0).
            if math.ceil(num_rows / math.ceil(num_rows / num_shards)) < num_shards:
                return True
    return False


def _summary(
    config: TrainConfig, trained: list[TrainedParameter], num_groups: int
) -> str:
    """Return the log summary: parameters with and without weight decay, and learning rates."""

    def count(members: list[TrainedParameter]) -> str:
        return f"{sum(one.shape.numel() for one in members):,d} in {len(members):,d} tensors"

    decaying = [one for one in trained if one.decays]
    still = [one for one in trained if not one.decays]
    heads = [one for one in trained if one.is_head]
    apart = (
        f"{count(decaying)}, none on {count(still)} (biases, norms, scalars)"
        if still
        else "all of them"
    )
    parts = [
        f"{count(trained)} trained, {num_groups:,d} {'group' if num_groups == 1 else 'groups'}",
        f"weight decay {config.optimizer.weight_decay:g} on {apart}",
    ]
    if config.optimizer.head_learning_rate is not None:
        parts.append(
            f"head_learning_rate {config.optimizer.head_learning_rate:g} for {count(heads)} (heads, projections, scales)"
        )
    if config.optimizer.layer_lr_decay != 1.0:
        rates = [one.learning_rate for one in trained if one not in heads]
        low, high = (min(rates), max(rates)) if rates else (0.0, 0.0)
        parts.append(
            f"layer_lr_decay {config.optimizer.layer_lr_decay:g}: peaks from {low:.3g} (lowest) to {high:.3g} (last layer)"
        )
    return "; ".join(parts)
