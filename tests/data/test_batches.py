"""The global batch: a pure function of seed, epoch and step, whatever asked for it before."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vembed.data.batching.schedule import BatchSchedule, ContentKeys, rank_examples
from vembed.errors import UserError


def epoch_of(schedule, epoch):
    return [schedule.batch(epoch, step) for step in range(schedule.batches_per_epoch)]


def drawn_in(schedule, epoch):
    return np.concatenate(epoch_of(schedule, epoch)).tolist()


def make_keys(rows):
    counts = np.array(list(map(len, rows)))
    return ContentKeys(np.concatenate(rows).astype(np.int64), counts)


@given(
    st.integers(1, 200), st.integers(1, 40), st.integers(0, 2**40), st.integers(0, 5)
)
def test_every_example_once_but_the_last_incomplete_batch(size, batch, seed, epoch):
    schedule = BatchSchedule([size], batch, seed)
    assert schedule.batches_per_epoch == max(1, size // batch)
    assert schedule.num_left_out == (size % batch if size >= batch else 0)
    for rows in epoch_of(schedule, epoch):
        assert len(rows) == min(size, batch)
        assert rows.dtype == np.int64
    drawn = set(drawn_in(schedule, epoch))
    assert len(drawn) == size - schedule.num_left_out
    assert drawn <= set(range(size))


def test_pure_function_of_seed_epoch_and_step():
    used = BatchSchedule([100], 8, seed=3)
    for epoch in (4, 0, 2):
        epoch_of(used, epoch)
    used.batch(1, 7)[:] = -1
    batch = used.batch(1, 7).tolist()
    assert batch == BatchSchedule([100], 8, seed=3).batch(1, 7).tolist()
    assert batch != used.batch(2, 7).tolist()
    assert batch != BatchSchedule([100], 8, seed=4).batch(1, 7).tolist()


def test_the_order_is_the_same_in_every_release():
    # A change here breaks the resuming of runs that an older release has begun.
    assert BatchSchedule([10], 5, seed=42).batch(0, 0).tolist() == [7, 3, 4, 2, 5]
    weighted = BatchSchedule([6, 4], 5, seed=1, weights=[0.5, 2.0])
    assert weighted.batch(3, 1).tolist() == [8, 4, 8, 6, 7]


@given(st.integers(1, 100), st.integers(1, 9))
def test_ranks_share_the_batch(num_rows, world_size):
    parts = [rank_examples(num_rows, rank, world_size) for rank in range(world_size)]
    rows = [row for part in parts for row in range(part.start, part.stop)]
    assert rows == list(range(num_rows))
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 3.0])),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
    st.integers(0, 99),
)
def test_weights(sources, homogeneous, seed):
    sizes, weights = zip(*sources, strict=True)
    groups = range(len(sizes)) if homogeneous else None
    schedule = BatchSchedule(sizes, 1, seed, weights=weights, source_groups=groups)
    ends = np.cumsum(sizes)
    total = np.zeros(ends[-1])
    for epoch in range(4):
        counts = np.bincount(drawn_in(schedule, epoch), minlength=ends[-1])
        total += counts
        for part, (size, weight) in zip(
            np.split(counts, ends[:-1]), sources, strict=True
        ):
            assert part.sum() == max(1, round(size * weight)), "in each epoch"
    for part in np.split(total, ends[:-1]):
        assert part.max() - part.min() <= 1, "no example again before all others"


def test_homogeneous_batches():
    schedule = BatchSchedule([103, 51, 17], 10, seed=0, source_groups=[0, 1, 2])
    assert schedule.batches_per_epoch == 10 + 5 + 1
    assert schedule.num_left_out == 3 + 1 + 7
    sources = []
    for rows in epoch_of(schedule, 0):
        (source,) = set(np.searchsorted([103, 154], rows, side="right").tolist())
        sources.append(source)
    assert sources != sorted(sources), "in mixed order"
    assert len(set(drawn_in(schedule, 0))) == 160


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.integers(0, 30), min_size=1, max_size=3), min_size=20, max_size=120
    ),
    st.integers(1, 6),
    st.integers(0, 9),
    st.booleans(),
)
def test_no_duplicates(rows, batch, seed, homogeneous):
    half = len(rows) // 2
    sizes = [half, len(rows) - half]
    options = {
        "keys": make_keys(rows),
        "source_groups": [0, 1] if homogeneous else None,
    }
    try:
        schedule = BatchSchedule(sizes, batch, seed, **options)
    except UserError as error:
        assert "no_duplicates" in str(error)
        return
    for epoch in range(3):
        for indices in epoch_of(schedule, epoch):
            recorded = set()
            for index in indices:
                assert recorded.isdisjoint(rows[index])
                recorded.update(rows[index])
        drawn = drawn_in(schedule, epoch)
        assert len(set(drawn)) == len(drawn), "no example twice in an epoch"
        if epoch == 0:
            assert len(drawn) + schedule.num_left_out == len(rows)


@pytest.mark.parametrize(
    ("rows", "size"),
    [
        # 20,000 pairs over 5,000 documents: each document four times, as in real collections.
        ([[100_000 + number, number % 5_000] for number in range(20_000)], 512),
        # Queries occur seven times (the last one six), documents three or four times.
        ([[number // 7, 10_000 + (7 * number) % 300] for number in range(1077)], 32),
    ],
)
def test_no_duplicates_loses_only_the_remainder(rows, size):
    schedule = BatchSchedule([len(rows)], size, 42, keys=make_keys(rows))
    assert schedule.num_left_out == len(rows) % size
    assert schedule.batches_per_epoch == len(rows) // size
    drawn = []
    for epoch in range(2):
        for indices in epoch_of(schedule, epoch):
            keys = {key for index in indices for key in rows[index]}
            assert len(keys) == 2 * size
        drawn.append(set(drawn_in(schedule, epoch)))
    assert drawn[0] != drawn[1], "others are left out in each epoch"


def test_each_epoch_has_as_many_batches_of_each_source():
    """Although epoch 0 draws all four equal contents and epoch 1 none."""
    rows = [[0]] * 4 + [[number] for number in range(4, 20)]
    options = {"weights": [0.5, 1.0], "keys": make_keys(rows), "source_groups": [0, 1]}
    schedule = BatchSchedule([16, 4], 4, seed=6, **options)
    for epoch in range(4):
        is_second = [batch[0] >= 16 for batch in epoch_of(schedule, epoch)]
        assert sorted(is_second) == [False, True]


@pytest.mark.parametrize("other", [0, 1000])
def test_no_duplicates_without_duplicates_changes_nothing(other):
    """Also where an example has one content twice."""
    keys = make_keys([[number, other + number] for number in range(50)])
    distinct = BatchSchedule([50], 8, seed=5, keys=keys)
    assert drawn_in(distinct, 2) == drawn_in(BatchSchedule([50], 8, seed=5), 2)


def test_one_text_in_most_examples_is_left_out_and_counted():
    rows = [[number, 10_000] if number < 700 else [number] for number in range(1000)]
    schedule = BatchSchedule([1000], 10, seed=0, keys=make_keys(rows))
    assert 28 <= schedule.batches_per_epoch <= 300 // 9
    assert schedule.num_left_out == 1000 - schedule.batches_per_epoch * 10


def test_the_deferred_do_not_cost_quadratic_time():
    keys = make_keys([[number, 10**9 + number % 3] for number in range(60_000)])
    start = time.process_time()
    schedule = BatchSchedule([60_000], 3, seed=0, keys=keys)
    assert schedule.num_left_out < 3_000
    assert time.process_time() - start < 3


def test_a_million_examples():
    start = time.process_time()
    schedule = BatchSchedule([1_000_000], 1024, seed=0)
    for step in range(500):
        schedule.batch(0, step)
    assert time.process_time() - start < 3


@pytest.mark.parametrize(
    ("sizes", "smallest", "said"),
    [
        ([100, 7], 7, "smallest batch has 7"),
        ([103], 10, "3 of 103"),
    ],
)
def test_incomplete_batches(sizes, smallest, said):
    schedule = BatchSchedule(sizes, 10, 0, source_groups=range(len(sizes)))
    for epoch in (0, 3):
        lengths = {len(rows) for rows in epoch_of(schedule, epoch)}
        assert lengths == {smallest, 10}
    assert said in schedule.summary()
