"""Columns of a global batch: numbers of all ranks, gathered by one collective."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vembed.parallel import collectives


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of each rank's inputs, rows of the model's output, rows and hard negatives, known to all. By rank."""

    inputs: list[int]
    outputs: list[int]
    rows: list[int]
    negatives: list[int]


def rank_slice(rank: int, counts: Sequence[int]) -> slice:
    """Return a rank's part of a column that the ranks have gathered."""
    first = sum(counts[:rank])
    return slice(first, first + counts[rank])


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
