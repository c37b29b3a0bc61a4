"""Micro-batches: division of a rank's inputs by length into groups within a token budget. Pure functions."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from vembed.models.families.family import Modality

Lengths = Sequence[int] | np.ndarray

PRICE_DIVISOR = 16
"""An additional micro-batch must save more than 1/16 of the budget in padding."""


def split(
    lengths: Lengths, budget: int, max_rows: int | None = None, at_least: int = 0
) -> list[list[int]]:
    """Return micro-batches of indices, longest inputs first, of at most `budget` padded tokens and `max_rows` rows.

    An input longer than the budget gets its own micro-batch. If there are fewer than `at_least` micro-batches, the
    largest are split; if there are fewer inputs than `at_least`, empty micro-batches are appended.
    """
    values = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-values, kind="stable")
    ends = _cut(values[order], budget, max_rows)
    if len(ends) < at_least:
        ends = _split_largest(ends, values[order], at_least)
    indices = order.tolist()
    parts = [indices[start:end] for start, end in pairwise([0, *ends])]
    # All ranks must run equally many forward passes: under FSDP each one is a collective.
    return parts + [[] for _ in range(at_least - len(parts))]


class LockstepSplit:
    """Micro-batches of the inputs of each modality, of which every rank must run equally many.

    A forward pass of a sharded model is collective. So each rank splits its own inputs, the ranks exchange `counts`,
    and a rank below the maximum of a modality splits its micro-batches further, or adds empty ones.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        places_of: Mapping[Modality, Sequence[int]],
        budget: int,
        max_rows: int | None = None,
    ) -> None:
        """`lengths`: of all inputs of the rank. `places_of`: the inputs of each modality, as positions in `lengths`."""
        self.lengths = lengths
        self.places_of = places_of
        self.budget = budget
        self.max_rows = max_rows
        self.splits = {name: self._split(places) for name, places in places_of.items()}
        self.counts = list(map(len, self.splits.values()))
        """Number of this rank's micro-batches of each modality, in the order of `places_of`."""
        self.padded_tokens = 0
        """Padded tokens of this rank before the ranks have agreed."""
        for micro_batches in self.splits.values():
            self.padded_tokens += padded_tokens(lengths, micro_batches)

    def agreed(self, counts: Sequence[int]) -> dict[Modality, list[list[int]]]:
        """Return micro-batches of positions in `lengths`, exactly `counts` of each modality: the maxima over the ranks.
        Modalities that no rank has inputs of are left out."""
        agreed = {}
        for (modality, micro_batches), count in zip(
            self.splits.items(), counts, strict=True
        ):
            if count > len(micro_batches):
                # Split anew, and not padded with dummies: more, smaller micro-batches cost this rank less padding.
                agreed[modality] = self._split(self.places_of[modality], count)
            elif micro_batches:
                agreed[modality] = micro_batches
        return agreed

    def _split(self, places: Sequence[int], at_least: int = 0) -> list[list[int]]:
        lengths = [self.lengths[place] for place in places]
        # From rows of `places` back to positions in `self.lengths`.
        micro_batches = []
        for rows in split(lengths, self.budget, self.max_rows, at_least):
            micro_batches.append([places[row] for row in rows])
        return micro_batches


def padded_tokens(lengths: Lengths, micro_batches: Sequence[Sequence[int]]) -> int:
    """Return the tokens that the model computes: each micro-batch is padded to its longest input."""
    total = 0
    for rows in micro_batches:
        longest = max((int(lengths[row]) for row in rows), default=0)
        total += len(rows) * longest
    return total


def _cut(ordered: np.ndarray, budget: int, max_rows: int | None) -> list[int]:
    """Return the end of each micro-batch, with the fewest padded tokens plus price of each micro-batch.

    Dynamic programming from the shortest input to the longest: `cheapest[i]` is the lowest cost of the inputs i, i + 1,
    ..., and `ends[i]` the end of the first micro-batch in that solution. A micro-batch that begins at i is padded to
    `widths[i]`, since the inputs are sorted in descending order.
    """
    num_items = len(ordered)
    if num_items == 0:
        return []
    most_rows = np.maximum(1, budget // ordered)
    left = num_items - np.arange(num_items)  # not beyond the last input
    most = np.minimum(np.minimum(most_rows, left), max_rows or num_items).tolist()
    widths = ordered.tolist()
    # The fixed cost of a micro-batch in tokens, for kernel launches and FSDP's all-gathers.
    price = min(budget, widths[0] * (max_rows or budget)) // PRICE_DIVISOR
    rows = np.arange(1, num_items + 1)
    # The last one stays 0: no input is left.
    cheapest = np.zeros(num_items + 1, dtype=np.int64)
    ends = [0] * num_items
    for i in range(num_items - 1, -1, -1):
        # costs[r - 1]: r rows in this micro-batch, and the cheapest solution for the inputs after them.
        costs = rows[: most[i]] * widths[i] + cheapest[i + 1 : i + 1 + most[i]]
        # Searched from the end: of equal costs, the most rows.
        num_rows = most[i] - int(costs[::-1].argmin())
        cheapest[i] = costs[num_rows - 1] + price
        ends[i] = i + num_rows
    chosen_ends = [ends[0]]
    while chosen_ends[-1] < num_items:
        chosen_ends.append(ends[chosen_ends[-1]])
    return chosen_ends


def _split_largest(ends: list[int], widths: np.ndarray, at_least: int) -> list[int]:
    """Split the largest micro-batch in two parts of similar padded size until there are `at_least`."""
    # heapq is a min-heap, so sizes are negative; micro-batches of one row cannot be split.
    heap = []
    for start, end in pairwise([0, *ends]):
        if end - start > 1:
            heap.append((-(end - start) * widths[start], start, end))
    heapq.heapify(heap)
    cuts = set(ends)
    while heap and len(cuts) < at_least:
        _, start, end = heapq.heappop(heap)
        # Both parts are padded to their longest input, which comes first. The larger of the two is made smallest.
        inner = np.arange(start + 1, end)
        left = (inner - start) * widths[start]
        right = (end - inner) * widths[inner]
        cut = start + 1 + int(np.maximum(left, right).argmin())
        cuts.add(cut)
        for first, last in ((start, cut), (cut, end)):
            if last - first > 1:
                heapq.heappush(heap, (-(last - first) * widths[first], first, last))
    return sorted(cuts)
