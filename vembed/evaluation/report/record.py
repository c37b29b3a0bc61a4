"""RunRecord: a run as read from its folder (config.yaml, metrics.jsonl, run.json), without any presentation. RunSummary:
facts about a finished run that its other files lack."""

import json
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from vembed import __version__
from vembed.config.schema import Options, TrainConfig
from vembed.errors import UserError
from vembed.files import (
    read_json_object,
    read_state_text,
    read_yaml,
    replace_text,
    short_name,
)

SUMMARY_FILE = "run.json"
REPORTED_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "accelerate",
    "peft",
    "bitsandbytes",
    "flash-attn",
    "torchao",
    "safetensors",
    "datasets",
    "numpy",
)

METRIC_NAMES = {
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


Scores = dict[str, float]
"""Metric -> score, with keys such as `ndcg@10`, `dim256/ndcg@10` or `spearman`."""


@dataclass(frozen=True)
class ReportTable:
    """A table for the page, for Markdown and for the console. Cells are formatted text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    pictures: Mapping[tuple[int, int], tuple[str, ...]] = field(default_factory=dict)
    """Data addresses of thumbnails in cells, by row and column; the page alone shows them."""


@dataclass(frozen=True)
class RecordedEvaluation:
    """One evaluation of the run."""

    step: int
    scores: Scores


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run. Every field has a "not known" value, so that an interrupted run still gets a report."""

    model: str = ""
    """The model and the reasons for its settings, as logged (`ModelDescription.summary()`)."""
    properties: list[str] = field(default_factory=list)
    """The model's name and what its users need to know of it, one line each."""
    start_changes: list[str] = field(default_factory=list)
    """What the model had before the first step that its files do not have: prompts, a projection."""
    data: list[str] = field(default_factory=list)
    """The training data, one line per source, with counts and skipped records."""
    language: str | None = None
    """Of the training texts. Empty: unclear and not English."""
    evaluation: str = ""
    """The evaluation data (`EvalData.summary()`)."""
    metric: str = ""
    """The deciding metric, e.g. ndcg@10. Empty: derived from the measured ones."""
    final_step: int | None = None
    """The step whose weights are in `final/`. None: the last one."""
    num_steps: int | None = None
    """Optimizer steps of the run."""
    num_examples: int | None = None
    num_parameters: int | None = None
    num_trainable: int | None = None
    num_processes: int = 1
    strategy: str = ""
    device: str = ""
    precision: str = ""
    decided_options: list[str] = field(default_factory=list)
    """Options whose value in config.yaml was chosen by vembed."""
    decisions: dict[str, dict[str, str]] = field(default_factory=dict)
    """Decisions of the run by name, each with its value, reason and source."""
    seconds: float | None = None
    """Wall-clock time of the run, over all resumed parts."""
    finished: str = ""
    """Date and time of the end, ISO 8601."""
    versions: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def save(self, output_dir: str | Path) -> None:
        """Write run.json. Only the main process calls it."""
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False)
        replace_text(Path(output_dir, SUMMARY_FILE), text + "\n")


@dataclass(frozen=True)
class RunRecord:
    """Contents of a run's output folder."""

    folder: Path
    config: Options
    steps: list[dict[str, Any]]
    evaluations: list[RecordedEvaluation]
    summary: RunSummary

    @property
    def before(self) -> Scores:
        """Scores before the first step; empty if not measured."""
        for evaluation in self.evaluations[:1]:
            if evaluation.step == 0:
                return evaluation.scores
        return {}

    @property
    def final(self) -> RecordedEvaluation | None:
        """Evaluation of the weights in `final/`."""
        trained = [evaluation for evaluation in self.evaluations if evaluation.step > 0]
        # A step may be evaluated again in a resumed run. The last evaluation counts.
        for evaluation in reversed(trained):
            if evaluation.step == self.summary.final_step:
                return evaluation
        return trained[-1] if trained else None

    @property
    def after(self) -> Scores:
        """Scores of the weights in `final/`; empty if not measured."""
        return self.final.scores if self.final else {}

    @property
    def headline(self) -> str:
        """The deciding metric of the run; empty without an evaluation."""
        measured = self.after or self.before
        for key in (self.summary.metric, *HEADLINES, *measured):
            if key in measured:
                return key
        return ""

    @property
    def dims(self) -> list[int]:
        """Measured Matryoshka sizes, largest first."""
        dims = set()
        for key in self.after or self.before:
            match = re.match(r"dim(\d+)/", key)
            if match:
                dims.add(int(match[1]))
        return sorted(dims, reverse=True)

    @property
    def last_step(self) -> int:
        """The last step that was logged or evaluated."""
        steps = [0]
        steps += [int(line["step"]) for line in self.steps[-1:]]
        steps += [evaluation.step for evaluation in self.evaluations]
        return max(steps)

    def name(self) -> str:
        """Name of the run, by default its folder's."""
        return str(self.config.get("run_name") or self.folder.resolve().name)

    def model_name(self) -> str:
        """Short name of the model: the last part of a path or Hub name."""
        return short_name(str(self.config.get("model_name", "model")))


def changed_settings(config: Options) -> Options:
    """Return the options of a config that differ from their defaults."""
    defaults = TrainConfig(model_name="", data_path="").to_dict()
    return {
        key: value
        for key, value in config.items()
        if (key, value) not in defaults.items()
    }


def run_options(model: str, names: Sequence[str]) -> Options:
    """Return options of the run that made a model; none for a model of another origin."""
    path = Path(model).expanduser()
    # The run itself, or its final/ or one of its checkpoints.
    for folder in (path, path.parent):
        if (folder / "config.yaml").is_file():
            config = read_run(folder).config
            return {name: config[name] for name in names if name in config}
    return {}


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
    steps = []
    evaluations = []
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
            scores = {}
            for key, value in values["eval"].items():
                if value is not None:
                    scores[key] = float(value)
            evaluations.append(RecordedEvaluation(int(values["step"]), scores))
        else:
            steps.append(values)
    return RunRecord(
        folder,
        config,
        steps,
        evaluations,
        read_summary(folder),
    )


def read_summary(output_dir: str | Path) -> RunSummary:
    """Read the summary; return an empty one if there is none."""
    path = Path(output_dir, SUMMARY_FILE)
    if not path.exists():
        return RunSummary()
    return RunSummary(**read_json_object(path))


def collect_versions() -> dict[str, str]:
    """Return versions of Python, the system and packages that can affect a result. Packages not installed are left
    out."""
    versions = {
        "vembed": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    for package in REPORTED_PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def metric_name(key: str) -> str:
    """Return a metric's display name: ndcg@10 -> nDCG@10."""
    kind, _, tail = key.partition("/")
    if kind in ("guard", "task"):
        name, _, metric = tail.rpartition("/")
        return f"{kind} {name}: {metric_name(metric)}"
    base, at, cut = key.partition("@")
    return METRIC_NAMES.get(base, base) + at + cut


def scores_line(
    when: str,
    scores: Scores,
    before: Scores,
    metric: str,
    *,
    is_short: bool = False,
) -> str:
    """Return the main scores of one evaluation as a log line, each with its change since before training. The first
    also has the score of a reranker's first stage. `metric`: one more metric to include, the first. `is_short`: with the
    first metric alone."""
    cells: list[str] = []
    for key in dict.fromkeys((metric, *TABLE)):
        if key not in scores:
            continue
        size, _, name = key.rpartition("/")
        cell = f"{metric_name(name)} {scores[key]:.4f}"
        if size:
            cell += f" at {size.removeprefix('dim')} dimensions"
        comparisons = []
        if key in before:
            comparisons.append(f"{scores[key] - before[key]:+.4f}")
        first_stage = scores.get(FIRST_STAGE + key)
        # Only of the first metric: the line is short.
        if first_stage is not None and not cells:
            comparisons.append(f"first stage {first_stage:.4f}")
        if comparisons:
            cell += f" ({'; '.join(comparisons)})"
        cells.append(cell)
    if is_short:
        cells = cells[:1]
    return f"evaluation {when}: {', '.join(cells)}"
