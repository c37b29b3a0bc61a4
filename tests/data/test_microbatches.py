"""The plan of micro-batches: nothing lost, nothing above the budget, split as asked."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vembed.data.batching.rank_batch import (
    LockstepSplit,
    padded_tokens,
    split_by_length,
)

ANY_INPUTS = given(
    lengths=st.lists(st.integers(0, 600), max_size=60),
    budget=st.integers(1, 5_000),
    max_inputs=st.none() | st.integers(1, 20),
    at_least=st.integers(0, 80),
)


@ANY_INPUTS
def test_every_index_once_within_the_budget(lengths, budget, max_inputs, at_least):
    split = split_by_length(lengths, budget, max_inputs, at_least)
    assert sorted(itertools.chain.from_iterable(split)) == list(range(len(lengths)))
    for rows in split:
        assert len(rows) <= 1 or padded_tokens(lengths, [rows]) <= budget
        assert max_inputs is None or len(rows) <= max_inputs
    in_order = [lengths[row] for rows in split for row in rows]
    assert in_order == sorted(lengths, reverse=True)
    alone = len(split_by_length(lengths, budget, max_inputs))
    assert len(split) == max(alone, at_least)
    num_empty = max(0, at_least - max(alone, len(lengths)))
    assert [bool(rows) for rows in split] == [
        place < len(split) - num_empty for place in range(len(split))
    ]


@pytest.mark.parametrize(
    ("lengths", "budget", "at_least", "expected"),
    [
        ([64, 16, 16, 16, 16], 999, 2, [[0], [1, 2, 3, 4]]),
        ([5, 100, 3], 40, 0, [[1], [0, 2]]),  # one is longer than the budget
        ([5, 7], 100, 4, [[1], [0], [], []]),
    ],
)
def test_splits(lengths, budget, at_least, expected):
    assert split_by_length(lengths, budget, at_least=at_least) == expected


def test_fast_enough_for_every_step():
    lengths = np.random.default_rng(0).lognormal(4.0, 0.8, 8192)
    start = time.process_time()
    split_by_length(np.clip(lengths, 5, 512).astype(int), 16_384)
    assert time.process_time() - start < 2


def test_ranks_agree_on_the_micro_batches_of_each_group():
    lengths = [[9, 1, 5, 5, 2, 7, 30], [3, 3], []]
    places = [
        {"text": [0, 2, 4], "image": [1, 3, 5, 6], "both": []},
        {"text": [0], "image": [1], "both": []},
        {"text": [], "image": [], "both": []},
    ]
    ranks = []
    for rank_lengths, rank_places in zip(lengths, places, strict=True):
        ranks.append(LockstepSplit(rank_lengths, rank_places, 10, 2))
    counts = np.max([rank.counts for rank in ranks], axis=0).tolist()
    for rank, rank_places in zip(ranks, places, strict=True):
        splits = rank.split_into(counts)
        assert list(splits) == ["text", "image"]  # no rank has inputs of the last group
        assert [len(split) for split in splits.values()] == counts[:2]
        for group, split in splits.items():
            assert sorted(itertools.chain(*split)) == rank_places[group]
    assert ranks[0].padded_tokens >= sum(lengths[0])
    assert ranks[2].padded_tokens == 0
