"""Exact top-k in tiles against a full sort, in every corner: ties, exclusions, few documents, odd sizes."""

import numpy as np
import pytest
import torch

from vembed.evaluation.ranking_keys import as_keys, documents_of, scores_of
from vembed.mining import search
from vembed.mining.known_positives import Pairs
from vembed.mining.search import TopK


def found_by_tiles(queries, documents, k, excluded, tile):
    best = TopK(queries, k, excluded)
    for first in range(0, len(documents), tile):
        best.see(documents[first : first + tile], first)
    keys = best.keys()
    return documents_of(keys).numpy(), scores_of(keys).numpy()


def found_by_sort(scores, k, excluded):
    """Best first, of equal scores the lower number first."""
    scores = scores.copy()
    scores[excluded.queries, excluded.documents] = -np.inf
    order = np.lexsort(
        (np.broadcast_to(np.arange(scores.shape[1]), scores.shape), -scores), axis=1
    )[:, :k]
    found = np.take_along_axis(scores, order, axis=1)
    order = np.where(found > -np.inf, order, -1)
    if order.shape[1] < k:
        order = np.pad(order, ((0, 0), (0, k - order.shape[1])), constant_values=-1)
    return order


@pytest.mark.parametrize("num_queries", [1, 5, 33])
@pytest.mark.parametrize("num_documents", [3, 64, 257, 1000])
@pytest.mark.parametrize("k", [1, 10, 70])
@pytest.mark.parametrize("first", [1, 4096])
def test_equal_to_a_sort(num_queries, num_documents, k, first, monkeypatch):
    monkeypatch.setattr(search, "QUERY_TILE", 16)
    monkeypatch.setattr(search, "DOCUMENT_TILE", 70)
    monkeypatch.setattr(search, "FIRST", first)
    monkeypatch.setattr(search, "BLOCK", 8)
    draw = np.random.default_rng(num_documents * k)
    # Whole numbers give exact sums and many ties.
    queries = draw.integers(-2, 3, (num_queries, 6)).astype(np.float32)
    documents = draw.integers(-2, 3, (num_documents, 6)).astype(np.float32)
    pairs = draw.integers(0, [num_queries, num_documents], (num_queries * 4, 2))
    excluded = Pairs.of(pairs[:, 0], pairs[:, 1])
    found, scores = found_by_tiles(
        torch.from_numpy(queries), torch.from_numpy(documents), k, excluded, 70
    )
    wanted = found_by_sort((queries @ documents.T).astype(np.float64), k, excluded)
    np.testing.assert_array_equal(found, wanted)
    known = found >= 0
    row = np.nonzero(known)[0]
    np.testing.assert_array_equal(
        scores[known], np.einsum("nd,nd->n", queries[row], documents[found[known]])
    )
    assert np.isneginf(scores[~known]).all()


def test_keys_sort_as_scores_and_then_numbers():
    scores = torch.tensor([-torch.inf, -2.5, -0.0, 0.0, 1e-30, 3.0, 3.0])
    keys = as_keys(scores, torch.tensor([0, 1, 3, 2, 4, 6, 5]))
    assert keys.argsort(descending=True).tolist() == [6, 5, 4, 3, 2, 1, 0]
    np.testing.assert_array_equal(scores_of(keys), scores)


def test_nothing_is_lost_where_later_documents_are_better(monkeypatch):
    """Scores that rise: every block passes the threshold."""
    monkeypatch.setattr(search, "FIRST", 1)
    documents = torch.linspace(-1, 1, 3000)[:, None]
    found, _ = found_by_tiles(
        torch.ones(3, 1), documents, 20, Pairs.of(np.zeros(0), np.zeros(0)), 512
    )
    assert found.tolist() == [list(range(2999, 2979, -1))] * 3


@pytest.mark.parametrize("document_tile", [32, 500])
@pytest.mark.parametrize("too_many", [0, 4])
@pytest.mark.parametrize("instructions", ["of this machine", None])
def test_exact_whatever_the_first_pass_rounds(
    document_tile, too_many, instructions, monkeypatch
):
    """Scores that bfloat16 and the float32 of a product in tiles do not tell apart, lengths that differ, and queries
    whose best score is negative: the result is that of a sort of all float32 scores, bit by bit."""
    monkeypatch.setattr(search, "QUERY_TILE", 8)
    monkeypatch.setattr(search, "DOCUMENT_TILE", document_tile)
    monkeypatch.setattr(search, "FIRST", 600)
    monkeypatch.setattr(search, "TOO_MANY", too_many)
    if instructions is None:
        monkeypatch.setattr(search, "bf16_instructions", lambda: None)
    draw = torch.Generator().manual_seed(0)
    documents = torch.randn(150, 24, generator=draw).repeat(10, 1)
    documents += 1e-5 * torch.randn(documents.shape, generator=draw)
    documents *= torch.rand(len(documents), 1, generator=draw) + 0.5
    queries = torch.randn(20, 24, generator=draw)
    documents[:, 0] = documents[:, 0].abs() + 0.1
    queries[0] = -torch.eye(24)[0]  # every score is negative
    k = 30
    found, scores = found_by_tiles(
        queries, documents, k, Pairs.of(np.arange(20), np.arange(20)), 700
    )
    row, column = torch.arange(len(queries)), torch.arange(len(documents))
    exact = search.products(
        queries, row.repeat_interleave(len(column)), documents, column.repeat(len(row))
    )
    exact = exact.view(len(row), len(column)).numpy()
    wanted = found_by_sort(exact, k, Pairs.of(np.arange(20), np.arange(20)))
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(scores, np.take_along_axis(exact, wanted, axis=1))
