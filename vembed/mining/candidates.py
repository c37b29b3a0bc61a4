"""Candidates: the best documents of every query by all retrievers together, in chunks of queries, kept on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor

from vembed.data.cache import short_hash
from vembed.mining.config import BM25, MineConfig, Retriever
from vembed.mining.documents import Documents, array_identity
from vembed.mining.encoders import (
    Encoder,
    encoder_identity,
    encoder_precision,
    load_encoder,
)
from vembed.mining.known import Known, Pairs
from vembed.mining.retrievers import LexicalRetriever
from vembed.mining.search import pair_scores, search
from vembed.mining.vectors import VectorStore, encode_missing
from vembed.parallel.session import Session
from vembed.progress import ProgressReport

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


CHUNK = 32_768
"""Queries that are searched for together: what bounds the memory, and what a kill in the search loses."""


class Searcher(Protocol):
    """A retriever that is ready to search. Its methods are collective."""

    def search(
        self, first: int, last: int, k: int, excluded: Pairs
    ) -> tuple[np.ndarray, np.ndarray]:
        """[Q, k] best candidates for queries first .. last - 1 and their scores; -1 and -inf where there are fewer."""
        ...

    def pair_scores(self, first: int, pairs: Pairs) -> np.ndarray:
        """The score of each pair, whose queries count from `first`."""
        ...


class DenseRetriever:
    """Vectors of a model."""

    def __init__(
        self,
        retriever: Retriever,
        config: MineConfig,
        folder: Path,
        documents: Documents,
        known: Known,
        session: Session,
    ) -> None:
        """Encode what is not on disk yet. Collective."""
        self._session, self._num_candidates = session, documents.num_candidates
        self._store, self._queries, self.num_encoded = encode_all(
            retriever, config, folder, documents, known, session
        )

    def search(
        self, first: int, last: int, k: int, excluded: Pairs
    ) -> tuple[np.ndarray, np.ndarray]:
        """[Q, k] best candidates for queries first .. last - 1 and their scores."""
        queries = self._queries.between(first, last)
        return search(
            queries, self._store, self._num_candidates, k, excluded, self._session
        )

    def pair_scores(self, first: int, pairs: Pairs) -> np.ndarray:
        """The score of each pair, whose queries count from `first`."""
        if not len(pairs):
            return np.zeros(0, np.float32)
        queries = self._queries.between(first, first + int(pairs.queries.max()) + 1)
        return pair_scores(queries, self._store, pairs, self._session)

    def claims(self, positives: Pairs) -> ClaimFinder:
        """Return a finder of claims by this model. Collective."""
        return ClaimFinder(
            self._queries,
            self._store,
            positives,
            self._queries.folder / "pairs",
            self._session,
        )


@dataclass(frozen=True)
class Candidates:
    """Candidates of consecutive queries."""

    first: int
    documents: np.ndarray
    """[Q, K] numbers of documents, best first; -1 where there are fewer."""
    scores: np.ndarray
    """[Q, K] what the first model gives them."""
    positives: Pairs
    """Known positives of these queries; queries count from `first`."""
    positive_scores: np.ndarray
    """Scores of the known positives by the first model."""
    claimed: np.ndarray
    """[Q, K] which candidates another query claims, with `prefer_claimed`; otherwise none."""

    def __len__(self) -> int:
        return len(self.documents)

    @classmethod
    def unclaimed(
        cls,
        first: int,
        documents: np.ndarray,
        scores: np.ndarray,
        positives: Pairs,
        positive_scores: np.ndarray,
    ) -> Candidates:
        """Candidates of which none is known to be claimed."""
        return cls(
            first,
            documents,
            scores,
            positives,
            positive_scores,
            np.zeros(documents.shape, bool),
        )

    def lowest_positive(self) -> np.ndarray:
        """[Q] the lowest score of each query's known positives, inf where none is known."""
        lowest = np.full(len(self), np.inf)
        np.minimum.at(lowest, self.positives.queries, self.positive_scores)
        return lowest


def with_claims(candidates: Candidates, claims: ClaimFinder | None) -> Candidates:
    """Return the candidates with what a finder says. Collective."""
    if claims is None:
        return candidates
    limit = claimed_limit(candidates.lowest_positive())
    return replace(
        candidates,
        claimed=claims.claimed(
            candidates.first, candidates.documents, candidates.scores, limit
        ),
    )


class CandidateStore:
    """Searches for all queries chunk by chunk, and remembers what was found."""

    def __init__(
        self,
        config: MineConfig,
        documents: Documents,
        known: Known,
        folder: Path,
        session: Session,
    ) -> None:
        self._config, self._known, self._folder, self._session = (
            config,
            known,
            folder,
            session,
        )
        self._excluded = known.excluded(with_negatives=config.keep_negatives)
        self._retrievers = config.all_retrievers()
        self._searchers: list[Searcher] = [
            LexicalRetriever(folder, documents, known, session)
            if one.model == BM25
            else DenseRetriever(one, config, folder, documents, known, session)
            for one in self._retrievers
        ]
        self._claims: ClaimFinder | None = None
        dense = [
            number for number, one in enumerate(self._retrievers) if one.model != BM25
        ]
        # Limits are on the scores of one model: the first dense one, since those of BM25 have no common scale.
        self._primary = self._searchers[dense[0] if dense else 0]
        if config.takes_claimed and isinstance(self._primary, DenseRetriever):
            self._claims = self._primary.claims(known.positives)
        self._name = self._identity(documents)

    @property
    def num_encoded(self) -> int:
        """Vectors that were computed now, and not found on disk."""
        return sum(
            one.num_encoded
            for one in self._searchers
            if isinstance(one, DenseRetriever)
        )

    def find_all(self) -> None:
        """Search for every query whose chunk is not on disk yet. Collective."""
        with ProgressReport("searching", active=self._session.is_main) as progress:
            for first in range(0, self._known.num_queries, CHUNK):
                # All ranks see the folder, and files appear only before the barrier below: they agree on what is
                # missing.
                if not self._path(first).exists():
                    found = self._find(
                        first, min(first + CHUNK, self._known.num_queries)
                    )
                    if self._session.is_main:
                        self._save(found)
                    self._session.barrier()
                progress(
                    min(first + CHUNK, self._known.num_queries), self._known.num_queries
                )

    def chunks(self) -> Iterator[Candidates]:
        """Candidates, chunk by chunk."""
        for first in range(0, self._known.num_queries, CHUNK):
            with np.load(self._path(first)) as found:
                positives = Pairs(
                    found["positive_queries"], found["positive_documents"]
                )
                yield Candidates(
                    first,
                    found["documents"],
                    found["scores"],
                    positives,
                    found["positive_scores"],
                    found["claimed"],
                )

    def scores_of(self, pairs: Pairs) -> np.ndarray:
        """Return the first model's scores of pairs. Collective."""
        parts = [np.zeros(0, np.float32)]
        for first in range(0, self._known.num_queries, CHUNK):
            among = pairs.among(first, first + CHUNK)
            parts.append(
                self._primary.pair_scores(
                    first, Pairs(among.queries - first, among.documents)
                )
            )
        return np.concatenate(parts)

    def _find(self, first: int, last: int) -> Candidates:
        among = self._excluded.among(first, last)
        excluded = Pairs(among.queries - first, among.documents)
        k = self._config.top_k
        found = [
            searcher.search(first, last, k, excluded) for searcher in self._searchers
        ]
        documents, scores = found[0]
        if len(found) > 1:
            weights = [one.weight for one in self._retrievers]
            documents = fuse(found, weights, k, self._config.fusion, self._config.rrf_k)
            query, column = np.nonzero(documents >= 0)
            pairs = Pairs(query, documents[query, column])
            scores = np.full(documents.shape, -np.inf, np.float32)
            # A fused rank is no score: all candidates get that of one model.
            scores[query, column] = self._primary.pair_scores(first, pairs)
        known = self._known.positives.among(first, last)
        positives = Pairs(known.queries - first, known.documents)
        own = self._primary.pair_scores(first, positives)
        return with_claims(
            Candidates.unclaimed(first, documents, scores, positives, own), self._claims
        )

    def _identity(self, documents: Documents) -> str:
        """Everything that the result of a search depends on."""
        config, session = self._config, self._session
        retrievers = [
            [
                one.model_dump(),
                ""
                if one.model == BM25
                else encoder_identity(
                    one, config, encoder_precision(one, config, session)
                ),
            ]
            for one in self._retrievers
        ]
        arrays = (
            documents.exact,
            self._known.exact,
            self._excluded.queries,
            self._excluded.documents,
            self._known.positives.queries,
            self._known.positives.documents,
        )
        sums = [array_identity(one) for one in arrays]
        claims = self._claims is not None
        return short_hash(
            retrievers,
            config.top_k,
            config.fusion,
            config.rrf_k,
            sums,
            documents.num_candidates,
            claims,
        )

    def _path(self, first: int) -> Path:
        last = min(first + CHUNK, self._known.num_queries)
        return self._folder / "candidates" / self._name / f"{first:09d}-{last:09d}.npz"

    def _save(self, found: Candidates) -> None:
        path = self._path(found.first)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.part")
        with partial.open("wb") as file:
            np.savez(
                file,
                documents=found.documents,
                scores=found.scores,
                positive_queries=found.positives.queries,
                positive_documents=found.positives.documents,
                positive_scores=found.positive_scores,
                claimed=found.claimed,
            )
        partial.replace(path)


def encode_all(
    retriever: Retriever,
    config: MineConfig,
    folder: Path,
    documents: Documents,
    known: Known,
    session: Session,
) -> tuple[VectorStore, VectorStore, int]:
    """The vectors of documents and queries, and how many were computed now. Collective."""
    precision = encoder_precision(retriever, config, session)
    place = folder / "vectors" / encoder_identity(retriever, config, precision)
    # Loaded at most once, and only where vectors are missing.
    load: Callable[[], Encoder] = cache(
        lambda: load_encoder(retriever, config, session.device, precision)
    )
    of_documents = VectorStore(place, "document", documents.exact, config.vector_dtype)
    of_queries = VectorStore(place, "query", known.exact, config.vector_dtype)
    num_encoded = 0
    for store, item, what in (
        (of_queries, known.item, "queries"),
        (of_documents, documents.item, "documents"),
    ):
        num_encoded += encode_missing(
            store, load, item, session, f"{retriever.model}: encoding {what}"
        )
    return of_documents, of_queries, num_encoded


def fuse(
    found: Sequence[tuple[np.ndarray, np.ndarray]],
    weights: Sequence[float],
    k: int,
    how: str,
    rrf_k: int,
) -> np.ndarray:
    """[Q, k] documents of several rankings ([Q, n] documents and scores each) as one, -1 where there are fewer."""
    gains = []
    for (documents, scores), weight in zip(found, weights, strict=True):
        if how == "rrf":
            gain = np.broadcast_to(
                weight / (rrf_k + 1.0 + np.arange(documents.shape[1])), documents.shape
            )
        else:
            gain = weight * _standardised(scores)
        gains.append(np.where(documents >= 0, gain, 0.0))
    documents = np.concatenate([one for one, _ in found], axis=1)
    order = np.argsort(documents, axis=1, kind="stable")
    documents = np.take_along_axis(documents, order, axis=1)
    gain = np.take_along_axis(np.concatenate(gains, axis=1), order, axis=1)
    # Equal documents stand side by side now: the first of them gets the sum of all.
    is_first = np.ones(documents.shape, bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    group = np.cumsum(is_first.ravel()) - 1
    total = np.bincount(group, gain.ravel())[group].reshape(documents.shape)
    total[~is_first | (documents < 0)] = -np.inf
    best = np.argsort(-total, axis=1, kind="stable")[
        :, :k
    ]  # stable: of equal ones the lower number first
    chosen = np.take_along_axis(documents, best, axis=1)
    return np.where(np.take_along_axis(total, best, axis=1) > -np.inf, chosen, -1)


def _standardised(scores_QK: np.ndarray) -> np.ndarray:
    """Scores in standard deviations above the lowest of their query, so that a document that is missing has 0."""
    finite = np.isfinite(scores_QK)
    count = np.maximum(finite.sum(axis=1, keepdims=True), 1)
    values = np.where(finite, scores_QK, 0.0).astype(np.float64)
    mean = values.sum(axis=1, keepdims=True) / count
    deviation = np.sqrt(
        (np.where(finite, values - mean, 0.0) ** 2).sum(axis=1, keepdims=True) / count
    )
    lowest = np.where(finite, scores_QK, np.inf).min(axis=1, keepdims=True)
    result: np.ndarray = np.where(
        finite, (values - np.where(np.isfinite(lowest), lowest, 0.0)), 0.0
    ) / np.maximum(deviation, 1e-12)
    return result
