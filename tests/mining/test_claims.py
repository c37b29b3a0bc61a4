"""Claims against float64: a candidate is claimed if another query with its positive is nearer to it."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.mining.data import assert_same_rows, on_ranks, run, write_data
from tests.mining.test_ranks import mined
from vembed.evaluation.top_k import Pairs
from vembed.mining.candidates import CLAIM_MARGIN, CONSIDERED, NEAREST, ClaimFinder
from vembed.mining.inputs import open_command_session
from vembed.mining.options import MineConfig
from vembed.mining.retrievers import DenseRetriever

NUM_QUERIES = 60
NUM_DOCUMENTS = 400
DIM = 6


def unit_vectors(random, count):
    vectors = random.normal(size=(count, DIM)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def data():
    random = np.random.default_rng(0)
    queries = unit_vectors(random, NUM_QUERIES)
    documents = unit_vectors(random, NUM_DOCUMENTS)
    pairs = random.integers(0, [NUM_QUERIES, NUM_DOCUMENTS], (90, 2))
    return queries, documents, Pairs.of(pairs[:, 0], pairs[:, 1])


def expected(queries, documents, positives):
    """[Q, N] by the definition, in float64: how much nearer the nearest other pair is than it has to be."""
    sums = (
        queries[positives.queries].astype(np.float64) + documents[positives.documents]
    )
    scores = sums @ documents.T.astype(np.float64)  # [pairs, N]
    room = np.zeros((len(queries), len(documents)))
    for query in range(len(queries)):
        own_documents = positives.documents[positives.queries == query]
        is_known = (positives.queries == query) | np.isin(
            positives.documents, own_documents
        )
        best = np.where(is_known[:, None], scores, -np.inf).max(axis=0)
        other = np.where(is_known[:, None], -np.inf, scores).max(axis=0)
        room[query] = other - CLAIM_MARGIN * np.abs(other) - best
    return room


def test_claims_are_those_of_the_definition(tmp_path):
    queries, documents, positives = data()
    order = np.argsort(-(queries @ documents.T), axis=1)[:, :CONSIDERED]
    scores = np.take_along_axis(queries @ documents.T, order, axis=1)
    exact = np.arange(NUM_DOCUMENTS)
    corpus = SimpleNamespace(exact=exact, num_candidates=NUM_DOCUMENTS)
    known = SimpleNamespace(exact=np.arange(NUM_QUERIES))
    with open_command_session(None) as (session, _):
        dense = DenseRetriever(tmp_path, "m", corpus, known, session)
        assert dense.queries.encode(lambda numbers: queries[numbers]) == NUM_QUERIES
        dense.documents.encode(lambda numbers: documents[numbers])
        finder = ClaimFinder(dense, positives)
        actual = finder.claimed(10, order[10:], scores[10:], np.full(50, np.inf))
        limit = scores[10:, 20] - 1e-6
        limited = finder.claimed(10, order[10:], scores[10:], limit)
    room = np.take_along_axis(expected(queries, documents, positives), order, axis=1)[
        10:
    ]
    reference = room >= 0
    is_clear = np.abs(room) > 1e-5  # sums in float32 do not decide between less
    num_own = np.bincount(positives.queries, minlength=NUM_QUERIES).max()
    assert num_own < NEAREST
    assert 0.2 < reference.mean() < 0.999
    assert is_clear.mean() > 0.99
    np.testing.assert_array_equal(actual[is_clear], reference[is_clear])
    within = actual & (scores[10:] <= limit[:, None])
    np.testing.assert_array_equal(limited[is_clear], within[is_clear])


def test_the_docs_state_the_margin_that_is_computed():
    """s(q, d) + s(p, d) <= (1 - CLAIM_MARGIN) x, that is x is at least 1 / (1 - CLAIM_MARGIN) times as large."""
    share = 1 / (1 - CLAIM_MARGIN) - 1
    page = " ".join(Path("docs/mining.md").read_text(encoding="utf-8").split())
    assert f"is at least {share:.2%}".replace("%", " %") + " above" in page
    assert f"<= {1 - CLAIM_MARGIN:g} (s(q', d)" in page


@pytest.fixture
def options(tmp_path):
    actual = write_data(tmp_path)
    del actual["relative_margin"]
    return actual


def highest_share(row):
    """The highest score of a negative as a share of the positive's."""
    return max(row["negative_scores"], default=-1) / min(row["positive_scores"])


def test_claimed_candidates_come_first_where_no_limit_is_given(options):
    by_default, _ = run(options, scores=True)
    asked, _ = run(options, scores=True, relative_margin=0.05, prefer_claimed=True)
    strict, _ = run(options, scores=True, relative_margin=0.05)
    assert by_default != strict
    assert max(map(highest_share, [*asked, *strict])) <= 0.95 + 1e-5
    assert 0.95 < max(map(highest_share, by_default)) <= 1.05 + 1e-5


@pytest.mark.parametrize("limit", ["margin", "max_score", "threshold"])
def test_a_limit_that_is_given_leaves_claims_out(limit):
    base = {"model_name": "m", "data_path": "d", "output_path": "o.jsonl"}
    assert MineConfig(**base).takes_claimed
    assert not MineConfig(**base, **{limit: None}).takes_claimed


def test_two_ranks_find_the_claims_of_one(options, tmp_path):
    rows_alone, result = run(options)
    both, rows_of_both = on_ranks(mined, options, 2, tmp_path)
    assert both[0] == (result.counts, result.num_encoded)
    assert_same_rows(rows_of_both, rows_alone)
