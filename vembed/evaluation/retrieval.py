"""Full-corpus retrieval: exact tiled top-k over every document; nDCG, MRR, Recall and MAP by trec_eval."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytrec_eval
import torch
from torch import Tensor

from vembed.distributed import collectives
from vembed.distributed.devices import matmul_precision
from vembed.distributed.session import Session
from vembed.evaluation.dataset import RetrievalData
from vembed.evaluation.query_results import NUM_FOUND, QueryResults
from vembed.inference.encoding import Between, first_dims

QUERY_TILE = 256
DOCUMENT_TILE = 8192
"""Tile sizes: at most QUERY_TILE x DOCUMENT_TILE scores exist at once. They do not depend on the number of
processes, so that equal embeddings give equal rankings on any number of them."""

_NOTHING = torch.iinfo(torch.int64).min
_LOW_32 = 0xFFFFFFFF


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
    queries: QueryResults | None = None,
) -> dict[str, float]:
    """Return `ndcg@k`, `mrr@k`, `recall@k` and `map@k` for the embeddings, and `dim<d>/ndcg@k` for their first d
    coordinates, normalised first if `normalize`. A document with the query's own content is excluded unless the data
    mark it as relevant.

    With a session of several ranks it is collective: every rank passes the same embeddings, searches for a part of the
    queries, and gets the same scores. `between` is called after each tile, equally often on all ranks. `queries` gets
    the results of each query, for the whole embeddings.
    """
    excluded = own_documents(data)
    full = queries_QD.shape[1]
    scores: dict[str, float] = {}
    means: dict[int, dict[str, float]] = {}
    for dim in dict.fromkeys([full, *dims]):
        first, second = (first_dims(matrix, dim, normalize) for matrix in (queries_QD, documents_ND))
        keep = queries if dim == full else None
        means[dim] = _mean_over_ranks(
            first, second, data, ks, excluded=excluded, session=session, between=between, keep=keep
        )
    scores.update(means[full])
    for dim in dims:
        scores.update({f"dim{dim}/{name}": value for name, value in means[dim].items()})
    return scores


def own_documents(data: RetrievalData) -> np.ndarray:
    """Return, per query, the index of the document with the query's own content if it is not relevant, otherwise -1."""
    place = {item.key(): index for index, item in enumerate(data.documents)}
    found = (place.get(query.key(), -1) for query in data.queries)
    return np.array(
        [-1 if index in relevant else index for index, relevant in zip(found, data.relevance, strict=True)], np.int64
    )


def _mean_over_ranks(
    queries_QD: np.ndarray,
    documents_ND: np.ndarray,
    data: RetrievalData,
    ks: Sequence[int],
    *,
    excluded: np.ndarray,
    session: Session | None,
    between: Between | None,
    keep: QueryResults | None,
) -> dict[str, float]:
    rank, world_size = (session.rank, session.world_size) if session else (0, 1)
    device = session.device if session else torch.device("cpu")
    tiles = np.arange(len(queries_QD)) // QUERY_TILE
    owners = [np.flatnonzero(tiles % world_size == one) for one in range(world_size)]
    own, most = owners[rank], max(map(len, owners))
    rankings = top_k(
        queries_QD[own],
        documents_ND,
        max(ks),
        excluded=excluded[own],
        device=device,
        in_step_with=most,
        between=between,
    )
    names, values = score_rankings(rankings, [data.relevance[index] for index in own], ks)
    order, counts = np.concatenate(owners), [len(one) for one in owners]
    gathered = torch.from_numpy(values)
    if world_size > 1:
        gathered = collectives.all_gather_rows(gathered.to(device), counts).cpu()
    # Sum in the order of the queries, so that rounding does not depend on the number of processes.
    by_query = np.empty((len(queries_QD), len(names)))
    by_query[order] = gathered.numpy()
    if keep is not None:
        found = torch.from_numpy(np.ascontiguousarray(rankings[:, :NUM_FOUND]))
        if world_size > 1:
            found = collectives.all_gather_rows(found.to(device), counts).cpu()
        keep.names, keep.values = names, by_query
        keep.found = np.empty((len(order), found.shape[1]), np.int64)
        keep.found[order] = found.numpy()
    return dict(zip(names, by_query.mean(axis=0).tolist(), strict=True))


def top_k(
    queries_QD: np.ndarray,
    documents_ND: np.ndarray,
    k: int,
    *,
    excluded: np.ndarray | None = None,
    device: torch.device | str = "cpu",
    in_step_with: int = 0,
    between: Between | None = None,
) -> np.ndarray:
    """Return [Q, k] indices of the documents with the highest dot products, best first; ties go to the lower index.

    Missing entries are -1 if there are fewer than k documents. `excluded`: per query one document to leave out, or -1.
    `between` is called after each tile, as often as for `in_step_with` queries.
    """
    queries = torch.from_numpy(queries_QD).to(device)
    k_kept = min(k, len(documents_ND))
    tiles = torch.split(queries, QUERY_TILE)
    best = [torch.full((tile.shape[0], k_kept), _NOTHING, device=device) for tile in tiles]
    # `between` may be collective, so a rank with fewer query tiles still calls it for every tile of the largest rank.
    num_turns = max(len(tiles), -(-in_step_with // QUERY_TILE))
    for start in range(0, len(documents_ND), DOCUMENT_TILE):
        documents = torch.from_numpy(documents_ND[start : start + DOCUMENT_TILE]).to(device)
        for turn in range(num_turns):
            if turn < len(tiles):
                with matmul_precision("highest"):  # in TF32, documents less than 1e-3 apart would change places
                    scores = tiles[turn] @ documents.T
                if excluded is not None:
                    _leave_out(scores, excluded[turn * QUERY_TILE :][: len(scores)] - start)
                joined = torch.cat([best[turn], _best_keys(scores, k_kept, start)], dim=1)
                best[turn] = joined.topk(k_kept, dim=1).values
            if between is not None:
                between()
    rankings = np.full((len(queries_QD), k), -1, np.int64)
    if best:
        keys = torch.cat(best)
        rankings[:, :k_kept] = torch.where(keys == _NOTHING, -1, _LOW_32 - (keys & _LOW_32)).cpu().numpy()
    return rankings


def _leave_out(scores: Tensor, columns: np.ndarray) -> None:
    rows = np.flatnonzero((columns >= 0) & (columns < scores.shape[1]))
    scores[torch.from_numpy(rows), torch.from_numpy(columns[rows])] = -torch.inf


def _best_keys(scores_QT: Tensor, k: int, start: int) -> Tensor:
    """Return the k largest keys of each row of a tile whose first column is document `start`; fewer if the tile is
    narrower."""
    columns = torch.arange(start, start + scores_QT.shape[1], device=scores_QT.device)
    if scores_QT.shape[1] <= k:
        return _keys(scores_QT, columns)
    values, indices = scores_QT.topk(k + 1, dim=1)
    keys = _keys(values[:, :k], indices[:, :k] + start)
    # topk breaks ties arbitrarily. If the k-th and the next score are equal, select again by key.
    tied = values[:, k] == values[:, k - 1]
    if bool(tied.any()):
        keys[tied] = _keys(scores_QT[tied], columns).topk(k, dim=1).values
    return keys


def _keys(scores: Tensor, columns: Tensor) -> Tensor:
    """Return one integer per score and column that sorts by score, then by lower column, without ties."""
    bits = (scores + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    # The bits of positive floats sort as integers. Those of negative floats sort in reverse; flipping all but the sign
    # bit corrects that. The order then fills the upper 32 bits, the reversed column the lower 32.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    keys = (ordered << 32) + (_LOW_32 - columns)
    return torch.where(scores == -torch.inf, _NOTHING, keys)


def score_rankings(
    rankings: np.ndarray, relevance: Sequence[dict[int, int]], ks: Sequence[int]
) -> tuple[list[str], np.ndarray]:
    """Return the names of the metrics, and their values per query [Q, number of names], by trec_eval. nDCG uses the
    grade as gain; for the others every grade of 1 or more is relevant."""
    cuts = ",".join(str(k) for k in ks)
    measures = {f"ndcg_cut.{cuts}", f"recall.{cuts}", f"map_cut.{cuts}", "recip_rank"}
    names = [f"{metric}@{k}" for metric in ("ndcg", "mrr", "recall", "map") for k in ks]
    judged = {str(q): {str(doc): grade for doc, grade in grades.items()} for q, grades in enumerate(relevance)}
    # trec_eval sorts by score and breaks ties by name. Using the negative position as score keeps our order.
    run = {str(q): {str(doc): -float(i) for i, doc in enumerate(row) if doc >= 0} for q, row in enumerate(rankings)}
    found = pytrec_eval.RelevanceEvaluator(judged, measures).evaluate(run)
    values = np.zeros((len(rankings), len(names)))
    for query, figures in found.items():
        reciprocal = figures["recip_rank"]
        row = [figures[f"ndcg_cut_{k}"] for k in ks]
        row += [reciprocal if reciprocal >= 1 / k else 0.0 for k in ks]
        row += [figures[f"recall_{k}"] for k in ks] + [figures[f"map_cut_{k}"] for k in ks]
        values[int(query)] = row
    return names, values
