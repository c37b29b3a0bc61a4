"""Exact top-k of dot products: a first pass in tiles with a bounded error, then exact scores of what passes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from vembed.parallel.devices import matmul_precision

NOTHING = torch.iinfo(torch.int64).min
"""Key of an empty place of a ranking. It sorts last."""
_LOW_32 = 0xFFFFFFFF
_SPREAD = 0x9E3779B1
_GATHER = pow(_SPREAD, -1, 2**32)
"""Modulo 2**32 the one factor undoes the other: multiplied by the first, neighbouring numbers lie far apart."""
EPSILON = torch.finfo(torch.float32).eps

DOCUMENT_TILE = 4096
QUERY_TILE = 512
GPU_QUERY_TILE = 1024
"""DOCUMENT_TILE x QUERY_TILE scores exist at once: few calls beside the product, and 8 MB, which stay in a CPU's cache
between the product and the pass over it."""
BLOCK_DOCUMENTS = 32
"""Consecutive documents whose highest score is compared with the threshold. Only blocks that reach it are searched."""
FIRST_TILE_DOCUMENTS = 16_384
"""Size of the first tile: the highest scores in it give the first threshold."""
MAX_WAITING = 48
"""Documents per query that may wait before they are sorted in and the threshold rises."""
EXACT_SCORES_AT_ONCE = 1024
"""Exact scores that are computed at once. Always so many, since the rounding of a sum may depend on the shape."""


def as_keys(scores: Tensor, documents: Tensor) -> Tensor:
    """Return one whole number per score and document that sorts by score, without ties.

    Documents with equal scores are sorted by a permutation of their numbers. Relevant ones often stand first in a file, and
    must not profit from that.
    """
    bits = (scores.contiguous() + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    # The bits of positive floats sort as integers. Those of negative floats sort in reverse; flipping all but the sign
    # bit corrects that. The order then fills the upper 32 bits, the place in the permutation the lower 32.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    return (ordered << 32) + (documents * _SPREAD & _LOW_32)


def documents_of(keys: Tensor) -> Tensor:
    """Return the documents of keys, -1 for NOTHING."""
    return torch.where(keys == NOTHING, -1, keys * _GATHER & _LOW_32)


def scores_of(keys: Tensor) -> Tensor:
    """Return the scores of keys, -inf for NOTHING."""
    ordered = (keys >> 32).to(torch.int32)
    bits = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return torch.where(keys == NOTHING, -torch.inf, bits.view(torch.float32))


@dataclass(frozen=True)
class Pairs:
    """(query, document) pairs without repetition, ordered by query, then document."""

    queries: np.ndarray
    documents: np.ndarray

    def __len__(self) -> int:
        return len(self.queries)

    @classmethod
    def of(
        cls,
        queries: Any,
        documents: Any,
    ) -> Pairs:
        """Sort pairs and drop those that occur again."""
        both = np.stack([queries, documents], axis=1).astype(np.int64)
        unique = np.unique(both, axis=0)
        return cls(unique[:, 0].copy(), unique[:, 1].copy())

    @classmethod
    def union(cls, parts: Sequence[Pairs]) -> Pairs:
        """All pairs of several lists."""
        queries = np.concatenate([part.queries for part in parts])
        return cls.of(queries, np.concatenate([part.documents for part in parts]))

    @property
    def codes(self) -> np.ndarray:
        """One number per pair, ascending. Both numbers have less than 32 bits."""
        codes: np.ndarray = self.queries << 32 | self.documents
        return codes

    def bounds(self, num_queries: int) -> np.ndarray:
        """[num_queries + 1] where the pairs of each query begin, and the end of the last."""
        return np.searchsorted(self.queries, np.arange(num_queries + 1))

    def from_query(
        self,
        first: int,
        last: int,
    ) -> Pairs:
        """The pairs of queries first .. last - 1, whose queries count from `first`."""
        begin, end = np.searchsorted(self.queries, [first, last])
        return Pairs(self.queries[begin:end] - first, self.documents[begin:end])


NO_PAIRS = Pairs(np.zeros(0, np.int64), np.zeros(0, np.int64))


class TopK:
    """The documents with the highest dot products for each query, best first, while documents arrive in any order.

    Equal scores are ordered as `as_keys` says. The bits of a score depend on the two vectors alone, so the rankings
    are the same for any tiles and any number of ranks.
    """

    def __init__(
        self,
        queries_QD: Tensor,
        k: int,
        excluded: Pairs,
    ) -> None:
        """`excluded`: (row of the query, number of the document) pairs that are left out."""
        self.device = queries_QD.device
        size = QUERY_TILE if self.device.type == "cpu" else GPU_QUERY_TILE
        self._tiles: list[_QueryTile] = []
        for first in range(0, len(queries_QD), size):
            of_tile = excluded.from_query(first, first + size)
            tile = _QueryTile(queries_QD[first : first + size], k, of_tile)
            self._tiles.append(tile)
        self._empty = torch.empty((0, k), dtype=torch.int64, device=self.device)

    def add(
        self,
        documents_SD: Tensor,
        numbers_S: Tensor,
    ) -> None:
        """Compare the queries with documents that have these numbers."""
        documents_SD = documents_SD.to(self.device)
        numbers_S = numbers_S.to(self.device)
        # The bound on the error is that of float32. In TF32 documents less than 1e-3 apart would change places.
        with matmul_precision("highest"):
            for tile in self._tiles:
                tile.add(documents_SD, numbers_S)

    def keys(self) -> Tensor:
        """[Q, k] one whole number per (score, document), best first; NOTHING where there are fewer than k."""
        for tile in self._tiles:
            tile.sort_in()
        return torch.cat([self._empty, *(tile.best for tile in self._tiles)])

    def rankings(self) -> np.ndarray:
        """[Q, k] numbers of documents, best first; -1 where there are fewer than k."""
        return documents_of(self.keys()).cpu().numpy()


def top_k(
    queries_QD: np.ndarray,
    documents_ND: np.ndarray,
    k: int,
    excluded: Pairs = NO_PAIRS,
) -> np.ndarray:
    """[Q, k] the documents with the highest dot products, as `TopK` finds them."""
    search = TopK(torch.from_numpy(queries_QD), k, excluded)
    search.add(torch.from_numpy(documents_ND), torch.arange(len(documents_ND)))
    return search.rankings()


class _QueryTile:
    """A tile of queries: its scores with one tile of documents are in memory at once."""

    def __init__(
        self,
        queries_QD: Tensor,
        k: int,
        excluded: Pairs,
    ) -> None:
        self.queries = queries_QD
        self.lengths = torch.linalg.vector_norm(queries_QD, dim=1)
        self.num_queries = len(queries_QD)
        self.k = k
        device = queries_QD.device
        self.excluded = torch.from_numpy(excluded.codes).to(device)
        self.most_excluded = int(np.bincount(excluded.queries).max(initial=0))
        self.best = torch.full((self.num_queries, k), NOTHING, device=device)
        self.threshold = torch.full_like(self.lengths, -torch.inf)
        self.has_threshold = False
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.num_waiting = 0

    def add(
        self,
        documents_SD: Tensor,
        numbers_S: Tensor,
    ) -> None:
        """Collect the documents that may be among the best. `sort_in` merges them.

        No document of the k best is lost: its score in the first pass is at most `error` below the exact one. Each of
        two sums of D products is rounded: by at most D rounding errors, and by 8 sqrt(D) but for a chance of D exp(-32)
        (Higham and Mary, 2019).
        """
        dim = documents_SD.shape[1]
        longest = torch.linalg.vector_norm(documents_SD, dim=1).amax()
        num_errors = min(dim, 8 * math.sqrt(dim)) * EPSILON
        error_Q = self.lengths * longest * num_errors + 1e-30
        start = 0
        while start < len(documents_SD):
            end = start + (
                DOCUMENT_TILE if self.has_threshold else FIRST_TILE_DOCUMENTS
            )
            tile_TD = documents_SD[start:end]
            query, document = self._passing(tile_TD, error_Q)
            scores = products(
                self.queries,
                query,
                tile_TD,
                document,
            )
            number = numbers_S[start:end][document]
            keys = as_keys(scores, number)
            is_better = keys > self.best[query, -1]
            if len(self.excluded):
                is_better &= ~torch.isin(query << 32 | number, self.excluded)
            self.waiting.append((query[is_better], keys[is_better]))
            self.num_waiting += int(is_better.sum())
            # Sorted in rarely: a stale threshold lets a few more wait, and changes no result.
            if self.num_waiting > MAX_WAITING * self.num_queries:
                self.sort_in()
            start = end

    def sort_in(self) -> None:
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
        # [queries, most documents that wait for one query], filled up with NOTHING.
        column = torch.arange(len(query), device=keys.device) - starts[query]
        table = keys.new_full((self.num_queries, int(counts.max())), NOTHING)
        table[query, column] = keys[order]
        candidates = torch.cat([self.best, table], dim=1)
        self.best = candidates.topk(self.k, dim=1).values
        # The lowest key is NOTHING where there are fewer than k, and then the threshold stays.
        self.threshold = torch.maximum(self.threshold, scores_of(self.best[:, -1]))
        self.has_threshold = True

    def _passing(
        self,
        tile_TD: Tensor,
        error_Q: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the queries and the documents of a tile whose product reaches the threshold but for the error."""
        scores_TQ = tile_TD @ self.queries.T
        missing = -len(tile_TD) % BLOCK_DOCUMENTS
        if missing:
            scores_TQ = pad(scores_TQ, (0, 0, 0, missing), value=-torch.inf)
        scores_BLQ = scores_TQ.view(-1, BLOCK_DOCUMENTS, self.num_queries)
        # Queries are innermost, so that the maximum over a block runs over whole vectors.
        highest_BQ = scores_BLQ.amax(1)
        # So that k are left when the excluded ones are taken out.
        num_wanted = self.k + self.most_excluded
        if not self.has_threshold and len(tile_TD) >= num_wanted:
            # At least k documents that are not excluded reach the k-th highest of the blocks; few others do.
            among = highest_BQ if len(highest_BQ) >= 2 * num_wanted else scores_TQ
            reached = among.topk(num_wanted, dim=0, sorted=False).values.amin(0)
            lowest = reached - reached.abs() * EPSILON - error_Q
            self.threshold = torch.maximum(self.threshold, lowest)
            self.has_threshold = True
        lowest = (self.threshold - error_Q).clamp(min=torch.finfo(torch.float32).min)
        block, query = torch.nonzero(highest_BQ >= lowest, as_tuple=True)
        passes = scores_BLQ[block, :, query] >= lowest[query][:, None]
        row, place = torch.nonzero(passes, as_tuple=True)
        return query[row], block[row] * BLOCK_DOCUMENTS + place


def products(
    queries_QD: Tensor,
    query: Tensor,
    documents_SD: Tensor,
    document: Tensor,
) -> Tensor:
    """[N] the float32 products of pairs of rows, whose bits depend on nothing but the two rows."""
    missing = -len(query) % EXACT_SCORES_AT_ONCE
    queries = torch.split(pad(query, (0, missing)), EXACT_SCORES_AT_ONCE)
    documents = torch.split(pad(document, (0, missing)), EXACT_SCORES_AT_ONCE)
    scores = []
    for query_rows, document_rows in zip(queries, documents, strict=True):
        # index_select copies whole rows, which [...] does not.
        query_vectors = queries_QD.index_select(0, query_rows)
        document_vectors = documents_SD.index_select(0, document_rows)
        scores.append(query_vectors.mul_(document_vectors).sum(1))
    return torch.cat(scores)[: len(query)]
