"""What the definition of InfoNCE says, on batches small enough to count by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tests.losses.batches import config_of, gradients
from vembed.losses.batch import LossBatch
from vembed.losses.build import build_loss

# Six unit vectors at right angles: every cosine between different ones is 0, so that with temperature 1 each candidate
# adds 1 to the denominator and the own pair adds 1 too, unless query and positive are the same embedding.
A, B, C, D, E, F = range(6)


def batch_of(
    rows: list[tuple[int, int, int]],
    negatives: list[tuple[int, int]] = (),  # type: ignore[assignment]
    content: list[int] | None = None,
    embeddings: torch.Tensor | None = None,
) -> LossBatch:
    """Rows (example, query, positive), negatives (example, negative)."""
    example, query, positive = (
        torch.tensor(column) for column in zip(*rows, strict=True)
    )
    embeddings = torch.eye(6, dtype=torch.float64) if embeddings is None else embeddings
    return LossBatch(
        embeddings=embeddings.requires_grad_(),
        content=torch.tensor(content or range(len(embeddings))),
        query=query,
        positive=positive,
        example=example,
        negative=torch.tensor([n for _, n in negatives], dtype=torch.int64),
        negative_example=torch.tensor([e for e, _ in negatives], dtype=torch.int64),
        scores=None,
        rank_rows=slice(None),
        rank_negatives=slice(None),
    )


def num_candidates(batch: LossBatch, **options: object) -> float:
    """Size of the denominator of a batch whose rows all have the same, own pair included."""
    return math.exp(
        float(build_loss(config_of(temperature=1.0, **options))(batch).detach())
    )


def test_in_batch_and_hard_negatives_count_together() -> None:
    rows = [(0, A, B), (1, C, D)]
    assert num_candidates(batch_of(rows)) == pytest.approx(2)
    assert num_candidates(batch_of(rows, [(0, E), (1, F)])) == pytest.approx(4)
    assert num_candidates(
        batch_of(rows, [(0, E), (1, F)]), hard_negatives_scope="own"
    ) == pytest.approx(3)


def test_a_candidate_counts_as_often_as_it_occurs() -> None:
    assert num_candidates(
        batch_of([(0, A, B), (1, C, D)], [(0, E), (1, E), (1, E)])
    ) == pytest.approx(5)
    assert num_candidates(
        batch_of([(0, A, B), (1, C, D), (2, E, F)] * 1, [(2, F), (1, D), (0, B)])
    ) == pytest.approx(5)


def test_duplicates_are_masked_by_content_whatever_the_embedding() -> None:
    rows = [(0, A, B), (1, C, D)]
    assert num_candidates(batch_of(rows, content=[0, 7, 2, 7, 4, 5])) == pytest.approx(
        1
    )
    assert num_candidates(
        batch_of(rows, content=[0, 7, 2, 7, 4, 5]), mask_duplicates=False
    ) == pytest.approx(2)
    # The negatives E and F are the texts of the two queries.
    assert num_candidates(
        batch_of(rows, [(0, E), (0, F)], content=[0, 1, 2, 3, 0, 2])
    ) == pytest.approx(3)
    # Both rows have the same query text, and their positives stay negatives of each other.
    assert num_candidates(batch_of(rows, content=[0, 1, 0, 3, 4, 5])) == pytest.approx(
        2
    )


def test_several_positives_are_a_row_each_and_no_negatives_of_each_other() -> None:
    rows = [(0, A, B), (0, A, C), (0, A, D)]
    assert num_candidates(batch_of(rows)) == pytest.approx(1)
    assert num_candidates(batch_of(rows), mask_duplicates=False) == pytest.approx(1)
    assert num_candidates(batch_of([*rows, (1, E, F)])) == pytest.approx(
        math.exp((3 * math.log(2) + math.log(4)) / 4)
    )


def test_the_own_positive_counts_once_and_never_falls_out() -> None:
    same_text = batch_of([(0, A, B), (1, C, D)], content=[0, 0, 2, 2, 4, 5])
    assert num_candidates(same_text) == pytest.approx(2)
    assert num_candidates(
        batch_of([(0, A, B), (0, A, B), (1, C, D), (1, C, D)])
    ) == pytest.approx(3)
    assert num_candidates(same_text, false_negative_margin=-5.0) == pytest.approx(1)


def test_further_terms() -> None:
    batch = batch_of([(0, A, B), (1, C, D)], [(0, E), (1, F)])
    assert num_candidates(batch, query_query_negatives=True) == pytest.approx(4 + 1)
    assert num_candidates(batch, document_document_negatives=True) == pytest.approx(
        4 + 3
    )
    assert num_candidates(batch, bidirectional=True) == pytest.approx(math.sqrt(4 * 2))
    assert num_candidates(
        batch, document_document_negatives=True, hard_negatives_scope="own"
    ) == pytest.approx(3 + 2)


def test_the_reverse_direction_masks_queries_of_the_same_document() -> None:
    three = [(0, A, B), (1, C, D), (2, E, F)]
    assert num_candidates(batch_of(three), bidirectional=True) == pytest.approx(3)
    # The second row's positive has the text of the first one's: in both directions they are no negatives.
    shared = batch_of(three, content=[0, 1, 2, 1, 4, 5])
    assert num_candidates(shared, bidirectional=True) == pytest.approx(
        math.exp((2 * math.log(2) + math.log(3)) / 3)
    )
    # The same query twice: each is the other's duplicate in the reverse direction alone.
    twice = batch_of(three, content=[0, 1, 0, 3, 4, 5])
    reverse = (2 * math.log(2) + math.log(3)) / 3
    assert num_candidates(twice, bidirectional=True) == pytest.approx(
        math.exp((math.log(3) + reverse) / 2)
    )


def test_margin_leaves_out_what_scores_above_the_own_pair() -> None:
    near = torch.tensor(
        [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [0.8, 0.6]], dtype=torch.float64
    )
    batch = batch_of([(0, A, B)], [(0, C), (0, D)], embeddings=near)
    scores = torch.tensor([0.6, 0.0, 0.8], dtype=torch.float64)
    for margin, left in [
        (None, [0, 1, 2]),
        (0.25, [0, 1, 2]),
        (0.15, [0, 1]),
        (-0.5, [0, 1]),
        (-0.7, [0]),
    ]:
        loss = build_loss(config_of(temperature=1.0, false_negative_margin=margin))(
            batch
        )
        assert float(loss.detach()) == pytest.approx(
            float(torch.logsumexp(scores[left], 0) - scores[0])
        )


def test_equal_scores_are_not_above() -> None:
    batch = batch_of([(0, A, B), (1, C, D)], content=[0, 7, 2, 7, 4, 5])
    embeddings = torch.randn(
        6, 33, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    embeddings[D] = embeddings[B]
    embeddings[C] = embeddings[A]
    tied = batch_of([(0, A, B), (1, C, D)], embeddings=embeddings)
    assert num_candidates(
        tied, mask_duplicates=False, false_negative_margin=0.0
    ) == pytest.approx(2)
    assert num_candidates(
        batch, mask_duplicates=False, false_negative_margin=0.0
    ) == pytest.approx(2)


@pytest.mark.parametrize(
    "options", [{}, {"bidirectional": True, "query_query_negatives": True}], ids=str
)
def test_no_candidate_left_means_no_loss_and_no_gradient(
    options: dict[str, object],
) -> None:
    batch = batch_of([(0, A, B), (1, C, D)], [(0, E)], content=[3] * 6)
    loss = build_loss(config_of(**options))(batch)
    (gradient,) = gradients(loss, batch.embeddings)
    assert float(loss.detach()) == 0.0
    assert not gradient.any()


def test_matryoshka_weights_stay_with_their_sizes() -> None:
    embeddings = torch.randn(
        6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    batch = batch_of([(0, A, B), (1, C, D)], [(0, E)], embeddings=embeddings)

    def loss_at(**options: object) -> float:
        return float(build_loss(config_of(mrl_dims="auto", **options))(batch).detach())

    two, eight = loss_at(mrl_dims=[2]), loss_at(mrl_dims=[8])
    assert loss_at(mrl_dims=[8, 2], mrl_weights=[3.0, 0.25]) == pytest.approx(
        3 * eight + 0.25 * two
    )
    assert loss_at(mrl_dims=[2, 8], mrl_weights=[3.0, 0.25]) == pytest.approx(
        3 * two + 0.25 * eight
    )
    assert loss_at(mrl_dims=[2, 8]) == pytest.approx(two + eight)
    whole = float(build_loss(config_of())(batch).detach())
    assert eight == pytest.approx(whole)


def test_a_vector_of_zeros_scores_zero_and_gets_no_gradient() -> None:
    embeddings = torch.eye(6, dtype=torch.float64)
    embeddings[A] = 0.0
    embeddings[B, :2] = 0.0
    embeddings[B, 3] = 2.0
    embeddings[C] = embeddings[D] + embeddings[E]
    batch = batch_of([(0, A, B), (1, C, D)], embeddings=embeddings)
    loss = build_loss(config_of(mrl_dims=[2, 6], temperature=1.0))(batch)
    (gradient,) = gradients(loss, batch.embeddings)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()
    assert not gradient[A].any()
    assert gradient[C].any()


def test_sigmoid_by_hand() -> None:
    batch = batch_of([(0, A, A), (1, C, D)], [(0, E)], content=[0, 1, 2, 3, 4, 5])
    loss = build_loss(
        config_of(loss="sigmoid"), start_scale=2.0, start_bias=-1.0
    ).double()
    no = math.log1p(math.exp(-1.0))
    # Row 0: s = 1 with its positive; D and E are a no. Row 1: s = 0 with its positive; A and E are a no.
    wanted = (
        math.log1p(math.exp(-(2.0 - 1.0))) + 2 * no + math.log1p(math.exp(1.0)) + 2 * no
    ) / 2
    assert float(loss(batch).detach()) == pytest.approx(wanted, rel=1e-7)
