"""Storage for torch.distributed.checkpoint: safetensors files and a JSON index, so that nothing pickled is ever read.

torch's own FileSystemWriter pickles its metadata. Here each process writes its pieces of the tensors to
`rank<r>-<n>.safetensors`. The coordinator writes `index.json` (the file of each piece), the other files of the
checkpoint and its manifest, and renames the folder. All of it happens inside torch's save, so a failure on one process
is known to all, and an asynchronous save commits by itself.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    WriteItemType,
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
from vembed.training.checkpoint.folder import STATE, commit
from vembed.training.checkpoint.schema import INDEX

FILE_BYTES = 256 * 2**20
"""Approximate size of a file of pieces. While writing, a process holds this much twice in memory."""


@dataclass(frozen=True, slots=True)
class PieceLocation:
    """Location of one piece of a tensor."""

    file: str
    key: str
    checksum: str
    """Checksum of the whole file."""


class CheckpointWriter(StorageWriter):
    """Storage writer that fills `partial` and renames it to `final`."""

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
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer is made for one checkpoint."""

    @override
    def set_up_storage_writer(
        self, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: the folder exists."""

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the planner's plan unchanged."""
        return plan

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the planner's plans unchanged."""
        return plans

    @override
    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> Future[list[WriteResult]]:
        """Write this process's pieces, flush them, and return their locations."""
        results: list[WriteResult] = []
        for number, items in enumerate(_bundles(plan.items)):
            name = f"rank{self.rank:05d}-{number:05d}.safetensors"
            pieces: dict[str, torch.Tensor] = {}
            for item in items:
                # Clone: safetensors refuses tensors that share memory, as pieces of a flat parameter do.
                piece = planner.resolve_data(item)
                assert isinstance(piece, torch.Tensor)
                pieces[_key(item.index)] = (
                    piece.detach().cpu().clone(memory_format=torch.contiguous_format)
                )
            data = to_safetensors(pieces)
            checksum = hashlib.sha256(data).hexdigest()
            write_durably(self.partial / name, data)
            results += [
                WriteResult(
                    item.index,
                    len(data),
                    PieceLocation(name, _key(item.index), checksum),
                )
                for item in items
            ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write index, state and manifest, then rename. Runs on the coordinator after all have written."""
        stored = {
            result.index: result.storage_data
            for per_rank in results
            for result in per_rank
        }
        write_durably(
            self.partial / INDEX, json.dumps(_index(metadata, stored)).encode()
        )
        write_durably(self.partial / STATE, json.dumps(self.state, indent=1).encode())
        commit(
            self.partial,
            self.final,
            {piece.file: piece.checksum for piece in stored.values()},
        )
        self.on_commit()

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: checkpoints are not chosen by name."""
        return False


class CheckpointReader(StorageReader):
    """Storage reader for the pieces a process needs, from a checkpoint written by any number of processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.stored: dict[MetadataIndex, tuple[str, str]] = {}

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader is made for one checkpoint."""

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index in torch's form."""
        tensors: dict[str, TensorStorageMetadata] = {}
        places: dict[MetadataIndex, tuple[str, str]] = {}
        for name, entry in read_json_object(self.directory / INDEX).items():
            chunks = []
            for chunk in entry["chunks"]:
                chunks.append(
                    ChunkStorageMetadata(
                        torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"])
                    )
                )
                places[MetadataIndex(name, chunk["offsets"])] = (
                    chunk["file"],
                    chunk["key"],
                )
            dtype = getattr(torch, entry["dtype"])
            assert isinstance(dtype, torch.dtype)
            tensors[name] = TensorStorageMetadata(
                TensorProperties(dtype=dtype), torch.Size(entry["shape"]), chunks
            )
        return Metadata(
            state_dict_metadata=dict(tensors),
            storage_data=places,
            storage_meta=StorageMeta(),
        )

    @override
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Store the locations of the pieces."""
        self.stored = metadata.storage_data

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Sort the reads by file."""
        plan.items.sort(key=lambda item: self.stored[item.storage_index])
        return plan

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the planner's plans unchanged."""
        return plans

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the pieces, or the parts of them that this process holds, into its tensors."""
        by_file: dict[str, list[tuple[str, Any]]] = {}
        for item in plan.items:
            file, key = self.stored[item.storage_index]
            by_file.setdefault(file, []).append((key, item))
        for name, wanted in by_file.items():
            with safe_open(self.directory / name, framework="pt") as file:
                for key, item in wanted:
                    target = planner.resolve_tensor(item).detach()
                    if item.lengths:
                        part = zip(item.storage_offsets, item.lengths, strict=True)
                        source = file.get_slice(key)[
                            tuple(slice(start, start + size) for start, size in part)
                        ]
                    else:
                        source = file.get_tensor(key)
                    target.copy_(source)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: checkpoints are not chosen by name."""
        return False


def _key(index: MetadataIndex) -> str:
    """Return the name of a piece in its file."""
    return f"{index.fqn}@{','.join(str(start) for start in index.offset or ())}"


def _bundles(items: list[WriteItem]) -> Iterator[list[WriteItem]]:
    """Yield groups of pieces, one group per file, in order."""
    bundle: list[WriteItem] = []
    filled = 0
    for item in items:
        if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
            raise TypeError(
                f"{item.index.fqn} is not a tensor; a checkpoint holds only tensors and JSON"
            )
        size = (
            item.tensor_data.chunk.sizes.numel()
            * item.tensor_data.properties.dtype.itemsize
        )
        if bundle and filled + size > FILE_BYTES:
            yield bundle
            bundle = []
            filled = 0
        bundle.append(item)
        filled += size
    if bundle:
        yield bundle


def _index(
    metadata: Metadata, stored: dict[MetadataIndex, PieceLocation]
) -> dict[str, Any]:
    index = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        chunks = []
        for chunk in entry.chunks:
            place = stored[MetadataIndex(name, chunk.offsets)]
            sizes = list(chunk.sizes)
            offsets = list(chunk.offsets)
            chunks.append(
                {
                    "offsets": offsets,
                    "sizes": sizes,
                    "file": place.file,
                    "key": place.key,
                }
            )
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        index[name] = {"dtype": dtype, "shape": list(entry.size), "chunks": chunks}
    return index
