"""Columns of numbers that the ranks gather together: the rows of a global batch and their inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vembed.data.feeding import to_device
from vembed.distributed import collectives


@dataclass(frozen=True, slots=True)
class Column:
    """A rank's part of one column, on the host: int64 or float64, [n] or [n, k]."""

    values: Tensor
    counts: Sequence[int]
    """Length of each rank's part, known to all ranks."""


def gather_columns(columns: Mapping[str, Column], device: torch.device) -> dict[str, Tensor]:
    """Return the columns of all ranks, each concatenated by rank. One collective, however many columns there are.

    Every rank passes the same names, dtypes and trailing sizes.
    """
    rank, world_size = collectives.rank(), collectives.world_size()
    # Floating-point columns travel as their bits, not converted: all columns share one int64 collective.
    flat = [column.values.view(torch.int64).reshape(-1) for column in columns.values()]
    widths = [math.prod(column.values.shape[1:]) for column in columns.values()]
    for name, column in columns.items():
        assert len(column.values) == column.counts[rank], (name, len(column.values), column.counts[rank])
    # sizes[r][c]: numbers of rank r in column c.
    sizes = [
        [column.counts[of] * width for column, width in zip(columns.values(), widths, strict=True)]
        for of in range(world_size)
    ]
    per_rank = [sum(one) for one in sizes]
    gathered = collectives.all_gather_rows(to_device(torch.cat(flat), device), per_rank)
    pieces = [torch.split(chunk, sizes[of]) for of, chunk in enumerate(torch.split(gathered, per_rank))]
    return {
        name: torch.cat([piece[number] for piece in pieces])
        .view(column.values.dtype)
        .reshape(-1, *column.values.shape[1:])
        for number, (name, column) in enumerate(columns.items())
    }
