"""Candidates: the best documents of every query by all retrievers together, in chunks of queries, kept on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from vembed.data.cache import short_hash
from vembed.mining.config import BM25, MineConfig
from vembed.mining.documents import Documents, array_identity
from vembed.mining.known_positives import KnownPositives, Pairs
from vembed.mining.retrievers import DenseRetriever, LexicalRetriever, fuse
from vembed.mining.search import pair_scores, search
from vembed.mining.vectors import VectorStore
from vembed.parallel.session import Session
from vembed.progress import ProgressReport

CHUNK = 32_768
"""Queries that are searched for together: what bounds the memory, and what a kill in the search loses."""
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
    finite = np.where(np.isfinite(lowest_Q), lowest_Q, 0.0)
    limit: np.ndarray = lowest_Q + ABOVE * np.abs(finite)
    return limit


class ClaimFinder:
    """Finds claims by an exact search among the sums of the vectors of all known pairs.

    A document d is claimed if another query q' with a known positive p' has s(q', d) + s(p', d) at least 5 % above the
    same sum of the query itself. A relevant document that nobody has marked is near to its query and to the query's
    positives, so few claimed candidates are relevant. A hard negative is usually near to what another query asks for.
    """

    def __init__(
        self,
        queries: VectorStore,
        documents: VectorStore,
        positives: Pairs,
        folder: Path,
        session: Session,
    ) -> None:
        """Write the vectors of the pairs that are not in `folder` yet. Collective."""
        self._documents = documents
        self._positives = positives
        self._session = session
        # Part of a file's name: vectors of other pairs are never read for these.
        # The product may wrap around in int64, which changes nothing: it is a hash.
        keys = (
            queries.keys[positives.queries] * 31 + documents.keys[positives.documents]
        )
        self._pairs = VectorStore(folder, "query", keys, queries.dtype_name)
        # Ascending, as pairs are.
        self._codes = positives.queries << 32 | positives.documents
        for shard in self._pairs.missing(self._pairs.of_rank(session)):
            query = queries.take(positives.queries[shard.first : shard.last])
            positive = documents.take(positives.documents[shard.first : shard.last])
            # Not normalised: s(q', d) + s(p', d) is the dot product of d with this sum.
            self._pairs.write(shard, (query + positive).numpy())
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
        is_claimed = np.zeros(candidates_QK.shape, bool)
        place = np.flatnonzero(eligible)
        if not len(place) or not len(self._positives):
            return is_claimed
        # Many queries share candidates: each distinct one is searched for once.
        documents, which = np.unique(candidates_QK.ravel()[place], return_inverse=True)
        query = first + place // candidates_QK.shape[1]
        nothing = Pairs(np.zeros(0, np.int64), np.zeros(0, np.int64))
        for start in range(0, len(documents), BLOCK):
            inside = np.flatnonzero((which >= start) & (which < start + BLOCK))
            vectors = self._documents.take(documents[start : start + BLOCK])
            num_pairs = len(self._positives)
            nearest, scores = search(
                vectors, self._pairs, num_pairs, NEAREST, nothing, self._session
            )
            row = which[inside] - start
            best = self._best_of_query(query[inside], row, vectors)
            is_claimed.ravel()[place[inside]] = self._is_claimed(
                query[inside], best, nearest[row], scores[row]
            )
        return is_claimed

    def _best_of_query(
        self, query_N: np.ndarray, row_N: np.ndarray, vectors: Tensor
    ) -> np.ndarray:
        """[n] the highest sum of a query's pairs for the vector in a row; -inf where it has none. Collective."""
        # Pairs are sorted by query, so those of one are a range; the ranges of all are laid end to end.
        begin = np.searchsorted(self._positives.queries, query_N)
        end = np.searchsorted(self._positives.queries, query_N + 1)
        count = end - begin
        position = np.repeat(np.arange(len(query_N)), count)
        offset = np.arange(len(position)) - np.repeat(np.cumsum(count) - count, count)
        pairs = Pairs(row_N[position], np.repeat(begin, count) + offset)
        best = np.full(len(query_N), -np.inf)
        scores = pair_scores(vectors, self._pairs, pairs, self._session)
        np.maximum.at(best, position, scores)
        return best

    def _is_claimed(
        self,
        query_N: np.ndarray,
        best_N: np.ndarray,
        pairs_NR: np.ndarray,
        scores_NR: np.ndarray,
    ) -> np.ndarray:
        """[n] True where a pair of another query is nearer by the margin than all that speak for the query itself."""
        is_pair = pairs_NR >= 0
        pairs = np.where(is_pair, pairs_NR, 0)
        # A pair speaks for the query if it is one of its pairs, or if the pair's document is a positive of it too.
        codes = query_N[:, None] << 32 | self._positives.documents[pairs]
        at = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
        is_query = self._positives.queries[pairs] == query_N[:, None]
        speaks = is_pair & ((self._codes[at] == codes) | is_query)
        for_query = np.where(speaks, scores_NR, -np.inf).max(axis=1)
        for_query = np.maximum(best_N, for_query)
        for_others = np.where(is_pair & ~speaks, scores_NR, -np.inf).max(axis=1)
        is_other = np.isfinite(for_others)
        limit = np.where(is_other, for_others.astype(np.float64), 0.0)
        claimed: np.ndarray = is_other & (for_query <= limit - MARGIN * np.abs(limit))
        return claimed


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
    """Return the candidates with the claims that a finder finds. Collective."""
    if claims is None:
        return candidates
    limit = claimed_limit(candidates.lowest_positive())
    claimed = claims.claimed(
        candidates.first, candidates.documents, candidates.scores, limit
    )
    return replace(candidates, claimed=claimed)


class CandidateStore:
    """Searches for all queries chunk by chunk, and keeps the results on disk."""

    def __init__(
        self,
        config: MineConfig,
        documents: Documents,
        known: KnownPositives,
        folder: Path,
        session: Session,
    ) -> None:
        """Encode what has no vectors on disk yet. Collective."""
        self._config = config
        self._known = known
        self._folder = folder
        self._session = session
        self._excluded = known.excluded(with_negatives=config.keep_negatives)
        self._options = config.all_retrievers()
        self._retrievers: list[LexicalRetriever | DenseRetriever] = []
        for options in self._options:
            if options.model == BM25:
                lexical = LexicalRetriever(folder, documents, known, session)
                self._retrievers.append(lexical)
            else:
                dense = DenseRetriever(
                    options, config, folder, documents, known, session
                )
                self._retrievers.append(dense)
        # Limits are on the scores of one model: the first dense one, since those of BM25 have no common scale.
        self._primary = next(iter(self._dense), self._retrievers[0])
        self._claims: ClaimFinder | None = None
        if config.takes_claimed and isinstance(self._primary, DenseRetriever):
            self._claims = ClaimFinder(
                self._primary.queries,
                self._primary.documents,
                known.positives,
                self._primary.queries.folder / "pairs",
                session,
            )
        self._name = self._identity(documents)

    @property
    def _dense(self) -> list[DenseRetriever]:
        return [
            retriever
            for retriever in self._retrievers
            if isinstance(retriever, DenseRetriever)
        ]

    @property
    def num_encoded(self) -> int:
        """Vectors that were computed now, and not found on disk."""
        return sum(retriever.num_encoded for retriever in self._dense)

    def summary(self) -> list[str]:
        """One line for each model: in which precision its vectors are computed and stored."""
        return [retriever.summary for retriever in self._dense]

    def find_all(self) -> None:
        """Search for every query whose chunk is not on disk yet. Collective."""
        num_queries = self._known.num_queries
        with ProgressReport("searching", active=self._session.is_main) as progress:
            for first in range(0, num_queries, CHUNK):
                last = min(first + CHUNK, num_queries)
                # All ranks see the folder, and files appear only before the barrier below: they agree on what is
                # missing.
                if not self._path(first).exists():
                    candidates = self._find(first, last)
                    if self._session.is_main:
                        self._save(candidates)
                    self._session.barrier()
                progress(last, num_queries)

    def chunks(self) -> Iterator[Candidates]:
        """Candidates, chunk by chunk."""
        for first in range(0, self._known.num_queries, CHUNK):
            with np.load(self._path(first)) as arrays:
                yield Candidates(
                    first,
                    arrays["documents"],
                    arrays["scores"],
                    Pairs(arrays["positive_queries"], arrays["positive_documents"]),
                    arrays["positive_scores"],
                    arrays["claimed"],
                )

    def scores_of(self, pairs: Pairs) -> np.ndarray:
        """Return the first model's scores of pairs. Collective."""
        scores = [np.zeros(0, np.float32)]
        for first in range(0, self._known.num_queries, CHUNK):
            chunk = pairs.from_query(first, first + CHUNK)
            scores.append(self._primary.pair_scores(first, chunk))
        return np.concatenate(scores)

    def _find(self, first: int, last: int) -> Candidates:
        config = self._config
        excluded = self._excluded.from_query(first, last)
        rankings = [
            retriever.search(first, last, config.top_k, excluded)
            for retriever in self._retrievers
        ]
        documents, scores = rankings[0]
        if len(rankings) > 1:
            weights = [options.weight for options in self._options]
            documents = fuse(
                rankings, weights, config.top_k, config.fusion, config.rrf_k
            )
            query, column = np.nonzero(documents >= 0)
            pairs = Pairs(query, documents[query, column])
            scores = np.full(documents.shape, -np.inf, np.float32)
            # A fused rank is no score: all candidates get that of one model.
            scores[query, column] = self._primary.pair_scores(first, pairs)
        positives = self._known.positives.from_query(first, last)
        positive_scores = self._primary.pair_scores(first, positives)
        candidates = Candidates.unclaimed(
            first, documents, scores, positives, positive_scores
        )
        return with_claims(candidates, self._claims)

    def _identity(self, documents: Documents) -> str:
        """Everything that the result of a search depends on."""
        config = self._config
        retrievers = []
        for options, retriever in zip(self._options, self._retrievers, strict=True):
            retrievers.append([options.model_dump(), retriever.identity])
        arrays = (
            documents.exact,
            self._known.exact,
            self._excluded.queries,
            self._excluded.documents,
            self._known.positives.queries,
            self._known.positives.documents,
        )
        return short_hash(
            retrievers,
            config.top_k,
            config.fusion,
            config.rrf_k,
            [array_identity(array) for array in arrays],
            documents.num_candidates,
            self._claims is not None,
        )

    def _path(self, first: int) -> Path:
        last = min(first + CHUNK, self._known.num_queries)
        return self._folder / "candidates" / self._name / f"{first:09d}-{last:09d}.npz"

    def _save(self, candidates: Candidates) -> None:
        path = self._path(candidates.first)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.part")
        with partial.open("wb") as file:
            np.savez(
                file,
                documents=candidates.documents,
                scores=candidates.scores,
                positive_queries=candidates.positives.queries,
                positive_documents=candidates.positives.documents,
                positive_scores=candidates.positive_scores,
                claimed=candidates.claimed,
            )
        partial.replace(path)
