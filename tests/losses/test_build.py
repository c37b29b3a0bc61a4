"""From the config to a loss, and what it learns."""

from __future__ import annotations

import logging
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands import command
from tests.losses.batches import assert_close, check, config_of, make_batch
from vembed.config.schema import TrainConfig
from vembed.losses.build import build_loss


@pytest.mark.parametrize(
    "loss", ["infonce", "circle", "cosent", "angle", "cosine", "triplet", "sigmoid"]
)
def test_every_loss_falls_by_gradient_descent(loss: str) -> None:
    batch = make_batch(12, num_contents=None, max_negatives=2)
    objective = build_loss(config_of(loss=loss, learn_temperature=True)).double()
    optimizer = torch.optim.SGD(
        [batch.embeddings, *objective.parameters()],
        lr=1.0 if loss in ("cosine", "triplet") else 0.05,
    )
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        value = objective(batch)
        value.backward()
        losses.append(float(value.detach()))
        optimizer.step()
        objective.project_parameters()
    assert losses[-1] < 0.9 * losses[0]


LEARN = {"learn_temperature": True}
TERM = {"loss": "infonce", "learn_temperature": True, "temperature": 0.2}


@pytest.mark.parametrize(
    ("options", "start", "scale", "bias"),
    [
        ({}, {}, None, None),
        (LEARN, {}, 20.0, 0.0),
        (LEARN, {"start_scale": 100.0}, 100.0, 0.0),
        ({**LEARN, "temperature": 0.5}, {"start_scale": 117.0}, 2.0, 0.0),
        ({"losses": [TERM]}, {"start_scale": 100.0}, 5.0, 0.0),
        ({"loss": "sigmoid"}, {}, 20.0, -10.0),
        (
            {"loss": "sigmoid"},
            {"start_scale": 117.0, "start_bias": -12.5},
            117.0,
            -12.5,
        ),
        (
            {"loss": "sigmoid", "temperature": 0.5},
            {"start_scale": 117.0, "start_bias": -12.5},
            2.0,
            -12.5,
        ),
    ],
    ids=str,
)
def test_scale_and_bias_start_from_the_option_or_the_model(
    options: dict[str, Any],
    start: dict[str, float],
    scale: float | None,
    bias: float | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="vembed")
    config = TrainConfig(model_name="", data_path="", **options)
    loss = build_loss(config, **start)
    if scale is None:
        assert loss.scale_and_bias() is None
        assert not list(loss.parameters())
    else:
        assert loss.scale_and_bias() == pytest.approx((scale, bias))
        assert f"learned, starting at {1 / scale:.3g} (" in caplog.text


@pytest.mark.parametrize(
    ("options", "values"),
    [
        (LEARN, {0.001: 0.005, 3.0: 1.0, 0.3: 0.3}),
        ({"loss": "sigmoid"}, {-1.0: 0.0, 9.0: math.log(200.0)}),
    ],
)
def test_learned_scales_stay_in_their_range(
    options: dict[str, Any], values: dict[float, float]
) -> None:
    loss = build_loss(config_of(**options))
    parameter = next(loss.parameters())
    for value, clamped in values.items():
        with torch.no_grad():
            parameter.fill_(value)
        loss.project_parameters()
        assert float(parameter.detach()) == pytest.approx(clamped)


def test_bidirectional_changes_nothing_in_the_sigmoid_loss() -> None:
    batch = make_batch(6)
    assert torch.equal(
        *(
            build_loss(config_of(loss="sigmoid", bidirectional=both))(batch)
            for both in (True, False)
        )
    )


def test_matryoshka_sizes_come_from_the_config_or_the_model() -> None:
    batch = make_batch(6)
    named = build_loss(config_of(mrl_dims=[4, 12]))(batch)
    assert_close(
        build_loss(config_of(mrl_dims="auto"), mrl_dims=(12, 4))(batch),
        named,
        1e-14,
        "loss",
    )
    check(batch, config_of(), build_loss(config_of(), mrl_dims=(12, 4)))
    with pytest.raises(ValueError, match="sizes"):
        build_loss(config_of(mrl_dims=[13]))(batch)


@pytest.mark.promise("D24")
def test_each_matryoshka_size_keeps_its_own_weight_in_any_order() -> None:
    batch = make_batch(6)
    weights = {4: 1.0, 12: 2.0, 8: 3.0}
    alone = {dim: build_loss(config_of(mrl_dims=[dim]))(batch) for dim in weights}
    together = build_loss(
        config_of(mrl_dims=list(weights), mrl_weights=list(weights.values()))
    )(batch)
    assert_close(
        together,
        sum(weight * alone[dim] for dim, weight in weights.items()),
        1e-14,
        "loss",
    )


def run_benchmark(*options: str) -> str:
    """In a process of its own from the start: its peak of memory is measured."""
    command = [sys.executable, "-m", "benchmarks.loss", *options]
    root = Path(__file__).parents[2]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=root, env=one_thread, capture_output=True, text=True, check=True
    ).stdout


def test_the_benchmark_compares_times() -> None:
    words = ["--rows", "64", "--dim", "32", "--repeats", "1", "--memory-rows", "0"]
    done = command(*words, module="benchmarks.loss", folder=Path(__file__).parents[2])
    assert done.returncode == 0 and done.stdout.count("ratio") == 4, done.stderr


def test_peak_memory_of_a_process() -> None:
    """Beside the embeddings and their gradient there is never more than about one further copy of what is scored."""

    def fits() -> bool:
        printed = run_benchmark(
            "--repeats", "0", "--memory-rows", "16384", "--memory-own-rows", "64"
        )
        found = re.search(
            r"([\d.]+) GiB beyond the embeddings and their gradient \(([\d.]+) GiB each\)",
            printed,
        )
        assert found is not None
        beyond, gradient = (float(number) for number in found.groups())
        return beyond < 1.3 * gradient

    # Now and then the kernel hands a busy process larger pages than it asked for: the smallest peak is the loss's own.
    assert any(fits() for _ in range(3))
