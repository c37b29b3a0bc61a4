"""write_report(output_dir): report.html and report.md from a run's folder."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from vembed.config.schema import Options
from vembed.errors import UserError, masked, masked_option
from vembed.evaluation.query_results import (
    NO_DIFFERENCE,
    Changed,
    Comparison,
    Content,
    Interval,
    Results,
    compare_results,
    read_queries,
)
from vembed.evaluation.report.page import render_page, thumbnail
from vembed.evaluation.report.plots import (
    ACCENT,
    RUN_COLOURS,
    Curve,
    NumberFormat,
    Plot,
    Point,
    plot_curves,
)
from vembed.evaluation.report.record import (
    FIRST_STAGE,
    TABLE,
    ReportTable,
    RunRecord,
    changed_settings,
    metric_name,
    read_run,
)
from vembed.files import replace_text, short_name
from vembed.progress import duration, rate_text

STEP_COLUMNS = ("loss", "learning_rate", "grad_norm")
"""Columns, behind the step, of the steps since the last logged line."""
FORMS = {
    "float32": ("float32", 32, "var(--ink-soft)"),
    "int8": ("int8", 8, "var(--before)"),
    "binary": ("binary", 1, "var(--bad)"),
    "binary_rescored": ("binary, rescored", 1, ACCENT),
}
"""Stored forms of documents: name on pages, bits of a coordinate, and colour."""
MAX_CURVE_POINTS = 150
"""Of more values neighbours are averaged: a plot is about 300 units wide, and single steps are noisy."""


def write_report(output_dir: str | Path) -> Path:
    """Write both reports; return the path of report.html. Only the main process calls it."""
    record = read_run(output_dir)
    values = report_values(record)
    replace_text(record.folder / "report.md", render_page("run.md.j2", **values))
    path = record.folder / "report.html"
    replace_text(path, render_page("run.html.j2", **values))
    return path


# ---- tables --------------------------------------------------------------------------------------------------------


def score_table(
    record: RunRecord,
    keys: Sequence[str] | None = None,
    intervals: Mapping[str, Interval] | None = None,
) -> ReportTable:
    """Return a table of metrics before and after: those of `keys`, or all that were measured. With `intervals`, a
    column of the 95 % intervals of the changes."""
    measured = record.after or record.before
    if keys is None:
        is_main = re.compile(r"[^/]*$|guard/|task/")
        keys = [key for key in measured if is_main.match(key)]
    header = ["metric", "before", "after", "change"]
    # A reranker's scores stand beside those of the order that it was given.
    has_first_stage = any(key.startswith(FIRST_STAGE) for key in measured)
    if has_first_stage:
        header.insert(1, "first stage")
    if intervals:
        header.append("95 % interval of the change")
    rows = []
    for key in keys:
        if key not in measured:
            continue
        row = [metric_name(key), *_before_after(record, key)]
        if has_first_stage:
            first_score = measured.get(FIRST_STAGE + key)
            row.insert(1, "" if first_score is None else f"{first_score:.4f}")
        if intervals:
            row.append(str(intervals[key]) if key in intervals else "")
        rows.append(row)
    return ReportTable(header, rows)


def dims_table(record: RunRecord) -> ReportTable | None:
    """Return a table of the deciding metric by Matryoshka size, with the fraction of the full embedding's score."""
    if not record.dims:
        return None
    full = record.after.get(record.headline)
    rows = []
    for dim in record.dims:
        key = f"dim{dim}/{record.headline}"
        after = record.after.get(key)
        fraction = f"{after / full:.1%}" if after is not None and full else ""
        rows.append((str(dim), *_before_after(record, key), fraction))
    return ReportTable(("dims", "before", "after", "change", "of full size"), rows)


def changed_table(
    queries: Sequence[Changed],
    before: str = "found before",
    after: str = "found after",
) -> ReportTable | None:
    """Return a table of queries with what should be found and what was found first, `before` and `after`, with
    thumbnails of images; None without queries."""
    rows = []
    pictures = {}
    for row, query in enumerate(queries):
        cells: list[tuple[Sequence[Content], str]]
        cells = [([query.query], ""), (query.relevant, "")]
        for documents in (query.documents_before, query.documents_after):
            mark = "[relevant] " if documents and documents[0][1] else ""
            first = [item for item, _ in documents[:1]]
            cells.append((first, mark if documents else "nothing"))
        texts = []
        for column, (items, mark) in enumerate(cells):
            parts = []
            for item in items:
                names = [short_name(path) for path in item["images"]]
                parts.append(" ".join(filter(None, [item["text"], *names])))
            texts.append(mark + "; ".join(parts))
            paths = items[0]["images"] if items else ()
            addresses = [thumbnail(path) for path in paths]
            pictures[row, column] = tuple(filter(None, addresses))
        rows.append((*texts, f"{query.before:.3f} -> {query.after:.3f}"))
    header = ("query", "relevant", before, after, "score")
    return ReportTable(header, rows, pictures) if rows else None


def _before_after(record: RunRecord, key: str) -> tuple[str, str, str]:
    """Return a score before and after, and the change, as text."""
    before = record.before.get(key)
    after = record.after.get(key)
    return (
        "" if before is None else f"{before:.4f}",
        "" if after is None else f"{after:.4f}",
        "" if before is None or after is None else f"{after - before:+.4f}",
    )


# ---- sentences -----------------------------------------------------------------------------------------------------


def verdict(record: RunRecord, changes: Comparison | None) -> str:
    """Return whether the change of the deciding metric is more than chance, in one sentence; empty if not known."""
    if changes is None or record.headline not in changes.intervals:
        return ""
    interval = changes.intervals[record.headline]
    counts = (
        f"{changes.num_better:,d} of {changes.num_queries:,d} queries got better and "
        f"{changes.num_worse:,d} worse"
    )
    name = metric_name(record.headline)
    if not interval.is_clear:
        return f"{name}: {NO_DIFFERENCE}; {counts}."
    return f"{counts}; the change of {name} is more than chance."


def sentence(record: RunRecord) -> str:
    """Return a summary of the run in one or two sentences."""
    summary = record.summary
    text = f"{record.model_name()}, fine-tuned"
    if summary.num_examples is not None:
        text += f" on {summary.num_examples:,d} examples"
    num_steps = record.steps[-1]["step"] if record.steps else 0
    text += f" in {num_steps:,d} steps"
    if summary.seconds is not None:
        text += f" and {duration(summary.seconds)}"
    text += "."
    if record.before and summary.start_changes:
        changes = ", and ".join(summary.start_changes)
        text += f" Before training: the start model with {changes}."
    return text


def facts(record: RunRecord) -> list[tuple[str, str]]:
    """Return model, data and settings as name and value."""
    summary = record.summary
    trained = ""
    if summary.num_parameters and summary.num_trainable is not None:
        share = summary.num_trainable / summary.num_parameters
        trained = f"{summary.num_trainable:,d} of {summary.num_parameters:,d} parameters ({share:.0%})"
    sources = [line.removeprefix("data: ") for line in summary.data]
    weights_kept = f"those after step {record.final.step:,d}" if record.final else ""
    named = {
        "Model": "\n".join(summary.properties),
        "Trained": trained,
        "Training data": short_paths("\n".join(sources)),
        "Evaluation data": short_paths(summary.evaluation),
        "Loss": str(record.config.get("loss", "")),
        "Weights kept": weights_kept,
        "Strategy": summary.strategy,
        "Mixed precision": summary.precision,
        "Device": summary.device,
        "Processes": str(summary.num_processes),
        "Finished": summary.finished[:16].replace("T", " "),
    }
    return [(name, masked(value)) for name, value in named.items() if value]


def short_paths(text: str) -> str:
    """Shorten absolute paths to their last parts."""
    # From a slash at the beginning of a word (behind a blank, quotation mark, bracket, comma or colon) to the last
    # slash before a name, so that `a/b` and `https://` stay.
    return re.sub(r"(?<![^\s'\"\[{(,:])/[^\s'\",]*/(?=[^/\s])", "", text)


# ---- plots ---------------------------------------------------------------------------------------------------------


def curves(record: RunRecord) -> list[Curve]:
    """Return the recorded curves for the report: of each step where it is recorded, else of each logged line."""
    points: dict[str, list[Point]] = {key: [] for key in QUANTITIES}

    def add(
        step: float,
        key: str,
        value: Any,
    ) -> None:
        if isinstance(value, int | float):
            points.setdefault(key, []).append((float(step), float(value)))

    for line in record.steps:
        peaks = [process.get("peak_gb") or 0.0 for process in line.get("memory") or []]
        add(line["step"], "memory", max(peaks, default=None))
        for key, value in line.items():
            if key.startswith("loss/") or key in LINE_QUANTITIES:
                add(line["step"], key, value)
        for step, *values in line["steps"]:
            for key, value in zip(STEP_COLUMNS, values, strict=True):
                add(step, key, value)
    for evaluation in record.evaluations:
        for key, score in evaluation.scores.items():
            if key.startswith(("task/", "guard/")):
                add(evaluation.step, key, score)
    drawn = []
    for key, key_points in points.items():
        # A curve of zeros (no padding, no memory on a CPU) says nothing.
        if len(key_points) < 2 or not any(value for _, value in key_points):
            continue
        steps, values = _thinned(key_points)
        of_score = (metric_name(key), "", "{:.4f}".format)
        title, note, write = QUANTITIES.get(key, of_score)
        if key.startswith("loss/"):
            title = f"Loss, {key.removeprefix('loss/')}"
            note = "mean between two log lines"
            write = "{:.3g}".format
        from_zero = key in QUANTITIES and key not in ("loss", "grad_norm")
        drawn.append(Curve(title, note, steps, values, write, from_zero))
    return drawn


def _thinned(points: list[Point]) -> tuple[list[float], list[float]]:
    """Average neighbouring points where there are more than MAX_CURVE_POINTS. The last point is kept as it is."""
    num_groups = min(len(points) - 1, MAX_CURVE_POINTS)
    groups = np.array_split(np.array(points[:-1]), num_groups)
    means = [group.mean(axis=0) for group in groups]
    steps, values = np.array([*means, points[-1]]).T
    return steps.tolist(), values.tolist()


def _evaluations_curve(record: RunRecord, key: str) -> Curve:
    """Return a metric over the evaluations."""
    steps = []
    values = []
    for evaluation in record.evaluations:
        if key in evaluation.scores:
            steps.append(evaluation.step)
            values.append(evaluation.scores[key])
    return Curve(
        metric_name(key),
        "of each evaluation",
        steps,
        values,
        "{:.3f}".format,
        has_points=True,
    )


def stored_values(scores: Mapping[str, float]) -> dict[str, Any]:
    """Return what the template of the stored forms shows: a table with the share of the float score at full size, and
    nDCG@10 by the bytes of a document, a line for each form. Nothing without their scores."""
    scores_by_dim: dict[str, dict[int, float]] = {form: {} for form in FORMS}
    for key, value in scores.items():
        if key.startswith("compressed/"):
            _, form, dim, _ = key.split("/")
            scores_by_dim[form][int(dim)] = value
    _, full_score = max(scores_by_dim["float32"].items(), default=(0, 0.0))
    rows = []
    lines = []
    for form, (name, bits, colour) in FORMS.items():
        powers = []
        values = []
        for size, value in sorted(scores_by_dim[form].items(), reverse=True):
            num_bytes = math.ceil(size * bits / 8)
            share = f"{value / full_score:.3f}" if full_score else "-"
            rows.append((name, str(size), f"{num_bytes:,d}", f"{value:.4f}", share))
            powers.append(math.log2(num_bytes))
            values.append(value)
        write = "{:.2f}".format
        curve = Curve(name, "", powers, values, write, has_points=True)
        if values:
            lines.append((colour, curve))
    if not rows:
        return {}
    plot = plot_curves(
        lines,
        x_label="bytes per document",
        write_x=lambda power: f"{2**power:,.0f}",
    )
    header = ("vectors", "size", "bytes", "nDCG@10", "of float32")
    table = ReportTable(header, rows)
    return {"table": table, "lines": lines, "plot": plot}


QUANTITIES: dict[str, tuple[str, str, NumberFormat]] = {
    "loss": ("Loss", "of the global batch", "{:.3g}".format),
    "learning_rate": ("Learning rate", "", "{:.2g}".format),
    "grad_norm": ("Gradient norm", "global, before clipping", "{:.3g}".format),
    "samples_per_second": ("Throughput", "examples per second", rate_text),
    "padding_fraction": ("Padding", "share of tokens", "{:.0%}".format),
    "memory": ("Memory", "peak of the fullest process, GiB", "{:.3g}".format),
}
"""Logged quantities with title, note and number format of their curves."""
LINE_QUANTITIES = QUANTITIES.keys() - {*STEP_COLUMNS, "memory"}
"""Quantities that have one value in a logged line."""


# ---- the two reports -----------------------------------------------------------------------------------------------


def report_values(record: RunRecord) -> dict[str, Any]:
    """Return what the templates of both reports show."""
    changes = None
    if record.before and record.final is not None:
        # The queries before training against those with the weights kept, where both were recorded.
        first = read_queries(record.folder, 0)
        last = read_queries(record.folder, record.final.step)
        changes = compare_results(first, last, record.headline)
    intervals = changes.intervals if changes else None
    key = record.headline
    changed: dict[bool, Options] = {False: {}, True: {}}
    for name, value in changed_settings(record.config).items():
        is_decided = name in record.summary.decided_options
        changed[is_decided][name] = masked_option(name, value)
    figures = [(curve, plot_curves([(ACCENT, curve)])) for curve in curves(record)]
    scores_plot = None
    if len(record.evaluations) > 2:  # more than a before and an after
        kept_step = record.final.step if record.final else None
        curve = _evaluations_curve(record, key)
        scores_plot = plot_curves([(ACCENT, curve)], kept_step)
    return {
        "title": f"{record.model_name()} - vembed report",
        "name": record.name(),
        "label": metric_name(key),
        "before": record.before.get(key),
        "after": record.after.get(key),
        # Two losses of different batches are no result.
        "fallback": "Not evaluated" if record.steps else "No step was logged",
        "sentence": sentence(record),
        "warnings": [masked(warning) for warning in record.summary.warnings],
        "verdict": verdict(record, changes),
        "scores": score_table(record, TABLE, intervals),
        "all_scores": score_table(record, intervals=intervals),
        "scores_plot": scores_plot,
        "dims": dims_table(record),
        "stored": stored_values(record.after),
        "better": changed_table(changes.better) if changes else None,
        "worse": changed_table(changes.worse) if changes else None,
        "figures": figures,
        "facts": facts(record),
        "changed_settings": _as_yaml(changed[False]),
        "decided_settings": _as_yaml(changed[True]),
        "versions": record.summary.versions,
    }


def _as_yaml(settings: Options) -> str:
    """Return settings as they stand in a config, with short paths; empty for none."""
    if not settings:
        return ""
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    return short_paths(text)


# ---- several runs side by side: paired differences, curves, settings that differ, queries won and lost -------------


NEVER_COMPARED = ("output_dir", "run_name", "resume")
"""Settings that differ between any two runs, and those that change no result."""


@dataclass
class ComparedRun:
    """One of the compared runs. All others are compared with the first."""

    name: str
    record: RunRecord
    queries: Results | None = None
    """Results per query of the weights that count. None: not recorded."""
    changes: Comparison | None = None
    """Its queries against those of the first run. None for the first, and where `not_paired` says why."""
    not_paired: str = ""
    has_other_data: bool = False
    """True if its scores are of other queries, so that they must not be compared."""

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

    def comparable(self, key: str) -> list[ComparedRun]:
        """Return the runs with a metric that were evaluated on the queries of the first."""
        return [
            run
            for run in self.runs
            if key in run.record.after and not run.has_other_data
        ]

    def best(self, key: str) -> ComparedRun | None:
        """Return the run with the highest value of a metric."""
        # Of equal scores the first run counts.
        return max(
            self.comparable(key),
            key=lambda run: run.record.after[key],
            default=None,
        )

    def differing_settings(self) -> dict[str, list[Any]]:
        """Options and versions that differ, with the value of each run."""
        options = []
        for run in self.runs:
            run_options = dict(run.record.config)
            for package, version in run.record.summary.versions.items():
                run_options[f"{package} version"] = version
            options.append(run_options)
        settings = {}
        for name in dict.fromkeys(chain(*options)):
            if name in NEVER_COMPARED:
                continue
            values = [named.get(name) for named in options]
            compared = values
            if name.endswith(" version"):
                # A run that was stopped tells no versions.
                compared = [value for value in values if value is not None]
            if any(value != compared[0] for value in compared):
                settings[name] = values
        return settings

    def figures(self) -> list[tuple[Curve, Plot]]:
        """Return plots of all runs: the deciding metric first, then what was logged by step."""
        evaluated = []
        logged: dict[str, list[tuple[str, Curve]]] = {}
        for number, run in enumerate(self.runs):
            colour = RUN_COLOURS[number % len(RUN_COLOURS)]
            if run.record.evaluations:
                curve = _evaluations_curve(run.record, self.metric)
                evaluated.append((colour, curve))
            for curve in curves(run.record):
                logged.setdefault(curve.title, []).append((colour, curve))
        groups = list(logged.values())
        if any(len(curve.steps) > 1 for _, curve in evaluated):
            groups.insert(0, evaluated)
        return [(group[0][1], plot_curves(group)) for group in groups]


# ---- reading -------------------------------------------------------------------------------------------------------


def read_several(folders: Sequence[str | Path]) -> SeveralRuns:
    """Read the folders of at least two runs, finished or not."""
    if len(folders) < 2:
        raise UserError(
            f"{len(folders)} run was given: a comparison needs two or more, as vembed compare runs/a runs/b"
        )
    records = [read_run(folder) for folder in folders]
    metrics = [record.headline for record in records if record.after]
    metric = metrics[0] if metrics else ""
    runs: list[ComparedRun] = []
    names = [record.name() for record in records]
    if len(set(names)) < len(names):
        names = [str(record.folder) for record in records]
    for name, record in zip(names, records, strict=True):
        run = ComparedRun(name, record)
        if record.final is not None:
            run.queries = read_queries(record.folder, record.final.step)
        if runs:
            _compare(runs[0], run, metric)
        runs.append(run)
    return SeveralRuns(runs, metric)


def _compare(
    first: ComparedRun,
    run: ComparedRun,
    metric: str,
) -> None:
    """Compare the queries of a run with those of the first, if these are the same ones."""
    contents = []
    sizes = [
        compared.record.summary.evaluation.partition(", from")[0]
        for compared in (first, run)
    ]
    for compared in (first, run):
        results = compared.queries
        if results is None:
            # Correlations have no results per query: the number of pairs tells the data apart.
            run.has_other_data = sizes[0] != sizes[1]
            run.not_paired = f"no results per query were recorded by {compared.name}"
            return
        texts = [(row["query"], row["relevant"]) for row in results["queries"]]
        contents.append((len(results["values"]), results["num_documents"], texts))
    if contents[0] == contents[1]:
        run.changes = compare_results(first.queries, run.queries, metric)
    else:
        run.not_paired = f"{run.name} was evaluated on other data than {first.name}"
        run.has_other_data = True


# ---- text and JSON -------------------------------------------------------------------------------------------------


def score_lines(runs: SeveralRuns) -> str:
    """Return each run's scores as lines of plain text, with the interval of its difference in the deciding metric."""
    lines = []
    for run in runs.runs:
        scores = [
            f"{metric_name(key)} {run.record.after[key]:.4f}"
            for key in runs.metrics
            if key in run.record.after
        ]
        line = f"{run.name}: {', '.join(scores) or 'not evaluated'}"
        interval = run.interval(runs.metric)
        if interval is not None:
            line += f" ({interval.difference:+.4f}, 95 % interval {interval})"
        lines.append(line + "\n")
    return "".join(lines)


def as_json(runs: SeveralRuns) -> dict[str, Any]:
    """Return the comparison as JSON values."""
    names = [run.name for run in runs.runs]
    best = runs.best(runs.metric)
    settings = {}
    for option, values in runs.differing_settings().items():
        settings[option] = dict(zip(names, values, strict=True))
    return {
        "metric": runs.metric or None,
        "compared_with": names[0],
        "best": None if best is None else best.name,
        "runs": [{**run_json(run.record), "name": run.name} for run in runs.runs],
        "differences": [_changes_json(run) for run in runs.runs[1:]],
        "settings": settings,
    }


def run_json(record: RunRecord) -> dict[str, Any]:
    """Return the result of one run as JSON values. Its name is that of its folder."""
    evaluations = [
        {"step": evaluation.step, "scores": evaluation.scores}
        for evaluation in record.evaluations
    ]
    return {
        "name": record.folder.resolve().name,
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
        before = [item["text"] for item, _ in query.documents_before]
        after = [item["text"] for item, _ in query.documents_after]
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


def write_comparison(runs: SeveralRuns, path: Path) -> None:
    """Write the page."""
    warnings = []
    for run in runs.runs:
        if not run.record.summary.finished:
            step = run.record.last_step
            warnings.append(f"{run.name}: stopped after step {step:,d}.")
        if runs.metric and run.not_paired:
            warnings.append(f"Not paired: {run.not_paired}.")
    settings = []
    for name, values in runs.differing_settings().items():
        texts = ["-" if value is None else short_paths(str(value)) for value in values]
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
        changed_table=changed_table,
        metric_name=metric_name,
    )
    replace_text(path, page)


def _verdict(runs: SeveralRuns) -> str:
    """Return whether the highest score is more than chance against the first run."""
    best = runs.best(runs.metric)
    if best is None:
        return "None of them was evaluated after a step."
    first = runs.runs[0]
    name = metric_name(runs.metric)
    if best is first:
        return f"No other run is above {first.name}, with which they are compared."
    interval = best.interval(runs.metric)
    if best.changes is None or interval is None:
        return f"Whether the difference from {first.name} is more than chance is not known."
    verdict = (
        "the difference is more than chance" if interval.is_clear else NO_DIFFERENCE
    )
    return (
        f"{best.changes.num_better:,d} of {best.changes.num_queries:,d} queries are better than with {first.name}, "
        f"{best.changes.num_worse:,d} worse. {name} {interval.difference:+.4f} "
        f"(95 % interval {interval.low:+.4f} to {interval.high:+.4f}): {verdict}."
    )
