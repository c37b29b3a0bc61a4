"""Exchange between the ranks for the loss: embeddings, gathered or passed round a ring, and columns of numbers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vembed.data.batching.feeding import to_device
from vembed.losses.exchange import RingParts
from vembed.parallel import collectives
from vembed.parallel.ring import NeighbourRing
from vembed.parallel.session import Session


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of each rank's inputs, rows and hard negatives, known to all."""

    inputs: list[int]
    rows: list[int]
    negatives: list[int]


class LossExchange(ABC):
    """Exchange that gives a rank's loss the embeddings of all ranks, and the rank its gradient."""

    @abstractmethod
    def leaf(self, own: Tensor, counts: Counts) -> Tensor:
        """Return the embeddings that the loss is given, as a new leaf. Collective."""

    @abstractmethod
    def parts(self, counts: Counts, device: torch.device) -> RingParts | None:
        """Return how the batch is divided where the leaf holds own embeddings alone, else None."""

    @abstractmethod
    def own_gradient(self, leaf: Tensor, counts: Counts) -> Tensor:
        """Return the gradient of L with respect to the own embeddings, from that of this rank's part. Collective."""


class Gathered(LossExchange):
    """Every rank holds the embeddings of all."""

    def leaf(self, own: Tensor, counts: Counts) -> Tensor:
        """See LossExchange."""
        # The gather itself is not differentiated; `reduce_scatter_rows` does its backward by hand.
        return collectives.all_gather_rows(own, counts.inputs).requires_grad_()

    def parts(self, counts: Counts, device: torch.device) -> RingParts | None:
        """See LossExchange."""
        del counts, device
        return None

    def own_gradient(self, leaf: Tensor, counts: Counts) -> Tensor:
        """See LossExchange."""
        # Every rank's loss depends on all embeddings. Summed over the ranks, each rank gets the rows of its own inputs.
        return collectives.reduce_scatter_rows(gradient_of(leaf), counts.inputs)


class InRing(LossExchange):
    """Every rank holds its own embeddings. The ring brings those of others, and their gradients back."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.ring = NeighbourRing(rank, world_size)

    def leaf(self, own: Tensor, counts: Counts) -> Tensor:
        """See LossExchange."""
        del counts
        return own.detach().requires_grad_()

    def parts(self, counts: Counts, device: torch.device) -> RingParts | None:
        """See LossExchange."""
        return RingParts(
            ring=self.ring,
            rank=self.rank,
            num_inputs=sum(counts.inputs),
            first_input=sum(counts.inputs[: self.rank]),
            rows=tuple(_parts(counts.rows)),
            negatives=tuple(
                torch.arange(one.start, one.stop, device=device)
                for one in _parts(counts.negatives)
            ),
        )

    def own_gradient(self, leaf: Tensor, counts: Counts) -> Tensor:
        """See LossExchange."""
        # The ring has brought the other ranks' parts of this gradient home already.
        del counts
        return gradient_of(leaf)


def loss_exchange(session: Session) -> LossExchange:
    """Return the exchange that a run's placement has decided on."""
    is_ring = session.placement.exchange.value == "ring" and session.world_size > 1
    return InRing(session.rank, session.world_size) if is_ring else Gathered()


def gradient_of(leaf: Tensor) -> Tensor:
    """Return the gradient of a leaf, or zeros if the loss did not depend on it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def part_of(rank: int, counts: list[int]) -> slice:
    """Return a rank's part of a column that the ranks have gathered."""
    first = sum(counts[:rank])
    return slice(first, first + counts[rank])


def _parts(counts: list[int]) -> list[slice]:
    """Return the parts of all ranks."""
    return [part_of(rank, counts) for rank in range(len(counts))]


@dataclass(frozen=True, slots=True)
class Column:
    """A rank's part of one column, on the host: int64 or float64, [n] or [n, k]."""

    values: Tensor
    counts: Sequence[int]
    """Length of each rank's part, known to all ranks."""


def gather_columns(
    columns: Mapping[str, Column], device: torch.device
) -> dict[str, Tensor]:
    """Return the columns of all ranks, each concatenated by rank. One collective, however many columns there are.

    Every rank passes the same names, dtypes and trailing sizes.
    """
    rank = collectives.rank()
    # Floating-point columns travel as their bits, not converted: all columns share one int64 collective.
    flat = [column.values.view(torch.int64).reshape(-1) for column in columns.values()]
    widths = [math.prod(column.values.shape[1:]) for column in columns.values()]
    for name, column in columns.items():
        assert len(column.values) == column.counts[rank], (
            name,
            len(column.values),
            column.counts[rank],
        )
    # sizes[r, c]: numbers of rank r in column c. On the host: reading a number from the device would wait for it.
    counts = np.array([column.counts for column in columns.values()], dtype=np.int64)
    sizes = (counts * np.array(widths)[:, None]).T
    per_rank = sizes.sum(1)
    gathered = collectives.all_gather_rows(
        to_device(torch.cat(flat), device), per_rank.tolist()
    )
    # starts[r, c]: where the numbers of rank r in column c begin. No loop over ranks: there may be a thousand.
    starts = (per_rank.cumsum() - per_rank)[:, None] + sizes.cumsum(1) - sizes
    found = {}
    for number, (name, column) in enumerate(columns.items()):
        size = sizes[:, number]
        shift = starts[:, number] - (size.cumsum() - size)
        places = np.arange(size.sum()) + np.repeat(shift, size)
        values = gathered[to_device(torch.from_numpy(places), device)]
        found[name] = values.view(column.values.dtype).reshape(
            -1, *column.values.shape[1:]
        )
    return found
