"""Full-corpus retrieval: the first documents of every query; nDCG, MRR, Recall and MAP by trec_eval, also of documents
that are stored in int8 or in bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vembed.data.examples import KeyIndex
from vembed.evaluation.dataset import Corpus, RetrievalData
from vembed.evaluation.query_results import NUM_FOUND, QueryResults
from vembed.evaluation.top_k import Pairs, TopK, top_k
from vembed.inference.encoding import InterruptCheck, first_dims, quantized, ranges_of
from vembed.parallel import collectives
from vembed.parallel.session import Session

DOCUMENTS_PER_SEARCH_TILE = 8192
"""Documents that are searched at once. Only a tile of them is copied and normalised at a time."""
METRICS = ("ndcg", "mrr", "recall", "map")
COMPRESSED_FORMS = ("float32", "int8", "binary", "binary_rescored")
COMPRESSED_K = 10
RESCORING_FACTOR = 4
"""Binary with rescoring: the search by bits finds RESCORING_FACTOR * COMPRESSED_K documents, which are then ordered."""


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
    """The first documents of every query, by the whole embeddings and by their first coordinates. Documents are added in
    parts.

    A document with the query's own content is excluded unless the data mark it as relevant. With a session of several
    ranks it is collective: every rank passes the same embeddings, searches for its share of the queries, and gets the
    same scores. `check_interrupt` is called after each tile, equally often on all ranks.
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
        check_interrupt: InterruptCheck | None = None,
    ) -> None:
        """`dims`: further sizes; each is normalised after the cut, if `normalize`."""
        self._data = data
        self._ks = ks
        self._dims = dims
        self._normalize = normalize
        self._check_interrupt = check_interrupt
        self._session = session
        self._full = queries_QD.shape[1]
        world_size = session.world_size if session else 1
        # Queries are dealt to the ranks in turn.
        first = session.rank if session else 0
        self._dealt = range(first, len(queries_QD), world_size)
        device = session.device if session else "cpu"
        excluded = excluded_pairs(data, self._dealt)
        self._searches: dict[int, TopK] = {}
        for dim in dict.fromkeys([self._full, *dims]):
            queries = first_dims(queries_QD[first::world_size], dim, normalize)
            on_device = torch.from_numpy(queries).to(device)
            self._searches[dim] = TopK(on_device, max(ks), excluded)

    def add(self, documents_ND: np.ndarray, numbers_N: np.ndarray) -> None:
        """Search in some documents, which have these numbers in the data."""
        for dim, search in self._searches.items():
            for start in range(0, len(documents_ND), DOCUMENTS_PER_SEARCH_TILE):
                tile = slice(start, start + DOCUMENTS_PER_SEARCH_TILE)
                documents = first_dims(documents_ND[tile], dim, self._normalize)
                search.add(
                    torch.from_numpy(documents), torch.from_numpy(numbers_N[tile])
                )
                if self._check_interrupt is not None:
                    self._check_interrupt()

    def scores(self, results: QueryResults | None = None) -> dict[str, float]:
        """Return `ndcg@k`, `mrr@k`, `recall@k` and `map@k` for the embeddings, and `dim<d>/ndcg@k` for the further
        sizes. `results` gets those of each query, for the whole embeddings."""
        scores = {}
        num_queries = len(self._data.queries)
        relevance = [self._data.relevance[query] for query in self._dealt]
        for dim, search in self._searches.items():
            rankings = search.rankings()
            names, values = score_rankings(rankings, relevance, self._ks)
            # Summed in the order of the queries, so that rounding does not depend on the number of ranks.
            by_query = from_all_ranks(values, num_queries, self._session)
            means = dict(zip(names, by_query.mean(axis=0).tolist(), strict=True))
            if dim == self._full:
                scores.update(means)
                if results is not None:
                    first = rankings[:, :NUM_FOUND]
                    results.names = names
                    results.values = by_query
                    results.found = from_all_ranks(first, num_queries, self._session)
            if dim in self._dims:
                for name, value in means.items():
                    scores[f"dim{dim}/{name}"] = value
        return scores


def from_all_ranks(
    rows: np.ndarray,
    num_rows: int,
    session: Session | None,
) -> np.ndarray:
    """Return the rows of all ranks, to which they were dealt in turn, in their order."""
    if session is None or session.world_size == 1:
        return rows
    local = torch.from_numpy(np.ascontiguousarray(rows)).to(session.device)
    return collectives.all_gather_dealt(local, num_rows).cpu().numpy()


def correlations(similarities: np.ndarray, labels: Sequence[float]) -> dict[str, float]:
    """Return `spearman` and `pearson` between similarities and the scores of the data."""
    from scipy import stats  # takes a third of a second to import, and few runs need it

    if np.ptp(similarities) == 0:  # undefined for a constant; counted as 0
        return {"spearman": 0.0, "pearson": 0.0}
    return {
        "spearman": float(stats.spearmanr(similarities, labels).statistic),
        "pearson": float(stats.pearsonr(similarities, labels).statistic),
    }


def excluded_pairs(data: RetrievalData, queries: Sequence[int]) -> Pairs:
    """Return, for some of the queries, the document with the query's own content, unless it is relevant."""
    documents = data.documents
    if isinstance(documents, Corpus):
        keys = documents.keys
    else:
        keys = np.array([item.key() for item in documents], np.int64)
    query_keys = np.array([data.queries[query].key() for query in queries], np.int64)
    rows = []
    excluded = []
    for row, document in enumerate(KeyIndex(keys).find(query_keys).tolist()):
        if document >= 0 and document not in data.relevance[queries[row]]:
            rows.append(row)
            excluded.append(document)
    return Pairs.of(rows, excluded)


def metric_names(ks: Sequence[int]) -> list[str]:
    """Return the names of the metrics at these cut-offs, in the order of `score_rankings`."""
    names = []
    for metric in METRICS:
        names += [f"{metric}@{k}" for k in ks]
    return names


def score_rankings(
    rankings: np.ndarray,
    relevance: Sequence[dict[int, int]],
    ks: Sequence[int],
) -> tuple[list[str], np.ndarray]:
    """Return the names of the metrics, and their values per query [Q, number of names], by trec_eval. nDCG uses the
    grade as gain; for the others every grade of 1 or more is relevant."""
    import pytrec_eval  # here, so that what is trained without evaluation does without it

    cuts = ",".join(str(k) for k in ks)
    measures = {f"ndcg_cut.{cuts}", f"recall.{cuts}", f"map_cut.{cuts}", "recip_rank"}
    judged = {}
    run = {}
    for query, grades in enumerate(relevance):
        judged[str(query)] = {str(number): grade for number, grade in grades.items()}
        # trec_eval sorts by score and breaks ties by name. Using the negative position as score keeps our order.
        ranked = rankings[query][rankings[query] >= 0]
        run[str(query)] = {
            str(number): -float(place) for place, number in enumerate(ranked)
        }
    by_query = pytrec_eval.RelevanceEvaluator(judged, measures).evaluate(run)
    names = metric_names(ks)
    values = np.zeros((len(rankings), len(names)))
    for query, measured in by_query.items():
        # trec_eval's reciprocal rank has no cut-off: a rank beyond k counts as 0.
        reciprocal = measured["recip_rank"]
        # In the order of METRICS.
        row = [measured[f"ndcg_cut_{k}"] for k in ks]
        row += [reciprocal if reciprocal >= 1 / k else 0.0 for k in ks]
        row += [measured[f"recall_{k}"] for k in ks]
        row += [measured[f"map_cut_{k}"] for k in ks]
        values[int(query)] = row
    return names, values


def compressed_scores(
    queries_QD: np.ndarray,
    documents_ND: np.ndarray,
    data: RetrievalData,
    dims: Sequence[int],
    normalize: bool,
) -> dict[str, float]:
    """Return `compressed/<form>/<size>/ndcg@10` for each form of the stored documents and each size.

    int8: queries stay float, documents are levels of each coordinate. binary: signs of both. binary_rescored: the first
    documents by signs, ordered by the float query and the documents' signs, so that only bits are stored.
    """
    excluded = excluded_pairs(data, range(len(data.queries)))
    scores = {}
    for dim in dict.fromkeys([documents_ND.shape[1], *dims]):
        queries = first_dims(queries_QD, dim, normalize)
        documents = first_dims(documents_ND, dim, normalize)
        # int8 as a search engine reads it: the middle of each of the 256 levels, as floats [N, dim].
        ranges = ranges_of(documents)
        steps = np.where(ranges[1] > ranges[0], (ranges[1] - ranges[0]) / 255, 1)
        levels = quantized(documents, "uint8", ranges).astype(np.float32)
        restored = (ranges[0] + (levels + 0.5) * steps).astype(np.float32)
        # Bits as a search engine reads them: 0 and below are -1.
        signs = np.where(documents > 0, 1, -1).astype(np.float32)
        query_signs = np.where(queries > 0, 1, -1).astype(np.float32)
        # C candidates by bits, ordered by the float query and the documents' signs.
        candidates_QC = top_k(
            query_signs, signs, COMPRESSED_K * RESCORING_FACTOR, excluded
        )
        scores_QC = np.einsum("qd,qcd->qc", queries, signs[candidates_QC])
        scores_QC = np.where(candidates_QC >= 0, scores_QC, -np.inf)
        # Stable: equal scores keep the order by bits, which already breaks ties by number.
        order = np.argsort(-scores_QC, axis=1, kind="stable")[:, :COMPRESSED_K]
        rankings = (
            top_k(queries, documents, COMPRESSED_K, excluded),
            top_k(queries, restored, COMPRESSED_K, excluded),
            top_k(query_signs, signs, COMPRESSED_K, excluded),
            np.take_along_axis(candidates_QC, order, axis=1),
        )
        for form, ranking in zip(COMPRESSED_FORMS, rankings, strict=True):
            _, values = score_rankings(ranking, data.relevance, [COMPRESSED_K])
            scores[compressed_name(form, dim)] = float(values[:, 0].mean())
    return scores


def compressed_name(form: str, dim: int) -> str:
    """Return the name of the score of a stored form at a size."""
    return f"compressed/{form}/{dim}/ndcg@{COMPRESSED_K}"
