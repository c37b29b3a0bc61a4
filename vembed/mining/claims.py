"""Claims: which candidates of a query are nearer to another query of the data and its known positive.

A document d is claimed if some other query q' with a known positive p' has s(q', d) + s(p', d) at least 5 % above the
same sum of the query itself. A relevant document that nobody has marked is near to its query and to the query's
positives, so few claimed candidates are relevant; a hard negative is usually near to what another query asks for.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor

from vembed.mining.known import Pairs
from vembed.mining.search import pair_scores, search
from vembed.mining.vectors import VectorStore
from vembed.parallel.session import Session

MARGIN = 0.05
"""Share by which the sum of the other query is above that of the query itself."""
ABOVE = 0.05
"""Share of the positive's score by which a claimed candidate may be above it: the default margin, on the other side."""
CONSIDERED = 40
"""Candidates per query for which claims are looked for, the best ones below the limit of claimed candidates."""
NEAREST = 8
"""Known pairs nearest to a candidate that are looked at."""
BLOCK = 32_768
"""Documents that are searched for together."""


def claimed_limit(lowest_Q: np.ndarray) -> np.ndarray:
    """[Q] the highest score of a claimed candidate, from the lowest score of each query's known positives."""
    found: np.ndarray = lowest_Q + ABOVE * np.abs(
        np.where(np.isfinite(lowest_Q), lowest_Q, 0.0)
    )
    return found


class ClaimFinder:
    """Finds claims by an exact search among the sums of the vectors of all known pairs."""

    def __init__(
        self,
        queries: VectorStore,
        documents: VectorStore,
        positives: Pairs,
        folder: Path,
        session: Session,
    ) -> None:
        """Write the vectors of the pairs that are not in `folder` yet. Collective."""
        self._documents, self._positives, self._session = documents, positives, session
        # Part of a file's name: vectors of other pairs are never read for these.
        # The product may wrap around in int64, which changes nothing: it is a hash.
        keys = (
            queries.keys[positives.queries] * 31 + documents.keys[positives.documents]
        )
        self._pairs = VectorStore(folder, "query", keys, queries.dtype_name)
        self._codes = (
            positives.queries << 32 | positives.documents
        )  # ascending, as pairs are
        for shard in self._pairs.missing(self._pairs.of_rank(session)):
            own = slice(shard.first, shard.last)
            # Not normalised: s(q', d) + s(p', d) is the dot product of d with this sum.
            total = queries.take(positives.queries[own]) + documents.take(
                positives.documents[own]
            )
            self._pairs.write(shard, total.numpy())
        session.barrier()

    def claimed(
        self,
        first: int,
        candidates_QK: np.ndarray,
        scores_QK: np.ndarray,
        limit_Q: np.ndarray,
    ) -> np.ndarray:
        """[Q, K] which candidates of queries first, first + 1, ... are claimed. Collective.

        Only the first CONSIDERED of each query that score at most its limit are looked at.
        """
        eligible = (candidates_QK >= 0) & (scores_QK <= limit_Q[:, None])
        eligible &= np.cumsum(eligible, axis=1) <= CONSIDERED
        found = np.zeros(candidates_QK.shape, bool)
        place = np.flatnonzero(eligible)
        if not len(place) or not len(self._positives):
            return found
        # Many queries share candidates: each distinct one is searched for once.
        documents, which = np.unique(candidates_QK.ravel()[place], return_inverse=True)
        query = first + place // candidates_QK.shape[1]
        claimed = np.zeros(len(place), bool)
        for start in range(0, len(documents), BLOCK):
            inside = np.flatnonzero((which >= start) & (which < start + BLOCK))
            vectors = self._documents.take(documents[start : start + BLOCK])
            nothing = Pairs(np.zeros(0, np.int64), np.zeros(0, np.int64))
            nearest, scores = search(
                vectors,
                self._pairs,
                len(self._positives),
                NEAREST,
                nothing,
                self._session,
            )
            row = which[inside] - start
            own = self._own(query[inside], row, vectors)
            claimed[inside] = self._is_claimed(
                query[inside], own, nearest[row], scores[row]
            )
        found.ravel()[place] = claimed
        return found

    def _own(
        self, query_N: np.ndarray, row_N: np.ndarray, vectors: Tensor
    ) -> np.ndarray:
        """[n] the highest sum of a query's own pairs for the vector in a row; -inf where it has none. Collective."""
        # Pairs are sorted by query, so those of one are a range; the ranges of all are laid end to end.
        begin, end = (
            np.searchsorted(self._positives.queries, query_N + one) for one in (0, 1)
        )
        count = end - begin
        position = np.repeat(np.arange(len(query_N)), count)
        pair = (
            np.arange(len(position))
            - np.repeat(np.cumsum(count) - count, count)
            + np.repeat(begin, count)
        )
        found = np.full(len(query_N), -np.inf)
        np.maximum.at(
            found,
            position,
            pair_scores(
                vectors, self._pairs, Pairs(row_N[position], pair), self._session
            ),
        )
        return found

    def _is_claimed(
        self,
        query_N: np.ndarray,
        own_N: np.ndarray,
        pairs_NR: np.ndarray,
        scores_NR: np.ndarray,
    ) -> np.ndarray:
        """[n] True where a pair of another query is nearer by the margin than all that speak for the query itself."""
        there = pairs_NR >= 0
        pairs = np.where(there, pairs_NR, 0)
        # A pair speaks for the query if it is its own, or if the pair's document is a positive of the query too.
        codes = query_N[:, None] << 32 | self._positives.documents[pairs]
        shared = (
            self._codes[
                np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
            ]
            == codes
        )
        speaks = there & (shared | (self._positives.queries[pairs] == query_N[:, None]))
        own = np.maximum(own_N, np.where(speaks, scores_NR, -np.inf).max(axis=1))
        other = (
            np.where(there & ~speaks, scores_NR, -np.inf).max(axis=1).astype(np.float64)
        )
        is_there = np.isfinite(other)
        limit = np.where(is_there, other, 0.0)
        found: np.ndarray = is_there & (own <= limit - MARGIN * np.abs(limit))
        return found
