"""NeighbourRing: blocks of columns pass from rank to rank, and their gradients with them, while the ranks compute."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from torch import Tensor

from vembed.losses.exchange import Ring, TravellingColumns, Visit
from vembed.parallel import collectives

COLUMNS_AT_ONCE = 8192
"""Columns of a block at most: small beside a rank's own, and large enough for the network."""


class NeighbourRing(Ring):
    """A ring over all ranks: each sends to the next and receives from the one before.

    A rank's columns are cut into pieces, equally many on every rank. Piece by piece, the blocks of all ranks move on by
    one rank at a time. While a rank computes with a block, the same block is on its way to the next rank, and the next
    block comes in. A gradient follows one step behind: a rank adds its part to what the ranks before it have summed.
    """

    def __init__(
        self, rank: int, world_size: int, columns_at_once: int = COLUMNS_AT_ONCE
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.columns_at_once = columns_at_once

    def visits(
        self,
        rank_columns: TravellingColumns,
        *,
        with_gradient: bool,
        held: Tensor | None = None,
    ) -> Iterator[Visit]:
        """See Ring."""
        # From the largest rank: all take part in equally many shifts, some with empty pieces.
        num_pieces = -(-max(rank_columns.counts) // self.columns_at_once)
        steps = [
            (piece, distance)
            for piece in range(num_pieces)
            for distance in range(1, self.world_size)
        ]
        if not steps:
            return
        cuts = [_cuts(count, num_pieces) for count in rank_columns.counts]
        longest = max(part.stop - part.start for parts in cuts for part in parts)
        like = rank_columns.packed(slice(0, 0))
        # Two buffers: one is read and sent on, the other receives.
        rooms = [like.new_empty(longest, rank_columns.width) for _ in range(2)]
        gradients = _Gradients(rank_columns, longest, like) if with_gradient else None

        def block(number: int) -> tuple[int, slice]:
            piece, distance = steps[number]
            owner = (self.rank - distance) % self.world_size
            return owner, cuts[owner][piece]

        def start(number: int, passed: Tensor | None) -> collectives.Transfer:
            """Receive the block of a step. Sent is the own piece, or the block that is passed on."""
            piece, distance = steps[number]
            # A round begins with the own piece. From then on a rank passes on what it has just received.
            sent = (
                rank_columns.packed(cuts[self.rank][piece])
                if distance == 1 or passed is None
                else passed
            )
            return collectives.start_ring_shift(
                sent, rooms[number % 2][: _length(block(number)[1])]
            )

        # The last step's block was held, on every rank: it does not come again, and its gradient joins at the end.
        num_visits = len(steps) - (held is not None)
        arriving = start(0, None) if num_visits else collectives.Transfer(())
        for number, (piece, distance) in enumerate(steps[:num_visits]):
            arriving.wait()
            owner, columns = block(number)
            values = rooms[number % 2][: _length(columns)]
            # Before the yield: the transfer runs while the caller computes. Both only read `values`.
            if number + 1 < num_visits:
                arriving = start(number + 1, values)
            part = None if gradients is None else gradients.zeros(_length(columns))
            yield Visit(owner, columns, values, part, is_last=number + 1 == num_visits)
            if gradients is not None and part is not None:
                # What comes next is the gradient of this rank's next block, or, after a whole round, of its own.
                is_home = distance == self.world_size - 1
                coming = cuts[self.rank][piece] if is_home else block(number + 1)[1]
                gradients.pass_on(part, coming, is_home=is_home)
        if gradients is not None:
            if held is not None:
                gradients.pass_on(held, cuts[self.rank][-1], is_home=True)
            gradients.add_pending(None)


class _Gradients:
    """Buffers of the gradients that travel: one that this rank fills, one that it sends, one that it receives."""

    def __init__(
        self, rank_columns: TravellingColumns, longest: int, like: Tensor
    ) -> None:
        self.own = rank_columns
        # Two: one is still being sent while the next is filled.
        self.parts = [
            like.new_empty(longest, rank_columns.gradient_width) for _ in range(2)
        ]
        self.room = like.new_empty(longest, rank_columns.gradient_width)
        self.number = 0
        self.arriving: tuple[collectives.Transfer, Tensor, slice | None] | None = None

    def zeros(self, length: int) -> Tensor:
        """Return the buffer for this rank's part of a block's gradient."""
        self.number += 1
        return self.parts[self.number % 2][:length].zero_()

    def pass_on(self, part: Tensor, coming: slice, *, is_home: bool) -> None:
        """Add what other ranks found for this block, and send the sum on. `coming`: the columns of what is received."""
        # First the sum of the ranks before: what is sent must hold it.
        self.add_pending(part)
        received = self.room[: _length(coming)]
        self.arriving = (
            collectives.start_ring_shift(part, received),
            received,
            coming if is_home else None,
        )

    def add_pending(self, part: Tensor | None) -> None:
        """Wait for the gradient under way, and add it to the own columns, or to this rank's part of its block."""
        if self.arriving is None:
            return
        transfer, received, home = self.arriving
        transfer.wait()
        if home is not None:
            self.own.add_gradient(home, received)
        elif part is not None:
            part += received


def _cuts(count: int, num_pieces: int) -> Sequence[slice]:
    bounds = [count * piece // num_pieces for piece in range(num_pieces + 1)]
    return [slice(first, last) for first, last in itertools.pairwise(bounds)]


def _length(columns: slice) -> int:
    length: int = columns.stop - columns.start
    return length
