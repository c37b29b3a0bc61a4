"""Comparison of two evaluations query by query: intervals of the differences, and the queries that changed most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vembed.files import read_json_object

FOLDER = "evaluations"
"""Folder of the results per query, inside the run's."""
NUM_RESAMPLES = 2_000
DRAWS_AT_ONCE = 2**14
"""Draws of one array, which stays in the cache."""
MAX_RESAMPLED_QUERIES = 10_000
"""Up to which the interval is resampled; with more the normal distribution gives the same."""
NUM_SHOWN = 10
NO_DIFFERENCE = "no difference that the data can show"


@dataclass(frozen=True, slots=True)
class Interval:
    """95 % interval of a mean difference."""

    difference: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Return whether the interval excludes zero."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        text = f"{self.low:+.4f} to {self.high:+.4f}"
        return text if self.is_clear else f"{text}: {NO_DIFFERENCE}"


@dataclass(frozen=True, slots=True)
class Changed:
    """One query whose score changed."""

    query: Mapping[str, Any]
    relevant: Sequence[Mapping[str, Any]]
    before: float
    after: float
    found_before: Sequence[tuple[Mapping[str, Any], bool]]
    """First documents, each with whether it is relevant."""
    found_after: Sequence[tuple[Mapping[str, Any], bool]]
    pictures: Mapping[str, str] = field(default_factory=dict)
    """Thumbnails of images that the data hold themselves, by their names."""


@dataclass(frozen=True)
class Comparison:
    """Two evaluations of the same queries."""

    intervals: dict[str, Interval]
    better: list[Changed]
    worse: list[Changed]
    num_better: int = 0
    num_worse: int = 0
    num_queries: int = 0


def path_of(output_dir: Path, step: int) -> Path:
    """Return the file of an evaluation."""
    return output_dir / FOLDER / f"step-{step}.json"


def read_queries(path: Path) -> Mapping[str, Any] | None:
    """Return what `write` wrote, or None if there is no such file."""
    return read_json_object(path) if path.exists() else None


def compare_queries(
    folder: Path, first: int, last: int, metric: str
) -> Comparison | None:
    """Return the comparison of the evaluations after two steps; None if one has no file."""
    before = read_queries(path_of(folder, first))
    after = read_queries(path_of(folder, last))
    if before is None or after is None:
        return None
    return compare_results(before, after, metric)


def compare_results(
    before: Mapping[str, Any], after: Mapping[str, Any], metric: str
) -> Comparison | None:
    """Return the comparison of two evaluations of the same queries; None if their numbers differ."""
    if len(before["values"]) != len(after["values"]) or not before["values"]:
        return None
    names = [name for name in after["metrics"] if name in before["metrics"]]
    if not names:
        return Comparison({}, [], [])
    scores_before = _scores_by_metric(before)
    scores_after = _scores_by_metric(after)
    differences = [scores_after[name] - scores_before[name] for name in names]
    per_metric = paired_intervals(np.stack(differences, axis=1))
    intervals = dict(zip(names, per_metric, strict=True))
    if metric not in names:
        return Comparison(intervals, [], [])
    change = differences[names.index(metric)]
    pictures = {**before.get("pictures", {}), **after.get("pictures", {})}

    def changed(number: int) -> Changed:
        row_before = before["queries"][number]
        row_after = after["queries"][number]
        return Changed(
            row_after["query"],
            row_after["relevant"],
            float(scores_before[metric][number]),
            float(scores_after[metric][number]),
            list(zip(row_before["found"], row_before["is_relevant"], strict=True)),
            list(zip(row_after["found"], row_after["is_relevant"], strict=True)),
            pictures,
        )

    # Metrics of all queries are recorded, and texts of the first ones alone.
    num_texts = min(len(before["queries"]), len(after["queries"]))
    order = np.argsort(change[:num_texts], kind="stable").tolist()
    better = [
        changed(number) for number in order[::-1][:NUM_SHOWN] if change[number] > 0
    ]
    worse = [changed(number) for number in order[:NUM_SHOWN] if change[number] < 0]
    return Comparison(
        intervals,
        better,
        worse,
        int((change > 0).sum()),
        int((change < 0).sum()),
        len(change),
    )


def _scores_by_metric(results: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return [queries] scores of each metric."""
    values = np.asarray(results["values"])
    return dict(zip(results["metrics"], values.T, strict=True))


def paired_intervals(differences_QM: np.ndarray) -> list[Interval]:
    """Return the mean difference of each metric and its 95 % interval, by the paired bootstrap over the queries."""
    count = len(differences_QM)
    means = differences_QM.mean(axis=0)
    if count > MAX_RESAMPLED_QUERIES:
        # 95 % of a normal distribution lie within 1.96 standard errors.
        half = 1.96 * differences_QM.std(axis=0, ddof=1) / count**0.5
        bounds = np.stack([means - half, means + half])
    else:
        # The report of a run is the same each time it is written.
        draw = np.random.default_rng(0)
        at_once = max(1, DRAWS_AT_ONCE // count)
        resampled = []
        for start in range(0, NUM_RESAMPLES, at_once):
            num_samples = min(at_once, NUM_RESAMPLES - start)
            resampled.append(_resampled_means(differences_QM, draw, num_samples))
        bounds = np.quantile(np.concatenate(resampled), [0.025, 0.975], axis=0)
    return [
        Interval(float(mean), float(low), float(high))
        for mean, low, high in zip(means, *bounds, strict=True)
    ]


def _resampled_means(
    differences_QM: np.ndarray, draw: np.random.Generator, num_samples: int
) -> np.ndarray:
    """Return the means of some resamples: [samples, metrics]."""
    count = len(differences_QM)
    queries_SQ = draw.integers(0, count, (num_samples, count))
    # One bin for each query of each sample.
    bins_SQ = queries_SQ + count * np.arange(num_samples)[:, None]
    times = np.bincount(bins_SQ.ravel(), minlength=num_samples * count)
    times_SQ = times.reshape(num_samples, count)
    # A mean weighs each query by how often it was drawn.
    return np.asarray(times_SQ @ differences_QM / count)
