"""What a step may cost, counted by benchmarks.counts: padding, forwards, waits for the device, collectives, memory."""

import pytest

from benchmarks.counts import NUM_RANKS, more_counts, run_counts, write_data
from tests.harness import run_ranks
from tests.tiny import shared, tiny_bert


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    """Counts of a tiny model's runs; those of padding and of the loss are the benchmark's own."""
    folder = tmp_path_factory.mktemp("counts")
    write_data(folder)
    runs, _ = run_ranks(run_counts, NUM_RANKS, folder, shared(tiny_bert))
    return {"runs": runs, **more_counts()}


def test_texts_are_not_padded_and_where_a_model_needs_it_far_less_than_by_columns(
    counts,
):
    assert {run["padding"] for run in counts["runs"]} == {0.0}
    padded, by_column = (
        1 / (1 - counts[key]) for key in ("padding_if_padded", "padding_by_column")
    )
    assert padded < 1.2
    assert by_column > 1.8 * padded


def test_the_step_seldom_waits_for_the_device(counts):
    # Loss and gradient norm, the width of the candidates' keys, and on CPUs alone how much of it is used. Nothing for
    # each micro-batch. tests/imitation counts the reads of a GPU.
    for run in counts["runs"]:
        assert run["reads_per_step"] <= 4


def test_the_loss_never_makes_a_square(counts):
    elements = {int(rows): number for rows, number in counts["loss_elements"].items()}
    assert elements[8192] < 8192**2 / 4
    assert elements[8192] <= 2 * elements[4096] <= 4 * elements[2048]
