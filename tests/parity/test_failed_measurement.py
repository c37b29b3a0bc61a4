"""A measurement of memory that fails leaves nothing behind in a sharded model: the gradients after it are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from tests.harness import run_ranks
from tests.parity.engine import (
    Case,
    build,
    examples,
    full_gradients,
    step_of,
    worst_error,
)
from vembed.parallel import parameters
from vembed.parallel.session import start_session
from vembed.parallel.step_memory import PeakMeter, measure_demand

FAILURES = (
    "none",
    "no measurement",
    "forward",
    "backward",
    "second backward",
    "backward before torch 2.13",
)


class Failing:
    """A hook of a layer that runs out of memory in a forward or a backward pass."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.backwards = 0

    def __call__(self, module: nn.Module, given: Any, output: Any) -> None:
        """Fail here, or later in the backward pass."""
        if self.where == "forward":
            raise torch.cuda.OutOfMemoryError("simulated")
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(self.backward)

    def backward(self, gradient: Tensor) -> Tensor:
        """Fail in the first or the second backward pass."""
        self.backwards += 1
        if self.where.startswith("backward") or (
            self.where == "second backward" and self.backwards == 2
        ):
            raise torch.cuda.OutOfMemoryError("simulated")
        return gradient


class Straight(PeakMeter):
    """A stand-in: 1,000 bytes, and 7 for each token."""

    def __init__(self) -> None:
        self.tokens = 0

    def reset(self) -> None:
        """Begin."""
        self.tokens = 0

    def peak(self) -> int:
        """Return the bytes."""
        return 1000 + 7 * self.tokens


def steps_after(
    folder: Path,
) -> list[tuple[tuple[float, float], dict[str, Tensor], dict[str, Tensor]]]:
    """On every rank, for each failure: the demand, and the gradients of two steps after it."""
    case = Case("budget", num_examples=6)
    config = case.config(folder, strategy="fsdp", gradient_checkpointing=False)
    found = []
    with start_session(config) as session:
        for failure in FAILURES:
            embedder, loss, featuriser = build(config)
            model = session.prepare(embedder, embedder.description.layer_classes)
            step, rank_batch = step_of(
                model, loss, featuriser, session, examples(case), case.budget()
            )
            meter, demand = Straight(), None
            if failure != "no measurement":
                layer = embedder.backbone.encoder.layer[1]
                hook = layer.register_forward_hook(Failing(failure))
                count = embedder.register_forward_pre_hook(
                    lambda _, given, meter=meter: setattr(
                        meter, "tokens", given[0][0][1]["input_ids"].numel()
                    )
                )
                with patch.object(
                    parameters,
                    "_RESETS",
                    parameters._RESETS and "before" not in failure,
                ):
                    demand = measure_demand(
                        model, featuriser, session, rank_batch.features, meter
                    )
                hook.remove()
                count.remove()
            gradients = []
            for number in range(2):
                step.accumulate(rank_batch, number, weight=1.0, last=True)
                gradients.append(full_gradients(model))
                model.zero_grad(set_to_none=True)
            found.append(
                ((demand.fixed, demand.per_token) if demand else (0.0, 0.0), *gradients)
            )
    return found


@pytest.mark.promise("E01")
def test_a_failed_trial_left_every_later_gradient_at_none() -> None:
    for rank in run_ranks(steps_after, 2, Case("budget").folder(), process_group=False):
        by_failure = dict(zip(FAILURES, rank, strict=True))
        _, *wanted = by_failure["no measurement"]
        assert by_failure["none"][0] == pytest.approx((1000.0, 7.0)), (
            "the line through two sizes"
        )
        for failure, (demand, *gradients) in by_failure.items():
            for ours, theirs in zip(gradients, wanted, strict=True):
                name, error = worst_error(ours, theirs)
                assert ours and error <= 1e-9, (failure, name)
            if failure not in ("none", "no measurement"):
                assert demand[1] > 7.0, "the estimate of `vembed plan` instead"
