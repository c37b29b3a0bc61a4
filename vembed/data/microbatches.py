"""Micro-batches: the lengths of a rank's inputs cut into groups that fit a token budget. Pure functions, no tensors."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

Lengths = Sequence[int] | np.ndarray

PRICE = 16
"""One micro-batch more is worth it where it saves more than 1/16 of the budget in padding."""


def num_micro_batches(lengths: Lengths, budget: int, max_rows: int | None = None) -> int:
    """How many micro-batches `plan` makes of these lengths when nobody asks for more."""
    return len(_cut(_sorted(lengths, budget, max_rows)[1], budget, max_rows))


def plan(lengths: Lengths, budget: int, max_rows: int | None = None, at_least: int = 0) -> list[list[int]]:
    """Indices of the inputs, longest first, in micro-batches of at most `budget` padded tokens and `max_rows` rows.

    An input longer than the budget is alone. With fewer than `at_least` micro-batches the largest are split, and where
    there are fewer inputs than that, empty ones stand at the end.
    """
    order, ordered = _sorted(lengths, budget, max_rows)
    ends = _split(_cut(ordered, budget, max_rows), ordered, at_least)
    indices = order.tolist()
    parts = [indices[start:end] for start, end in pairwise([0, *ends])]
    return parts + [[] for _ in range(at_least - len(parts))]


def padded_tokens(lengths: Lengths, micro_batches: Sequence[Sequence[int]]) -> int:
    """Tokens that go through the model: each micro-batch is padded to its longest input."""
    return sum(len(rows) * max(int(lengths[row]) for row in rows) for rows in micro_batches if rows)


def price(longest: int, budget: int, max_rows: int | None) -> int:
    """What a micro-batch costs besides its tokens, in tokens: kernels to launch, and layers to gather under FSDP."""
    return min(budget, longest * max_rows if max_rows else budget) // PRICE


def _sorted(lengths: Lengths, budget: int, max_rows: int | None) -> tuple[np.ndarray, np.ndarray]:
    values = np.asarray(lengths, dtype=np.int64)
    if budget < 1 or (max_rows is not None and max_rows < 1) or (len(values) and values.min() < 1):
        raise ValueError(f"lengths, budget ({budget}) and max_rows ({max_rows}) have to be at least 1")
    order = np.argsort(-values, kind="stable")
    return order, values[order]


def _cut(ordered: np.ndarray, budget: int, max_rows: int | None) -> list[int]:
    """Where each micro-batch ends, so that padded tokens plus the price of each micro-batch are as few as can be."""
    num_items = len(ordered)
    if num_items == 0:
        return []
    most = np.maximum(1, budget // ordered)
    if max_rows is not None:
        most = np.minimum(most, max_rows)
    most = np.minimum(most, num_items - np.arange(num_items)).tolist()
    widths = ordered.tolist()
    each = price(widths[0], budget, max_rows)
    rows = np.arange(1, num_items + 1)
    cheapest = np.zeros(num_items + 1, dtype=np.int64)  # of the inputs from i on
    ends = [0] * num_items
    for i in range(num_items - 1, -1, -1):
        costs = rows[: most[i]] * widths[i] + cheapest[i + 1 : i + 1 + most[i]]
        num_rows = most[i] - int(costs[::-1].argmin())  # of equally cheap ones the most rows
        cheapest[i] = costs[num_rows - 1] + each
        ends[i] = i + num_rows
    found = [ends[0]]
    while found[-1] < num_items:
        found.append(ends[found[-1]])
    return found


def _split(ends: list[int], ordered: np.ndarray, at_least: int) -> list[int]:
    """Halve the largest micro-batch until there are enough; halves of equal padded size keep all of them balanced."""
    if len(ends) >= at_least:
        return ends
    widths = ordered.tolist()
    heap = [(-(end - start) * widths[start], start, end) for start, end in pairwise([0, *ends]) if end - start > 1]
    heapq.heapify(heap)
    cuts = set(ends)
    while heap and len(cuts) < at_least:
        _, start, end = heapq.heappop(heap)
        cut = _middle(widths, start, end)
        cuts.add(cut)
        for first, last in ((start, cut), (cut, end)):
            if last - first > 1:
                heapq.heappush(heap, (-(last - first) * widths[first], first, last))
    return sorted(cuts)


def _middle(widths: list[int], start: int, end: int) -> int:
    """The cut that makes the larger of both halves smallest; the left one grows with it, the right one shrinks."""
    low, high = start + 1, end - 1
    while low < high:
        cut = (low + high) // 2
        if (cut - start) * widths[start] >= (end - cut) * widths[cut]:
            high = cut
        else:
            low = cut + 1
    before = low - 1
    if before > start and (end - before) * widths[before] <= (low - start) * widths[start]:
        return before
    return low
