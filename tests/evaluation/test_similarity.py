"""Scored pairs: correlations against scipy-free arithmetic."""

import numpy as np
import pytest

from vembed.evaluation.scores import similarity_metrics


def plain_pearson(a, b):
    a, b = np.asarray(a, float) - np.mean(a), np.asarray(b, float) - np.mean(b)
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


def ranks(values):
    return [
        1
        + sum(other < value for other in values)
        + (sum(other == value for other in values) - 1) / 2
        for value in values
    ]


def test_correlations_with_ties():
    rng = np.random.default_rng(0)
    first, second = (
        rng.normal(size=(20, 6)).astype(np.float32),
        rng.normal(size=(20, 6)).astype(np.float32),
    )
    scores = rng.integers(0, 5, 20).tolist()
    for dim, prefix in ((6, ""), (2, "dim2/")):
        cosines = [
            float(
                np.dot(a[:dim], b[:dim])
                / np.linalg.norm(a[:dim])
                / np.linalg.norm(b[:dim])
            )
            for a, b in zip(first.astype(float), second.astype(float), strict=True)
        ]
        found = similarity_metrics(first, second, scores, [2])
        assert found[f"{prefix}pearson"] == pytest.approx(
            plain_pearson(cosines, scores), abs=1e-6
        )
        assert found[f"{prefix}spearman"] == pytest.approx(
            plain_pearson(ranks(cosines), ranks(scores)), abs=1e-6
        )


def test_perfect_order_and_dot_product():
    first = np.array([[1, 0]] * 3, np.float32)
    second = np.array([[1, 5], [2, 5], [9, 5]], np.float32)
    assert similarity_metrics(first, second, [0.1, 0.2, 0.3], normalize=False)[
        "spearman"
    ] == pytest.approx(1)


def test_a_model_that_gives_one_vector_follows_nothing():
    same = np.ones((3, 2), np.float32)
    assert similarity_metrics(same, same, [1.0, 2.0, 3.0]) == {
        "spearman": 0.0,
        "pearson": 0.0,
    }
