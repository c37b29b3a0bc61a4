"""CoSENT, cosine regression and triplets in chunks, and what they ask of the data."""

from dataclasses import replace

import pytest
import torch

import vembed.losses.similarity
from tests.losses.batches import check, config_of, make_batch
from vembed.errors import UserError
from vembed.losses.build import build_loss

MRL = {"mrl_dims": [8, 4, 12], "mrl_weights": [0.5, 2.0, 1.0]}


def test_many_pairs_go_in_chunks(monkeypatch):
    monkeypatch.setattr(vembed.losses.similarity, "PAIRS_AT_ONCE", 3)
    for loss in ("cosent", "angle", "cosine", "triplet"):
        check(make_batch(11, max_negatives=3), config_of(loss=loss, **MRL))


def test_cosent_looks_at_the_order_of_scores_alone():
    batch = make_batch(8, num_contents=None)
    loss = build_loss(config_of(loss="cosent"))
    assert batch.scores is not None
    stretched = replace(batch, scores=batch.scores.exp() * 100)
    assert torch.equal(loss(batch), loss(stretched))
    equal = replace(batch, scores=torch.ones_like(batch.scores))
    assert float(loss(equal).detach()) == 0.0


@pytest.mark.parametrize("loss", ["cosent", "angle", "cosine"])
def test_scores_are_asked_for(loss):
    batch = replace(make_batch(4), scores=None)
    with pytest.raises(UserError, match=f"loss: {loss} needs a score for every pair"):
        build_loss(config_of(loss=loss))(batch)


def test_dot_products_take_scores_of_any_scale():
    batch = make_batch(4)
    batch = replace(
        batch, scores=torch.linspace(0, 5, batch.num_rows, dtype=torch.float64)
    )
    check(batch, config_of(loss="cosine", similarity="dot"))
