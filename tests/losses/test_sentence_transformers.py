"""The same losses in sentence-transformers, on the same embeddings: loss and gradient agree to 1e-10 in float64.

Its models and collators are left out: its losses are given the embeddings. Where the two differ by definition, the test
says how.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.losses.batches import assert_close, config_of
from vembed.losses.batch import LossBatch, TeacherVectors
from vembed.losses.build import build_loss

pytest.importorskip("sentence_transformers")

N = 8
WAYS = 3
DIM = 12
TEACHER_DIM = 6
Columns = list[Tensor]


def columns(num, seed):
    draw = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(N, DIM, generator=draw, dtype=torch.float64) + 1.0
        ).requires_grad_()
        for _ in range(num)
    ]


def batch_of(embeddings, teachers):
    """Query, positive and negative columns, without duplicates."""
    numbers = torch.arange(N)
    num_negatives = len(embeddings) - 2
    return LossBatch(
        embeddings=torch.cat(embeddings),
        content=torch.arange(N * len(embeddings)),
        query=numbers,
        positive=N + numbers,
        example=numbers,
        negative=2 * N + torch.arange(N * num_negatives),
        negative_example=numbers.repeat(num_negatives),
        scores=None,
        rank_rows=slice(0, N),
        rank_negatives=slice(0, N * num_negatives),
        teachers=teachers,
    )


def teacher_vectors(guides):
    numbers = torch.arange(N)
    vectors = F.normalize(torch.cat(guides), dim=1)
    return TeacherVectors(
        vectors, numbers, N + numbers, 2 * N + torch.arange(N * (len(guides) - 2))
    )


def guides(num):
    draw = torch.Generator().manual_seed(5)
    return [
        torch.randn(N, TEACHER_DIM, generator=draw, dtype=torch.float64) + 0.5
        for _ in range(num)
    ]


def compare(embeddings, options, teachers, theirs, factor):
    """Our loss times `factor` equals theirs, and so does the gradient of every column."""
    expected = torch.autograd.grad(theirs, embeddings)
    ours = (
        build_loss(config_of(**options)).double()(batch_of(embeddings, teachers))
        * factor
    )
    assert_close(ours, theirs, 1e-10, "loss")
    for entry, gradient in zip(
        torch.autograd.grad(ours, embeddings), expected, strict=True
    ):
        assert_close(entry, gradient, 1e-10, "gradient")


def peer(kind, **settings):
    """A loss of theirs without a model."""
    loss = kind.__new__(kind)
    nn.Module.__init__(loss)
    for name, value in {"gather_across_devices": False, **settings}.items():
        setattr(loss, name, value)
    return loss


@pytest.mark.parametrize("strategy", ["absolute", "relative"])
@pytest.mark.parametrize("contrast", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_gist(strategy, contrast, cached, monkeypatch):
    """Their positives are contrasted with positives alone, ours with hard negatives too: compared without negatives.
    The query itself is masked there by the guide's score of 1, here by its content."""
    from sentence_transformers.sentence_transformer.losses import (
        CachedGISTEmbedLoss,
        GISTEmbedLoss,
        gist_embed,
    )

    num = 2 if contrast else 3
    embeddings = columns(num, 1)
    guided = guides(num)
    settings = {
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
    if cached:
        loss = peer(CachedGISTEmbedLoss, **settings)
        theirs = loss.calculate_loss(
            [[embedding] for embedding in embeddings], [[entry] for entry in guided]
        )
    else:
        loss = peer(
            GISTEmbedLoss,
            model="student",
            guide="guide",
            must_retokenize=False,
            **settings,
        )
        monkeypatch.setattr(
            gist_embed,
            "embed_columns",
            lambda model, features: [feature[model] for feature in features],
        )
        features = [
            {"student": embedding, "guide": two}
            for embedding, two in zip(embeddings, guided, strict=True)
        ]
        theirs = loss(features, torch.empty(0))
    options = {
        "guide": "guide",
        "guide_margin": "5%" if strategy == "relative" else 0.05,
        "temperature": 0.05,
        "same_side_negatives": "both" if contrast else "none",
    }
    compare(embeddings, options, {"guide": teacher_vectors(guided)}, theirs, 1.0)


def test_angle():
    """Labels are compared in order, as in CoSENT: theirs is CoSENT with another similarity."""
    from sentence_transformers.sentence_transformer.losses import AnglELoss
    from sentence_transformers.util import pairwise_angle_sim

    embeddings = columns(2, 9)
    labels = torch.arange(N, dtype=torch.float64).remainder(4) / 3
    theirs = peer(
        AnglELoss, similarity_fct=pairwise_angle_sim, scale=20.0
    ).compute_loss_from_embeddings(embeddings, labels)
    batch = replace(batch_of(embeddings, {}), scores=labels)
    ours = build_loss(config_of(loss="angle", temperature=0.05)).double()(batch)
    assert_close(ours, theirs, 1e-10, "loss")
    expected = torch.autograd.grad(theirs, embeddings)
    for entry, gradient in zip(
        torch.autograd.grad(ours, embeddings), expected, strict=True
    ):
        assert_close(entry, gradient, 1e-10, "gradient")
