"""Choice of negatives among the candidates: limits on scores, `threshold: auto`, no near-duplicates of positives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

from vembed.data.near_duplicates import DuplicateFinder
from vembed.errors import UserError
from vembed.mining.candidates import Candidates, claimed_limit
from vembed.mining.config import MineConfig
from vembed.mining.documents import Documents
from vembed.mining.known import Known
from vembed.parallel import collectives
from vembed.parallel.session import Session

COMPARED = 32
"""Known positives of a query that a candidate's text is compared with."""


@dataclass(frozen=True)
class Limits:
    """Limits of a candidate's score. None: no limit."""

    relative_margin: float | None
    margin: float | None
    max_score: float | None
    min_score: float | None

    @classmethod
    def of(cls, config: MineConfig) -> Limits:
        """Those of the config."""
        return cls(
            config.relative_margin, config.margin, config.max_score, config.min_score
        )

    def highest(self, positive_Q: np.ndarray) -> np.ndarray:
        """[Q] the highest score that a negative may have, from the lowest score of each query's known positives."""
        highest = np.full(
            len(positive_Q), np.inf if self.max_score is None else self.max_score
        )
        if self.margin is not None:
            highest = np.minimum(highest, positive_Q - self.margin)
        if self.relative_margin is not None:
            below = self.relative_margin * np.abs(
                np.where(np.isfinite(positive_Q), positive_Q, 0.0)
            )
            highest = np.minimum(highest, positive_Q - below)
        return highest


@dataclass(frozen=True)
class Chosen:
    """The negatives of some consecutive queries, best first; -1 and -inf where there are fewer."""

    documents: np.ndarray
    scores: np.ndarray


class Chooser:
    """Chooses for chunks of queries, and counts why candidates are left out."""

    def __init__(
        self,
        config: MineConfig,
        limits: Limits,
        documents: Documents,
        known: Known,
        session: Session,
    ) -> None:
        self._config, self._limits, self._session = config, limits, session
        self._known, self._num_documents = known, len(documents)
        self._near = DuplicateFinder(
            lambda number: documents.item(number).text, config.near_duplicate
        )
        self._counts: Counter[str] = Counter()

    def choose(self, candidates: Candidates, depth: int) -> Chosen:
        """At most `depth` negatives for each query. Collective: the ranks share the queries."""
        rank, world_size = self._session.rank, self._session.world_size
        # Consecutive queries for each rank: their parts are joined in order by the gather below.
        bounds = [len(candidates) * one // world_size for one in range(world_size + 1)]
        own = range(bounds[rank], bounds[rank + 1])
        documents = np.full((len(own), depth), -1, np.int64)
        scores = np.full((len(own), depth), -np.inf, np.float32)
        allowed = self._allowed(candidates, own)
        positives = candidates.positives.bounds(len(candidates))
        claimed = candidates.claimed & self._config.takes_claimed
        for place, query in enumerate(own):
            begin, end = positives[query], positives[query + 1]
            compared = candidates.positives.documents[begin:end][:COMPARED]
            # First the candidates that another query claims: they are relevant there, and hardly here.
            order = self._order(
                candidates, query, np.flatnonzero(allowed[place] & claimed[query])
            )
            others = self._order(
                candidates, query, np.flatnonzero(allowed[place] & ~claimed[query])
            )
            columns = np.concatenate([order, others])
            found = self._of_query(
                candidates.documents[query], columns, compared.tolist(), depth
            )
            documents[place, : len(found)] = candidates.documents[query, found]
            scores[place, : len(found)] = candidates.scores[query, found]
        sizes = [bounds[one + 1] - bounds[one] for one in range(world_size)]
        return Chosen(
            collectives.all_gather_rows(torch.from_numpy(documents), sizes).numpy(),
            collectives.all_gather_rows(torch.from_numpy(scores), sizes).numpy(),
        )

    def counts(self) -> dict[str, int]:
        """Candidates by what became of them, of all ranks. Collective."""
        names = ("candidates", "skipped", "too_high", "too_low", "near_duplicates")
        return dict(
            zip(
                names,
                collectives.sum_ints([self._counts[name] for name in names]),
                strict=True,
            )
        )

    def _allowed(self, candidates: Candidates, own: range) -> np.ndarray:
        """[Q, K] which candidates keep to the limits."""
        documents = candidates.documents[own.start : own.stop]
        scores = candidates.scores[own.start : own.stop]
        there = documents >= 0
        # Counted among those that are there, so that skip_first skips documents and not empty places.
        later = there & (np.cumsum(there, axis=1) > self._config.skip_first)
        lowest = candidates.lowest_positive()[own.start : own.stop]
        highest = self._limits.highest(lowest)
        # In float64: a candidate at the limit is at it in any arithmetic.
        exact = scores.astype(np.float64)
        low_enough = exact <= highest[:, None]
        if self._config.takes_claimed and self._config.prefer_claimed == "auto":
            # Nobody has set a limit: the default margin is for those that nobody claims.
            low_enough |= candidates.claimed[own.start : own.stop] & (
                exact <= claimed_limit(lowest)[:, None]
            )
        low_enough &= later
        kept = low_enough
        if self._limits.min_score is not None:
            kept = low_enough & (scores >= self._limits.min_score)
        self._counts["candidates"] += int(there.sum())
        self._counts["skipped"] += int((there & ~later).sum())
        self._counts["too_high"] += int((later & ~low_enough).sum())
        self._counts["too_low"] += int((low_enough & ~kept).sum())
        return kept

    def _of_query(
        self,
        documents: np.ndarray,
        columns: np.ndarray,
        positives: list[int],
        depth: int,
    ) -> list[int]:
        """Return the first columns whose documents are no near-duplicates of positives."""
        chosen: list[int] = []
        for column in columns:
            if self._near.is_near(int(documents[column]), positives):
                self._counts["near_duplicates"] += 1
                continue
            chosen.append(int(column))
            if len(chosen) == depth:
                break
        return chosen

    def _order(
        self, candidates: Candidates, query: int, columns: np.ndarray
    ) -> np.ndarray:
        """The columns in the order in which they are taken: a pure function of seed, query and candidates."""
        if self._config.sampling == "top" or not len(columns):
            return columns
        random = np.random.default_rng([self._config.seed, candidates.first + query])
        # Drawn for all columns and then selected: a candidate's draw does not depend on which others are allowed.
        draws = random.uniform(size=(candidates.documents.shape[1],))[columns]
        if self._config.sampling == "random":
            return columns[np.argsort(draws, kind="stable")]
        # Gumbel's trick: the order of score / temperature + noise is that of draws without replacement.
        noisy = candidates.scores[
            query, columns
        ] / self._config.sampling_temperature - np.log(-np.log(draws + 1e-300))
        return columns[np.argsort(-noisy, kind="stable")]


def of_turn(negatives: np.ndarray, turn: int, number: int) -> np.ndarray:
    """Return `number` of a query's negatives for its row number `turn`; all where there are no more."""
    if len(negatives) <= number:
        return negatives
    # Rows of one query get different negatives before any is used twice.
    return negatives[(turn * number + np.arange(number)) % len(negatives)]


HIDDEN_SHARE = 0.5
FEWEST = 30
"""Queries that an estimate needs."""
MOST = 50_000
MARGINS = np.arange(0.0, 0.605, 0.005)
QUANTILES = np.arange(1.0, -0.001, -0.005)
"""Margins that are tried, and absolute thresholds, as quantiles of the known positives' scores."""


@dataclass(frozen=True)
class Calibration:
    """The threshold that was chosen, and what is expected of it."""

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

    def summary(self, wanted: float) -> str:
        """One line for the log."""
        line = (
            f"threshold: {self.threshold} (estimated rate of false negatives {self.rate:.1%}, "
            f"{self.rate_without:.1%} without it; {self.num_hidden:,d} known positives were hidden for the estimate)"
        )
        if self.is_reached:
            return line
        return f"{line}; no threshold brings the rate to {wanted:.1%}"


def calibrate(chunks: Iterable[Candidates], config: MineConfig) -> Calibration:
    """The highest threshold at which the estimated rate is at most `max_false_negative_rate`.

    With several positives per query, a random half of them is hidden, and the threshold is a margin below the lowest of
    the others. With one each, it is hidden for all queries, and the threshold is an absolute score. The estimate takes
    it that as many relevant documents are unknown as are known, so a hidden one may stand for several.
    """
    sample = _Sample.of(chunks, config)
    # The other limits of the config stay; the margin is what is looked for.
    base = replace(Limits.of(config), relative_margin=None)
    tried: list[tuple[Limits, float]] = []
    for step in MARGINS if sample.is_relative else QUANTILES:
        limits = (
            replace(base, relative_margin=float(step))
            if sample.is_relative
            else replace(
                base,
                max_score=float(np.quantile(sample.positive_scores, max(step, 0.0))),
            )
        )
        tried.append((limits, sample.rate(limits, config)))
    reached = [one for one in tried if one[1] <= config.max_false_negative_rate]
    # From the loosest to the strictest: the first that keeps to the rate leaves the hardest negatives.
    limits, rate = reached[0] if reached else min(tried, key=lambda one: one[1])
    return Calibration(
        limits, rate, sample.rate(base, config), sample.num_hidden, bool(reached)
    )


@dataclass(frozen=True)
class _Sample:
    """Queries with their candidates, the hidden positives put back among them."""

    scores: np.ndarray
    """[Q, K] descending, -inf where there are fewer."""
    is_hidden: np.ndarray
    """[Q, K] which of them are hidden positives."""
    weights: np.ndarray
    """[Q] number of unknown relevant documents that each hidden one stands for."""
    lowest: np.ndarray
    """[Q] the lowest score of a query's other positives; inf where it has none."""
    is_relative: bool
    positive_scores: np.ndarray

    @property
    def num_hidden(self) -> int:
        return int(self.is_hidden.sum())

    @classmethod
    def of(cls, chunks: Iterable[Candidates], config: MineConfig) -> _Sample:
        queries: list[tuple[np.ndarray, np.ndarray]] = []
        for candidates in chunks:
            bounds = candidates.positives.bounds(len(candidates))
            for query in range(min(len(candidates), MOST - len(queries))):
                own = candidates.positive_scores[bounds[query] : bounds[query + 1]]
                queries.append(
                    (
                        candidates.scores[query].astype(np.float64),
                        own.astype(np.float64),
                    )
                )
        with_several = [one for one in queries if len(one[1]) > 1]
        is_relative = len(with_several) >= FEWEST
        used = with_several if is_relative else [one for one in queries if len(one[1])]
        if len(used) < FEWEST:
            raise UserError(
                f"threshold: auto estimates from queries with known positives, and {len(used):,d} are too few (at "
                f"least {FEWEST}): set relative_margin or max_score"
            )
        random = np.random.default_rng([config.seed, 1])
        width = config.top_k + max(len(own) for _, own in used)
        scores = np.full((len(used), width), -np.inf)
        hidden = np.zeros((len(used), width), bool)
        lowest, weights = np.full(len(used), np.inf), np.ones(len(used))
        for row, (found, own) in enumerate(used):
            order = random.permutation(len(own))
            num_hidden = (
                max(1, int(len(own) * HIDDEN_SHARE)) if is_relative else len(own)
            )
            # Half of the known ones are hidden, and as many as all known ones are unknown.
            weights[row] = len(own) / num_hidden
            back, rest = own[order[:num_hidden]], own[order[num_hidden:]]
            values = np.concatenate([back, found])
            place = np.argsort(-values, kind="stable")
            scores[row, : len(values)] = values[place]
            hidden[row, : len(values)] = place < num_hidden
            lowest[row] = rest.min(initial=np.inf)
        # What is below the top_k would not be a candidate.
        return cls(
            scores[:, : config.top_k],
            hidden[:, : config.top_k],
            weights,
            lowest,
            is_relative,
            np.concatenate([own for _, own in used]),
        )

    def rate(self, limits: Limits, config: MineConfig) -> float:
        """The share of hidden positives among the negatives that would be chosen."""
        kept = np.isfinite(self.scores)
        kept[:, : config.skip_first] = False
        highest = limits.highest(
            self.lowest if self.is_relative else np.full(len(self.lowest), np.inf)
        )
        kept &= self.scores <= highest[:, None]
        if limits.min_score is not None:
            kept &= self.scores >= limits.min_score
        if config.sampling == "top":
            kept &= np.cumsum(kept, axis=1) <= config.num_negatives
            return float(
                (kept & self.is_hidden).sum(axis=1) @ self.weights / max(kept.sum(), 1)
            )
        # Any of those that are left is as likely as any other: the expected share.
        per_query = np.minimum(kept.sum(axis=1), config.num_negatives)
        shares = (kept & self.is_hidden).sum(axis=1) / np.maximum(kept.sum(axis=1), 1)
        return float((shares * per_query) @ self.weights / max(per_query.sum(), 1))
