"""One update of the weights: float16's gradient scale, which a resumed run must go on with."""

import math
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from tests.training.test_checkpoint import resumed, starting
from tests.training.tiny_run import assert_same, config_for
from vembed.errors import RunError
from vembed.training import optimizer as module
from vembed.training.hooks.metrics import Watch
from vembed.training.optimizer import FIRST_SCALE, GradientScale, Outcome, Update
from vembed.training.trainer import LoopState

HALF = SimpleNamespace(mixed_precision="fp16", strategy="single")


def train(run, state, overflows):
    """Steps as the run takes them in float16, where `overflows` says which gradients are not finite; the scales."""
    update = Update(run.model, run.loss, run.optimizer, HALF, 1.0, state.scale)
    scales = []
    for is_overflow in overflows:
        loss = run.model(torch.arange(11)).pow(2).sum() * run.loss.scale
        (loss * state.scale.value).backward()
        if is_overflow:
            run.model.head.weight.grad[0] = torch.inf
        outcome = update.apply(float(loss.detach()))
        assert outcome.applied != is_overflow
        state.step += 1
        scales.append(state.scale.value)
    run.state = asdict(state)
    return scales


def watching(folder, precision="bf16"):
    """The checks of a run, begun."""
    run = SimpleNamespace(
        config=config_for(folder),
        session=SimpleNamespace(mixed_precision=precision),
        state=LoopState(),
        output=folder,
    )
    watch = Watch()
    watch.on_build(run)
    watch.on_start(run)
    return watch


def report_of(step, outcome, *finite):
    """A step with a batch for each line of the data, and whether its embeddings are finite."""
    report = SimpleNamespace(
        step=step,
        outcome=outcome,
        embeddings=torch.eye(4),
    )
    report.batches = []
    for line, is_finite in enumerate(finite, start=1):
        batch = SimpleNamespace(where=[f"train.jsonl:{line}"])
        total = torch.tensor(1.0 if is_finite else torch.nan)
        result = SimpleNamespace(embeddings_sum=total)
        report.batches.append((batch, result))
    return report


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # It grows after the third good step, which the break divides.
        ([0, 1, 0, 0], [0, 0, 0, 0, 1]),
        # It has come down to 1, and stays there.
        ([1] * 18, [0, 0, 0, 1]),
    ],
)
def test_float16_resumes_with_its_scale_bit_for_bit(
    tmp_path, monkeypatch, before, after
):
    monkeypatch.setattr(module, "GROWTH_STEPS", 3)
    with resumed(tmp_path / "whole") as run:
        scales = train(run, LoopState(), before + after)
        expected = run.whole()
        remaining = run.state
    with resumed(tmp_path / "broken") as run:
        actual = train(run, LoopState(), before)
        run.save()
    with resumed(tmp_path / "broken", resume=True) as run:
        actual += train(run, LoopState.restored(run.state), after)
        assert actual == scales
        assert run.state == remaining
        assert_same(run.whole(), expected)
    assert scales[0] in (FIRST_SCALE, FIRST_SCALE / 2)
    assert len(set(scales)) > 2


def test_float16_that_overflows_with_the_lowest_scale_stops_the_run(tmp_path):
    """Otherwise a model whose weights are broken would leave out every step to the end, each with the same line."""
    with starting(tmp_path) as run:
        scale = GradientScale(value=2.0, is_started=True)
        update = Update(run.model, run.loss, run.optimizer, HALF, 1.0, scale)
        watch = watching(tmp_path, precision="fp16")
        outcomes = []
        for _ in range(2):
            run.model(torch.arange(11)).sum().backward()
            run.model.head.weight.grad[0] = torch.inf
            outcomes.append(update.apply(1.0))
    assert [outcome.is_overflow for outcome in outcomes] == [True, False]
    assert scale.value == 1.0
    watch.on_step(report_of(1, outcomes[0], True))
    with pytest.raises(RunError, match=r"step 2: .*norm inf.*mixed_precision: bf16"):
        watch.on_step(report_of(2, outcomes[1], True))


def test_examples_of_each_batch_of_a_step_are_named(tmp_path):
    """With gradient_accumulation_steps the batch that broke the step need not be its last."""
    outcome = Outcome(math.nan, math.nan, applied=False)
    report = report_of(7, outcome, True, False, True)
    with pytest.raises(RunError, match=r"on rank 0: train\.jsonl:2\. "):
        watching(tmp_path).on_step(report)
