"""Training state in a checkpoint: weights and optimizer state as named tensors that any strategy can read, and their
storage for torch.distributed.checkpoint.

torch's default storage pickles its metadata. Its storage for safetensors does not: each process writes its pieces of the
tensors to files of its own, and their headers say where each piece begins in its tensor.
"""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.futures import Future
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from typing_extensions import override

from vembed.errors import UserError
from vembed.files import sha256_of, write_durably
from vembed.models.families.backbones import unwrapped_name
from vembed.parallel import collectives
from vembed.parallel.parameters import local_tensor
from vembed.training.checkpoint.folders import STATE, commit

log = logging.getLogger("vembed")

_OPTIMIZER = "optimizer."
_HOOKS = "hooks."
_TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
_OWN = re.compile(r"\.rank\d+of\d+$")
MAX_NAMED = 3

FILE_BYTES = 256 * 2**20
"""Approximate size of a file of pieces. While writing, a process holds this much twice in memory."""


class CheckpointWriter(HuggingFaceStorageWriter):
    """Torch's writer of safetensors into `partial`, which adds checksums and state, and renames the folder to `final`.

    Torch calls its methods, so a failure on one process is known to all, and an asynchronous save commits by itself.
    """

    def __init__(
        self,
        partial: Path,
        final: Path,
        state: dict[str, Any],
        *,
        on_commit: Callable[[], None],
    ) -> None:
        super().__init__(str(partial), save_distributed=True)
        self.partial = partial
        self.final = final
        self.state = state
        self.on_commit = on_commit

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Divide the pieces of each process among files of FILE_BYTES. Runs on the coordinator."""
        plans = super().prepare_global_plan(plans)
        for plan in plans:
            file_numbers: dict[str, int] = {}
            num_bytes = 0
            for item in plan.items:
                file_numbers[item.index.fqn] = 1 + num_bytes // FILE_BYTES
                data = item.tensor_data
                assert data is not None
                num_bytes += data.chunk.sizes.numel() * data.properties.dtype.itemsize
            plan.storage_data["fqn_to_index_mapping"] = file_numbers
        return plans

    @override
    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> Future[list[WriteResult]]:
        """Write and flush this process's pieces, and return the name and the checksum of each one's file."""
        results = super().write_data(plan, planner).wait()
        names = {result.storage_data.relative_path for result in results}
        checksums = {name: sha256_of(self.partial / name) for name in names}
        with_checksums = []
        for result in results:
            name = result.storage_data.relative_path
            with_checksums.append(replace(result, storage_data=(name, checksums[name])))
        done: Future[list[WriteResult]] = Future()
        done.set_result(with_checksums)
        return done

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write state and manifest, then rename. Runs on the coordinator after all have written."""
        write_durably(self.partial / STATE, json.dumps(self.state, indent=1).encode())
        checksums: dict[str, str] = {}
        for of_rank in results:
            checksums.update(result.storage_data for result in of_rank)
        commit(self.partial, self.final, checksums)
        self.on_commit()


class CheckpointPlanner(DefaultSavePlanner):
    """Torch's planner, with pieces that safetensors takes."""

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return a copy of a piece in host memory. Tensors that share memory or are not contiguous are refused."""
        piece: Any = super().resolve_data(write_item)
        return piece.detach().cpu().clone(memory_format=torch.contiguous_format)  # type: ignore[no-any-return]


def stored_tensors(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    """Return shape, type and pieces of each tensor of a checkpoint."""
    metadata: Any = HuggingFaceStorageReader(str(checkpoint)).read_metadata()
    return dict(metadata.state_dict_metadata)


def _quieten_torch() -> None:
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


@dataclass(frozen=True, slots=True)
class Trained:
    """What is trained, and so belongs in a checkpoint."""

    model: nn.Module
    loss: nn.Module
    optimizer: Optimizer | None = None
    """None: its state is neither read nor written."""
    of_hooks: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors of hooks by name. They are filled in place by a checkpoint that holds them."""

    @property
    def modules(self) -> nn.Module:
        """Model and loss in one module: their names begin with "model." and "loss.", as in the optimizer's state."""
        return nn.ModuleDict({"model": self.model, "loss": self.loss})


def tensors_of(trained: Trained) -> dict[str, Any]:
    """Return trained weights, buffers, optimizer state and tensors of hooks by name, as plain tensors or DTensors."""
    _quieten_torch()
    optimizer = trained.optimizer
    modules = trained.modules
    tensors = _weights(modules)
    tensors |= {_HOOKS + name: value for name, value in trained.of_hooks.items()}
    # A new optimizer has no state, and get_state_dict would create some by taking a step.
    if optimizer is not None and optimizer.state:
        state = get_optimizer_state_dict(modules, optimizer, options=_TRAINED)
        tensors |= _state_tensors(state["state"])
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name} is not a tensor; a checkpoint holds only tensors and JSON"
            )
        tensors[name] = _movable(value)
    return tensors


def restore(
    trained: Trained,
    checkpoint: Path,
    *,
    no_dist: bool,
    checks_dtypes: bool = False,
) -> None:
    """Restore model, loss and optimizer from a checkpoint, and those tensors of hooks that it holds.

    The optimizer's group options (learning rate, weight decay, betas) stay as the config has them. `no_dist`: this
    process reads alone. `checks_dtypes`: refuse weights that are stored as another type than this run holds.
    """
    _quieten_torch()
    stored = stored_tensors(checkpoint)
    optimizer = trained.optimizer
    modules = trained.modules
    # The same names as in `tensors_of`: a tensor of the checkpoint finds its place by name alone.
    weights = _weights(modules)
    tensors = dict(weights)
    for name, value in trained.of_hooks.items():
        if _HOOKS + name in stored:
            tensors[_HOOKS + name] = value
    state: dict[str, Any] = {}
    groups: Any = []
    # Collective under FSDP, like each get_ and set_ below. All ranks read the same files, so all take the same branch.
    if optimizer is not None and any(name.startswith(_OPTIMIZER) for name in stored):
        # torch allocates the state tensors by a step with zero gradients, and only if there are none yet.
        optimizer.zero_grad(set_to_none=True)
        allocated: Any = get_optimizer_state_dict(modules, optimizer, options=_TRAINED)
        groups = allocated["param_groups"]
        # State that the step above has made, and the checkpoint lacks, is not loaded.
        for name, values in allocated["state"].items():
            if any(key.startswith(f"{_OPTIMIZER}{name}.") for key in stored):
                state[name] = values
        tensors |= _state_tensors(state)
    if optimizer is None:
        stored = {
            name: entry
            for name, entry in stored.items()
            if not name.startswith(_OPTIMIZER)
        }
    _check(tensors, stored, checks_dtypes=checks_dtypes)
    load(
        {name: _movable(value) for name, value in tensors.items()},
        storage_reader=HuggingFaceStorageReader(str(checkpoint)),
        planner=DefaultLoadPlanner(flatten_state_dict=False),
        no_dist=no_dist,
    )
    if FullyShardedDataParallel.fsdp_modules(trained.model):
        # FSDP1 returned copies of its flat parameters' pieces, so they must be loaded back.
        set_model_state_dict(modules, weights, options=_TRAINED)
        if optimizer is not None and state:
            _put_numbers(state, tensors)
            set_optimizer_state_dict(
                modules,
                optimizer,
                {"state": state, "param_groups": groups},
                options=_TRAINED,
            )
    elif optimizer is not None:
        # The tensors above were the live ones. Numbers are still to be restored, and state that the checkpoint lacks
        # (created by the step above) is dropped.
        for name, parameter in modules.named_parameters():
            if unwrapped_name(name) in state:
                _put_numbers(
                    {unwrapped_name(name): optimizer.state[parameter]}, tensors
                )
            else:
                optimizer.state.pop(parameter, None)
    if optimizer is not None and not state:
        optimizer.state.clear()


def _weights(modules: nn.Module) -> dict[str, Any]:
    """Return trained parameters and buffers. Extra state entries of quantised frozen layers are left out."""
    # Names of extra state entries begin with that of their parameter and a dot.
    frozen = []
    for name, parameter in modules.named_parameters():
        if not parameter.requires_grad:
            frozen.append(unwrapped_name(name) + ".")
    prefixes = tuple(frozen)
    weights = {}
    for name, value in get_model_state_dict(modules, options=_TRAINED).items():
        if not name.startswith(prefixes):
            weights[name] = value
    return weights


def _state_tensors(state: Any) -> dict[str, Any]:
    """Return the tensors of an optimizer's state by name. They share its memory, except for those of numbers.

    A quantised shard (torchao) is stored as its parts: its blocks do not fit shards of another size, so their names
    contain the rank and the world size. Collective where the state is sharded.
    """
    values = _flat_state(state, _OPTIMIZER)
    quantised = set()
    for name, value in values.items():
        if is_traceable_wrapper_subclass(local_tensor(value)):
            quantised.add(name)
    # torchao quantises only shards of whole blocks, so one rank may have to and another not. The other shards of the
    # same tensor are stored by rank too.
    if any(isinstance(value, DTensor) for value in values.values()):
        quantised.update(*collectives.gather_objects(quantised))
    shard = f"rank{collectives.rank()}of{collectives.world_size()}"
    tensors: dict[str, Any] = {}
    for name, value in values.items():
        local: Any = local_tensor(value)
        if name not in quantised:
            tensors[name] = value
        elif is_traceable_wrapper_subclass(local):
            for part in local.__tensor_flatten__()[0]:
                tensors[f"{name}.{part}.{shard}"] = getattr(local, part)
        elif local.numel() > 0:
            tensors[f"{name}.{shard}"] = local
    return tensors


def _flat_state(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the tensors of nested state by name. Numbers become tensors."""
    values: dict[str, Any] = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            values |= _flat_state(value, f"{name}.")
        elif isinstance(value, Tensor):
            values[name] = value
        else:
            values[name] = torch.tensor(value)
    return values


def _put_numbers(
    state: Any,
    tensors: Mapping[str, Any],
    prefix: str = _OPTIMIZER,
) -> None:
    """Write numbers, which were loaded as tensors, back into the optimizer's state."""
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            _put_numbers(value, tensors, f"{name}.")
        elif not isinstance(value, Tensor):
            state[key] = tensors[name].item()


def _movable(value: Any) -> Any:
    """Return FSDP1's ShardedTensor as an equivalent DTensor on the same memory. Asynchronous saving supports only
    DTensors."""
    if not isinstance(value, ShardedTensor):
        return value
    shape = value.size()
    shards = value.local_shards()
    local = torch.empty(0, *shape[1:], dtype=value.dtype)
    if shards:
        local = shards[0].tensor
    # Without communication: the mesh is made of a group that exists, and `run_check` would compare the ranks.
    mesh = DeviceMesh.from_group(value._process_group, local.device.type)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
    )


def _check(
    tensors: Mapping[str, Any],
    stored: Mapping[str, TensorStorageMetadata],
    *,
    checks_dtypes: bool,
) -> None:
    """Raise UserError unless the checkpoint holds exactly the tensors that this run trains."""
    missing = sorted(tensors.keys() - stored.keys())
    pieces = [name for name in stored if _OWN.search(name)]
    other_pieces = [name for name in missing if _OWN.search(name)]
    for name in missing:
        # Shards of another size may not be quantised at all.
        if any(piece.startswith(f"{name}.") for piece in pieces):
            other_pieces.append(name)
    if pieces and other_pieces:
        raise UserError(
            f"the checkpoint's optimizer state cannot be divided among {collectives.world_size()} process(es), since its "
            "8-bit blocks follow the shards: resume on as many processes as wrote it (only optim: adamw moves freely), "
            "or start anew in another output_dir"
        )
    unused = []
    for name in sorted(stored.keys() - tensors.keys()):
        if not name.startswith(_HOOKS) and not _OWN.search(name):
            unused.append(name)
    differences = []
    sides = {"only this run trains": missing, "only the checkpoint has": unused}
    for side, names in sides.items():
        num_more = len(names) - MAX_NAMED
        more = f" and {num_more:,d} more" if num_more > 0 else ""
        if names:
            differences.append(f"{side} {', '.join(names[:MAX_NAMED])}{more}")
    settings = "model, LoRA, freeze and optim settings"
    for name, value in tensors.items() if not differences else ():
        saved = stored[name]
        is_weight = not name.startswith((_OPTIMIZER, _HOOKS))
        if value.size() != saved.size:
            differences.append(
                f"{name} has the shape {list(saved.size)} there and {list(value.size())} in this run"
            )
        elif checks_dtypes and is_weight and value.dtype != saved.properties.dtype:
            settings = "torch_dtype and mixed_precision"
            differences.append(
                f"{name} is stored as {saved.properties.dtype} there and is {value.dtype} in this run"
            )
    if differences:
        raise UserError(
            f"the checkpoint is of another model or optimizer: {'; '.join(differences[:2])}; resume with the {settings} "
            "and the strategy that it was trained with, or start anew in another output_dir"
        )
