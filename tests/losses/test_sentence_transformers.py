"""The same losses in sentence-transformers, on the same embeddings: loss and gradient agree to 1e-10 in float64.

Its models and collators are left out: its losses are given the embeddings. Where the two differ by definition, the test
says how.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from sentence_transformers.sentence_transformer.losses import (
    AnglELoss,
    CachedGISTEmbedLoss,
)
from sentence_transformers.util import pairwise_angle_sim
from torch import nn

from tests.losses.batches import assert_close, config_of
from tests.losses.test_definition import batch_of
from vembed.losses.batch import TeacherVectors
from vembed.losses.build import build_loss

N = 8
DIM = 12


def columns(num, seed, dim=DIM):
    draw = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(num):
        values = torch.randn(N, dim, generator=draw, dtype=torch.float64) + 1.0
        made.append(values.requires_grad_())
    return made


def batch_of_columns(embeddings, **values):
    """Query, positive and negative columns, without duplicates."""
    rows = [(row, row, N + row) for row in range(N)]
    num_negatives = N * (len(embeddings) - 2)
    negatives = [(number % N, 2 * N + number) for number in range(num_negatives)]
    batch = batch_of(rows, negatives, embeddings=torch.cat(embeddings))
    return replace(batch, **values)


def compare(embeddings, options, theirs, **values):
    """Our loss equals theirs, and so does the gradient of every column."""
    batch = batch_of_columns(embeddings, **values)
    ours = build_loss(config_of(**options)).double()(batch)
    assert_close(ours, theirs, 1e-10, "loss")
    expected = torch.autograd.grad(theirs, embeddings)
    actual = torch.autograd.grad(ours, embeddings)
    for gradient, their_gradient in zip(actual, expected, strict=True):
        assert_close(gradient, their_gradient, 1e-10, "gradient")


def peer(kind, **settings):
    """A loss of theirs without a model."""
    loss = kind.__new__(kind)
    nn.Module.__init__(loss)
    for name, value in {"gather_across_devices": False, **settings}.items():
        setattr(loss, name, value)
    return loss


@pytest.mark.parametrize("strategy", ["absolute", "relative"])
@pytest.mark.parametrize("contrast", [False, True])
def test_gist(strategy, contrast):
    """Their positives are contrasted with positives alone, ours with hard negatives too: compared without negatives.
    The query itself is masked there by the guide's score of 1, here by its content."""
    num = 2 if contrast else 3
    embeddings = columns(num, 1)
    guided = [vectors.detach() for vectors in columns(num, 5, dim=6)]
    loss = peer(
        CachedGISTEmbedLoss,
        temperature=0.05,
        margin_strategy=strategy,
        margin=0.05,
        contrast_anchors=contrast,
        contrast_positives=contrast,
        similarity_fct=nn.CosineSimilarity(dim=-1),
        cross_entropy_loss=nn.CrossEntropyLoss(),
        mini_batch_size=3,
        show_progress_bar=False,
    )
    theirs = loss.calculate_loss(
        [[embedding] for embedding in embeddings], [[vectors] for vectors in guided]
    )
    options = {
        "guide": "guide",
        "guide_margin": "5%" if strategy == "relative" else 0.05,
        "temperature": 0.05,
        "same_side_negatives": "both" if contrast else "none",
    }
    batch = batch_of_columns(embeddings)
    vectors = F.normalize(torch.cat(guided), dim=1)
    guide = TeacherVectors(vectors, batch.query, batch.positive, batch.negative)
    compare(embeddings, options, theirs, teachers={"guide": guide})


def test_angle():
    """Labels are compared in order, as in CoSENT: theirs is CoSENT with another similarity."""
    embeddings = columns(2, 9)
    labels = torch.arange(N, dtype=torch.float64).remainder(4) / 3
    loss = peer(AnglELoss, similarity_fct=pairwise_angle_sim, scale=20.0)
    theirs = loss.compute_loss_from_embeddings(embeddings, labels)
    compare(
        embeddings, {"loss": "angle", "temperature": 0.05}, theirs, label_scores=labels
    )
