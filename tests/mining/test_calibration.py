"""`threshold: auto` against the truth: scores are drawn, so which documents are relevant without a mark is known."""

import numpy as np
import pytest

from vembed.evaluation.top_k import Pairs
from vembed.mining.candidates import CandidateChunk, Limits, calibrate
from vembed.mining.options import MineConfig

NUM_QUERIES = 1500
NUM_OTHERS = 60
TOP_K = 50


def drawn(num_known, num_unknown, seed=0):
    """Candidates, and which of them are relevant: unmarked documents score as the marked ones do."""
    random = np.random.default_rng(seed)
    level = random.normal(0.0, 0.05, (NUM_QUERIES, 1))
    relevant = level + random.normal(0.6, 0.12, (NUM_QUERIES, num_known + num_unknown))
    others = level + random.normal(0.2, 0.12, (NUM_QUERIES, NUM_OTHERS))
    scores = np.concatenate([relevant[:, num_known:], others], axis=1).astype(
        np.float32
    )
    order = np.argsort(-scores, axis=1)[:, :TOP_K]
    queries = np.repeat(np.arange(NUM_QUERIES), num_known)
    positives = Pairs.of(queries, 1000 + np.tile(np.arange(num_known), NUM_QUERIES))
    known = relevant[:, :num_known].ravel().astype(np.float32)
    sorted_scores = np.take_along_axis(scores, order, axis=1)
    unclaimed = np.zeros(order.shape, bool)
    candidates = CandidateChunk(0, order, sorted_scores, positives, known, unclaimed)
    return candidates, order < num_unknown


def true_rate(candidates, is_relevant, limits, config):
    remaining = (
        candidates.scores <= limits.highest(candidates.lowest_positive())[:, None]
    )
    remaining &= np.cumsum(remaining, axis=1) <= config.num_negatives
    return (remaining & is_relevant).sum() / remaining.sum()


@pytest.mark.parametrize("expected", [0.02, 0.05])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_true_rate_is_near_what_was_asked_for(count, expected):
    config = MineConfig(
        model_name="m",
        data_path="d",
        output_path="o.jsonl",
        threshold="auto",
        top_k=TOP_K,
        max_false_negative_rate=expected,
    )
    candidates, is_relevant = drawn(count, count)
    actual = calibrate([candidates], config, 42)
    assert actual.is_reached
    assert actual.rate <= expected
    assert (
        true_rate(candidates, is_relevant, Limits(None, None, None, None), config)
        > 2 * expected
    )
    assert true_rate(candidates, is_relevant, actual.limits, config) <= 1.4 * expected
