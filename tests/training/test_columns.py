"""Columns that the ranks gather: of several dtypes, of unequal length, in one collective."""

import numpy as np
import torch

from tests.harness import run_ranks
from vembed.data.examples import distinct
from vembed.parallel import collectives
from vembed.training.step import Column, gather_columns

COUNTS = {"indices": [2, 0, 3], "weights": [1, 4, 0]}


def part(name, rank):
    generator = torch.Generator().manual_seed(10 * rank + len(name))
    count = COUNTS[name][rank]
    if name == "indices":
        return torch.randint(-(2**62), 2**62, (count,), generator=generator)
    return torch.randn(count, dtype=torch.float64, generator=generator)


def gathered():
    columns = {
        name: Column(part(name, collectives.rank()).numpy(), counts)
        for name, counts in COUNTS.items()
    }
    collectives.calls.clear()
    actual = gather_columns(columns)
    return actual, collectives.calls.total()


def test_columns_arrive_bit_for_bit():
    expected = {
        name: torch.cat([part(name, rank) for rank in range(3)]) for name in COUNTS
    }
    for result, num_collectives in run_ranks(gathered, 3):
        assert num_collectives == 1
        for name, column in expected.items():
            assert (
                torch.equal(result[name], column) and result[name].dtype == column.dtype
            )


def test_distinct_values_and_where_they_went():
    values = ["b", "a", "B", "c", "A", "b"]
    firsts, where = distinct(values, key=str.lower)
    assert firsts == ["b", "a", "c"]
    np.testing.assert_array_equal(where, [0, 1, 0, 2, 1, 0])
    assert distinct([], key=str.lower)[0] == []
