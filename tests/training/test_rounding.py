"""Weights in bfloat16 alone: rounding is right on average, updates do not vanish, and draws repeat."""

import pytest
import torch

from tests.training.tiny_run import TinyLoss, TinyModel, config_for
from vembed.errors import UserError
from vembed.training.optimizer import build_optimizer
from vembed.training.rounded_adamw import RoundedAdamW, rounded_to_bfloat16


def test_rounding_goes_to_a_neighbour_and_is_right_on_average():
    draw = torch.Generator().manual_seed(0)
    value = torch.tensor([1.001, -0.3, 3e-5, 0.0, 7.0, float("inf")])
    bits = torch.randint(0, 2**16, (20_000, 6), generator=draw, dtype=torch.int32)
    actual = rounded_to_bfloat16(value.expand(20_000, 6), bits).double()
    assert bool(actual[:, 5].isinf().all())
    steps = [2.0**-7, 2.0**-9, 2.0**-23, 0.0, 0.0]
    for column, step in enumerate(steps):
        draws = actual[:, column]
        assert len(draws.unique()) <= 2
        # The mean of n draws lies within 5 steps / (2 sqrt(n)) of the value, but once in a million.
        error = abs(float(draws.mean() - value[column].double()))
        assert error <= 5 * step / (2 * 20_000**0.5) + 1e-12


def steps(dtype, *, rounds, seed=3):
    """A weight of 1 after 200 steps of 1e-4 with gradients of one sign: 0.98 without rounding."""
    weight = torch.nn.Parameter(torch.ones(1000, dtype=dtype))
    groups = [{"params": [weight], "weight_decay": 0.0}]
    options = {
        "lr": 1e-4,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
    }
    optimizer = (
        RoundedAdamW(groups, **options, seed=seed)
        if rounds
        else torch.optim.AdamW(groups, **options)
    )
    for _ in range(200):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return weight.detach().double()


def test_small_updates_do_not_vanish():
    nearest = steps(torch.bfloat16, rounds=False)
    assert bool((nearest == 1.0).all()), "nothing is learned"
    rounded = steps(torch.bfloat16, rounds=True)
    assert rounded.mean().item() == pytest.approx(0.98, abs=5e-4)
    exact = steps(torch.float32, rounds=False)
    wide = steps(torch.float32, rounds=True)
    torch.testing.assert_close(wide, exact, rtol=1e-6, atol=0)


def test_draws_repeat_and_follow_the_seed():
    first = steps(torch.bfloat16, rounds=True)
    assert torch.equal(first, steps(torch.bfloat16, rounds=True))
    assert not torch.equal(first, steps(torch.bfloat16, rounds=True, seed=4))


def test_bfloat16_weights_get_it_and_what_cannot_be_is_refused(tmp_path):
    def built(dtype, **options):
        return build_optimizer(
            TinyModel().to(dtype), TinyLoss(), config_for(tmp_path, **options).optimizer
        )

    assert isinstance(built(torch.bfloat16), RoundedAdamW)
    assert isinstance(built(torch.float32), torch.optim.AdamW)
    for optim in ("sgd", "adafactor", "adamw_8bit"):
        with pytest.raises(
            UserError, match=f"optim: {optim}: updates of bfloat16 weights vanish"
        ):
            built(torch.bfloat16, optim=optim)
