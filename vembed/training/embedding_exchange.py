"""Exchange of embeddings for the loss: gathered on every rank, or passed round a ring in blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

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
