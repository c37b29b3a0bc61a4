"""Several runs side by side: scores with paired differences, curves, settings that differ, queries won and lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vembed.config.schema import TrainConfig
from vembed.errors import UserError
from vembed.evaluation.query_results import (
    NO_DIFFERENCE,
    Comparison,
    Interval,
    compare_results,
    path_of,
    read_queries,
)
from vembed.evaluation.report.page import render_page
from vembed.evaluation.report.plots import RUN_COLOURS, Curve, Plot, plot_runs
from vembed.evaluation.report.record import (
    TABLE,
    RunRecord,
    metric_name,
    read_run,
)
from vembed.evaluation.report.report import (
    changed_table,
    curves,
    format_option,
    short_paths,
)
from vembed.files import replace_text
from vembed.progress import duration

NEVER_COMPARED = ("output_dir", "run_name", "resume")
"""Settings that differ between any two runs, and those that change no result."""


@dataclass
class ComparedRun:
    """One of the compared runs. All others are compared with the first."""

    name: str
    record: RunRecord
    queries: Mapping[str, Any] | None = None
    """Results per query of the weights that count. None: not recorded."""
    changes: Comparison | None = None
    """Its queries against those of the first run. None for the first, and where `not_paired` says why."""
    not_paired: str = ""
    has_other_data: bool = False
    """True if its scores are of other queries, so that they must not be compared."""

    @property
    def state(self) -> str:
        """Finished, or stopped and where."""
        if self.record.summary.finished:
            return "finished"
        return f"stopped after step {self.record.last_step:,d}"

    def interval(self, metric: str) -> Interval | None:
        """Return the difference from the first run in a metric. None: not known."""
        return None if self.changes is None else self.changes.intervals.get(metric)


@dataclass(frozen=True)
class SeveralRuns:
    """Compared runs. The others are compared with the first one."""

    runs: Sequence[ComparedRun]
    metric: str
    """The deciding metric of the first run that has one. Empty without any evaluation."""

    @property
    def metrics(self) -> list[str]:
        """Metrics of the table, the deciding one first."""
        names = [self.metric] if self.metric else []
        for key in TABLE:
            is_measured = any(key in run.record.after for run in self.runs)
            if is_measured and key not in names:
                names.append(key)
        return names

    def comparable(self, key: str) -> dict[str, float]:
        """Return a metric by run, of those that were evaluated on the queries of the first."""
        scores = {}
        for run in self.runs:
            if key in run.record.after and not run.has_other_data:
                scores[run.name] = run.record.after[key]
        return scores

    @property
    def best(self) -> ComparedRun | None:
        """The run with the highest deciding metric."""
        scores = self.comparable(self.metric)
        best = None
        for run in self.runs:
            if run.name not in scores:
                continue
            # Of equal scores the first run counts.
            if best is None or scores[run.name] > scores[best.name]:
                best = run
        return best

    def differing_settings(self) -> dict[str, list[Any]]:
        """Options that differ, with the value of each run."""
        # A run of an older vembed lacks newer options: they had no effect, as with their defaults.
        defaults = TrainConfig(model_name="", data_path="").to_dict()
        names: dict[str, None] = {}
        for run in self.runs:
            names |= dict.fromkeys(run.record.config)
        settings = {}
        for name in names:
            if name in NEVER_COMPARED:
                continue
            default = defaults.get(name)
            values = [run.record.config.get(name, default) for run in self.runs]
            if any(value != values[0] for value in values):
                settings[name] = values
        return settings

    def figures(self) -> list[tuple[Curve, Plot, str]]:
        """Return plots of all runs: the deciding metric first, then what was logged by step."""
        name = metric_name(self.metric)
        evaluated = []
        logged: dict[str, list[tuple[int, Curve]]] = {}
        for number, run in enumerate(self.runs):
            steps, scores = run.record.scores_over_steps(self.metric)
            if steps:
                curve = Curve(
                    name, "of each evaluation", steps, scores, "{:.3f}".format
                )
                evaluated.append((number, curve))
            for curve in curves(run.record):
                logged.setdefault(curve.title, []).append((number, curve))
        figures = []
        if any(len(curve.steps) > 1 for _, curve in evaluated):
            plot = plot_runs(evaluated, has_points=True)
            figures.append((evaluated[0][1], plot, ""))
        for run_curves in logged.values():
            first_curve = run_curves[0][1]
            figures.append((first_curve, plot_runs(run_curves), ""))
        return figures


# ---- reading -------------------------------------------------------------------------------------------------------


def read_several(folders: Sequence[str | Path]) -> SeveralRuns:
    """Read the folders of at least two runs, finished or not."""
    if len(folders) < 2:
        raise UserError(
            f"{len(folders)} run was given: a comparison needs two or more, as vembed compare runs/a runs/b"
        )
    resolved = set()
    for folder in folders:
        path = Path(folder).resolve()
        if path in resolved:
            raise UserError(f"{path} was given twice: give each run once")
        resolved.add(path)
    records = [read_run(folder) for folder in folders]
    metric = ""
    for record in records:
        if record.after:
            metric = record.headline
            break
    runs: list[ComparedRun] = []
    for name, record in zip(_names(records), records, strict=True):
        run = ComparedRun(name, record)
        if record.final is not None:
            run.queries = read_queries(path_of(record.folder, record.final.step))
        if runs:
            _compare(runs[0], run, metric)
        runs.append(run)
    return SeveralRuns(runs, metric)


def _names(records: Sequence[RunRecord]) -> list[str]:
    """Return a different short name for each run: run_name or folder, with more of the path where these are equal."""
    folders = []
    names = []
    for record in records:
        folder = record.folder.resolve()
        folders.append(folder)
        names.append(str(record.config.get("run_name") or folder.name))
    # run_name may be the same in all runs of one config. At some depth the paths differ: no folder was given twice.
    depth = 1
    while len(set(names)) < len(names):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        depth += 1
    return names


def _compare(
    first: ComparedRun,
    run: ComparedRun,
    metric: str,
) -> None:
    """Compare the queries of a run with those of the first, if these are the same ones."""
    if first.queries is None or run.queries is None:
        lacking = [entry.name for entry in (first, run) if entry.queries is None]
        run.not_paired = (
            f"no results per query were recorded by {' and '.join(lacking)}"
        )
        return
    contents = []
    for results in (first.queries, run.queries):
        texts = [(row["query"], row["relevant"]) for row in results["queries"]]
        contents.append((len(results["values"]), texts))
    if contents[0] == contents[1]:
        run.changes = compare_results(first.queries, run.queries, metric)
        return
    run.not_paired = f"{first.name} and {run.name} were evaluated on other queries"
    run.has_other_data = True


# ---- text and JSON -------------------------------------------------------------------------------------------------


def score_lines(runs: SeveralRuns) -> str:
    """Return each run's scores as lines of plain text, with the interval of its difference in the deciding metric."""
    lines = []
    for run in runs.runs:
        scores = []
        for key in runs.metrics:
            if key in run.record.after:
                scores.append(f"{metric_name(key)} {run.record.after[key]:.4f}")
        line = f"{run.name}: {', '.join(scores) or 'not evaluated'}"
        interval = run.interval(runs.metric)
        if interval is not None:
            line += f" ({interval.difference:+.4f}, 95 % interval {interval})"
        lines.append(line + "\n")
    return "".join(lines)


def as_json(runs: SeveralRuns) -> dict[str, Any]:
    """Return the comparison as JSON values."""
    names = [run.name for run in runs.runs]
    settings = {}
    for option, values in runs.differing_settings().items():
        settings[option] = dict(zip(names, values, strict=True))
    return {
        "metric": runs.metric or None,
        "compared_with": names[0],
        "best": None if runs.best is None else runs.best.name,
        "runs": [run_json(run.name, run.record) for run in runs.runs],
        "differences": [_changes_json(run) for run in runs.runs[1:]],
        "settings": settings,
    }


def run_json(name: str, record: RunRecord) -> dict[str, Any]:
    """Return the result of one run as JSON values."""
    evaluations = []
    for evaluation in record.evaluations:
        evaluations.append({"step": evaluation.step, "scores": evaluation.scores})
    return {
        "name": name,
        "folder": str(record.folder),
        "is_finished": bool(record.summary.finished),
        "last_step": record.last_step,
        "seconds": record.summary.seconds,
        "metric": record.headline or None,
        "scored_step": None if record.final is None else record.final.step,
        "before": record.before,
        "after": record.after,
        "evaluations": evaluations,
        "last_loss": record.steps[-1].get("loss") if record.steps else None,
    }


def _changes_json(run: ComparedRun) -> dict[str, Any]:
    changes = run.changes
    if changes is None:
        return {"run": run.name, "not_paired": run.not_paired}
    metrics = {}
    for name, interval in changes.intervals.items():
        metrics[name] = {**asdict(interval), "is_clear": interval.is_clear}
    queries = []
    for query in (*changes.better, *changes.worse):
        before = [item["text"] for item, _ in query.found_before]
        after = [item["text"] for item, _ in query.found_after]
        queries.append(
            {
                "query": query.query["text"],
                "relevant": [item["text"] for item in query.relevant],
                "first": {"score": query.before, "found": before},
                "this": {"score": query.after, "found": after},
            }
        )
    num_wins = len(changes.better)
    return {
        "run": run.name,
        "num_queries": changes.num_queries,
        "num_better": changes.num_better,
        "num_worse": changes.num_worse,
        "metrics": metrics,
        "wins": queries[:num_wins],
        "losses": queries[num_wins:],
    }


# ---- page ----------------------------------------------------------------------------------------------------------


def write_comparison(runs: SeveralRuns, target: str | Path) -> Path:
    """Write the page and return its path."""
    path = Path(target)
    if not path.absolute().parent.is_dir():
        raise UserError(
            f"{path.absolute().parent} is not a folder, so {path.name} cannot be written"
        )
    warnings = []
    for run in runs.runs:
        if not run.record.summary.finished:
            warnings.append(f"{run.name}: {run.state}.")
        if runs.metric and run.not_paired:
            warnings.append(f"Not paired: {run.not_paired}.")
    settings = []
    for name, values in runs.differing_settings().items():
        texts = [short_paths(format_option(value)) or "-" for value in values]
        settings.append((name, texts))
    page = render_page(
        "comparison.html.j2",
        title=f"{len(runs.runs)} runs - vembed compare",
        names=[run.name for run in runs.runs],
        num_colours=len(RUN_COLOURS),
        runs=runs,
        sentence=_verdict(runs),
        warnings=warnings,
        settings=settings,
        figures=runs.figures(),
        facts=_facts(runs),
        changed_table=changed_table,
        metric_name=metric_name,
    )
    replace_text(path, page)
    return path


def _verdict(runs: SeveralRuns) -> str:
    """Return whether the highest score is more than chance against the first run."""
    best = runs.best
    if best is None:
        return "None of them was evaluated after a step."
    first = runs.runs[0]
    name = metric_name(runs.metric)
    if best is first:
        sentence = f"{first.name} is the run that the others are compared with"
        num_paired = 0
        num_clear = 0
        for run in runs.runs:
            if run.changes is None:
                continue
            num_paired += 1
            interval = run.interval(runs.metric)
            if interval is not None and interval.is_clear:
                num_clear += 1
        if not num_paired:
            return f"{sentence}. Their queries could not be paired."
        return f"{sentence}. {num_clear} of {num_paired} differ from it in {name} by more than chance."
    interval = best.interval(runs.metric)
    if best.changes is None or interval is None:
        reason = f": {best.not_paired}" if best.not_paired else ""
        return f"Whether the difference from {first.name} is more than chance is not known{reason}."
    verdict = (
        "the difference is more than chance" if interval.is_clear else NO_DIFFERENCE
    )
    return (
        f"{best.changes.num_better:,d} of {best.changes.num_queries:,d} queries are better than with {first.name}, "
        f"{best.changes.num_worse:,d} worse. {name} {interval.difference:+.4f} "
        f"(95 % interval {interval.low:+.4f} to {interval.high:+.4f}): {verdict}."
    )


def _facts(runs: SeveralRuns) -> list[tuple[str, list[str]]]:
    """Return what is known of each run. What is known of none is left out."""
    rows: dict[str, list[str]] = {}
    for run in runs.runs:
        record = run.record
        summary = record.summary
        seconds = summary.seconds
        step = record.final.step if record.final else None
        run_facts = {
            "Model": record.model_name(),
            "State": run.state,
            "Scored weights": f"after step {step:,d}" if step else "",
            "Examples": _count(summary.num_examples),
            "Trained parameters": _count(summary.num_trainable),
            "Time": "" if seconds is None else duration(seconds),
            "Processes": str(summary.num_processes) if summary.finished else "",
            "Device": summary.device,
            "Strategy": summary.strategy,
            "Mixed precision": summary.precision,
            "Folder": record.folder.resolve().name,
        }
        for name, fact in run_facts.items():
            rows.setdefault(name, []).append(fact)
    # Versions of packages, where they differ.
    versions = [run.record.summary.versions for run in runs.runs]
    packages: dict[str, None] = {}
    for by_package in versions:
        packages |= dict.fromkeys(by_package)
    for package in packages:
        package_versions = [by_package.get(package, "") for by_package in versions]
        if len(set(package_versions) - {""}) > 1:
            rows[f"{package} version"] = package_versions
    known_rows = []
    for name, values in rows.items():
        if any(values):
            known_rows.append((name, values))
    return known_rows


def _count(number: int | None) -> str:
    return f"{number:,d}" if number else ""
