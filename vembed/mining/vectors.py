"""Vectors on disk: shards of consecutive items, each written whole by one rank, kept for later runs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vembed.data.cache import short_hash
from vembed.data.examples import Item, Kind
from vembed.errors import UserError
from vembed.inference.encoding import first_dims
from vembed.mining.encoders import Encoder
from vembed.parallel import collectives
from vembed.parallel.session import Session
from vembed.progress import ProgressReport

SMALLEST_SHARD = 128
LARGEST_SHARD = 16_384
NUM_SHARDS_WANTED = 64
"""Shards are small enough that every rank has some, and that a kill loses little; their size depends on the number of
items alone, so that any number of ranks makes the same shards."""

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True)
class Shard:
    """Items first .. last - 1."""

    number: int
    first: int
    last: int
    path: Path


class VectorStore:
    """The vectors of a list of items, in a folder that all ranks see."""

    def __init__(self, folder: Path, kind: Kind, keys: np.ndarray, dtype: str) -> None:
        """`keys`: the contents of the items. A shard's file is named by those in it, so that it counts for no other."""
        self.kind: Kind = kind
        self.folder = folder
        self.keys = keys
        self.dtype_name = dtype
        self.dtype = DTYPES[dtype]
        self.shards = [
            Shard(
                number,
                first,
                last,
                folder
                / f"{kind}-{number:06d}-{short_hash(_hash(keys[first:last]))}.npy",
            )
            for number, (first, last) in enumerate(_bounds(len(keys)))
        ]

    def __len__(self) -> int:
        return self.shards[-1].last if self.shards else 0

    def of_rank(self, session: Session) -> list[Shard]:
        """The shards that a rank writes and searches."""
        return self.shards[session.rank :: session.world_size]

    def missing(self, shards: Sequence[Shard]) -> list[Shard]:
        """Those that are not there yet."""
        return [shard for shard in shards if not shard.path.exists()]

    def write(self, shard: Shard, vectors_ND: np.ndarray) -> None:
        """Write a shard under another name, then rename it: a half-written one never counts."""
        values = torch.from_numpy(np.ascontiguousarray(vectors_ND)).to(self.dtype)
        stored = (
            values.view(torch.uint16) if self.dtype is torch.bfloat16 else values
        )  # numpy has no bfloat16
        shard.path.parent.mkdir(parents=True, exist_ok=True)
        partial = shard.path.with_suffix(f".{os.getpid()}.part")
        try:
            with partial.open("wb") as file:
                np.save(file, stored.numpy())
            partial.replace(shard.path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise UserError(
                f"{shard.path} cannot be written ({error.strerror or error}): free some space, name another work_dir, "
                "or set vector_dtype: float16"
            ) from error

    def rows(self, shard: Shard, numbers: np.ndarray) -> Tensor:
        """The float32 vectors of some items of a shard."""
        return self._wide(np.load(shard.path, mmap_mode="r")[numbers - shard.first])

    def read(self, shard: Shard) -> Tensor:
        """All float32 vectors of a shard."""
        return self._wide(np.load(shard.path, mmap_mode="r"))

    def take(self, numbers: np.ndarray) -> Tensor:
        """The float32 vectors of some items of any shards, in the order of the numbers."""
        order = np.argsort(numbers, kind="stable")
        ordered = numbers[order]
        vectors: Tensor | None = None
        for shard in self.shards:
            begin, end = np.searchsorted(ordered, [shard.first, shard.last])
            if begin < end:
                rows = self.rows(shard, ordered[begin:end])
                vectors = (
                    torch.empty(len(numbers), rows.shape[1])
                    if vectors is None
                    else vectors
                )
                vectors[torch.from_numpy(order[begin:end])] = rows
        return torch.empty(0, 0) if vectors is None else vectors

    def between(self, first: int, last: int) -> Tensor:
        """The float32 vectors of items first .. last - 1, of any shards."""
        parts = []
        for shard in self.shards:
            if shard.first < last and shard.last > first:
                stored = np.load(shard.path, mmap_mode="r")
                parts.append(
                    self._wide(stored[max(first - shard.first, 0) : last - shard.first])
                )
        return torch.cat(parts)

    def _wide(self, stored: np.ndarray) -> Tensor:
        # A copy: the mapped file cannot be written to, which torch warns about.
        values = torch.from_numpy(np.array(stored))
        if self.dtype is torch.bfloat16:
            values = values.view(torch.bfloat16)
        return values.to(torch.float32)


def encode_missing(
    store: VectorStore,
    encoder: Callable[[], Encoder],
    item: Callable[[int], Item],
    session: Session,
    title: str,
) -> int:
    """Encode the shards that are not there yet, each rank its own; returns how many vectors were computed by all.

    Collective. `encoder` is called only where something is missing.
    """
    todo = store.missing(store.of_rank(session))
    total = sum(shard.last - shard.first for shard in todo)
    done = 0
    with ProgressReport(title, active=session.is_main) as progress:
        for shard in todo:
            vectors = encoder().encode(
                [item(number) for number in range(shard.first, shard.last)], store.kind
            )
            _check_finite(vectors, store.kind)
            store.write(shard, vectors)
            done += shard.last - shard.first
            progress(done, total)
    session.barrier()
    # After the barrier every shard is written by its rank; one that is not here lies on another machine's disk.
    if lost := store.missing(store.shards):
        raise UserError(
            f"{lost[0].path} was written by another rank and is not here: work_dir must be a folder that all machines "
            "see"
        )
    return sum(collectives.sum_ints([total]))


def encode_together(
    store: VectorStore,
    item: Callable[[int], Item],
    encode: Callable[[Sequence[tuple[Item, Kind]]], np.ndarray],
    session: Session,
    *,
    unit: bool,
) -> None:
    """Encode all shards by a model whose ranks must run together, as those of sharded weights must. Collective.

    `encode` is called equally often on all ranks, without items where a rank has no shard left. `unit`: vectors get
    length 1.
    """
    for first in range(0, len(store.shards), session.world_size):
        # One shard for each rank in a round. Behind the last shard a slice is empty, and the rank only takes part.
        rank_shards = store.shards[first : first + session.world_size][
            session.rank : session.rank + 1
        ]
        vectors = encode(
            [
                (item(number), store.kind)
                for shard in rank_shards
                for number in range(shard.first, shard.last)
            ]
        )
        for shard in rank_shards:
            _check_finite(vectors, store.kind)
            store.write(shard, first_dims(vectors, vectors.shape[1], unit))
    session.barrier()


def _bounds(num_items: int) -> Iterator[tuple[int, int]]:
    size = SMALLEST_SHARD
    # Doubling: a few more items leave the size of the shards, and so their files, as they are.
    while size < LARGEST_SHARD and size * NUM_SHARDS_WANTED < num_items:
        size *= 2
    for first in range(0, num_items, size):
        yield first, min(first + size, num_items)


def _hash(keys: np.ndarray) -> list[int]:
    return list(
        hashlib.blake2b(np.ascontiguousarray(keys).tobytes(), digest_size=12).digest()
    )


def _check_finite(vectors_ND: np.ndarray, kind: Kind) -> None:
    broken = int((~np.isfinite(vectors_ND).all(axis=1)).sum())
    if broken:
        raise UserError(
            f"the model gives vectors that are not numbers for {broken:,d} of {len(vectors_ND):,d} inputs ({kind}): "
            "its weights are broken, or overflow in their dtype (try torch_dtype: float32)"
        )
