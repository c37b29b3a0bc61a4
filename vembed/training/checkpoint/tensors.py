"""Training state for checkpoints: weights and optimizer state as named tensors that any strategy can read."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from vembed.errors import UserError
from vembed.models.names import plain_name
from vembed.parallel import collectives

log = logging.getLogger("vembed")

_OPTIMIZER = "optimizer."
_HOOKS = "hooks."
_TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
_OWN = re.compile(r"\.rank\d+of\d+$")
MAX_NAMED = 3

Load = Callable[[dict[str, Any]], None]
"""Function that fills tensors in place from a checkpoint, by name."""


class ModelAndLoss(nn.Module):
    """Model and loss as one module. Parameter names begin with "model." and "loss.", as in the optimizer."""

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss = loss


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One value of the optimizer's state, and the tensors that represent it in a checkpoint."""

    path: tuple[str, ...]
    """Name of the parameter, then keys."""
    value: Any
    pieces: dict[str, Any]
    """Tensors by name. They share memory with `value`, unless that is a number."""


def quieten_torch() -> None:
    """Suppress torch's warnings about FSDP1's sharded state and about saving in a single process, in all threads, and
    its records of every tensor that is saved."""
    for message in (
        "torch.distributed is disabled, unavailable or uninitialized",
        "Please use DTensor instead and we are deprecating ShardedTensor",
        "`_get_pg_default_device` will be deprecated",
        "Multiple backends are registered with this ProcessGroup",
    ):
        warnings.filterwarnings("ignore", message=message)
    # It writes two records for each tensor of a checkpoint, which nobody reads and which take longer than a small save.
    logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.ERROR)


def tensors_of(
    model: nn.Module,
    loss: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return trained weights, buffers, optimizer state and `extra` (tensors of hooks) by name, as plain tensors or
    DTensors."""
    model_and_loss = ModelAndLoss(model, loss)
    tensors = {
        name: _movable(value) for name, value in _weights(model_and_loss).items()
    }
    tensors |= {_HOOKS + name: _movable(value) for name, value in (extra or {}).items()}
    # A new optimizer has no state, and get_state_dict would create some by taking a step.
    if optimizer is not None and optimizer.state:
        state: Any = get_optimizer_state_dict(
            model_and_loss, optimizer, options=_TRAINED
        )["state"]
        for leaf in _leaves(state):
            tensors |= leaf.pieces
    return tensors


def restore(
    model: nn.Module,
    loss: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    saved: Mapping[str, list[int]],
    load: Load,
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
    saved_optimizer: str = "",
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Restore model, loss and optimizer from a checkpoint with the names and shapes `saved`, and of the tensors `extra`
    those that it holds. `dtypes`: refuse weights that are stored as another type than this run holds.

    The optimizer's group options (learning rate, weight decay, betas) stay as the config has them.
    """
    # The same names as in `tensors_of`: a tensor of the checkpoint finds its place by name alone.
    model_and_loss = ModelAndLoss(model, loss)
    weights = _weights(model_and_loss)
    _check_weights(weights, saved, dtypes or {})
    tensors = {name: _movable(value) for name, value in weights.items()}
    tensors |= {
        _HOOKS + name: _movable(value)
        for name, value in (extra or {}).items()
        if _HOOKS + name in saved
    }
    leaves: list[_Leaf] = []
    state: dict[str, Any] = {}
    groups: Any = []
    if optimizer is not None and any(name.startswith(_OPTIMIZER) for name in saved):
        # torch allocates the state tensors by a step with zero gradients, and only if there are none yet.
        optimizer.zero_grad(set_to_none=True)
        whole: Any = get_optimizer_state_dict(
            model_and_loss, optimizer, options=_TRAINED
        )
        state = whole["state"]
        groups = whole["param_groups"]
        # State that the step above has made, and the checkpoint lacks, is not loaded.
        held = {
            name
            for name in state
            if any(key.startswith(f"{_OPTIMIZER}{name}.") for key in saved)
        }
        state = {name: value for name, value in state.items() if name in held}
        leaves = _leaves(state)
        _check_optimizer(leaves, saved, saved_optimizer, optimizer_kind(optimizer))
        for leaf in leaves:
            tensors |= leaf.pieces
    load(tensors)
    if FullyShardedDataParallel.fsdp_modules(model):
        # FSDP1 returned copies of its flat parameters' pieces, so they must be loaded back.
        _put_numbers(leaves, state)
        set_model_state_dict(model_and_loss, weights, options=_TRAINED)
        if optimizer is not None and leaves:
            set_optimizer_state_dict(
                model_and_loss,
                optimizer,
                {"state": state, "param_groups": groups},
                options=_TRAINED,
            )
    elif optimizer is not None:
        # The tensors above were the live ones. Numbers are still to be restored, and state that the checkpoint lacks
        # (created by the step above) is dropped.
        live = {
            plain_name(name): parameter
            for name, parameter in model_and_loss.named_parameters()
        }
        _put_numbers(leaves, {name: optimizer.state[live[name]] for name in state})
        for name, parameter in live.items():
            if name not in state:
                optimizer.state.pop(parameter, None)
    if optimizer is not None and not leaves:
        optimizer.state.clear()


def optimizer_kind(optimizer: torch.optim.Optimizer) -> str:
    """Return the optimizer's name and library, such as "AdamW8bit of torchao"."""
    return (
        f"{type(optimizer).__name__} of {type(optimizer).__module__.partition('.')[0]}"
    )


def _weights(model_and_loss: ModelAndLoss) -> dict[str, Any]:
    """Return trained parameters and buffers. Extra state entries of quantised frozen layers are left out."""
    frozen = {
        plain_name(name) + "."
        for name, parameter in model_and_loss.named_parameters()
        if not parameter.requires_grad
    }
    weights = get_model_state_dict(model_and_loss, options=_TRAINED)
    return {
        name: value
        for name, value in weights.items()
        if not any(name.startswith(start) for start in frozen)
    }


def _leaves(state: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[_Leaf]:
    """Yield the values of an optimizer's state, at any nesting depth."""
    leaves = []
    for key, value in state.items():
        here = (*path, key)
        if isinstance(value, dict):
            leaves += _leaves(value, here)
        else:
            leaves.append(
                _Leaf(here, value, _pieces(_OPTIMIZER + ".".join(here), value))
            )
    return leaves


def _pieces(name: str, value: Any) -> dict[str, Any]:
    """Return the tensors that represent a value: a tensor itself, a number as a tensor, a quantised shard (torchao) as
    its parts.

    The blocks of a quantised shard do not fit shards of another size, so the name contains the rank and the world size.
    """
    if not isinstance(value, Tensor):
        return {name: torch.tensor(value)}
    value = _movable(value)
    local: Any = value.to_local() if isinstance(value, DTensor) else value
    if not is_traceable_wrapper_subclass(local):
        return {name: value}
    shard = f"rank{collectives.rank()}of{collectives.world_size()}"
    return {
        f"{name}.{part}.{shard}": getattr(local, part)
        for part in local.__tensor_flatten__()[0]
    }


def _movable(value: Any) -> Any:
    """Return FSDP1's ShardedTensor as an equivalent DTensor on the same memory. Asynchronous saving supports only
    DTensors."""
    if not isinstance(value, ShardedTensor):
        return value
    shape = value.size()
    shards = value.local_shards()
    local = (
        shards[0].tensor if shards else torch.empty(0, *shape[1:], dtype=value.dtype)
    )
    mesh = DeviceMesh.from_group(value._process_group, local.device.type)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
    )


def _put_numbers(leaves: list[_Leaf], state: Mapping[str, Any]) -> None:
    """Write numbers, which were loaded as tensors, back into the optimizer's state."""
    for leaf in leaves:
        if isinstance(leaf.value, Tensor):
            continue
        place = state
        for key in leaf.path[:-1]:
            place = place[key]
        place[leaf.path[-1]] = next(iter(leaf.pieces.values())).item()  # type: ignore[index]


def _check_weights(
    weights: Mapping[str, Any],
    saved: Mapping[str, list[int]],
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Raise UserError unless the checkpoint holds exactly the tensors that this run trains."""
    held = {name for name in saved if not name.startswith((_OPTIMIZER, _HOOKS))}
    missing = sorted(set(weights) - held)
    extra = sorted(held - set(weights))
    if missing or extra:
        sides = {"only this run trains": missing, "only the checkpoint has": extra}
        named = "; ".join(
            f"{side} {_few(names)}" for side, names in sides.items() if names
        )
        raise UserError(
            f"the checkpoint is of another model: {named}; resume with the model, LoRA and freeze settings that it was "
            "trained with, or start anew in another output_dir"
        )
    for name, value in weights.items():
        if list(value.size()) != saved[name]:
            raise UserError(
                f"the checkpoint is of another model: {name} has the shape {saved[name]} there and "
                f"{list(value.size())} in this run; resume with the settings that it was trained with"
            )
        if dtypes.get(name, value.dtype) != value.dtype:
            raise UserError(
                f"the checkpoint is of another model: {name} is stored as {dtypes[name]} there and is {value.dtype} in "
                "this run; resume with the torch_dtype and mixed_precision that it was trained with"
            )


def _check_optimizer(
    leaves: list[_Leaf], saved: Mapping[str, list[int]], theirs: str, ours: str
) -> None:
    """Raise UserError if the optimizer state does not fit: another optimizer, or 8-bit blocks of other shards."""
    held = {
        name for name in saved if name.startswith(_OPTIMIZER) and not _OWN.search(name)
    }
    shapes = {
        name: list(piece.size())
        for leaf in leaves
        for name, piece in leaf.pieces.items()
    }
    foreign = sorted(name for name, shape in shapes.items() if saved.get(name) != shape)
    foreign += sorted(held - set(shapes))
    if not foreign:
        return
    if theirs == ours and any(_OWN.search(name) for name in foreign):
        raise UserError(
            f"the checkpoint's state of {theirs} cannot be divided among {collectives.world_size()} process(es), since "
            "its 8-bit blocks follow the shards: resume on as many processes as wrote it (only optim: adamw moves "
            "freely), or start anew in another output_dir"
        )
    raise UserError(
        f"the checkpoint holds the state of {theirs}, which {ours} cannot take over ({foreign[0]}): resume with the "
        "optim and strategy that it was trained with (8-bit state does not move between copied and sharded "
        "parameters), or start anew in another output_dir"
    )


def _few(names: list[str]) -> str:
    """Return the first of many names, and their number."""
    more = f" and {len(names) - MAX_NAMED:,d} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
