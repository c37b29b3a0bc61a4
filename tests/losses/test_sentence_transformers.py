"""Guided InfoNCE in sentence-transformers, on the same embeddings: loss and gradient agree to 1e-10 in float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from sentence_transformers.sentence_transformer.losses import CachedGISTEmbedLoss
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


@pytest.mark.parametrize("strategy", ["absolute", "relative"])
@pytest.mark.parametrize("contrast", [False, True])
def test_gist(strategy, contrast):
    """Their positives are contrasted with positives alone, ours with hard negatives too: compared without negatives.
    The query itself is masked there by the guide's score of 1, here by its content."""
    num = 2 if contrast else 3
    embeddings = columns(num, 1)
    guided = [vectors.detach() for vectors in columns(num, 5, dim=6)]
    loss = CachedGISTEmbedLoss.__new__(CachedGISTEmbedLoss)
    nn.Module.__init__(loss)
    settings = {
        "gather_across_devices": False,
        "temperature": 0.05,
        "margin_strategy": strategy,
        "margin": 0.05,
        "contrast_anchors": contrast,
        "contrast_positives": contrast,
        "similarity_fct": nn.CosineSimilarity(dim=-1),
        "cross_entropy_loss": nn.CrossEntropyLoss(),
        "mini_batch_size": 3,
        "show_progress_bar": False,
    }
    for name, value in settings.items():
        setattr(loss, name, value)
    theirs = loss.calculate_loss(
        [[embedding] for embedding in embeddings], [[vectors] for vectors in guided]
    )
    options = {
        "guide": "guide",
        "guide_margin": "5%" if strategy == "relative" else 0.05,
        "temperature": 0.05,
        "same_side_negatives": "both" if contrast else "none",
    }
    rows = [(row, row, N + row) for row in range(N)]
    num_negatives = N * (num - 2)
    negatives = [(number % N, 2 * N + number) for number in range(num_negatives)]
    batch = batch_of(rows, negatives, embeddings=torch.cat(embeddings))
    vectors = F.normalize(torch.cat(guided), dim=1)
    guide = TeacherVectors(vectors, batch.query, batch.positive, batch.negative)
    batch = replace(batch, teachers={"guide": guide})
    ours = build_loss(config_of(**options)).double()(batch)
    assert_close(ours, theirs, 1e-10, "loss")
    expected = torch.autograd.grad(theirs, embeddings)
    actual = torch.autograd.grad(ours, embeddings)
    for gradient, their_gradient in zip(actual, expected, strict=True):
        assert_close(gradient, their_gradient, 1e-10, "gradient")
