"""Exact top-k over all documents: a product in tiles with a bounded error, then exact scores of what passes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from vembed.evaluation.ranking_keys import NOTHING, as_keys, documents_of, scores_of
from vembed.mining.known_positives import Pairs
from vembed.mining.vectors import VectorStore
from vembed.parallel import collectives
from vembed.parallel.devices import bf16_instructions, matmul_precision
from vembed.parallel.session import Session

DOCUMENT_TILE = 4096
QUERY_TILE = 512
GPU_QUERY_TILE = 1024
"""DOCUMENT_TILE x QUERY_TILE scores exist at once: few calls beside the product, and 4 MB in bfloat16, which stay in a
CPU's cache between the product and the pass over it."""
BLOCK = 32
"""Consecutive documents whose highest score is compared with the threshold; only blocks above it are looked at."""
FIRST = 16_384
"""At most so many of the first documents are one tile: their highest scores give the first threshold."""
WAITING = 48
"""Documents per query that may wait before they are sorted in and the threshold rises."""
ROWS = 1024
"""Exact scores that are computed at once: always so many, since the rounding of a sum may depend on the shape."""
TOO_MANY = 4
"""A first pass in bfloat16 ends where more than so many times k documents per query pass it at once."""
GATHERED_QUERIES = 8192


class TopK:
    """The best documents of some queries, of all documents seen so far."""

    def __init__(self, queries_QD: Tensor, k: int, excluded: Pairs) -> None:
        """`excluded`: (position of the query, document) pairs that are left out. All queries are on one device."""
        self.k = k
        self.device = queries_QD.device
        on_cpu = self.device.type == "cpu"
        size = QUERY_TILE if on_cpu else GPU_QUERY_TILE
        dtype = (
            torch.bfloat16 if on_cpu and bf16_instructions() == "AMX" else torch.float32
        )
        self._queries = [
            _QueryTile(part, k, excluded.among(first, first + len(part)), first, dtype)
            for first, part in zip(
                range(0, len(queries_QD), size),
                torch.split(queries_QD, size),
                strict=True,
            )
        ]
        self._room = _Room(self.device)

    def see(self, documents_SD: Tensor, first: int) -> None:
        """Take in documents first, first + 1, ..., in ascending order of their numbers."""
        documents = _Vectors(documents_SD.to(self.device))
        for queries in self._queries:
            queries.see(documents, first, self._room)

    def keys(self) -> Tensor:
        """[Q, k] one whole number per (score, document), best first; NOTHING where there are fewer than k."""
        if not self._queries:
            return torch.empty((0, self.k), dtype=torch.int64, device=self.device)
        return torch.cat([queries.finish() for queries in self._queries])


class _Room:
    """Memory for scores that all tiles use in turn: fresh memory for each would cost more than what is done in it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = torch.empty(0)

    def scores(self, num_blocks: int, num_queries: int, dtype: torch.dtype) -> Tensor:
        """[B, BLOCK, Q] whatever was there before."""
        shape = (num_blocks, BLOCK, num_queries)
        if self._last.shape != shape or self._last.dtype != dtype:
            self._last = torch.empty(shape, dtype=dtype, device=self._device)
        return self._last


class _Vectors:
    """Vectors, and what they lose in the dtype of the first pass."""

    def __init__(self, vectors_ND: Tensor) -> None:
        self.vectors = vectors_ND
        self.lengths: Tensor = torch.linalg.vector_norm(vectors_ND, dim=1)
        self._rounded: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    def rounded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[N, D] the vectors in a dtype, and [N] the lengths of the differences."""
        if dtype not in self._rounded:
            rounded = self.vectors.to(dtype)
            self._rounded[dtype] = (
                rounded,
                torch.linalg.vector_norm(self.vectors - rounded, dim=1),
            )
        return self._rounded[dtype]


class _QueryTile:
    """Some queries, whose scores of a tile of documents exist at once."""

    def __init__(
        self,
        queries_QD: Tensor,
        k: int,
        excluded: Pairs,
        first_query: int,
        dtype: torch.dtype,
    ) -> None:
        self.queries = _Vectors(queries_QD)
        self.num_queries = len(queries_QD)
        self.k = k
        self.dtype = dtype
        device = queries_QD.device
        # One sorted number per excluded pair, for a binary search among few scores instead of a mask over all.
        codes = (excluded.queries - first_query) << 32 | excluded.documents
        self.excluded = torch.from_numpy(codes).to(device)  # ascending, as pairs are
        self.most_excluded = (
            int(np.bincount(excluded.queries - first_query).max())
            if len(excluded)
            else 0
        )
        self.best = torch.full(
            (self.num_queries, k), NOTHING, dtype=torch.int64, device=device
        )
        self.threshold = torch.full((self.num_queries,), -torch.inf, device=device)
        self.has_threshold = False
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.num_waiting = 0

    def see(self, documents: _Vectors, first: int, room: _Room) -> None:
        """Let the documents wait that may be among the best.

        No document of the k best is lost: its score in the first pass is at most `error` below the exact one."""
        start = 0
        while start < len(documents.vectors):
            start = self._see_some(documents, start, first, room)

    def _see_some(
        self, documents: _Vectors, start: int, first: int, room: _Room
    ) -> int:
        """Take in tiles until enough is found; returns where the next one begins."""
        queries_DQ = self.queries.rounded(self.dtype)[0].T
        vectors_SD = documents.rounded(self.dtype)[0]
        error = self._error(documents)
        lowest = self._lowest(error)
        blocks: list[_Blocks] = []
        num_found = 0
        end = start
        while end < len(vectors_SD) and num_found <= WAITING * self.num_queries:
            part_TD = vectors_SD[
                end : end + (DOCUMENT_TILE if self.has_threshold else FIRST)
            ]
            scores_BLQ = room.scores(
                -(-len(part_TD) // BLOCK), self.num_queries, self.dtype
            )
            scores_TQ = scores_BLQ.view(-1, self.num_queries)
            torch.mm(part_TD, queries_DQ, out=scores_TQ[: len(part_TD)])
            if len(part_TD) < len(scores_TQ):
                scores_TQ[len(part_TD) :] = -torch.inf
            if not self.has_threshold:
                self._first_threshold(scores_BLQ, len(part_TD), error)
                lowest = self._lowest(error)
            comparable_BLQ = scores_BLQ.view(lowest.dtype)
            # Queries are innermost, so that the maximum over a block runs over whole vectors.
            block, query = torch.nonzero(
                comparable_BLQ.amax(1) >= lowest, as_tuple=True
            )
            blocks.append(_Blocks(comparable_BLQ[block, :, query], query, block, end))
            num_found += len(query)
            end += len(part_TD)
        query, document = _reaching(blocks, lowest)
        if (
            self.dtype is torch.bfloat16
            and len(query) > TOO_MANY * (self.k + self.most_excluded) * self.num_queries
        ):
            self.dtype = torch.float32  # the scores are so close to each other that bfloat16 does not tell them apart
            self.has_threshold = False  # a higher one can be found now
            return start
        self._let_wait(query, document, documents, first)
        return end

    def finish(self) -> Tensor:
        self._sort_in()
        return self.best

    def _error(self, documents: _Vectors) -> Tensor:
        """[Q] at most so much does a score of the first pass differ from the exact one, before it is rounded itself.

        |qd - q'd'| <= |q - q'||d| + |q'||d - d'|, and each of two sums of D products is rounded in float32: by at most
        D rounding errors, and by 8 sqrt(D) but for a chance of D exp(-32) (Higham and Mary, 2019)."""
        lost_Q = self.queries.rounded(self.dtype)[1]
        lost_S = documents.rounded(self.dtype)[1]
        lengths_Q = self.queries.lengths
        longest = documents.lengths.amax()
        dim = documents.vectors.shape[1]
        sums = (
            lengths_Q
            * longest
            * min(dim, 8 * math.sqrt(dim))
            * torch.finfo(torch.float32).eps
            + 1e-30
        )
        return lost_Q * longest + (lengths_Q + lost_Q) * lost_S.amax() + sums

    def _lowest(self, error: Tensor) -> Tensor:
        """[Q] the lowest score of the first pass that is looked at. Where all are positive, bits that compare as the
        scores do, and faster."""
        lowest = (
            (self.threshold - error)
            .clamp(min=torch.finfo(self.dtype).min)
            .to(self.dtype)
        )
        if bool((lowest > 0).all()):
            return lowest.view(
                torch.int16 if self.dtype is torch.bfloat16 else torch.int32
            )
        return lowest

    def _first_threshold(
        self, scores_BLQ: Tensor, num_documents: int, error: Tensor
    ) -> None:
        """At least k documents that are not excluded reach the k-th highest of the blocks; few others do."""
        k = (
            self.k + self.most_excluded
        )  # so that k are left when the excluded ones are taken out
        if num_documents >= k:
            among = (
                scores_BLQ.amax(1)
                if len(scores_BLQ) >= 2 * k
                else scores_BLQ.flatten(0, 1)
            )
            reached = among.float().topk(k, dim=0, sorted=False).values.amin(0)
            lowest = reached - reached.abs() * torch.finfo(self.dtype).eps - error
            self.threshold = torch.maximum(self.threshold, lowest)
            self.has_threshold = True

    def _let_wait(
        self, query: Tensor, document: Tensor, documents: _Vectors, first: int
    ) -> None:
        """Compute the exact scores of pairs, and let those above the threshold wait."""
        scores = products(self.queries.vectors, query, documents.vectors, document)
        # Documents come in ascending order: of equal scores the earlier one stays, so above is what counts.
        above = scores > self.threshold[query]
        query = query[above]
        document = first + document[above]
        scores = scores[above]
        keys = as_keys(scores, document)
        if len(self.excluded):
            codes = query << 32 | document
            at = torch.searchsorted(self.excluded, codes).clamp_(
                max=len(self.excluded) - 1
            )
            allowed = self.excluded[at] != codes
            query = query[allowed]
            keys = keys[allowed]
        self.waiting.append((query, keys))
        self.num_waiting += len(query)
        # Sorted in rarely: a stale threshold lets a few more wait, and changes no result.
        if self.num_waiting > WAITING * self.num_queries:
            self._sort_in()

    def _sort_in(self) -> None:
        """Keep the k best of those so far and those that wait, and raise the threshold."""
        if not self.num_waiting:
            return
        query = torch.cat([query for query, _ in self.waiting])
        keys = torch.cat([keys for _, keys in self.waiting])
        self.waiting = []
        self.num_waiting = 0
        query, order = torch.sort(query, stable=True)
        counts = torch.bincount(query, minlength=self.num_queries)
        starts = torch.cumsum(counts, 0) - counts
        table = torch.full(
            (self.num_queries, int(counts.max())),
            NOTHING,
            dtype=torch.int64,
            device=keys.device,
        )
        table[query, torch.arange(len(query), device=keys.device) - starts[query]] = (
            keys[order]
        )
        self.best = torch.cat([self.best, table], dim=1).topk(self.k, dim=1).values
        # The lowest key is NOTHING where there are fewer than k, and then the threshold stays.
        self.threshold = torch.maximum(self.threshold, scores_of(self.best[:, -1]))
        self.has_threshold = True


@dataclass(frozen=True)
class _Blocks:
    """Blocks of a tile whose highest score reaches the lowest that is looked at."""

    values: Tensor
    query: Tensor
    block: Tensor
    start: int
    """Position of the first document of the tile."""


def _reaching(parts: list[_Blocks], lowest: Tensor) -> tuple[Tensor, Tensor]:
    """The queries and documents of the scores in some blocks that reach the lowest that is looked at."""
    values_NL = torch.cat([part.values for part in parts])
    query = torch.cat([part.query for part in parts])
    counts = torch.tensor([len(part.query) for part in parts], device=query.device)
    starts = torch.tensor(
        [part.start for part in parts], device=query.device
    ).repeat_interleave(counts)
    first = starts + torch.cat([part.block for part in parts]) * BLOCK
    row, place = torch.nonzero(values_NL >= lowest[query][:, None], as_tuple=True)
    return query[row], first[row] + place


def search(
    queries_QD: Tensor,
    store: VectorStore,
    num_candidates: int,
    k: int,
    excluded: Pairs,
    session: Session,
) -> tuple[np.ndarray, np.ndarray]:
    """[Q, k] numbers of the best documents among the first `num_candidates`, and their scores; best first, of equal
    scores the lower number first; -1 and -inf where there are fewer.

    Collective: every rank searches its shards for all queries and gets the same result as one rank alone would.
    """
    best = TopK(queries_QD.to(session.device), k, excluded)
    with matmul_precision("highest"):  # the bound on the error is that of float32
        for shard in store.of_rank(session):
            if shard.first < num_candidates:
                best.see(store.read(shard)[: num_candidates - shard.first], shard.first)
    keys = _merged(best.keys(), k, session.world_size).cpu()
    return documents_of(keys).numpy(), scores_of(keys).numpy()


def pair_scores(
    queries_QD: Tensor, store: VectorStore, pairs: Pairs, session: Session
) -> np.ndarray:
    """The score of each pair (position of the query, document). Collective: each rank looks up its own shards."""
    scores = torch.zeros(len(pairs))
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
            scores[part] = torch.einsum(
                "nd,nd->n", queries_QD[pairs.queries[part]], documents
            )
    # Each pair's document is in one shard, so all other ranks add 0.
    return collectives.sum_tensor(scores).numpy()


def products(
    queries_QD: Tensor, query: Tensor, documents_SD: Tensor, document: Tensor
) -> Tensor:
    """[N] the float32 products of pairs of rows, whose bits depend on nothing but the two rows."""
    missing = -len(query) % ROWS
    queries = torch.split(pad(query, (0, missing)), ROWS)
    documents = torch.split(pad(document, (0, missing)), ROWS)
    scores = []
    for query_rows, document_rows in zip(queries, documents, strict=True):
        # index_select copies whole rows, which [...] does not.
        query_vectors = queries_QD.index_select(0, query_rows)
        document_vectors = documents_SD.index_select(0, document_rows)
        scores.append(query_vectors.mul_(document_vectors).sum(1))
    return torch.cat(scores)[: len(query)]


def _merged(keys_QK: Tensor, k: int, world_size: int) -> Tensor:
    """The k best over all ranks, on every rank."""
    if world_size == 1:
        return keys_QK
    parts = []
    for part in torch.split(keys_QK, GATHERED_QUERIES):
        gathered = collectives.all_gather_rows(part, [len(part)] * world_size)
        parts.append(
            gathered.view(world_size, len(part), k)
            .transpose(0, 1)
            .reshape(len(part), -1)
            .topk(k, 1)
            .values
        )
    return torch.cat(parts) if parts else keys_QK
