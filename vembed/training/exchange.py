"""Exchange between the ranks for the loss: embeddings, gathered or passed round a ring, and columns of numbers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from vembed.losses.exchange import RingParts
from vembed.parallel import collectives
from vembed.parallel.ring import NeighbourRing
from vembed.parallel.session import Session


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of each rank's inputs, rows and hard negatives, known to all. By rank."""

    inputs: list[int]
    rows: list[int]
    negatives: list[int]


class LossExchange(ABC):
    """Gives a rank's loss the embeddings of all ranks, and the rank its gradient."""

    @abstractmethod
    def leaf(self, embeddings: Tensor, counts: Counts) -> Tensor:
        """Return what the loss reads as a new leaf, from this rank's embeddings [n, D]. Collective."""

    @abstractmethod
    def parts(self, counts: Counts, device: torch.device) -> RingParts | None:
        """Return how the batch is divided where the leaf holds this rank's embeddings alone, else None."""

    @abstractmethod
    def local_gradient(self, leaf: Tensor, counts: Counts) -> Tensor:
        """Return this rank's rows [n, D] of dL/d(embeddings), after the backward pass of its part of L. Collective."""


class Gathered(LossExchange):
    """Every rank holds the embeddings [U, D] of all."""

    @override
    def leaf(self, embeddings: Tensor, counts: Counts) -> Tensor:
        # The gather itself is not differentiated; `reduce_scatter_rows` does its backward by hand.
        return collectives.all_gather_rows(embeddings, counts.inputs).requires_grad_()

    @override
    def parts(self, counts: Counts, device: torch.device) -> RingParts | None:
        return None

    @override
    def local_gradient(self, leaf: Tensor, counts: Counts) -> Tensor:
        # Every rank's part of L depends on all embeddings. Summed over the ranks, each rank gets its own rows.
        return collectives.reduce_scatter_rows(_gradient(leaf), counts.inputs)


class InRing(LossExchange):
    """Every rank holds its own embeddings. The ring brings those of others, and their gradients back."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.ring = NeighbourRing(rank, world_size)

    @override
    def leaf(self, embeddings: Tensor, counts: Counts) -> Tensor:
        return embeddings.detach().requires_grad_()

    @override
    def parts(self, counts: Counts, device: torch.device) -> RingParts | None:
        ranks = range(len(counts.rows))
        negatives = []
        for rank in ranks:
            part = rank_slice(rank, counts.negatives)
            negatives.append(torch.arange(part.start, part.stop, device=device))
        return RingParts(
            ring=self.ring,
            rank=self.rank,
            num_inputs=sum(counts.inputs),
            first_input=sum(counts.inputs[: self.rank]),
            rows=tuple(rank_slice(rank, counts.rows) for rank in ranks),
            negatives=tuple(negatives),
        )

    @override
    def local_gradient(self, leaf: Tensor, counts: Counts) -> Tensor:
        # The ring has brought the other ranks' parts of this gradient home already.
        return _gradient(leaf)


def loss_exchange(session: Session) -> LossExchange:
    """Return the exchange that a run's placement has decided on."""
    if session.placement.exchange.value == "ring" and session.world_size > 1:
        return InRing(session.rank, session.world_size)
    return Gathered()


def rank_slice(rank: int, counts: Sequence[int]) -> slice:
    """Return a rank's part of a column that the ranks have gathered."""
    first = sum(counts[:rank])
    return slice(first, first + counts[rank])


def _gradient(leaf: Tensor) -> Tensor:
    """Return the gradient of a leaf, or zeros if the loss did not depend on it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


# ---- columns -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    """A rank's part of one column, on the host: int64 or float64, [n] or [n, k]."""

    values: Tensor
    counts: Sequence[int]
    """Length of each rank's part, known to all ranks."""


def gather_columns(columns: Mapping[str, Column]) -> dict[str, Tensor]:
    """Return the columns of all ranks on the host, each concatenated by rank. One collective, however many columns there are.

    Every rank passes the same names, dtypes and trailing sizes.
    """
    rank = collectives.rank()
    flat = []
    sizes_by_column = []
    for name, column in columns.items():
        assert len(column.values) == column.counts[rank], name
        # Floating-point columns travel as their bits, not converted: all columns share one int64 collective.
        flat.append(column.values.view(torch.int64).reshape(-1))
        width = math.prod(column.values.shape[1:])
        sizes_by_column.append(np.array(column.counts, dtype=np.int64) * width)
    # sizes[r, c]: numbers of rank r in column c. On the host: reading a number from the device would wait for it.
    sizes = np.stack(sizes_by_column, axis=1)
    per_rank = sizes.sum(axis=1)
    # By way of the host: numbers that a GPU gathers would have to be waited for.
    joined = torch.cat(flat).to(collectives.number_device())
    gathered = collectives.all_gather_rows(joined, per_rank.tolist()).cpu()
    # starts[r, c]: where the numbers of rank r in column c begin. No loop over ranks: there may be a thousand.
    starts = (per_rank.cumsum() - per_rank)[:, None] + sizes.cumsum(axis=1) - sizes
    results = {}
    for number, (name, column) in enumerate(columns.items()):
        size = sizes[:, number]
        # The i-th number of the result lies at i + shift of its rank.
        shift = starts[:, number] - (size.cumsum() - size)
        positions = np.arange(size.sum()) + np.repeat(shift, size)
        values = gathered[torch.from_numpy(positions)]
        shape = (-1, *column.values.shape[1:])
        results[name] = values.view(column.values.dtype).reshape(shape)
    return results
