"""Exact top-k in tiles against a full sort, in every corner: ties, exclusions, few documents, odd sizes, any order."""

import numpy as np
import pytest
import torch

from vembed.evaluation import top_k
from vembed.evaluation.top_k import Pairs, TopK, documents_of, scores_of


def found_in_chunks(queries, documents, k, excluded, size, order=None):
    """Numbers and scores, best first; documents arrive in chunks and in an order."""
    order = torch.arange(len(documents)) if order is None else order
    best = TopK(queries, k, excluded)
    for numbers in order.split(size):
        best.add(documents[numbers], numbers)
    keys = best.keys()
    assert (best.rankings() == documents_of(keys).numpy()).all()
    return documents_of(keys).numpy(), scores_of(keys).numpy()


def found_by_sort(scores, k, excluded):
    """Best first, of equal scores in the order of the permutation; -1 where there are fewer than k."""
    scores = scores.copy()
    scores[excluded.queries, excluded.documents] = -np.inf
    places = [number * 0x9E3779B1 % 2**32 for number in range(scores.shape[1])]
    places = np.broadcast_to(places, scores.shape)
    order = np.lexsort((-places, -scores), axis=1)[:, :k]
    actual = np.take_along_axis(scores, order, axis=1)
    order = np.where(actual > -np.inf, order, -1)
    missing = max(k - order.shape[1], 0)
    return np.pad(order, ((0, 0), (0, missing)), constant_values=-1)


def set_tiles(monkeypatch, **sizes):
    for name, size in sizes.items():
        monkeypatch.setattr(top_k, name, size)


@pytest.mark.parametrize("num_queries", [0, 5, 33])
@pytest.mark.parametrize("num_documents", [3, 257, 1000])
@pytest.mark.parametrize("k", [1, 10, 70])
@pytest.mark.parametrize("first", [1, 4096])
@pytest.mark.parametrize("in_order", [True, False])
def test_equal_to_a_sort(num_queries, num_documents, k, first, in_order, monkeypatch):
    set_tiles(
        monkeypatch,
        QUERY_TILE=16,
        DOCUMENT_TILE=70,
        FIRST_TILE_DOCUMENTS=first,
        BLOCK_DOCUMENTS=8,
    )
    draw = np.random.default_rng(num_documents * k)
    # Whole numbers give exact sums and many ties. Some are negative zeros.
    queries = draw.integers(-2, 3, (num_queries, 6)).astype(np.float32)
    documents = draw.integers(-2, 3, (num_documents, 6)).astype(np.float32)
    documents[documents == 0] *= -1.0
    pairs = draw.integers(0, [max(num_queries, 1), num_documents], (num_queries * 4, 2))
    excluded = Pairs.of(pairs[:, 0], pairs[:, 1])
    order = None if in_order else torch.from_numpy(draw.permutation(num_documents))
    actual, scores = found_in_chunks(
        torch.from_numpy(queries), torch.from_numpy(documents), k, excluded, 70, order
    )
    expected = found_by_sort((queries @ documents.T).astype(np.float64), k, excluded)
    np.testing.assert_array_equal(actual, expected)
    known = actual >= 0
    row = np.nonzero(known)[0]
    exact = np.einsum("nd,nd->n", queries[row], documents[actual[known]])
    np.testing.assert_array_equal(scores[known], exact)
    assert np.isneginf(scores[~known]).all()
