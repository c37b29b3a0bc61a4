"""Scored pairs: correlations of similarities with the scores of the data."""

import numpy as np
import pytest

from vembed.evaluation.scores import similarity_metrics


def test_dot_products_keep_lengths_and_one_vector_for_all_follows_nothing():
    first = np.array([[1, 0]] * 3, np.float32)
    second = np.array([[1, 5], [2, 5], [9, 5]], np.float32)
    labels = [0.1, 0.2, 0.3]
    scores = similarity_metrics(first, second, labels, [], False)
    assert scores["spearman"] == pytest.approx(1)
    nothing = {"spearman": 0.0, "pearson": 0.0}
    assert similarity_metrics(first, first, labels, [], True) == nothing
