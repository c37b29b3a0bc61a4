"""Merging arithmetic against numpy in float64."""

import numpy as np
import pytest
import torch

from vembed.weights import merge
from vembed.weights.merge import Recipe, merged_pieces

SIZE = 1000


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(merge, "PIECE", 64)


@pytest.fixture(scope="module")
def values():
    draw = np.random.default_rng(0)
    base = draw.normal(size=SIZE).astype(np.float32)
    models = [
        (base + 0.1 * draw.normal(size=SIZE)).astype(np.float32) for _ in range(3)
    ]
    return base.astype(np.float64), [model.astype(np.float64) for model in models]


def reader(array):
    return lambda start, stop: torch.from_numpy(array[start:stop].copy())


def merged(values, method, weights=(1.0, 1.0, 1.0), **options):
    base, models = values
    recipe = Recipe(method, weights, **options)
    readers = [reader(model) for model in models[: len(weights)]]
    pieces = merged_pieces(recipe, "w", SIZE, readers, reader(base))
    return torch.cat(list(pieces)).numpy()


def slerp(first, second, share):
    cosine = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
    angle = np.arccos(cosine)
    left = np.sin((1 - share) * angle)
    right = np.sin(share * angle)
    return (left * first + right * second) / np.sin(angle)


def close(actual, expected, summed):
    assert np.abs(actual - expected).max() <= 1e-12 * np.abs(summed).max()


def test_slerp(values):
    base, (a, b, _) = values
    close(merged(values, "slerp", (0.7, 0.3)), slerp(a, b, 0.3), [a, b])
    close(merged(values, "slerp", (0.0, 1.0)), b, b)
    expected = base + slerp(a - base, b - base, 1 / 2)
    close(merged(values, "slerp", (1.0, 1.0), of_differences=True), expected, [a, b])


def test_slerp_of_equal_tensors_and_of_zeros_is_a_line(values):
    _, (a, _, _) = values
    close(merged((a, [a, a.copy()]), "slerp", (1.0, 1.0)), a, a)
    zeros = np.zeros(SIZE)
    close(merged((zeros, [zeros, a]), "slerp", (1.0, 1.0)), a / 2, a)


def test_task_arithmetic_and_interpolation(values):
    base, (a, b, c) = values
    expected = base + 0.5 * ((a - base) - 2 * (b - base) + (c - base))
    weights = (1.0, -2.0, 1.0)
    close(merged(values, "task_arithmetic", weights, scale=0.5), expected, [a, b, c])
    expected = base + 0.7 * (np.mean([a, b, c], axis=0) - base)
    close(merged(values, "mean", interpolate=0.7), expected, [a, b, c])


@pytest.mark.parametrize("density", [0.1, 0.2, 1.0])
def test_ties(values, density):
    base, models = values
    weights = np.array([1.0, 2.0, 0.5])[:, None]
    changes = np.array(models) - base
    sizes = np.abs(changes).astype(np.float32)
    smallest = np.sort(sizes, axis=1)[:, -round(density * SIZE), None]
    trimmed = np.where(sizes >= smallest, changes, 0)
    total = (weights * trimmed).sum(0)
    agrees = (np.sign(trimmed) == np.sign(total)) & (trimmed != 0)
    above = (weights * trimmed * agrees).sum(0)
    below = (weights * agrees).sum(0)
    mean = np.divide(above, below, out=np.zeros(SIZE), where=below != 0)
    options = {"density": density, "scale": 1.5}
    actual = merged(values, "ties", tuple(weights[:, 0]), **options)
    close(actual, base + 1.5 * mean, models)


def test_dare_keeps_a_share_and_scales_it_up(values):
    base, models = values
    remaining = merged(values, "dare", (1.0,), density=0.25) - base
    change = models[0] - base
    is_kept = np.abs(remaining) > 1e-12
    assert 0.2 < is_kept.mean() < 0.3
    np.testing.assert_allclose(remaining[is_kept], change[is_kept] / 0.25, rtol=1e-9)
    again = merged(values, "dare", (1.0,), density=0.25) - base
    other = merged(values, "dare", (1.0,), density=0.25, seed=1) - base
    assert (again == remaining).all()
    assert (other != remaining).any()
