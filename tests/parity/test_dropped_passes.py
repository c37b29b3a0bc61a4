"""Measured passes leave nothing behind in a sharded model: the gradients after them are the same."""

from unittest import mock

import pytest
import torch

from tests.harness import run_ranks
from tests.measure import gradient_errors
from tests.parity.engine import (
    Case,
    build,
    examples,
    full_gradients,
    step_of,
)
from vembed.parallel.session import start_session
from vembed.parallel.step_memory import Demand, measure_demand

CASES = ("no measurement", "measurement")


def steps_after(folder):
    """On every rank, for each case: the demand, and the gradients of two steps after it."""
    case = Case("budget", num_examples=6)
    config = case.config(folder, strategy="fsdp", gradient_checkpointing=False)
    actual = []
    with start_session(config) as session:
        for name in CASES:
            embedder, loss, featuriser = build(config)
            model = session.prepare(embedder, embedder.description.layer_classes)
            step, rank_batch = step_of(
                model, loss, featuriser, session, examples(case), case.budget()
            )
            demand = None
            if name == "measurement":
                sizes = [0]

                def note(_, inputs, sizes=sizes):
                    sizes.append(inputs[0][0][1]["input_ids"].numel())

                count = embedder.register_forward_pre_hook(note)
                # In place of a GPU's counters: 1,000 bytes, and 7 for each token.
                with mock.patch.multiple(
                    torch.cuda,
                    reset_peak_memory_stats=lambda _: None,
                    max_memory_allocated=lambda _, sizes=sizes: 1000 + 7 * sizes[-1],
                ):
                    demand = measure_demand(
                        model, featuriser, session, rank_batch.features
                    )
                count.remove()
            gradients = []
            for number in range(2):
                step.accumulate(rank_batch, number, weight=1.0, is_last_batch=True)
                gradients.append(full_gradients(model))
                model.zero_grad(set_to_none=True)
            actual.append((demand, *gradients))
    return actual


@pytest.mark.promise("E01")
def test_passes_whose_gradients_are_dropped_leave_nothing_behind():
    for rank in run_ranks(steps_after, 2, Case("budget").folder()):
        by_case = dict(zip(CASES, rank, strict=True))
        _, *expected = by_case["no measurement"]
        # The line through two sizes.
        assert by_case["measurement"][0] == Demand(1000.0, 7.0)
        for name, (_, *gradients) in by_case.items():
            for ours, theirs in zip(gradients, expected, strict=True):
                assert max(gradient_errors(ours, theirs).values()) <= 1e-9, name
