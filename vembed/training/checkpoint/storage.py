"""Storage for torch.distributed.checkpoint: safetensors files and a JSON index, so that nothing pickled is ever read.

torch's own FileSystemWriter pickles its metadata. Here each process writes its pieces of the tensors to
`rank<r>-<n>.safetensors`. The coordinator writes `index.json` (the file of each piece), the other files of the
checkpoint and its manifest, and renames the folder. All of it happens inside torch's save, so a failure on one process
is known to all, and an asynchronous save commits by itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save as to_safetensors
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
from torch.distributed.checkpoint.storage import (
    StorageReader,
    StorageWriter,
    WriteResult,
)
from torch.futures import Future
from typing_extensions import override

from vembed.files import read_json_object
from vembed.saving.durability import write_durably
from vembed.training.checkpoint.folder import INDEX, STATE, commit

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

    @override
    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing."""

    @override
    def set_up_storage_writer(
        self, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: the folder exists."""

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
    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing."""

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index in torch's form."""
        return Metadata(dict(self.tensors), storage_meta=StorageMeta())

    @override
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: the index is read."""

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the pieces, or the parts of them that this process holds, into its tensors."""
        by_file: dict[str, list[tuple[str, Any]]] = {}
        for item in plan.items:
            name, key = self.stored[item.storage_index]
            by_file.setdefault(name, []).append((key, item))
        for name, wanted in by_file.items():
            with safe_open(self.directory / name, framework="pt") as file:
                for key, item in wanted:
                    target = planner.resolve_tensor(item).detach()
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
