"""What a step may cost, counted by the benchmarks: padding, and waits for the device."""

import pytest

from benchmarks.cases import CASES
from benchmarks.counts import NUM_RANKS, run_counts, write_data
from benchmarks.work import useful_work
from tests.harness import run_ranks
from tests.tiny import shared, tiny_bert


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Counts of a tiny model's runs."""
    folder = tmp_path_factory.mktemp("counts")
    write_data(folder)
    counts, _ = run_ranks(run_counts, NUM_RANKS, folder, shared(tiny_bert))
    return counts


def test_texts_are_not_padded_and_where_a_model_needs_it_far_less_than_by_columns(
    runs,
):
    assert {run["padding"] for run in runs} == {0.0}
    (case,) = [case for case in CASES if case.name == "natural-128"]
    _, _, paddings = useful_work(case)
    padded, by_column = (1 / (1 - padding) for padding in paddings)
    assert padded < 1.2
    assert by_column > 1.8 * padded


def test_the_step_seldom_waits_for_the_device(runs):
    # Loss and gradient norm, the width of the candidates' keys, and on CPUs alone how much of it is used. Nothing for
    # each micro-batch. tests/imitation counts the reads of a GPU.
    for run in runs:
        assert run["reads_per_step"] <= 4
