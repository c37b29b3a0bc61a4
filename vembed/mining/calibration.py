"""`threshold: auto`: hide a part of the known positives, and see at which threshold they would become negatives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from vembed.errors import UserError
from vembed.mining.candidate_store import Candidates
from vembed.mining.choice import Limits
from vembed.mining.config import MineConfig

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

    def summary(self, wanted: float) -> str:
        """One line for the log."""
        limits = self.limits
        what = (
            f"relative_margin={limits.relative_margin:.3f}"
            if limits.relative_margin is not None
            else f"max_score={limits.max_score:.4f}"
        )
        line = (
            f"threshold: {what} (estimated rate of false negatives {self.rate:.1%}, {self.rate_without:.1%} without "
            f"it; {self.num_hidden:,d} known positives were hidden for the estimate)"
        )
        return (
            line
            if self.is_reached
            else f"{line}; no threshold brings the rate to {wanted:.1%}"
        )


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
