"""Ring: the interface by which a loss sees the columns of other ranks that were not gathered.

A rank's columns are the rows of its table that serve every rank as candidates. Blocks of them pass from rank to rank.
In a round with gradients a block's gradient travels with it, and every rank adds its part, until it is back where it
began.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Visit:
    """A block of another rank's columns that is here now."""

    owner: int
    """The rank whose columns they are."""
    columns: slice
    """Their positions among its columns."""
    values: Tensor
    """[C, width] what their rank packed for them. Valid until the next visit."""
    gradient: Tensor | None
    """[C, gradient width] zeros, for this rank's part of their gradient; None in a round without gradients."""
    is_last: bool = False
    """No visit follows in this round, so that it stays valid."""


class TravellingColumns(ABC):
    """This rank's columns, as the ring asks for them."""

    counts: Sequence[int]
    """Number of columns of each rank."""
    width: int
    gradient_width: int

    @abstractmethod
    def packed(self, columns: slice) -> Tensor:
        """Return [C, width], contiguous: some of the columns of this rank, for all other ranks."""

    @abstractmethod
    def add_gradient(self, columns: slice, gradient: Tensor) -> None:
        """Add [C, gradient width], the sum of what all other ranks found for some of the columns of this rank."""


class Ring(ABC):
    """Ranks that pass blocks of columns round."""

    @abstractmethod
    def visits(
        self, own: TravellingColumns, *, with_gradient: bool, held: Tensor | None = None
    ) -> Iterator[Visit]:
        """Yield every block of all other ranks. Collective: every rank must finish the iteration.

        `held`: this rank's part of the gradient of the last block of the round before, which does not come again.
        """


@dataclass(frozen=True, slots=True)
class RingParts:
    """Division of the inputs, rows and hard negatives of a global batch over the ranks of a ring."""

    ring: Ring
    rank: int
    num_inputs: int
    """Inputs of all ranks."""
    first_input: int
    """Number of the first input of this rank."""
    rows: tuple[slice, ...]
    """The rows of each rank."""
    negatives: tuple[Tensor, ...]
    """Numbers of the hard negatives of each rank, mixtures included."""
    first_mixture: int = 0
    """Offset that is subtracted from the number of a mixture of this rank to get its position among the embeddings of this rank."""

    def positions(self, numbers: Tensor) -> Tensor:
        """Return where among this rank's embeddings its inputs of these numbers are."""
        # Numbers from num_inputs on are those of mixtures, which stand behind the
        # embeddings of this rank.
        is_input = numbers < self.num_inputs
        return torch.where(
            is_input, numbers - self.first_input, numbers - self.first_mixture
        )
