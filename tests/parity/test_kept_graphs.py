"""Gradient Cache keeps the graphs of as many micro-batches as fit and replays the others: the gradient is the same."""

from dataclasses import replace

import pytest

from tests.harness import run_ranks
from tests.parity.engine import (
    LORA,
    Case,
    assert_equal_gradients,
    reference,
    steps_on_ranks,
    with_whole_loss,
)

CASES = [
    Case("dropout", dropout=0.1, micro="row", cache=None),
    Case("lora-dropout", LORA, dropout=0.1, cache=None, num_examples=13),
]
KEPT_TOKENS = {"none": 1, "part": 80, "all": 10**9}


@pytest.mark.parametrize(
    ("num_ranks", "strategy"),
    [(1, "single"), (2, "ddp"), (3, "fsdp")],
)
def test_gradient_is_the_same_however_many_graphs_are_kept(num_ranks, strategy):
    placed = []
    for case in CASES:
        for kept_tokens in KEPT_TOKENS.values():
            placed.append((replace(case, kept_tokens=kept_tokens), case.folder()))
    by_rank = run_ranks(steps_on_ranks, num_ranks, placed, strategy, {})
    expected = {case.name: reference(case, num_ranks) for case in CASES}
    numbers = {}
    for index, (case, _) in enumerate(placed):
        results = [rank[index] for rank in by_rank]
        name = list(KEPT_TOKENS)[index % len(KEPT_TOKENS)]
        numbers[case.name, name] = results[0][1:]
        assert {result[1:] for result in results} == {results[0][1:]}
        gradients = with_whole_loss([result[0] for result in results])
        assert_equal_gradients(gradients, expected[case.name])
    for case in CASES:
        num_micro_batches, num_kept = numbers[case.name, "all"]
        assert num_kept == num_micro_batches
        assert numbers[case.name, "none"] == (2 * num_micro_batches, 0)
        num_forwards, num_kept = numbers[case.name, "part"]
        assert 0 < num_kept < num_micro_batches
        assert num_forwards == 2 * num_micro_batches - num_kept
