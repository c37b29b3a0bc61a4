"""Candidates: the best documents of every query by all retrievers together, in chunks of queries, kept on disk,
and the negatives that are chosen among them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vembed.config.schema import NegativeSelection
from vembed.data.near_duplicates import (
    KEPT_TEXTS,
    comparable_text,
    containment,
    ngrams,
)
from vembed.errors import UserError
from vembed.evaluation.top_k import NO_PAIRS, Pairs
from vembed.files import short_hash, written_aside
from vembed.mining.inputs import Documents, KnownPositives, MiningInputs, array_identity
from vembed.mining.options import BM25, MineConfig
from vembed.mining.retrievers import DenseRetriever, LexicalRetriever, fuse, open_dense
from vembed.parallel import collectives
from vembed.parallel.session import Session

QUERIES_PER_SEARCH = 32_768
"""Queries that are searched for together: what bounds the memory, and what a kill in the search loses."""
CLAIM_MARGIN = 0.05
"""Share of the other query's sum by which that of the query itself is below it."""
ABOVE = 0.05
"""Share of the positive's score by which a claimed candidate may be above it: the default margin, on the other side."""
CONSIDERED = 40
"""Candidates per query for which claims are looked for, the best ones below the limit of claimed candidates."""
NEAREST = 8
"""Known pairs nearest to a candidate that are looked at."""
DOCUMENTS_PER_SEARCH = 32_768
"""Documents that are searched for together."""


class ClaimFinder:
    """Finds claims by an exact search among the sums of the vectors of all known pairs.

    A document d is claimed if the sum of the query itself, s(q, d) + s(p, d), is at least 5 % below s(q', d) + s(p', d)
    of another query q' with a known positive p', which is then at least 5.26 % above. A relevant document that nobody has
    marked is near to its query and to the query's positives, so few claimed candidates are relevant. A hard negative is
    usually near to what another query asks for.
    """

    def __init__(
        self,
        retriever: DenseRetriever,
        positives: Pairs,
    ) -> None:
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
        if not num_pairs:
            return is_claimed
        # Many queries share candidates: each distinct one is searched for once.
        documents, which = np.unique(candidates_QK.ravel()[place], return_inverse=True)
        query = first + place // candidates_QK.shape[1]
        for start in range(0, len(documents), DOCUMENTS_PER_SEARCH):
            inside = np.flatnonzero(
                (which >= start) & (which < start + DOCUMENTS_PER_SEARCH)
            )
            vectors = self._documents.take(
                documents[start : start + DOCUMENTS_PER_SEARCH]
            )
            # s(q', d) + s(p', d) is the dot product of d with the sum of q' and p'.
            nearest, scores = self._sums.search(
                vectors,
                num_pairs,
                NEAREST,
                NO_PAIRS,
            )
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
        # For each query: how many pairs the queries before it have, where its range begins.
        before = np.cumsum(count) - count
        offset = np.arange(len(position)) - np.repeat(before, count)
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
        # A pair speaks for the query if its document is a positive of the query: one of its own pairs, or of another query
        # with the same positive. Where there are fewer pairs the number is -1, and the score of -inf changes nothing.
        codes = query_N[:, None] << 32 | self._positives.documents[pairs_NR]
        speaks = np.isin(codes, self._positives.codes)
        scores_NR = scores_NR.astype(np.float64)
        for_query = np.where(speaks, scores_NR, -np.inf).max(axis=1)
        for_query = np.maximum(best_N, for_query)
        for_others = np.where(speaks, -np.inf, scores_NR).max(axis=1)
        limit = for_others - CLAIM_MARGIN * np.abs(for_others)
        claimed: np.ndarray = np.isfinite(for_others) & (for_query <= limit)
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

    def of_queries(self, values: np.ndarray) -> list[np.ndarray]:
        """Return the values of the known positives of each query, of those of all."""
        bounds = self.positives.bounds(len(self))
        return np.split(values, bounds[1:-1])

    def lowest_positive(self) -> np.ndarray:
        """[Q] the lowest score of each query's known positives, inf where none is known."""
        lowest = np.full(len(self), np.inf)
        np.minimum.at(lowest, self.positives.queries, self.positive_scores)
        return lowest


@dataclass
class CandidateSearch:
    """The search for all queries by all retrievers, chunk by chunk. Methods are collective."""

    options: NegativeSelection
    known: KnownPositives
    retrievers: Sequence[LexicalRetriever | DenseRetriever]
    session: Session
    excluded: Pairs
    folder: Path
    """For the result of each chunk; all ranks see it."""

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
        for first in range(0, self.known.num_queries, QUERIES_PER_SEARCH):
            last = min(first + QUERIES_PER_SEARCH, self.known.num_queries)
            path = self.folder / f"{first:09d}-{last:09d}.npz"
            # All ranks see the folder, and files appear only behind the search, which is collective: they agree on what
            # is missing.
            if not path.exists():
                candidates = self._find(first, last)
                if self.session.is_main:
                    with written_aside(path) as partial, partial.open("wb") as file:
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
        for first in range(0, self.known.num_queries, QUERIES_PER_SEARCH):
            chunk = pairs.from_query(first, first + QUERIES_PER_SEARCH)
            scores.append(self._primary.pair_scores(first, chunk))
        return np.concatenate(scores)

    def _find(
        self,
        first: int,
        last: int,
    ) -> CandidateChunk:
        excluded = self.excluded.from_query(first, last)
        rankings = []
        for retriever in self.retrievers:
            rankings.append(
                retriever.search(
                    first,
                    last,
                    self.options.top_k,
                    excluded,
                )
            )
        documents, scores = rankings[0]
        if len(rankings) > 1:
            assert isinstance(self.options, MineConfig)
            documents = fuse(rankings, self.options)
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
            limit = CLAIMED_LIMITS.highest(candidates.lowest_positive())
            claimed[:] = self._claims.claimed(
                first,
                documents,
                scores,
                limit,
            )
        return candidates


def open_candidates(
    config: MineConfig,
    inputs: MiningInputs,
    folder: Path,
    session: Session,
) -> CandidateSearch:
    """Encode and index what is not in a folder yet, and return the search. Collective."""
    known = inputs.known
    options = config.all_retrievers()
    retrievers: list[LexicalRetriever | DenseRetriever] = []
    for each in options:
        if each.model == BM25:
            retrievers.append(LexicalRetriever(inputs, session))
        else:
            retrievers.append(
                open_dense(
                    each,
                    config,
                    folder,
                    inputs,
                    session,
                )
            )
    excluded = known.excluded(with_negatives=config.keep_negatives)
    arrays = (
        inputs.documents.exact,
        known.exact,
        excluded.codes,
        known.positives.codes,
    )
    # Everything that the result of a search depends on.
    name = short_hash(
        [each.model_dump() for each in options],
        [retriever.identity for retriever in retrievers],
        config.top_k,
        config.fusion,
        config.rrf_k,
        [array_identity(array) for array in arrays],
        inputs.documents.num_candidates,
        config.takes_claimed,
    )
    return CandidateSearch(
        config,
        known,
        retrievers,
        session,
        excluded=excluded,
        folder=folder / "candidates" / name,
    )


# ---- the choice among them: limits on scores, `threshold: auto`, no near-duplicates of positives -------------------


MAX_COMPARED_POSITIVES = 32
"""Known positives of a query that a candidate's text is compared with."""
HIDDEN_POSITIVES_SHARE = 0.5
"""Share of a query's known positives that is hidden for an estimate."""
MIN_QUERIES = 30
"""Queries that an estimate needs."""
MAX_QUERIES = 50_000
MARGINS = np.arange(0.0, 0.605, 0.005)
QUANTILES = np.arange(1.0, -0.001, -0.005)
"""Margins that are tried, and absolute thresholds, as quantiles of the known positives' scores."""


@dataclass(frozen=True)
class Limits:
    """Limits of a candidate's score. None: no limit."""

    relative_margin: float | None
    margin: float | None
    max_score: float | None
    min_score: float | None

    @classmethod
    def of(cls, options: NegativeSelection) -> Limits:
        """Those of the options."""
        return cls(
            options.relative_margin,
            options.margin,
            options.max_score,
            options.min_score,
        )

    def highest(self, positive_Q: np.ndarray) -> np.ndarray:
        """[Q] the highest score that a negative may have, from the lowest score of each query's known positives."""
        top = np.inf if self.max_score is None else self.max_score
        highest = np.full(len(positive_Q), top)
        if self.margin is not None:
            highest = np.minimum(highest, positive_Q - self.margin)
        if self.relative_margin is not None:
            finite = np.where(np.isfinite(positive_Q), positive_Q, 0.0)
            below = self.relative_margin * np.abs(finite)
            highest = np.minimum(highest, positive_Q - below)
        return highest


CLAIMED_LIMITS = Limits(-ABOVE, None, None, None)
"""Of a claimed candidate."""

UNDECIDED = -1.0
"""In place of a judgement."""


class Chosen(NamedTuple):
    """The negatives of some consecutive queries, best first."""

    documents: np.ndarray
    """[Q, n] their numbers; -1 where there are fewer."""
    scores: np.ndarray
    judgements: np.ndarray
    """[Q, n] how likely each is relevant; UNDECIDED where no judge gave an answer."""


JudgeChunk = Callable[[CandidateChunk, Chosen], Chosen]


@dataclass(frozen=True)
class Choice:
    """The negatives of all queries, and how they were chosen."""

    chosen: Chosen
    counts: dict[str, int]
    """Candidates, and how many of them were left out for which reason."""
    limits: Limits
    calibration: Calibration | None
    """Result of `threshold: auto`."""
    note: str
    """The same as a line for the log, or nothing."""


def choose_negatives(
    search: CandidateSearch,
    seed: int,
    documents: Documents,
    *,
    depth: int,
    judge: JudgeChunk | None = None,
) -> Choice:
    """Choose at most `depth` negatives of each query. `judge` keeps some of those of a chunk. Collective."""
    options = search.options
    calibration = None
    note = ""
    limits = Limits.of(options)
    if options.threshold == "auto":
        calibration = calibrate(search.chunks(), options, seed)
        limits = calibration.limits
        note = calibration.summary(options.max_false_negative_rate)
    chooser = Chooser(
        options,
        seed,
        limits,
        documents,
    )
    chunks = []
    # Chunk by chunk: choice and judging look at one query at a time.
    for candidates in search.chunks():
        negatives = chooser.choose(candidates, depth)
        chunks.append(judge(candidates, negatives) if judge else negatives)
    chosen = Chosen(*map(np.concatenate, zip(*chunks, strict=True)))
    return Choice(
        chosen,
        chooser.counts(),
        limits,
        calibration,
        note,
    )


@dataclass
class Chooser:
    """Chooses for chunks of queries, and counts why candidates are left out."""

    options: NegativeSelection
    seed: int
    limits: Limits
    documents: Documents
    num_left_out: Counter[str] = field(default_factory=Counter)
    """Candidates of this rank, and how many of them were left out for which reason."""

    def __post_init__(self) -> None:
        # The n-grams of documents that come again are kept.
        self._ngrams = functools.lru_cache(maxsize=KEPT_TEXTS)(
            lambda number: ngrams(comparable_text(self.documents.item(number)))
        )

    def choose(
        self,
        candidates: CandidateChunk,
        depth: int,
    ) -> Chosen:
        """At most `depth` negatives for each query. Collective: the ranks share the queries."""
        queries = range(collectives.rank(), len(candidates), collectives.world_size())
        columns = np.full((len(queries), depth), -1, np.int64)
        allowed = self._allowed(candidates, queries)
        positives_of = candidates.of_queries(candidates.positives.documents)
        threshold = self.options.near_duplicate
        for row, query in enumerate(queries):
            compared = positives_of[query][:MAX_COMPARED_POSITIVES].tolist()
            # First the candidates that another query claims: they are relevant there, and hardly here.
            order = self._order(candidates, query, np.flatnonzero(allowed[row]))
            is_second = ~candidates.claimed[query, order]
            place = 0
            for column in order[np.argsort(is_second, kind="stable")]:
                document = int(candidates.documents[query, column])
                if threshold is not None and any(
                    containment(self._ngrams(document), self._ngrams(other))
                    >= threshold
                    for other in compared
                ):
                    self.num_left_out["near_duplicates"] += 1
                    continue
                columns[row, place] = column
                place += 1
                if place == depth:
                    break
        dealt = torch.from_numpy(columns)
        columns = collectives.all_gather_dealt(dealt, len(candidates)).numpy()
        documents = np.take_along_axis(candidates.documents, columns, axis=1)
        documents[columns < 0] = -1
        scores = np.take_along_axis(candidates.scores, columns, axis=1)
        return Chosen(documents, scores, np.full(scores.shape, UNDECIDED, np.float32))

    def counts(self) -> dict[str, int]:
        """Candidates by what became of them, of all ranks. Collective."""
        names = ("candidates", "skipped", "too_high", "too_low", "near_duplicates")
        totals = collectives.sum_ints([self.num_left_out[name] for name in names])
        return dict(zip(names, totals, strict=True))

    def _allowed(
        self,
        candidates: CandidateChunk,
        queries: range,
    ) -> np.ndarray:
        """[n, K] which candidates of some queries keep to the limits."""
        rows = slice(queries.start, None, queries.step)
        scores = candidates.scores[rows]
        is_candidate = candidates.documents[rows] >= 0
        # Counted among those that are there, so that skip_first skips documents and not empty places.
        place = np.cumsum(is_candidate, axis=1)
        later = is_candidate & (place > self.options.skip_first)
        lowest = candidates.lowest_positive()[rows]
        # In float64: a candidate at the limit is at it in any arithmetic.
        exact = scores.astype(np.float64)
        low_enough = exact <= self.limits.highest(lowest)[:, None]
        if self.options.prefer_claimed == "auto":
            # Nobody has set a limit: the default margin is for those that nobody claims.
            is_below = exact <= CLAIMED_LIMITS.highest(lowest)[:, None]
            low_enough |= candidates.claimed[rows] & is_below
        low_enough &= later
        is_allowed = low_enough
        if self.limits.min_score is not None:
            is_allowed = low_enough & (scores >= self.limits.min_score)
        self.num_left_out["candidates"] += int(is_candidate.sum())
        self.num_left_out["skipped"] += int((is_candidate & ~later).sum())
        self.num_left_out["too_high"] += int((later & ~low_enough).sum())
        self.num_left_out["too_low"] += int((low_enough & ~is_allowed).sum())
        return is_allowed

    def _order(
        self,
        candidates: CandidateChunk,
        query: int,
        columns: np.ndarray,
    ) -> np.ndarray:
        """The columns in the order in which they are taken: a pure function of seed, query and candidates."""
        if self.options.sampling == "top":
            return columns
        random = np.random.default_rng([self.seed, candidates.first + query])
        # Drawn for all columns and then selected: a candidate's draw does not depend on which others are allowed.
        num_columns = candidates.documents.shape[1]
        draws = random.uniform(size=(num_columns,))[columns]
        if self.options.sampling == "random":
            return columns[np.argsort(draws, kind="stable")]
        # Gumbel's trick: the order of score / temperature + noise is that of draws without replacement.
        noise = -np.log(-np.log(draws + 1e-300))
        scores = candidates.scores[query, columns] / self.options.sampling_temperature
        return columns[np.argsort(-(scores + noise), kind="stable")]


def columns_by_row(
    chosen: Chosen,
    query_of_row: np.ndarray,
    number: int,
) -> Iterator[np.ndarray]:
    """Yield the columns of the negatives of each row: at most `number` of those of its query."""
    turns = np.zeros(len(chosen.documents), np.int64)
    for query in query_of_row.tolist():
        columns = np.flatnonzero(chosen.documents[query] >= 0)
        if len(columns) > number:
            # Rows of one query get different negatives before any is used twice.
            places = turns[query] * number + np.arange(number)
            columns = columns[places % len(columns)]
        turns[query] += 1
        yield columns


@dataclass(frozen=True)
class Calibration:
    """The result of `threshold: auto`: the threshold, and what is expected of it."""

    limits: Limits
    rate: float
    """Estimated share of the negatives that are in truth relevant."""
    rate_without: float
    """The same without any threshold."""
    num_hidden: int
    is_reached: bool
    """True if the rate is at or below what was asked for."""

    @property
    def threshold(self) -> str:
        """The limit as an option."""
        if self.limits.relative_margin is not None:
            return f"relative_margin={self.limits.relative_margin:.3f}"
        return f"max_score={self.limits.max_score:.4f}"

    def summary(self, goal: float) -> str:
        """One line for the log."""
        line = (
            f"threshold: {self.threshold} (estimated rate of false negatives {self.rate:.1%}, "
            f"{self.rate_without:.1%} without it; {self.num_hidden:,d} known positives were hidden for the estimate)"
        )
        if self.is_reached:
            return line
        return f"{line}; no threshold brings the rate to {goal:.1%}"


def calibrate(
    chunks: Iterable[CandidateChunk],
    options: NegativeSelection,
    seed: int,
) -> Calibration:
    """The highest threshold at which the estimated rate is at most `max_false_negative_rate`.

    With several positives per query, a random half of them is hidden, and the threshold is a margin below the lowest of
    the others. With one each, it is hidden for all queries, and the threshold is an absolute score. The estimate
    assumes that as many relevant documents are unknown as are known, so a hidden one may stand for several.
    """
    # Per query: scores of candidates and of known positives.
    queries: list[tuple[np.ndarray, np.ndarray]] = []
    for candidates in chunks:
        positive_scores = candidates.positive_scores.astype(np.float64)
        positives_of = candidates.of_queries(positive_scores)
        of_chunk = zip(candidates.scores, positives_of, strict=True)
        queries += islice(of_chunk, MAX_QUERIES - len(queries))
    used = [query for query in queries if len(query[1]) > 1]
    is_relative = len(used) >= MIN_QUERIES
    if not is_relative:
        used = [query for query in queries if len(query[1])]
    if len(used) < MIN_QUERIES:
        raise UserError(
            f"threshold: auto estimates from queries with known positives, and {len(used):,d} are too few (at "
            f"least {MIN_QUERIES}): set relative_margin or max_score"
        )

    # The candidates of each query with the hidden positives put back among them, by descending score. What is below the
    # top_k would not be a candidate.
    random = np.random.default_rng([seed, 1])
    scores_QK = np.full((len(used), options.top_k), -np.inf)
    is_hidden_QK = np.zeros(scores_QK.shape, bool)
    # The lowest score of the positives that are not hidden.
    lowest_Q = np.full(len(used), np.inf)
    # Number of unknown relevant documents that each hidden one stands for.
    weights_Q = np.ones(len(used))
    for row, (scores, positives) in enumerate(used):
        order = random.permutation(len(positives))
        num_hidden = len(positives)
        if is_relative:
            num_hidden = max(1, int(len(positives) * HIDDEN_POSITIVES_SHARE))
            lowest_Q[row] = positives[order[num_hidden:]].min()
        # Half of the known ones are hidden, and as many as all known ones are unknown.
        weights_Q[row] = len(positives) / num_hidden
        values = np.concatenate([positives[order[:num_hidden]], scores])
        place = np.argsort(-values, kind="stable")[: options.top_k]
        scores_QK[row, : len(place)] = values[place]
        is_hidden_QK[row, : len(place)] = place < num_hidden

    def rate_of(limits: Limits) -> float:
        """The share of hidden positives among the negatives that would be chosen."""
        is_allowed = np.isfinite(scores_QK)
        is_allowed[:, : options.skip_first] = False
        is_allowed &= scores_QK <= limits.highest(lowest_Q)[:, None]
        if limits.min_score is not None:
            is_allowed &= scores_QK >= limits.min_score
        if options.sampling == "top":
            is_allowed &= np.cumsum(is_allowed, axis=1) <= options.num_negatives
        # Any of those that are left is as likely as any other: the expected share.
        num_kept = is_allowed.sum(axis=1)
        per_query = np.minimum(num_kept, options.num_negatives)
        num_hidden = (is_allowed & is_hidden_QK).sum(axis=1)
        shares = per_query / np.maximum(num_kept, 1)
        return float((num_hidden * shares) @ weights_Q / max(per_query.sum(), 1))

    # The other limits of the config stay; the margin is what is looked for.
    base = replace(Limits.of(options), relative_margin=None)
    if is_relative:
        limits = [replace(base, relative_margin=float(margin)) for margin in MARGINS]
    else:
        all_positives = np.concatenate([positives for _, positives in used])
        thresholds = np.quantile(all_positives, np.maximum(QUANTILES, 0.0))
        limits = [replace(base, max_score=float(score)) for score in thresholds]
    rates = np.array([rate_of(limit) for limit in limits])
    reaches = rates <= options.max_false_negative_rate
    # From the loosest to the strictest: the first that keeps to the rate leaves the hardest negatives.
    best = int(np.argmin(rates))
    if reaches.any():
        best = int(np.argmax(reaches))
    return Calibration(
        limits[best],
        float(rates[best]),
        rate_of(base),
        int(is_hidden_QK.sum()),
        bool(reaches.any()),
    )
