"""Exact top-k over all documents in tiles: beside the matrix product, one pass over each tile of scores."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vembed.distributed import collectives
from vembed.distributed.session import Session
from vembed.evaluation.ranking_keys import NOTHING, as_keys, documents_of, scores_of
from vembed.mining.known import Pairs
from vembed.mining.vectors import VectorStore

DOCUMENT_TILE = 4096
QUERY_TILE = 1024
"""At most DOCUMENT_TILE x QUERY_TILE scores exist at once: 16 MiB, so that the calls beside the product are few."""
BLOCK, LARGE_BLOCK = 16, 64
"""Documents whose highest score is compared with the threshold first; only blocks above it are looked at. They are
large once hits are rare."""
FIRST = 4096
"""Documents that are sorted tile by tile before the threshold decides: it is high enough then that few pass."""
MANY = 65_536
"""Documents after which hits are rare."""
WAITING = 48
"""Candidates per query that may wait before they are sorted in and the threshold rises."""
GATHERED_QUERIES = 8192


class TopK:
    """The best documents of some queries, of all tiles seen so far."""

    def __init__(self, queries_QD: Tensor, k: int, excluded: Pairs) -> None:
        """`excluded`: (position of the query, document) pairs that are left out. All queries are on one device."""
        self.k = k
        self.device = queries_QD.device
        self._tiles = [
            _QueryTile(part, k, excluded.among(first, first + len(part)), first)
            for first, part in zip(
                range(0, len(queries_QD), QUERY_TILE), torch.split(queries_QD, QUERY_TILE), strict=True
            )
        ]
        self._room = _Room(self.device)

    def see(self, documents_TD: Tensor, first: int) -> None:
        """Take in documents first, first + 1, ..., at most DOCUMENT_TILE, in ascending order of their numbers."""
        documents_DT = documents_TD.to(self.device).T
        for tile in self._tiles:
            tile.see(documents_DT, first, self._room)

    def keys(self) -> Tensor:
        """[Q, k] one whole number per (score, document), best first; NOTHING where there are fewer than k."""
        if not self._tiles:
            return torch.empty((0, self.k), dtype=torch.int64, device=self.device)
        return torch.cat([tile.finish() for tile in self._tiles])


class _Room:
    """Memory that all tiles use in turn: fresh memory for each would cost more than what is done in it."""

    def __init__(self, device: torch.device) -> None:
        self.scores = torch.empty(DOCUMENT_TILE * QUERY_TILE, device=device)
        self.highest = torch.empty(DOCUMENT_TILE // BLOCK * QUERY_TILE, device=device)
        self.is_above = torch.empty(DOCUMENT_TILE // BLOCK * QUERY_TILE, dtype=torch.bool, device=device)


class _QueryTile:
    """At most QUERY_TILE queries."""

    def __init__(self, queries_QD: Tensor, k: int, excluded: Pairs, first_query: int) -> None:
        self.queries_QD = queries_QD
        self.num_queries, self.k = len(queries_QD), k
        device = queries_QD.device
        # One sorted number per excluded pair, for a binary search among few scores instead of a mask over all.
        codes = (excluded.queries - first_query) << 32 | excluded.documents
        self.excluded = torch.from_numpy(codes).to(device)  # ascending, as pairs are
        self.most_excluded = int(np.bincount(excluded.queries - first_query).max()) if len(excluded) else 0
        self.best = torch.full((self.num_queries, k), NOTHING, dtype=torch.int64, device=device)
        self.threshold = torch.full((self.num_queries,), -torch.inf, device=device)
        self.num_seen = 0
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.num_waiting = 0

    def see(self, documents_DT: Tensor, first: int, room: _Room) -> None:
        num_documents = documents_DT.shape[1]
        scores_QT = room.scores[: self.num_queries * num_documents].view(self.num_queries, num_documents)
        torch.mm(self.queries_QD, documents_DT, out=scores_QT)
        before, self.num_seen = self.num_seen, self.num_seen + num_documents
        # The first tiles have no threshold yet, or a low one: their best are selected outright.
        if before < FIRST:
            self._take_best(scores_QT, first)
            return
        size = BLOCK if before < MANY else LARGE_BLOCK
        width = num_documents // size
        if width:
            # Block b is the columns b, b + width, b + 2 width, ...: the maximum over a block runs over whole vectors.
            blocks_QBW = scores_QT.as_strided((self.num_queries, size, width), (num_documents, width, 1))
            highest_QW = room.highest[: self.num_queries * width].view(self.num_queries, width)
            is_above_QW = room.is_above[: self.num_queries * width].view(self.num_queries, width)
            torch.amax(blocks_QBW, 1, out=highest_QW)
            torch.gt(highest_QW, self.threshold[:, None], out=is_above_QW)
            query, block = torch.nonzero(is_above_QW, as_tuple=True)
            self._take(blocks_QBW[query, :, block], query, first + block, width)
        whole = width * size
        if whole < num_documents:
            everyone = torch.arange(self.num_queries, device=scores_QT.device)
            self._take(scores_QT[:, whole:], everyone, torch.full_like(everyone, first + whole), 1)
        # Sorted in rarely: a stale threshold lets a few more wait, and changes no result.
        if self.num_waiting > WAITING * self.num_queries:
            self._sort_in()

    def finish(self) -> Tensor:
        self._sort_in()
        return self.best

    def _take_best(self, scores_QT: Tensor, first: int) -> None:
        """Let the k best of one of the first tiles wait, and all that are equal to the last of them."""
        # So many more that k are left when the excluded ones are taken out.
        k = min(self.k + self.most_excluded, scores_QT.shape[1])
        lowest = torch.maximum(scores_QT.topk(k, dim=1, sorted=False).values.amin(1), self.threshold)
        query, document = torch.nonzero(scores_QT >= lowest[:, None], as_tuple=True)
        self._wait(query, as_keys(scores_QT[query, document], first + document), first + document)
        self._sort_in()

    def _take(self, values_NB: Tensor, query: Tensor, first: Tensor, stride: int) -> None:
        """Let those of some blocks wait that are above the threshold; each block has its query and first document, and
        its documents are `stride` apart.

        Documents come in ascending order: of equal scores the earlier one stays, so above is what counts."""
        row, place = torch.nonzero(values_NB > self.threshold[query][:, None], as_tuple=True)
        documents = first[row] + place * stride
        self._wait(query[row], as_keys(values_NB[row, place], documents), documents)

    def _wait(self, query: Tensor, keys: Tensor, documents: Tensor) -> None:
        if len(self.excluded):
            codes = query << 32 | documents
            place = torch.searchsorted(self.excluded, codes).clamp_(max=len(self.excluded) - 1)
            allowed = self.excluded[place] != codes
            query, keys = query[allowed], keys[allowed]
        self.waiting.append((query, keys))
        self.num_waiting += len(query)

    def _sort_in(self) -> None:
        if not self.num_waiting:
            return
        query = torch.cat([one for one, _ in self.waiting])
        keys = torch.cat([one for _, one in self.waiting])
        self.waiting, self.num_waiting = [], 0
        query, order = torch.sort(query, stable=True)
        counts = torch.bincount(query, minlength=self.num_queries)
        starts = torch.cumsum(counts, 0) - counts
        table = torch.full((self.num_queries, int(counts.max())), NOTHING, dtype=torch.int64, device=keys.device)
        table[query, torch.arange(len(query), device=keys.device) - starts[query]] = keys[order]
        self._keep(table)

    def _keep(self, keys_QN: Tensor) -> None:
        """The k best of those so far and these."""
        self.best = torch.cat([self.best, keys_QN], dim=1).topk(self.k, dim=1).values
        last = self.best[:, -1]
        self.threshold = scores_of(last)  # -inf where there are fewer than k


def search(
    queries_QD: Tensor, store: VectorStore, num_candidates: int, k: int, excluded: Pairs, session: Session
) -> tuple[np.ndarray, np.ndarray]:
    """[Q, k] numbers of the best documents among the first `num_candidates`, and their scores; best first, of equal
    scores the lower number first; -1 and -inf where there are fewer.

    Collective: every rank searches its shards for all queries and gets the same result as one rank alone would.
    """
    best = TopK(queries_QD.to(session.device), k, excluded)
    for shard in store.of_rank(session):
        if shard.first >= num_candidates:
            continue
        for first, tile in store.tiles(shard, DOCUMENT_TILE):
            if first < num_candidates:
                best.see(tile[: num_candidates - first], first)
    keys = _merged(best.keys(), k, session.world_size).cpu()
    return documents_of(keys).numpy(), scores_of(keys).numpy()


def pair_scores(queries_QD: Tensor, store: VectorStore, pairs: Pairs, session: Session) -> np.ndarray:
    """The score of each pair (position of the query, document). Collective: each rank looks up its own shards."""
    found = torch.zeros(len(pairs))
    order = np.argsort(pairs.documents, kind="stable")
    ordered = pairs.documents[order]
    for shard in store.of_rank(session):
        begin, end = np.searchsorted(ordered, [shard.first, shard.last])
        if begin == end:
            continue
        chosen = order[begin:end]
        for start in range(0, len(chosen), DOCUMENT_TILE):
            part = chosen[start : start + DOCUMENT_TILE]
            documents = store.rows(shard, pairs.documents[part])
            found[part] = torch.einsum("nd,nd->n", queries_QD[pairs.queries[part]], documents)
    # Each pair's document is in one shard, so all other ranks add 0.
    return collectives.sum_tensor(found).numpy()


def _merged(keys_QK: Tensor, k: int, world_size: int) -> Tensor:
    """The k best over all ranks, on every rank."""
    if world_size == 1:
        return keys_QK
    parts = []
    for part in torch.split(keys_QK, GATHERED_QUERIES):
        gathered = collectives.all_gather_rows(part, [len(part)] * world_size)
        parts.append(gathered.view(world_size, len(part), k).transpose(0, 1).reshape(len(part), -1).topk(k, 1).values)
    return torch.cat(parts) if parts else keys_QK
