"""Scored pairs: correlations of similarities with the scores of the data."""

import numpy as np
import pytest
from scipy import stats

from vembed.evaluation.scores import similarity_metrics


def test_correlations_at_every_size():
    draw = np.random.default_rng(0)
    first = draw.normal(size=(20, 6)).astype(np.float32)
    second = draw.normal(size=(20, 6)).astype(np.float32)
    labels = draw.integers(0, 5, 20).tolist()  # with ties
    scores = similarity_metrics(first, second, labels, [2], True)
    for dim, prefix in ((6, ""), (2, "dim2/")):
        a = first[:, :dim].astype(float)
        b = second[:, :dim].astype(float)
        lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        cosines = (a * b).sum(axis=1) / lengths
        pearson = np.corrcoef(cosines, labels)[0, 1]
        spearman = np.corrcoef(stats.rankdata(cosines), stats.rankdata(labels))[0, 1]
        assert scores[f"{prefix}pearson"] == pytest.approx(pearson, abs=1e-6)
        assert scores[f"{prefix}spearman"] == pytest.approx(spearman, abs=1e-6)


def test_dot_products_keep_lengths_and_one_vector_for_all_follows_nothing():
    first = np.array([[1, 0]] * 3, np.float32)
    second = np.array([[1, 5], [2, 5], [9, 5]], np.float32)
    labels = [0.1, 0.2, 0.3]
    scores = similarity_metrics(first, second, labels, [], False)
    assert scores["spearman"] == pytest.approx(1)
    nothing = {"spearman": 0.0, "pearson": 0.0}
    assert similarity_metrics(first, first, labels, [], True) == nothing
