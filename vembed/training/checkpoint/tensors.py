"""Training state in a checkpoint: weights and optimizer state as named tensors that any strategy can read, and their
storage for torch.distributed.checkpoint.

torch's own FileSystemWriter pickles its metadata. Here nothing pickled is ever read: each process writes its pieces of
the tensors to `rank<r>-<n>.safetensors`. The coordinator writes `index.json` (the file of each piece), the other files of
the checkpoint and its manifest, and renames the folder. All of it happens inside torch's save, so a failure on one
process is known to all, and an asynchronous save commits by itself.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import (
    StorageReader,
    StorageWriter,
    WriteResult,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.futures import Future
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from typing_extensions import override

from vembed.errors import UserError
from vembed.files import read_json_object
from vembed.models.families.backbones import plain_name
from vembed.parallel import collectives
from vembed.parallel.parameters import local_tensor
from vembed.saving.durability import write_durably
from vembed.training.checkpoint.folder import INDEX, STATE, commit

log = logging.getLogger("vembed")

_OPTIMIZER = "optimizer."
_HOOKS = "hooks."
_TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
_OWN = re.compile(r"\.rank\d+of\d+$")
MAX_NAMED = 3

Leaf = tuple[tuple[str, ...], Any, dict[str, Any]]
"""One value of the optimizer's state: its path (name of the parameter, then keys), the value, and the tensors by name
that represent it in a checkpoint. They share memory with the value, unless that is a number."""


FILE_BYTES = 256 * 2**20
"""Approximate size of a file of pieces. While writing, a process holds this much twice in memory."""


class CheckpointWriter(StorageWriter):
    """Storage writer that fills `partial` and renames it to `final`. It is made for one checkpoint."""

    def __init__(
        self,
        partial: Path,
        final: Path,
        state: dict[str, Any],
        *,
        rank: int,
        on_commit: Callable[[], None],
    ) -> None:
        self.partial = partial
        self.final = final
        self.state = state
        self.rank = rank
        self.on_commit = on_commit

    # ---- torch calls these too; there is nothing to do in them

    @override
    def reset(self, checkpoint_id: Any = None) -> None: ...

    @override
    def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None: ...

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @override
    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> Future[list[WriteResult]]:
        """Write this process's pieces, flush them, and return file, key and checksum of the file for each."""
        bundles: list[list[WriteItem]] = [[]]  # one for each file
        filled = 0
        for item in plan.items:
            if item.tensor_data is None:
                raise TypeError(
                    f"{item.index.fqn} is not a tensor; a checkpoint holds only tensors and JSON"
                )
            dtype = item.tensor_data.properties.dtype
            size = item.tensor_data.chunk.sizes.numel() * dtype.itemsize
            if bundles[-1] and filled + size > FILE_BYTES:
                bundles.append([])
                filled = 0
            bundles[-1].append(item)
            filled += size
        results: list[WriteResult] = []
        for number, items in enumerate(bundles if plan.items else []):
            file = f"rank{self.rank:05d}-{number:05d}.safetensors"
            pieces: dict[str, torch.Tensor] = {}
            for item in items:
                piece = planner.resolve_data(item)
                assert isinstance(piece, torch.Tensor)
                # Clone: safetensors refuses tensors that share memory, as pieces of a flat parameter do.
                host = piece.detach().cpu()
                pieces[_key(item.index)] = host.clone(
                    memory_format=torch.contiguous_format
                )
            data = to_safetensors(pieces)
            checksum = hashlib.sha256(data).hexdigest()
            write_durably(self.partial / file, data)
            for item in items:
                stored = (file, _key(item.index), checksum)
                results.append(WriteResult(item.index, len(data), stored))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write index, state and manifest, then rename. Runs on the coordinator after all have written."""
        stored = {}
        for of_rank in results:
            for result in of_rank:
                stored[result.index] = result.storage_data
        index = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            chunks = []
            for chunk in entry.chunks:
                file, key, _ = stored[MetadataIndex(name, chunk.offsets)]
                offsets = list(chunk.offsets)
                sizes = list(chunk.sizes)
                chunks.append(
                    {"offsets": offsets, "sizes": sizes, "file": file, "key": key}
                )
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            index[name] = {"dtype": dtype, "shape": list(entry.size), "chunks": chunks}
        write_durably(self.partial / INDEX, json.dumps(index).encode())
        write_durably(self.partial / STATE, json.dumps(self.state, indent=1).encode())
        checksums = {file: checksum for file, _, checksum in stored.values()}
        commit(self.partial, self.final, checksums)
        self.on_commit()

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


class CheckpointReader(StorageReader):
    """Storage reader for the pieces a process needs, from a checkpoint written by any number of processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tensors: dict[str, TensorStorageMetadata] = {}
        """Shape, type and pieces of each tensor."""
        self.stored: dict[MetadataIndex, tuple[str, str]] = {}
        """File and key of each piece."""
        for name, entry in read_json_object(directory / INDEX).items():
            chunks = []
            for chunk in entry["chunks"]:
                offsets = chunk["offsets"]
                self.stored[MetadataIndex(name, offsets)] = (
                    chunk["file"],
                    chunk["key"],
                )
                chunks.append(
                    ChunkStorageMetadata(
                        torch.Size(offsets), torch.Size(chunk["sizes"])
                    )
                )
            properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
            shape = torch.Size(entry["shape"])
            self.tensors[name] = TensorStorageMetadata(properties, shape, chunks)

    @override
    def reset(self, checkpoint_id: Any = None) -> None: ...

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index in torch's form."""
        return Metadata(dict(self.tensors), storage_meta=StorageMeta())

    @override
    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None: ...

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the pieces, or the parts of them that this process holds, into its tensors."""
        items_by_file: dict[str, list[tuple[str, Any]]] = {}
        for item in plan.items:
            name, key = self.stored[item.storage_index]
            items_by_file.setdefault(name, []).append((key, item))
        for name, items in items_by_file.items():
            with safe_open(self.directory / name, framework="pt") as file:
                for key, item in items:
                    # This rank's memory of the tensor, [rows, ...]: under FSDP its shard along the first dimension.
                    target = planner.resolve_tensor(item).detach()
                    # A checkpoint of other shards: only the part of a stored piece that lies in this rank's shard.
                    if item.lengths:
                        part = zip(item.storage_offsets, item.lengths, strict=True)
                        slices = tuple(slice(at, at + size) for at, size in part)
                        target.copy_(file.get_slice(key)[slices])
                    else:
                        target.copy_(file.get_tensor(key))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def _key(index: MetadataIndex) -> str:
    """Return the name of a piece in its file."""
    return f"{index.fqn}@{','.join(str(start) for start in index.offset or ())}"


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
    # Collective under FSDP, like each get_ and set_ below. All ranks read one index, so all take the same branch.
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
        key_path = (*path, key)
        if isinstance(value, dict):
            leaves += _leaves(value, key_path)
            continue
        name = _OPTIMIZER + ".".join(key_path)
        pieces: dict[str, Any] = {name: value}
        if not isinstance(value, Tensor):
            pieces = {name: torch.tensor(value)}
        else:
            shard = f"rank{collectives.rank()}of{collectives.world_size()}"
            local: Any = local_tensor(value)
            if is_traceable_wrapper_subclass(local):
                pieces = {}
                for part in local.__tensor_flatten__()[0]:
                    pieces[f"{name}.{part}.{shard}"] = getattr(local, part)
        leaves.append((key_path, value, pieces))
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
    # Without communication: the mesh is made of a group that exists, and `run_check` would compare the ranks.
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
    leaves: list[Leaf], saved: Mapping[str, list[int]], saved_kind: str, kind: str
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
    if saved_kind == kind and any(_OWN.search(name) for name in foreign):
        raise UserError(
            f"the checkpoint's state of {saved_kind} cannot be divided among {collectives.world_size()} process(es), since "
            "its 8-bit blocks follow the shards: resume on as many processes as wrote it (only optim: adamw moves "
            "freely), or start anew in another output_dir"
        )
    raise UserError(
        f"the checkpoint holds the state of {saved_kind}, which {kind} cannot take over ({foreign[0]}): resume with the "
        "optim and strategy that it was trained with (8-bit state does not move between copied and sharded "
        "parameters), or start anew in another output_dir"
    )
