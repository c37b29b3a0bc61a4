"""Results of every query of one evaluation: metrics and first documents, written beside the run, and compared before and
after: intervals of the differences, and the queries that changed most."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vembed.data.examples import Item
from vembed.files import read_json_object, replace_text

if TYPE_CHECKING:
    from vembed.evaluation.dataset import RetrievalData

NUM_FIRST_DOCUMENTS = 3
"""Documents that are kept per query, the first of its ranking."""
MAX_QUERIES_WITH_TEXTS = 2_000
"""Queries whose texts are kept. Metrics are kept of all queries."""
MAX_TEXT_CHARACTERS = 300
EVALUATIONS_FOLDER = "evaluations"
"""Folder of the results per query, inside the run's."""
NUM_CHANGED_QUERIES = 10
MIN_QUERIES = 6
"""Queries that an interval needs. Fewer differences have one sign by chance in more than 5 % of the comparisons."""
NO_DIFFERENCE = "no difference that the data can show"


Results = Mapping[str, Any]
"""What a file holds of one evaluation: the metrics of all queries, and the texts of the first ones."""
Content = Mapping[str, Any]
"""Text and images of an item."""
JudgedDocuments = Sequence[tuple[Content, bool]]
"""First documents of a query, each with whether it is relevant."""


@dataclass
class QueryResults:
    """Results of every query. An evaluation fills an empty one."""

    names: Sequence[str] = ()
    values: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    """[queries, metrics]."""
    first_documents: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), int))
    """[queries, NUM_FIRST_DOCUMENTS] indices of the first documents; -1: none."""

    def content(
        self,
        data: RetrievalData,
        metrics: Sequence[str],
    ) -> Results:
        """Return the metrics of all queries and the texts of the first MAX_QUERIES_WITH_TEXTS, as JSON values."""
        chosen = [name for name in metrics if name in self.names]
        columns = [self.names.index(name) for name in chosen]

        def contents(documents: Sequence[int]) -> list[Content]:
            return [
                item_content(data.documents[document], f"document {document}")
                for document in documents
            ]

        texts = []
        for number, row in enumerate(self.first_documents[:MAX_QUERIES_WITH_TEXTS]):
            relevant = data.relevance[number]
            documents = [int(document) for document in row if document >= 0]
            texts.append(
                {
                    "query": item_content(data.queries[number], f"query {number}"),
                    # One relevant document is enough to read what was asked for. Some queries have hundreds.
                    "relevant": contents(list(relevant)[:1]),
                    "found": contents(documents),
                    "is_relevant": [document in relevant for document in documents],
                }
            )
        return {
            "num_documents": len(data.documents),
            "metrics": chosen,
            "values": np.round(self.values[:, columns], 6).tolist(),
            "queries": texts,
        }


def item_content(item: Item, name: str) -> Content:
    """Return text and images of an item, short enough for a report: paths, or the
    item's name where the data hold the image."""
    text = " ".join((item.text or "").split())
    if len(text) > MAX_TEXT_CHARACTERS:
        text = text[: MAX_TEXT_CHARACTERS - 3] + "..."
    images = [
        f"image of {name}" if image.path is None else image.path
        for image in item.images
    ]
    return {"text": text, "images": images}


# ---- files ---------------------------------------------------------------------------------------------------------


def _path_of(output_dir: Path, step: int) -> Path:
    """Return the file of an evaluation."""
    return output_dir / EVALUATIONS_FOLDER / f"step-{step}.json"


def read_queries(output_dir: Path, step: int) -> Results | None:
    """Return what `write_queries` wrote, or None if there is no such file."""
    path = _path_of(output_dir, step)
    return read_json_object(path) if path.exists() else None


def write_queries(output_dir: Path, step: int, content: Results) -> None:
    """Write the content of an evaluation as a whole or not at all."""
    path = _path_of(output_dir, step)
    path.parent.mkdir(exist_ok=True)
    replace_text(path, json.dumps(content, ensure_ascii=False))


# ---- comparison of two evaluations ----------------------------------------------------------------------------------


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Changed:
    """One query whose score changed."""

    query: Content
    relevant: Sequence[Content]
    before: float
    after: float
    documents_before: JudgedDocuments
    documents_after: JudgedDocuments


@dataclass(frozen=True)
class Comparison:
    """Two evaluations of the same queries."""

    intervals: dict[str, Interval]
    better: list[Changed]
    worse: list[Changed]
    num_better: int = 0
    num_worse: int = 0
    num_queries: int = 0


def compare_results(
    before: Results | None,
    after: Results | None,
    metric: str,
) -> Comparison | None:
    """Return the comparison of two evaluations of the same queries; None if one has no file or their numbers differ."""
    if before is None or after is None:
        return None
    if len(before["values"]) != len(after["values"]) or not before["values"]:
        return None
    names = [name for name in after["metrics"] if name in before["metrics"]]
    scores_before = _scores(before, names)
    scores_after = _scores(after, names)
    differences_QM = scores_after - scores_before
    per_metric = paired_intervals(differences_QM)
    intervals = dict(zip(names, per_metric, strict=True))
    if metric not in names:
        return Comparison(intervals, [], [])
    column = names.index(metric)
    change = differences_QM[:, column]

    def changed(number: int) -> Changed:
        row_before = before["queries"][number]
        row_after = after["queries"][number]
        return Changed(
            row_after["query"],
            row_after["relevant"],
            float(scores_before[number, column]),
            float(scores_after[number, column]),
            list(zip(row_before["found"], row_before["is_relevant"], strict=True)),
            list(zip(row_after["found"], row_after["is_relevant"], strict=True)),
        )

    # Metrics of all queries are recorded, and texts of the first ones alone.
    num_texts = min(len(before["queries"]), len(after["queries"]))
    # Numbers of queries, the largest losses first.
    order = np.argsort(change[:num_texts], kind="stable").tolist()
    better = [
        changed(number)
        for number in order[::-1][:NUM_CHANGED_QUERIES]
        if change[number] > 0
    ]
    worse = [
        changed(number) for number in order[:NUM_CHANGED_QUERIES] if change[number] < 0
    ]
    return Comparison(
        intervals,
        better,
        worse,
        int((change > 0).sum()),
        int((change < 0).sum()),
        len(change),
    )


def _scores(results: Results, names: Sequence[str]) -> np.ndarray:
    """Return [queries, names] scores."""
    columns = [results["metrics"].index(name) for name in names]
    return np.asarray(results["values"])[:, columns]


def paired_intervals(differences_QM: np.ndarray) -> list[Interval]:
    """Return the mean difference of each metric over the queries, and its 95 % interval: all differences that there can
    be where the queries are too few."""
    num_queries = len(differences_QM)
    means = differences_QM.mean(axis=0)
    margins = np.full_like(means, 2)
    if num_queries >= MIN_QUERIES:
        from scipy import stats  # takes a third of a second to import

        errors = differences_QM.std(axis=0, ddof=1) / num_queries**0.5
        margins = stats.t.ppf(0.975, num_queries - 1) * errors
    # Scores are from 0 to 1.
    lows = np.maximum(means - margins, -1)
    highs = np.minimum(means + margins, 1)
    bounds = zip(means.tolist(), lows.tolist(), highs.tolist(), strict=True)
    return [Interval(*values) for values in bounds]
