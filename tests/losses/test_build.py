"""From the config to a loss, and what it learns."""

import logging
import math

import pytest
import torch

from tests.losses.batches import assert_close, check, config_of, make_batch
from vembed.config.schema import TrainConfig
from vembed.losses.build import build_loss

LEARN = {"learn_temperature": True}
SIGLIP = {"start_scale": 117.0, "start_bias": -12.5}
TERM = {"loss": "infonce", "learn_temperature": True, "temperature": 0.2}


@pytest.mark.parametrize(
    ("options", "start", "scale", "bias"),
    [
        ({}, {}, None, None),
        (LEARN, {"start_scale": 100.0}, 100.0, 0.0),
        ({"losses": [TERM]}, {"start_scale": 100.0}, 5.0, 0.0),
        ({"loss": "sigmoid"}, {}, 20.0, -10.0),
        ({"loss": "sigmoid"}, SIGLIP, 117.0, -12.5),
        ({"loss": "sigmoid", "temperature": 0.5}, SIGLIP, 2.0, -12.5),
    ],
    ids=str,
)
def test_scale_and_bias_start_from_the_option_or_the_model(
    options, start, scale, bias, caplog
):
    caplog.set_level(logging.INFO, logger="vembed")
    config = TrainConfig(model_name="", data_path="", **options)
    loss = build_loss(config, **start)
    if scale is None:
        assert loss.logit_scale_and_bias() is None
        assert not list(loss.parameters())
    else:
        assert loss.logit_scale_and_bias() == pytest.approx((scale, bias))
        assert f"{1 / scale:.3g} (" in caplog.text


@pytest.mark.parametrize(
    ("options", "values"),
    [
        (LEARN, {0.001: 0.005, 3.0: 1.0, 0.3: 0.3}),
        ({"loss": "sigmoid"}, {-1.0: 0.0, 9.0: math.log(200.0)}),
    ],
)
def test_learned_scales_stay_in_their_range(options, values):
    loss = build_loss(config_of(**options))
    parameter = next(loss.parameters())
    for value, clamped in values.items():
        with torch.no_grad():
            parameter.fill_(value)
        loss.project_parameters()
        assert float(parameter.detach()) == pytest.approx(clamped)


def test_matryoshka_sizes_come_from_the_config_or_the_model():
    batch = make_batch(6)
    named = build_loss(config_of(mrl_dims=[4, 12]))(batch)
    of_model = build_loss(config_of(mrl_dims="auto"), mrl_dims=(12, 4))(batch)
    assert_close(of_model, named, 1e-14, "loss")
    check(batch, config_of(), build_loss(config_of(), mrl_dims=(12, 4)))
