"""RunRecord: a run as read from its folder (config.yaml, metrics.jsonl, run.json), without any presentation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vembed.config.schema import TrainConfig
from vembed.errors import UserError
from vembed.evaluation.report.summary import RunSummary, read_summary
from vembed.files import read_state_text, read_yaml
from vembed.names import short_name

NAMES = {
    "ndcg": "nDCG",
    "mrr": "MRR",
    "recall": "Recall",
    "map": "MAP",
    "spearman": "Spearman",
    "pearson": "Pearson",
}
HEADLINES = ("ndcg@10", "spearman")
FIRST_STAGE = "first_stage/"
"""Prefix of the scores of what a reranker sorts, in the order in which the first stage found it."""
TABLE = ("ndcg@10", "mrr@10", "recall@10", "map@10", "spearman", "pearson")
"""Metrics of the first table. The full table has the others."""


@dataclass(frozen=True)
class ReportTable:
    """A table for the page, for Markdown and for the console. Cells are formatted text."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    pictures: Mapping[tuple[int, int], tuple[str, ...]] = field(default_factory=dict)
    """Data addresses of thumbnails in cells, by row and column; the page alone shows them."""


@dataclass(frozen=True)
class RecordedEvaluation:
    """One evaluation of the run."""

    step: int
    epoch: float
    scores: dict[str, float]


@dataclass(frozen=True)
class RunRecord:
    """Contents of a run's output folder."""

    folder: Path
    config: dict[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[RecordedEvaluation]
    summary: RunSummary

    @property
    def before(self) -> dict[str, float]:
        """Scores before the first step; empty if not measured."""
        first = self.evaluations[0] if self.evaluations else None
        return first.scores if first is not None and first.step == 0 else {}

    @property
    def final(self) -> RecordedEvaluation | None:
        """Evaluation of the weights in `final/`."""
        last = None
        for evaluation in reversed(self.evaluations):
            if evaluation.step == 0:
                continue
            if evaluation.step == self.summary.final_step:
                return evaluation
            last = last or evaluation
        return last

    @property
    def after(self) -> dict[str, float]:
        """Scores of the weights in `final/`; empty if not measured."""
        return self.final.scores if self.final else {}

    @property
    def headline(self) -> str:
        """The deciding metric of the run; empty without an evaluation."""
        measured = self.after or self.before
        wanted = (self.summary.metric, *HEADLINES, *measured)
        return next((key for key in wanted if key in measured), "")

    @property
    def dims(self) -> list[int]:
        """Measured Matryoshka sizes, largest first."""
        dims = set()
        for key in self.after or self.before:
            match = re.match(r"dim(\d+)/", key)
            if match:
                dims.add(int(match[1]))
        return sorted(dims, reverse=True)

    def changed_settings(self) -> dict[str, Any]:
        """Settings that differ from their defaults."""
        defaults = TrainConfig(model_name="", data_path="").to_dict()
        return {
            key: value
            for key, value in self.config.items()
            if key not in defaults or defaults[key] != value
        }

    def model_name(self) -> str:
        """Short name of the model: the last part of a path or Hub name."""
        return short_name(str(self.config.get("model_name", "model")))


def read_run(output_dir: str | Path) -> RunRecord:
    """Read the folder of a run, finished or not."""
    folder = Path(output_dir)
    config_file = folder / "config.yaml"
    metrics_file = folder / "metrics.jsonl"
    if not config_file.exists():
        raise UserError(
            f"{folder} has no config.yaml, so it is not the folder of a run"
        )
    config = read_yaml(config_file)
    steps: list[dict[str, Any]] = []
    evaluations: list[RecordedEvaluation] = []
    metrics = ""
    if metrics_file.exists():
        metrics = read_state_text(metrics_file, errors="replace")
    for line in metrics.splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue  # the run was killed while it wrote its last line
        if "eval" in values:
            # null: a score that was not finite, which JSON cannot hold.
            scores = {
                key: float(value)
                for key, value in values["eval"].items()
                if value is not None
            }
            evaluations.append(
                RecordedEvaluation(
                    int(values["step"]), float(values.get("epoch") or 0.0), scores
                )
            )
        else:
            steps.append(values)
    return RunRecord(folder, config, steps, evaluations, read_summary(folder))


def metric_name(key: str) -> str:
    """Return a metric's display name: ndcg@10 -> nDCG@10."""
    kind, _, rest = key.partition("/")
    if kind in ("guard", "task"):
        name, _, metric = rest.rpartition("/")
        return f"{kind} {name}: {metric_name(metric)}"
    base, at, cut = key.partition("@")
    return NAMES.get(base, base) + at + cut


def scores_line(
    when: str,
    scores: dict[str, float],
    before: dict[str, float],
    metric: str = "",
    *,
    columns: int | None = None,
) -> str:
    """Return the main scores of one evaluation as a log line, each with its change since before training. `metric`:
    one more metric to include, the first. `columns`: leave out what does not fit."""
    cells = []
    for key in dict.fromkeys((metric, *TABLE)):
        if key not in scores:
            continue
        size, _, name = key.rpartition("/")
        cell = f"{metric_name(name)} {scores[key]:.4f}"
        if size:
            cell += f" at {size.removeprefix('dim')} dimensions"
        if key in before:
            cell += f" ({scores[key] - before[key]:+.4f})"
        cells.append(cell)
    line = f"evaluation {when}: {', '.join(cells)}"
    while columns is not None and len(cells) > 1 and len(line) > columns:
        del cells[-1]
        line = f"evaluation {when}: {', '.join(cells)}"
    return line
