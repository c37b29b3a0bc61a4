"""Retrieval: metrics against numbers worked out by hand and against plain loops."""

import math

import numpy as np
import pytest

from tests.harness import run_ranks
from vembed.data.examples import Item
from vembed.evaluation.dataset import RetrievalData
from vembed.evaluation.scores import retrieval_metrics, score_rankings
from vembed.parallel.session import start_command_session


def data_of(num_queries, num_documents, relevance):
    queries = tuple(Item(text=f"query {number}") for number in range(num_queries))
    documents = tuple(Item(text=f"text {number}") for number in range(num_documents))
    return RetrievalData("test", queries, documents, tuple(relevance))


def plain_metrics(ranking, relevant, k):
    """The metrics of one query. `relevant`: document -> grade."""

    def gain(grades):
        return sum(grade / math.log2(number + 2) for number, grade in enumerate(grades))

    grades = [relevant.get(document, 0) for document in ranking[:k]]
    best = sorted(relevant.values(), reverse=True)[:k]
    places = [number + 1 for number, grade in enumerate(grades) if grade > 0]
    precision = [(number + 1) / place for number, place in enumerate(places)]
    return {
        f"ndcg@{k}": gain(grades) / gain(best),
        f"mrr@{k}": 1 / places[0] if places else 0.0,
        f"recall@{k}": len(places) / len(relevant),
        f"map@{k}": sum(precision) / len(relevant),
    }


@pytest.mark.parametrize("ks", [[10], [1, 3, 10, 100]])
def test_metrics_against_plain_loops(ks):
    rng = np.random.default_rng(1)
    rankings = np.array([rng.permutation(150)[:100] for _ in range(30)])
    # Fewer documents than places, and none at all.
    rankings[1, 5:] = -1
    rankings[2] = -1
    relevance = []
    for _ in range(30):
        documents = rng.permutation(150)[: rng.integers(1, 6)].tolist()
        grades = rng.integers(1, 4, len(documents)).tolist()
        relevance.append(dict(zip(documents, grades, strict=True)))
    names, values = score_rankings(rankings, relevance, ks)
    for query in range(30):
        expected = {}
        for k in ks:
            expected |= plain_metrics(rankings[query].tolist(), relevance[query], k)
        assert dict(zip(names, values[query], strict=True)) == pytest.approx(expected)


def test_a_querys_own_text_is_not_found_unless_it_is_relevant():
    same = Item(text="the same text")
    documents = (same, Item(text="a near text"), Item(text="far"))
    embeddings = np.array([[1, 0], [0.9, 0.1], [0, 1]], np.float32)
    query = np.array([[1, 0]], np.float32)
    # The number of the relevant document, and 1 / its place.
    for relevant, expected in ((1, 1.0), (0, 1.0), (2, 0.5)):
        data = RetrievalData("test", (same,), documents, ({relevant: 1},))
        assert retrieval_metrics(query, embeddings, data, [2])["mrr@2"] == expected


def random_case(num_queries=60, num_documents=90, dims=16):
    rng = np.random.default_rng(3)
    queries = rng.normal(size=(num_queries, dims)).astype(np.float32)
    documents = rng.normal(size=(num_documents, dims)).astype(np.float32)
    relevance = [
        {number: 1, (number * 7) % num_documents: 2} for number in range(num_queries)
    ]
    return queries, documents, data_of(num_queries, num_documents, relevance)


@pytest.mark.parametrize("normalize", [True, False])
def test_dot_product_keeps_lengths(normalize):
    queries = np.array([[1, 0]], np.float32)
    documents = np.array([[1, 0], [5, 5]], np.float32)
    data = data_of(1, 2, [{0: 1}])
    scores = retrieval_metrics(queries, documents, data, [1], normalize=normalize)
    assert scores["recall@1"] == normalize


def metrics_of_cases(session=None):
    """Of many queries, and of one."""
    queries, documents, data = random_case()
    few = data_of(1, 90, [{5: 1}])
    return (
        retrieval_metrics(queries, documents, data, [1, 10], [4], session=session),
        retrieval_metrics(queries[:1], documents, few, [10], session=session),
    )


def _metrics_on_a_rank():
    with start_command_session() as session:
        return metrics_of_cases(session)


@pytest.mark.promise("B17")
def test_queries_divided_among_ranks_give_the_same_last_digit():
    expected = metrics_of_cases()
    assert run_ranks(_metrics_on_a_rank, 2) == [expected, expected]
