"""Training state for checkpoints: weights and optimizer state as named tensors that any strategy can read."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from vembed.errors import UserError
from vembed.models.families.backbones import plain_name
from vembed.parallel import collectives
from vembed.training.checkpoint.storage import CheckpointReader

log = logging.getLogger("vembed")

_OPTIMIZER = "optimizer."
_HOOKS = "hooks."
_TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
_OWN = re.compile(r"\.rank\d+of\d+$")
MAX_NAMED = 3

Leaf = tuple[tuple[str, ...], Any, dict[str, Any]]
"""One value of the optimizer's state: its path (name of the parameter, then keys), the value, and the tensors by name
that represent it in a checkpoint. They share memory with the value, unless that is a number."""


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
    # Names begin with "model." and "loss.", as in the optimizer's state.
    model_and_loss = nn.ModuleDict({"model": model, "loss": loss})
    tensors = _weights(model_and_loss)
    tensors |= {_HOOKS + name: value for name, value in (extra or {}).items()}
    # A new optimizer has no state, and get_state_dict would create some by taking a step.
    if optimizer is not None and optimizer.state:
        state: Any = get_optimizer_state_dict(
            model_and_loss, optimizer, options=_TRAINED
        )["state"]
        for _, _, pieces in _leaves(state):
            tensors |= pieces
    return {name: _movable(value) for name, value in tensors.items()}


def restore(
    model: nn.Module,
    loss: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    reader: CheckpointReader,
    *,
    no_dist: bool,
    checks_dtypes: bool = False,
    saved_optimizer: str = "",
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Restore model, loss and optimizer from a checkpoint, and of the tensors `extra` those that it holds.

    The optimizer's group options (learning rate, weight decay, betas) stay as the config has them. `no_dist`: this
    process reads alone. `checks_dtypes`: refuse weights that are stored as another type than this run holds.
    """
    saved = {name: list(entry.size) for name, entry in reader.tensors.items()}
    # The same names as in `tensors_of`: a tensor of the checkpoint finds its place by name alone.
    model_and_loss = nn.ModuleDict({"model": model, "loss": loss})
    weights = _weights(model_and_loss)
    _check_weights(weights, reader, checks_dtypes=checks_dtypes)
    tensors = dict(weights)
    for name, value in (extra or {}).items():
        if _HOOKS + name in saved:
            tensors[_HOOKS + name] = value
    leaves: list[Leaf] = []
    state: dict[str, Any] = {}
    groups: Any = []
    if optimizer is not None and any(name.startswith(_OPTIMIZER) for name in saved):
        # torch allocates the state tensors by a step with zero gradients, and only if there are none yet.
        optimizer.zero_grad(set_to_none=True)
        whole: Any = get_optimizer_state_dict(
            model_and_loss, optimizer, options=_TRAINED
        )
        groups = whole["param_groups"]
        # State that the step above has made, and the checkpoint lacks, is not loaded.
        for name, value in whole["state"].items():
            if any(key.startswith(f"{_OPTIMIZER}{name}.") for key in saved):
                state[name] = value
        leaves = _leaves(state)
        _check_optimizer(leaves, saved, saved_optimizer, optimizer_kind(optimizer))
        for _, _, pieces in leaves:
            tensors |= pieces
    load(
        {name: _movable(value) for name, value in tensors.items()},
        storage_reader=reader,
        planner=DefaultLoadPlanner(flatten_state_dict=False),
        no_dist=no_dist,
    )
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
        live = {}
        for name, parameter in model_and_loss.named_parameters():
            live[plain_name(name)] = parameter
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


def _weights(model_and_loss: nn.Module) -> dict[str, Any]:
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


def _leaves(state: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[Leaf]:
    """Return the values of an optimizer's state, at any nesting depth.

    A tensor stands for itself, and a number becomes one. A quantised shard (torchao) is stored as its parts: its blocks
    do not fit shards of another size, so their names contain the rank and the world size.
    """
    leaves: list[Leaf] = []
    for key, value in state.items():
        here = (*path, key)
        if isinstance(value, dict):
            leaves += _leaves(value, here)
            continue
        name = _OPTIMIZER + ".".join(here)
        pieces: dict[str, Any] = {name: value}
        if not isinstance(value, Tensor):
            pieces = {name: torch.tensor(value)}
        else:
            shard = f"rank{collectives.rank()}of{collectives.world_size()}"
            local: Any = value.to_local() if isinstance(value, DTensor) else value
            if is_traceable_wrapper_subclass(local):
                pieces = {}
                for part in local.__tensor_flatten__()[0]:
                    pieces[f"{name}.{part}.{shard}"] = getattr(local, part)
        leaves.append((here, value, pieces))
    return leaves


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


def _put_numbers(leaves: list[Leaf], state: Mapping[str, Any]) -> None:
    """Write numbers, which were loaded as tensors, back into the optimizer's state."""
    for path, value, pieces in leaves:
        if not isinstance(value, Tensor):
            place: Any = state
            for key in path[:-1]:
                place = place[key]
            (number,) = pieces.values()
            place[path[-1]] = number.item()


def _check_weights(
    weights: Mapping[str, Any], reader: CheckpointReader, *, checks_dtypes: bool
) -> None:
    """Raise UserError unless the checkpoint holds exactly the tensors that this run trains."""
    held = {
        name for name in reader.tensors if not name.startswith((_OPTIMIZER, _HOOKS))
    }
    sides = {
        "only this run trains": sorted(set(weights) - held),
        "only the checkpoint has": sorted(held - set(weights)),
    }
    differences = []
    for side, names in sides.items():
        num_more = len(names) - MAX_NAMED
        more = f" and {num_more:,d} more" if num_more > 0 else ""
        if names:
            differences.append(f"{side} {', '.join(names[:MAX_NAMED])}{more}")
    settings = "model, LoRA and freeze settings"
    for name, value in weights.items() if not differences else ():
        saved = reader.tensors[name]
        if value.size() != saved.size:
            differences.append(
                f"{name} has the shape {list(saved.size)} there and {list(value.size())} in this run"
            )
        elif checks_dtypes and value.dtype != saved.properties.dtype:
            settings = "torch_dtype and mixed_precision"
            differences.append(
                f"{name} is stored as {saved.properties.dtype} there and is {value.dtype} in this run"
            )
    if differences:
        raise UserError(
            f"the checkpoint is of another model: {'; '.join(differences[:2])}; resume with the {settings} that it was "
            "trained with, or start anew in another output_dir"
        )


def _check_optimizer(
    leaves: list[Leaf], saved: Mapping[str, list[int]], theirs: str, ours: str
) -> None:
    """Raise UserError if the optimizer state does not fit: another optimizer, or 8-bit blocks of other shards."""
    shapes = {}
    for _, _, pieces in leaves:
        for name, piece in pieces.items():
            shapes[name] = list(piece.size())
    foreign = sorted(name for name, shape in shapes.items() if saved.get(name) != shape)
    for name in sorted(saved):
        is_shared = name.startswith(_OPTIMIZER) and not _OWN.search(name)
        if is_shared and name not in shapes:
            foreign.append(name)
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
