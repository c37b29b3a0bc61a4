"""Columns of numbers that the ranks gather together: the rows of a global batch and their inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vembed.data.batching.feeding import to_device
from vembed.parallel import collectives


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
