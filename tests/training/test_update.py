"""One update of the weights: float16's gradient scale, which a resumed run must go on with."""

from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from tests.training.test_checkpoint import starting
from tests.training.tiny_run import assert_same, config_for
from vembed.training import update as module
from vembed.training.run import LoopState
from vembed.training.update import FIRST_SCALE, GradientScale, Update

HALF = SimpleNamespace(mixed_precision="fp16", strategy="single")


def train(run, state, tmp_path, overflows):
    """Steps as the run takes them in float16, where `overflows` says which gradients are not finite; the scales."""
    update = Update(run.model, run.loss, run.optimizer, HALF, config_for(tmp_path, max_grad_norm=1.0), state.scale)
    scales = []
    for is_overflow in overflows:
        loss = run.model(torch.arange(11)).pow(2).sum() * run.loss.scale
        (loss * state.scale.value).backward()
        if is_overflow:
            next(one for one in run.model.parameters() if one.grad is not None).grad[0] = torch.inf
        outcome = update.apply(loss.detach())
        assert outcome.applied is not is_overflow
        state.step += 1
        scales.append(state.scale.value)
    run.state = asdict(state)
    return scales


NO, YES = False, True


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([NO, YES, NO, NO], [NO, NO, NO, NO, YES]),  # it grows after the third good step, which the break divides
        ([YES] * 18, [NO, NO, NO, YES]),  # it has come down to 1, and stays there
    ],
)
def test_float16_resumes_with_its_scale_bit_for_bit(tmp_path, monkeypatch, before, after):
    monkeypatch.setattr(module, "GROWTH_STEPS", 3)
    with starting(tmp_path / "whole") as run:
        scales = train(run.resume(), LoopState(), tmp_path, before + after)
        expected, kept = run.whole(), run.state
    with starting(tmp_path / "broken") as run:
        found = train(run.resume(), LoopState(), tmp_path, before)
        run.save()
    with starting(tmp_path / "broken", resume=True) as run:
        run.resume()
        found += train(run, LoopState.restored(run.state), tmp_path, after)
        assert found == scales
        assert run.state == kept
        assert_same(run.whole(), expected)
    assert scales[0] in (FIRST_SCALE, FIRST_SCALE / 2)
    assert len(set(scales)) > 2


def test_other_dtypes_have_no_scale(tmp_path):
    with starting(tmp_path) as run:
        scale = GradientScale()
        session = SimpleNamespace(mixed_precision="bf16", strategy="single")
        update = Update(run.model, run.loss, run.optimizer, session, config_for(tmp_path), scale)
        run.model(torch.arange(11)).sum().backward()
        update.apply(torch.ones(()))
    assert scale == GradientScale(value=1.0, good_steps=0)
