"""What the definition of InfoNCE says, on batches small enough to count by hand."""

import math

import pytest
import torch

from tests.losses.batches import config_of, gradients
from vembed.losses.batch import LossBatch
from vembed.losses.build import build_loss

# Six unit vectors at right angles: every cosine between different ones is 0, so that with temperature 1 each candidate
# adds 1 to the denominator and the own pair adds 1 too, unless query and positive are the same embedding.
A, B, C, D, E, F = range(6)


def batch_of(rows, negatives=(), content=None, embeddings=None):
    """Rows (example, query, positive), negatives (example, negative)."""
    example, query, positive = torch.tensor(rows).T.contiguous()
    extra = torch.tensor(negatives, dtype=torch.int64).reshape(-1, 2)
    negative_example, negative = extra.T.contiguous()
    if embeddings is None:
        embeddings = torch.eye(6, dtype=torch.float64)
    return LossBatch(
        embeddings=embeddings.requires_grad_(),
        content=torch.tensor(content or range(len(embeddings))),
        query=query,
        positive=positive,
        example=example,
        negative=negative,
        negative_example=negative_example,
        label_scores=None,
        rank_rows=slice(0, len(rows)),
        rank_negatives=slice(0, len(negatives)),
    )


TWO = [(0, A, B), (1, C, D)]
THREE = [*TWO, (2, E, F)]
SEVERAL = [(0, A, B), (0, A, C), (0, A, D), (1, E, F)]
HARD = [(0, E), (1, F)]
OWN = {"hard_negatives_scope": "own"}
BOTH = {"bidirectional": True}
MARGIN = {"false_negative_margin": -5.0}
DOCUMENTS = {"same_side_negatives": "documents"}


def mean(*sizes):
    """The size whose logarithm is the mean of those of the rows."""
    return math.prod(sizes) ** (1 / len(sizes))


COUNTS = {
    "in-batch": (TWO, [], None, {}, 2),
    "in-batch and hard": (TWO, HARD, None, {}, 4),
    "hard negatives of the own example": (TWO, HARD, None, OWN, 3),
    "documents too": (TWO, HARD, None, DOCUMENTS, 7),
    "both directions": (TWO, HARD, None, BOTH, mean(4, 2)),
    # A candidate counts as often as it occurs.
    "one negative three times": (TWO, [(0, E), (1, E), (1, E)], None, {}, 5),
    "negatives that are positives": (THREE, [(2, F), (1, D), (0, B)], None, {}, 5),
    # Duplicates are masked by content, whatever the embedding.
    "equal positives": (TWO, [], [0, 7, 2, 7, 4, 5], {}, 1),
    "equal queries": (TWO, [], [0, 1, 0, 3, 4, 5], {}, 2),
    # Several positives of an example are a row each, and no negatives of each other.
    "several and one": (SEVERAL, [], None, {}, mean(2, 2, 2, 4)),
    # The own positive counts once and is never left out.
    "query and positive equal": (TWO, [], [0, 0, 2, 2, 4, 5], {}, 2),
    "all above the margin": (TWO, [], [0, 0, 2, 2, 4, 5], MARGIN, 1),
    # In the reverse direction queries of the same document are no negatives.
    "shared positive": (THREE, [], [0, 1, 2, 1, 4, 5], BOTH, mean(2, 2, 3)),
    # The same query twice: a duplicate in the reverse direction alone.
    "shared query": (THREE, [], [0, 1, 0, 3, 4, 5], BOTH, mean(3, mean(2, 2, 3))),
}


@pytest.mark.parametrize("case", COUNTS)
def test_number_of_candidates(case):
    """The size of the denominator, own pair included."""
    rows, negatives, content, options, expected = COUNTS[case]
    batch = batch_of(rows, negatives, content)
    loss = build_loss(config_of(temperature=1.0, **options))(batch)
    assert math.exp(float(loss.detach())) == pytest.approx(expected)


def test_equal_scores_are_not_above():
    draw = torch.Generator().manual_seed(0)
    embeddings = torch.randn(6, 33, generator=draw, dtype=torch.float64)
    embeddings[D] = embeddings[B]
    embeddings[C] = embeddings[A]
    batch = batch_of(TWO, embeddings=embeddings)
    config = config_of(temperature=1.0, false_negative_margin=0.0)
    loss = build_loss(config)(batch)
    assert float(loss.detach()) == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    "options", [{}, {"bidirectional": True, "same_side_negatives": "queries"}], ids=str
)
def test_no_candidate_left_means_no_loss_and_no_gradient(options):
    batch = batch_of(TWO, [(0, E)], content=[3] * 6)
    loss = build_loss(config_of(**options))(batch)
    (gradient,) = gradients(loss, batch.embeddings)
    assert float(loss.detach()) == 0.0
    assert not gradient.any()


def test_a_vector_of_zeros_scores_zero_and_gets_no_gradient():
    embeddings = torch.eye(6, dtype=torch.float64)
    embeddings[A] = 0.0
    embeddings[B, :2] = 0.0
    embeddings[B, 3] = 2.0
    embeddings[C] = embeddings[D] + embeddings[E]
    batch = batch_of(TWO, embeddings=embeddings)
    loss = build_loss(config_of(mrl_dims=[2, 6], temperature=1.0))(batch)
    (gradient,) = gradients(loss, batch.embeddings)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()
    assert not gradient[A].any()
    assert gradient[C].any()
