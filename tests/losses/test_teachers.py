"""Mixtures of negatives, and teachers that a loss cannot follow."""

from types import SimpleNamespace

import pytest
import torch

from tests.losses.batches import config_of, make_batch
from tests.tiny import shared, tiny_bert_st, tiny_reranker
from vembed.errors import UserError
from vembed.losses.batch import draw_mixtures
from vembed.teachers import Teachers


def test_mixtures_are_a_function_of_seed_batch_and_example():
    batch = make_batch(40, max_negatives=5, num_contents=None)
    drawn = draw_mixtures(batch, 42, 50)
    assert torch.equal(drawn.share, draw_mixtures(batch, 42, 50).share)
    assert not torch.equal(drawn.share, draw_mixtures(batch, 43, 50).share)
    assert (drawn.left != drawn.right).all()
    for parts in (drawn.left, drawn.right):
        assert torch.equal(batch.negative_example[parts], drawn.example)
    # Beta(2, 2): mean 1/2, variance 1/20.
    assert float(drawn.share.mean()) == pytest.approx(0.5, abs=0.02)
    assert float(drawn.share.var()) == pytest.approx(0.05, abs=0.005)


@pytest.mark.parametrize(
    "options",
    [
        {"guide": "reranker"},
        {"loss": "kl", "teacher": "reranker", "distill_candidates": "batch"},
    ],
    ids=["guide", "kl"],
)
def test_scores_of_pairs_are_no_vectors(options):
    teacher = {"name": "reranker", "model": str(shared(tiny_reranker))}
    config = config_of(teachers=[teacher], **options)
    session = SimpleNamespace(mixed_precision="no")
    with pytest.raises(UserError, match="teacher reranker is a reranker"):
        Teachers(config.objective, config.data, config.model, session)


def test_similarities_are_no_labels_of_bce():
    teacher = {"name": "embedder", "model": str(shared(tiny_bert_st))}
    config = config_of(teachers=[teacher], loss="bce", teacher="embedder")
    session = SimpleNamespace(mixed_precision="no")
    with pytest.raises(UserError, match="teacher embedder is an embedding model"):
        Teachers(config.objective, config.data, config.model, session)
