"""Candidates: the best documents of every query by all retrievers together, in chunks of queries, kept on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from vembed.config.schema import ChoiceOptions
from vembed.evaluation.top_k import NO_PAIRS, Pairs
from vembed.files import replaced_file, short_hash
from vembed.mining.inputs import Inputs, KnownPositives, array_identity
from vembed.mining.options import BM25, MineConfig
from vembed.mining.retrievers import (
    DenseRetriever,
    LexicalRetriever,
    Ranking,
    fuse,
    open_dense,
)
from vembed.parallel.session import Session

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
    limit = lowest_Q + ABOVE * np.abs(finite)
    return limit


class ClaimFinder:
    """Finds claims by an exact search among the sums of the vectors of all known pairs.

    A document d is claimed if another query q' with a known positive p' has s(q', d) + s(p', d) at least 5 % above the
    same sum of the query itself. A relevant document that nobody has marked is near to its query and to the query's
    positives, so few claimed candidates are relevant. A hard negative is usually near to what another query asks for.
    """

    def __init__(self, retriever: DenseRetriever, positives: Pairs) -> None:
        """Write the sums of the vectors of all pairs. Collective."""
        self._documents = retriever.documents
        self._sums = retriever.sums_of(positives)
        self._positives = positives

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
        num_pairs = len(self._positives)
        if not len(place) or not num_pairs:
            return is_claimed
        # Many queries share candidates: each distinct one is searched for once.
        documents, which = np.unique(candidates_QK.ravel()[place], return_inverse=True)
        query = first + place // candidates_QK.shape[1]
        for start in range(0, len(documents), BLOCK):
            inside = np.flatnonzero((which >= start) & (which < start + BLOCK))
            vectors = self._documents.take(documents[start : start + BLOCK])
            # s(q', d) + s(p', d) is the dot product of d with the sum of q' and p'.
            nearest, scores = self._sums.search(vectors, num_pairs, NEAREST, NO_PAIRS)
            row = which[inside] - start
            best = self._best_of_query(query[inside], row, vectors)
            is_claimed.ravel()[place[inside]] = self._is_claimed(
                query[inside], best, nearest[row], scores[row]
            )
        return is_claimed

    def _best_of_query(
        self,
        query_N: np.ndarray,
        row_N: np.ndarray,
        vectors: Tensor,
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
        np.maximum.at(best, position, self._sums.pair_scores(vectors, pairs))
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
        is_query = self._positives.queries[pairs] == query_N[:, None]
        speaks = np.isin(codes, self._positives.codes) | is_query
        scores_NR = np.where(is_pair, scores_NR, -np.inf).astype(np.float64)
        for_query = np.where(speaks, scores_NR, -np.inf).max(axis=1)
        for_query = np.maximum(best_N, for_query)
        for_others = np.where(speaks, -np.inf, scores_NR).max(axis=1)
        is_other = np.isfinite(for_others)
        limit = np.where(is_other, for_others, 0.0)
        claimed: np.ndarray = is_other & (for_query <= limit - MARGIN * np.abs(limit))
        return claimed


@dataclass(frozen=True)
class CandidateChunk:
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

    def lowest_positive(self) -> np.ndarray:
        """[Q] the lowest score of each query's known positives, inf where none is known."""
        lowest = np.full(len(self), np.inf)
        np.minimum.at(lowest, self.positives.queries, self.positive_scores)
        return lowest


@dataclass
class CandidateSearch:
    """The search for all queries by all retrievers, chunk by chunk. Methods are collective."""

    options: ChoiceOptions
    known: KnownPositives
    retrievers: Sequence[LexicalRetriever | DenseRetriever]
    session: Session
    excluded: Pairs
    folder: Path
    """For the result of each chunk; all ranks see it."""
    fuse_rankings: Callable[[Sequence[Ranking]], np.ndarray] | None = None
    """Of several retrievers."""

    def __post_init__(self) -> None:
        dense = [each for each in self.retrievers if isinstance(each, DenseRetriever)]
        self.summary = [retriever.summary for retriever in dense]
        self.num_encoded = sum(retriever.num_encoded for retriever in dense)
        """Vectors that were computed now, and not found on disk."""
        # Limits are on the scores of one model: the first dense one, since those of BM25 have no common scale.
        self._primary = next(iter(dense), self.retrievers[0])
        self._claims: ClaimFinder | None = None
        if self.options.takes_claimed and dense:
            self._claims = ClaimFinder(dense[0], self.known.positives)

    def chunks(self) -> Iterator[CandidateChunk]:
        """Search chunk by chunk, and keep each on disk, where a later call or run finds it. Collective."""
        for first in range(0, self.known.num_queries, CHUNK):
            last = min(first + CHUNK, self.known.num_queries)
            path = self.folder / f"{first:09d}-{last:09d}.npz"
            # All ranks see the folder, and files appear only behind the search, which is collective: they agree on what
            # is missing.
            if not path.exists():
                candidates = self._find(first, last)
                if self.session.is_main:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with replaced_file(path) as partial, partial.open("wb") as file:
                        np.savez(
                            file,
                            documents=candidates.documents,
                            scores=candidates.scores,
                            positive_scores=candidates.positive_scores,
                            claimed=candidates.claimed,
                        )
                self.session.barrier()
            positives = self.known.positives.from_query(first, last)
            with np.load(path) as arrays:
                yield CandidateChunk(first, positives=positives, **arrays)

    def scores_of(self, pairs: Pairs) -> np.ndarray:
        """Return the first model's scores of pairs."""
        scores = [np.zeros(0, np.float32)]
        for first in range(0, self.known.num_queries, CHUNK):
            chunk = pairs.from_query(first, first + CHUNK)
            scores.append(self._primary.pair_scores(first, chunk))
        return np.concatenate(scores)

    def _find(self, first: int, last: int) -> CandidateChunk:
        excluded = self.excluded.from_query(first, last)
        rankings = []
        for retriever in self.retrievers:
            rankings.append(retriever.search(first, last, self.options.top_k, excluded))
        documents, scores = rankings[0]
        if self.fuse_rankings is not None:
            documents = self.fuse_rankings(rankings)
            query, column = np.nonzero(documents >= 0)
            pairs = Pairs(query, documents[query, column])
            scores = np.full(documents.shape, -np.inf, np.float32)
            # A fused rank is no score: all candidates get that of one model.
            scores[query, column] = self._primary.pair_scores(first, pairs)
        positives = self.known.positives.from_query(first, last)
        positive_scores = self._primary.pair_scores(first, positives)
        claimed = np.zeros(documents.shape, bool)
        candidates = CandidateChunk(
            first, documents, scores, positives, positive_scores, claimed
        )
        if self._claims is not None:
            limit = claimed_limit(candidates.lowest_positive())
            claimed[:] = self._claims.claimed(first, documents, scores, limit)
        return candidates


def open_candidates(
    config: MineConfig,
    inputs: Inputs,
    folder: Path,
    session: Session,
) -> CandidateSearch:
    """Encode and index what is not in a folder yet, and return the search. Collective."""
    documents = inputs.documents
    known = inputs.known
    options = config.all_retrievers()
    weights = [each.weight for each in options]
    retrievers: list[LexicalRetriever | DenseRetriever] = []
    for each in options:
        if each.model == BM25:
            retrievers.append(LexicalRetriever(folder, inputs, session))
        else:
            retrievers.append(open_dense(each, config, folder, inputs, session))
    excluded = known.excluded(with_negatives=config.keep_negatives)
    arrays = (
        documents.exact,
        known.exact,
        excluded.queries,
        excluded.documents,
        known.positives.queries,
        known.positives.documents,
    )
    # Everything that the result of a search depends on.
    name = short_hash(
        [each.model_dump() for each in options],
        [retriever.identity for retriever in retrievers],
        config.top_k,
        config.fusion,
        config.rrf_k,
        [array_identity(array) for array in arrays],
        documents.num_candidates,
        config.takes_claimed,
    )

    def fuse_rankings(rankings: Sequence[Ranking]) -> np.ndarray:
        return fuse(rankings, weights, config.top_k, config.fusion, config.rrf_k)

    return CandidateSearch(
        config,
        known,
        retrievers,
        session,
        excluded=excluded,
        folder=folder / "candidates" / name,
        fuse_rankings=fuse_rankings if len(retrievers) > 1 else None,
    )
