"""The learning rate is a pure function of the step."""

import logging
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vembed
from tests.training.test_run import (
    NUM_TRAIN,
    metric_lines,
    settings_without_validation,
)
from tests.training.tiny_run import config_for
from vembed.training.optimizer import Schedule, lr_factor


def schedule_of(tmp_path, total_steps=10, examples=32, **options):
    config = config_for(tmp_path, **options).optimizer
    return Schedule(config, total_steps, examples)


def factors_of(total, warmup, kind):
    return [lr_factor(step, total, warmup, kind) for step in range(total)]


def test_the_rate_rises_to_the_peak_and_falls_along_a_line_or_a_cosine():
    rising = [0.25, 0.5, 0.75, 1.0]
    falling = [6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7]
    assert factors_of(10, 4, "linear") == pytest.approx(rising + falling)
    cosine = [0.5 * (1 + math.cos(step / 10 * math.pi)) for step in range(10)]
    assert factors_of(10, 0, "cosine") == pytest.approx(cosine)


@settings(max_examples=200)
@given(
    total=st.integers(1, 500),
    warmup=st.integers(0, 600),
    kind=st.sampled_from(["linear", "cosine", "constant"]),
)
def test_no_step_is_wasted_and_the_peak_is_reached(total, warmup, kind):
    factors = factors_of(total, warmup, kind)
    assert all(0.0 < factor <= 1.0 for factor in factors)
    if warmup <= total:
        assert max(factors) == 1.0
    peak = min(max(warmup - 1, 0), total - 1)
    assert factors[:peak] == sorted(factors[:peak])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)


def test_groups_keep_their_ratio_and_tensors_stay_tensors(tmp_path):
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    held = torch.tensor(0.5)
    groups = [
        {
            "params": weights[:1],
            "lr": 0.1,
            "initial_lr": 0.1,
        },
        {
            "params": weights[1:],
            "lr": held,
            "initial_lr": 0.5,
        },
    ]
    optimizer = torch.optim.AdamW(groups, foreach=False)
    value = schedule_of(tmp_path, warmup_steps=0).set(optimizer, 5)
    assert value == optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert optimizer.param_groups[1]["lr"] is held
    assert held.item() == pytest.approx(0.25)


@pytest.mark.promise("D32", "E27")
def test_scaling_with_the_batch_is_off_by_default_and_logged(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="vembed")
    assert schedule_of(tmp_path, examples=256).peak == 0.1
    assert "peak 0.1 (the same on any number of processes)" in caplog.text
    linear = schedule_of(
        tmp_path, examples=256, learning_rate=1e-4, scale_learning_rate="linear"
    )
    assert linear.peak == pytest.approx(1e-4 * 256 / 32)
    assert "peak 0.0008 (0.0001 * (256 examples per step / 32))" in caplog.text
    sqrt = schedule_of(tmp_path, examples=128, scale_learning_rate="sqrt")
    assert sqrt.peak == pytest.approx(0.2)


def test_warmup_in_steps_or_as_a_ratio(tmp_path, caplog):
    assert schedule_of(tmp_path, total_steps=15, warmup_steps=0.1).warmup_steps == 2
    assert schedule_of(tmp_path, total_steps=15, warmup_steps=7).warmup_steps == 7
    assert schedule_of(tmp_path, total_steps=15, warmup_steps=0.0).warmup_steps == 0
    assert caplog.messages == []
    schedule_of(tmp_path, total_steps=15, warmup_steps=30)
    assert "warmup_steps: 30 is more than the 15 steps" in caplog.text


@pytest.mark.parametrize("batch_size", [16, 200])
def test_the_batch_that_is_counted_is_the_one_that_there_is(tmp_path, batch_size):
    run = settings_without_validation(
        tmp_path,
        batch_size=batch_size,
        max_steps=1,
        warmup_steps=0,
        lr_scheduler_type="constant",
        scale_learning_rate="linear",
    )
    vembed.train(run)
    (step,) = [row for row in metric_lines(tmp_path / "run") if "loss" in row]
    assert step["learning_rate"] == pytest.approx(
        2e-3 * min(batch_size, NUM_TRAIN) / 32
    )
