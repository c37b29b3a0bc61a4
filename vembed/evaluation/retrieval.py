"""Full-corpus retrieval: exact tiled top-k over every document; nDCG, MRR, Recall and MAP by trec_eval."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vembed.evaluation.corpus import Corpus
from vembed.evaluation.dataset import RetrievalData
from vembed.evaluation.query_results import NUM_FOUND, QueryResults
from vembed.evaluation.ranking_keys import NOTHING, as_keys, documents_of
from vembed.inference.encoding import Between, first_dims
from vembed.parallel import collectives
from vembed.parallel.devices import matmul_precision
from vembed.parallel.session import Session

QUERY_TILE = 256
DOCUMENT_TILE = 8192
"""Tile sizes: at most QUERY_TILE x DOCUMENT_TILE scores exist at once. They do not depend on the number of
processes, so that equal embeddings give equal rankings on any number of them."""


def retrieval_metrics(
    queries_QD: np.ndarray,
    documents_ND: np.ndarray,
    data: RetrievalData,
    ks: Sequence[int],
    dims: Sequence[int] = (),
    *,
    normalize: bool = True,
    session: Session | None = None,
    between: Between | None = None,
) -> dict[str, float]:
    """Return the scores of a `RetrievalSearch` in all documents at once."""
    search = RetrievalSearch(
        queries_QD,
        data,
        ks,
        dims,
        normalize=normalize,
        session=session,
        between=between,
    )
    search.add(documents_ND, np.arange(len(documents_ND)))
    return search.scores()


class RetrievalSearch:
    """The first documents of every query, for the embeddings and for their first coordinates, while documents arrive.

    A document with the query's own content is excluded unless the data mark it as relevant. With a session of several
    ranks it is collective: every rank passes the same embeddings, searches for a part of the queries, and gets the
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
        rank, self._world_size = (
            (session.rank, session.world_size) if session else (0, 1)
        )
        self._device = session.device if session else torch.device("cpu")
        tiles = np.arange(len(queries_QD)) // QUERY_TILE
        # Whole tiles of queries, dealt in turn: a product of the same shape gives the same bits on any number of ranks.
        self._owners = [
            np.flatnonzero(tiles % self._world_size == one)
            for one in range(self._world_size)
        ]
        self._own = self._owners[rank]
        excluded = own_documents(data)[self._own]
        self._full = queries_QD.shape[1]
        self._found = {
            dim: RunningTopK(
                first_dims(queries_QD[self._own], dim, normalize),
                max(ks),
                len(data.documents),
                excluded=excluded,
                device=self._device,
                in_step_with=max(map(len, self._owners)),
                between=between,
            )
            for dim in dict.fromkeys([self._full, *dims])
        }

    def add(self, documents_ND: np.ndarray, numbers_N: np.ndarray) -> None:
        """Search in some documents, which have these numbers in the data."""
        for dim, top in self._found.items():
            # By tile, so that the normalised copy of a size is as small as a tile.
            for start in range(0, len(documents_ND), DOCUMENT_TILE):
                tile = slice(start, start + DOCUMENT_TILE)
                top.add(
                    first_dims(documents_ND[tile], dim, self._normalize),
                    numbers_N[tile],
                )

    def scores(self, queries: QueryResults | None = None) -> dict[str, float]:
        """Return `ndcg@k`, `mrr@k`, `recall@k` and `map@k` for the embeddings, and `dim<d>/ndcg@k` for the further
        sizes. `queries` gets the results of each query, for the whole embeddings."""
        means = {
            dim: self._mean(top.rankings(), queries if dim == self._full else None)
            for dim, top in self._found.items()
        }
        scores = dict(means[self._full])
        for dim in self._dims:
            scores.update(
                {f"dim{dim}/{name}": value for name, value in means[dim].items()}
            )
        return scores

    def _mean(
        self, rankings: np.ndarray, keep: QueryResults | None
    ) -> dict[str, float]:
        relevance = [self._data.relevance[index] for index in self._own]
        names, values = score_rankings(rankings, relevance, self._ks)
        # Sum in the order of the queries, so that rounding does not depend on the number of processes.
        by_query = self._gathered(values)
        if keep is not None:
            keep.names = names
            keep.values = by_query
            keep.found = self._gathered(np.ascontiguousarray(rankings[:, :NUM_FOUND]))
        return dict(zip(names, by_query.mean(axis=0).tolist(), strict=True))

    def _gathered(self, rank_rows: np.ndarray) -> np.ndarray:
        """Return the rows of all queries in their order, from those of each rank's queries."""
        rows = torch.from_numpy(rank_rows)
        if self._world_size > 1:
            counts = [len(owner) for owner in self._owners]
            rows = collectives.all_gather_rows(rows.to(self._device), counts).cpu()
        # Undo the deal: row i of the gathered rows is that of query order[i].
        order = np.concatenate(self._owners)
        gathered = np.empty((len(order), rank_rows.shape[1]), rank_rows.dtype)
        gathered[order] = rows.numpy()
        return gathered


def own_documents(data: RetrievalData) -> np.ndarray:
    """Return, per query, the index of the document with the query's own content if it is not relevant, otherwise -1."""
    documents = data.documents
    if isinstance(documents, Corpus):
        keys = documents.keys
    else:
        keys = np.fromiter((item.key() for item in documents), np.int64, len(documents))
    wanted = np.fromiter(
        (item.key() for item in data.queries), np.int64, len(data.queries)
    )
    positions = _places(keys, wanted)
    return np.array(
        [
            -1 if index in relevant else index
            for index, relevant in zip(positions, data.relevance, strict=True)
        ],
        np.int64,
    )


def _places(values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the position of each wanted value among distinct ones, -1 where it is not there."""
    if not len(values):
        return np.full(len(wanted), -1)
    order = np.argsort(values)
    # searchsorted gives len(values) for what is larger than all; the comparison below tells it from a hit.
    at = order[
        np.minimum(np.searchsorted(values, wanted, sorter=order), len(values) - 1)
    ]
    places: np.ndarray = np.where(values[at] == wanted, at, -1)
    return places


def top_k(
    queries_QD: np.ndarray,
    documents_ND: np.ndarray,
    k: int,
    *,
    excluded: np.ndarray | None = None,
) -> np.ndarray:
    """Return [Q, k] indices of the documents with the highest dot products, as `RunningTopK` finds them."""
    top = RunningTopK(queries_QD, k, len(documents_ND), excluded=excluded)
    top.add(documents_ND, np.arange(len(documents_ND)))
    return top.rankings()


class RunningTopK:
    """The documents with the highest dot products, best first, while documents arrive in any order; ties go to the
    lower number."""

    def __init__(
        self,
        queries_QD: np.ndarray,
        k: int,
        num_documents: int,
        *,
        excluded: np.ndarray | None = None,
        device: torch.device | str = "cpu",
        in_step_with: int = 0,
        between: Between | None = None,
    ) -> None:
        """`excluded`: per query the number of one document to leave out, or -1. `between` is called after each tile,
        as often as for `in_step_with` queries."""
        queries = torch.from_numpy(queries_QD).to(device)
        self._tiles = torch.split(queries, QUERY_TILE)
        self._k = k
        self._kept = min(k, num_documents)
        self._best = [
            torch.full((len(tile), self._kept), NOTHING, device=device)
            for tile in self._tiles
        ]
        self._excluded = excluded
        self._device = device
        self._between = between
        # `between` may be collective, so a rank with fewer query tiles still calls it for every tile of the largest
        # rank.
        self._num_turns = max(len(self._tiles), -(-in_step_with // QUERY_TILE))

    def add(self, documents_ND: np.ndarray, numbers_N: np.ndarray) -> None:
        """Compare the queries with some documents."""
        for start in range(0, len(documents_ND), DOCUMENT_TILE):
            tile = slice(start, start + DOCUMENT_TILE)
            self._add_tile(
                torch.from_numpy(documents_ND[tile]).to(self._device), numbers_N[tile]
            )

    def _add_tile(self, documents: Tensor, numbers_N: np.ndarray) -> None:
        left_out = (
            None if self._excluded is None else _places(numbers_N, self._excluded)
        )
        numbers = torch.from_numpy(numbers_N).to(self._device)
        for turn in range(self._num_turns):
            if turn < len(self._tiles):
                with matmul_precision(
                    "highest"
                ):  # in TF32, documents less than 1e-3 apart would change places
                    scores = self._tiles[turn] @ documents.T
                if left_out is not None:
                    _leave_out(scores, left_out[turn * QUERY_TILE :][: len(scores)])
                # A document is among the best of all only if it is among the best of its tile.
                joined = torch.cat(
                    [self._best[turn], _best_keys(scores, self._kept, numbers)], dim=1
                )
                self._best[turn] = joined.topk(self._kept, dim=1).values
            if self._between is not None:
                self._between()

    def rankings(self) -> np.ndarray:
        """Return [Q, k] numbers of documents; -1 where there are fewer than k."""
        keys = torch.cat(self._best)
        rankings = np.full((len(keys), self._k), -1, np.int64)
        rankings[:, : self._kept] = documents_of(keys).cpu().numpy()
        return rankings


def _leave_out(scores: Tensor, columns: np.ndarray) -> None:
    rows = np.flatnonzero(columns >= 0)
    scores[torch.from_numpy(rows), torch.from_numpy(columns[rows])] = -torch.inf


def _best_keys(scores_QT: Tensor, k: int, numbers_T: Tensor) -> Tensor:
    """Return the k largest keys of each row of a tile whose columns are the documents with these numbers; fewer if the
    tile is narrower."""
    if scores_QT.shape[1] <= k:
        return _keys(scores_QT, numbers_T)
    # One more than asked for shows whether the last place is tied.
    values, indices = scores_QT.topk(k + 1, dim=1)
    keys = _keys(values[:, :k], numbers_T[indices[:, :k]])
    # topk breaks ties arbitrarily. If the k-th and the next score are equal, select again by key.
    tied = values[:, k] == values[:, k - 1]
    if bool(tied.any()):
        keys[tied] = _keys(scores_QT[tied], numbers_T).topk(k, dim=1).values
    return keys


def _keys(scores: Tensor, numbers: Tensor) -> Tensor:
    """Return the keys of the scores, NOTHING for documents that are left out."""
    return torch.where(scores == -torch.inf, NOTHING, as_keys(scores, numbers))


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
