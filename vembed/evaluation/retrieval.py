"""Full-corpus retrieval: the first documents of every query; nDCG, MRR, Recall and MAP by trec_eval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vembed.data.distinct import KeyIndex
from vembed.evaluation.corpus import Corpus
from vembed.evaluation.dataset import RetrievalData
from vembed.evaluation.query_results import NUM_FOUND, QueryResults
from vembed.evaluation.top_k import Pairs, TopK
from vembed.inference.encoding import Between, first_dims
from vembed.parallel import collectives
from vembed.parallel.session import Session

DOCUMENT_TILE = 8192
"""Documents that are searched in at once: the normalised copy of a size is as small as a tile."""


def retrieval_metrics(
    queries_QD: np.ndarray,
    documents_ND: np.ndarray,
    data: RetrievalData,
    ks: Sequence[int],
    dims: Sequence[int] = (),
    **options: Any,
) -> dict[str, float]:
    """Return the scores of a `RetrievalSearch` in all documents at once."""
    search = RetrievalSearch(queries_QD, data, ks, dims, **options)
    search.add(documents_ND, np.arange(len(documents_ND)))
    return search.scores()


class RetrievalSearch:
    """The first documents of every query, for the embeddings and for their first coordinates, while documents arrive.

    A document with the query's own content is excluded unless the data mark it as relevant. With a session of several
    ranks it is collective: every rank passes the same embeddings, searches for its share of the queries, and gets the
    same scores. `between` is called after each tile, equally often on all ranks.
    """

    def __init__(
        self,
        queries_QD: np.ndarray,
        data: RetrievalData,
        ks: Sequence[int],
        dims: Sequence[int] = (),
        *,
        normalize: bool = True,
        session: Session | None = None,
        between: Between | None = None,
    ) -> None:
        """`dims`: further sizes; each is normalised after the cut, if `normalize`."""
        self._data = data
        self._ks = ks
        self._dims = dims
        self._normalize = normalize
        self._between = between
        self._full = queries_QD.shape[1]
        self._world_size = session.world_size if session else 1
        # Queries are dealt to the ranks in turn.
        first = session.rank if session else 0
        self._dealt = range(first, len(queries_QD), self._world_size)
        device = session.device if session else "cpu"
        excluded = excluded_pairs(data, self._dealt)
        self._searches: dict[int, TopK] = {}
        for dim in dict.fromkeys([self._full, *dims]):
            queries = first_dims(queries_QD[first :: self._world_size], dim, normalize)
            on_device = torch.from_numpy(queries).to(device)
            self._searches[dim] = TopK(on_device, max(ks), excluded)

    def add(self, documents_ND: np.ndarray, numbers_N: np.ndarray) -> None:
        """Search in some documents, which have these numbers in the data."""
        for dim, search in self._searches.items():
            for start in range(0, len(documents_ND), DOCUMENT_TILE):
                tile = slice(start, start + DOCUMENT_TILE)
                documents = first_dims(documents_ND[tile], dim, self._normalize)
                search.add(
                    torch.from_numpy(documents), torch.from_numpy(numbers_N[tile])
                )
                if self._between is not None:
                    self._between()

    def scores(self, results: QueryResults | None = None) -> dict[str, float]:
        """Return `ndcg@k`, `mrr@k`, `recall@k` and `map@k` for the embeddings, and `dim<d>/ndcg@k` for the further
        sizes. `results` gets those of each query, for the whole embeddings."""
        scores: dict[str, float] = {}
        relevance = [self._data.relevance[query] for query in self._dealt]
        for dim, search in self._searches.items():
            rankings = search.rankings()
            names, values = score_rankings(rankings, relevance, self._ks)
            # Summed in the order of the queries, so that rounding does not depend on the number of ranks.
            by_query = self._from_all_ranks(values)
            means = dict(zip(names, by_query.mean(axis=0).tolist(), strict=True))
            if dim == self._full:
                scores.update(means)
                if results is not None:
                    results.names = names
                    results.values = by_query
                    results.found = self._from_all_ranks(rankings[:, :NUM_FOUND])
            if dim in self._dims:
                for name, value in means.items():
                    scores[f"dim{dim}/{name}"] = value
        return scores

    def _from_all_ranks(self, rows: np.ndarray) -> np.ndarray:
        if self._world_size == 1:
            return rows
        local = torch.from_numpy(np.ascontiguousarray(rows))
        num_queries = len(self._data.queries)
        device = next(iter(self._searches.values())).device
        gathered = collectives.all_gather_dealt(local.to(device), num_queries)
        return gathered.cpu().numpy()


def excluded_pairs(data: RetrievalData, queries: Sequence[int]) -> Pairs:
    """Return, for some of the queries, the document with the query's own content, unless it is relevant."""
    documents = data.documents
    if isinstance(documents, Corpus):
        keys = documents.keys
    else:
        keys = np.array([item.key() for item in documents], np.int64)
    wanted = np.array([data.queries[query].key() for query in queries], np.int64)
    rows: list[int] = []
    excluded: list[int] = []
    for row, document in enumerate(KeyIndex(keys).find(wanted).tolist()):
        if document >= 0 and document not in data.relevance[queries[row]]:
            rows.append(row)
            excluded.append(document)
    return Pairs.of(rows, excluded)


def metric_names(ks: Sequence[int]) -> list[str]:
    """Return the names of the metrics at these cut-offs, in the order in which they are kept."""
    return [f"{metric}@{k}" for metric in ("ndcg", "mrr", "recall", "map") for k in ks]


def score_rankings(
    rankings: np.ndarray, relevance: Sequence[dict[int, int]], ks: Sequence[int]
) -> tuple[list[str], np.ndarray]:
    """Return the names of the metrics, and their values per query [Q, number of names], by trec_eval. nDCG uses the
    grade as gain; for the others every grade of 1 or more is relevant."""
    cuts = ",".join(str(k) for k in ks)
    measures = {f"ndcg_cut.{cuts}", f"recall.{cuts}", f"map_cut.{cuts}", "recip_rank"}
    names = metric_names(ks)
    judged = {
        str(q): {str(doc): grade for doc, grade in grades.items()}
        for q, grades in enumerate(relevance)
    }
    # trec_eval sorts by score and breaks ties by name. Using the negative position as score keeps our order.
    run = {
        str(q): {str(doc): -float(i) for i, doc in enumerate(row) if doc >= 0}
        for q, row in enumerate(rankings)
    }
    import pytrec_eval  # here, so that what is trained without evaluation does without it

    by_query = pytrec_eval.RelevanceEvaluator(judged, measures).evaluate(run)
    values = np.zeros((len(rankings), len(names)))
    for query, figures in by_query.items():
        reciprocal = figures["recip_rank"]
        row = [figures[f"ndcg_cut_{k}"] for k in ks]  # in the order of `metric_names`
        # trec_eval's reciprocal rank has no cut: a rank beyond k counts as 0.
        row += [reciprocal if reciprocal >= 1 / k else 0.0 for k in ks]
        row += [figures[f"recall_{k}"] for k in ks] + [
            figures[f"map_cut_{k}"] for k in ks
        ]
        values[int(query)] = row
    return names, values
