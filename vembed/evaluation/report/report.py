"""write_report(output_dir): report.html and report.md from a run's folder."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from vembed.evaluation.query_results import (
    NO_DIFFERENCE,
    Changed,
    Comparison,
    Interval,
    compare_results,
    path_of,
    read_queries,
)
from vembed.evaluation.report.page import render_page, thumbnail
from vembed.evaluation.report.plots import (
    Curve,
    Plot,
    plot_curve,
    plot_dims,
    plot_evaluations,
    plot_stored,
)
from vembed.evaluation.report.record import (
    FIRST_STAGE,
    TABLE,
    ReportTable,
    RunRecord,
    metric_name,
    read_run,
)
from vembed.files import replace_text, short_name
from vembed.progress import duration
from vembed.saving.card import calls_of
from vembed.saving.masking import masked, masked_option

MEANINGS = {
    "ndcg": "how well the first {k} results are ordered; 1 if all relevant documents come first.",
    "mrr": "one divided by the place of the first relevant document among the first {k}; 1 if it is always first.",
    "recall": "share of the relevant documents that are among the first {k} results.",
    "map": "precision at each relevant document among the first {k}, averaged; rewards finding all of them early.",
    "spearman": "whether the similarities order the pairs as the given scores do; 1 if exactly, 0 if not at all.",
    "pearson": "whether the similarities grow linearly with the given scores; 1 if exactly.",
}
"""One sentence for each metric."""
HOW_TO_EVALUATE = "set val_split: 0.1, or give val_data_path"
STEP_COLUMNS = ("loss", "learning_rate", "grad_norm")
"""Columns, behind the step, of the steps since the last logged line."""
FORMS = {
    "float32": "float32",
    "int8": "int8",
    "binary": "binary",
    "binary_rescored": "binary, rescored",
}
"""Stored forms of documents, and their names on pages."""
MAX_CURVE_POINTS = 600
"""More make the page larger without being visible."""


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
        rows.append(tuple(row))
    return ReportTable(tuple(header), tuple(rows))


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
    return ReportTable(
        ("dims", "before", "after", "change", "of full size"), tuple(rows)
    )


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
        cells: list[tuple[Sequence[Mapping[str, Any]], str]]
        cells = [([query.query], ""), (query.relevant, "")]
        for documents in (query.found_before, query.found_after):
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
            addresses = [query.pictures.get(path) or thumbnail(path) for path in paths]
            pictures[row, column] = tuple(filter(None, addresses))
        rows.append((*texts, f"{query.before:.3f} -> {query.after:.3f}"))
    header = ("query", "relevant", before, after, "score")
    return ReportTable(header, tuple(rows), pictures) if rows else None


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
    interval = changes.intervals.get(record.headline) if changes else None
    if changes is None or interval is None:
        return ""
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
    if summary.device:
        plural = "es" if summary.num_processes > 1 else ""
        text += f", {summary.num_processes} process{plural} on {summary.device}"
    text += "."
    if summary.evaluation:
        text += f" Measured on {short_paths(summary.evaluation)}."
    return text


def facts(record: RunRecord) -> list[tuple[str, str]]:
    """Return model, data and settings as name and value."""
    summary = record.summary
    config = record.config
    model = "\n".join(summary.properties) or _model_name(record)
    trained = ""
    if summary.num_parameters and summary.num_trainable is not None:
        share = summary.num_trainable / summary.num_parameters
        trained = f"{summary.num_trainable:,d} of {summary.num_parameters:,d} parameters ({share:.0%})"
    sources = [line.removeprefix("data: ") for line in summary.data]
    training_data = short_paths("\n".join(sources))
    if not training_data:
        paths = config["data_path"]
        entries = paths if isinstance(paths, list) else [{"path": paths}]
        training_data = "\n".join(short_name(str(entry["path"])) for entry in entries)
    evaluation = summary.evaluation or config.get("val_data_path")
    if not evaluation:
        evaluation = f"none ({HOW_TO_EVALUATE})"
    last_loss = record.steps[-1].get("loss") if record.steps else None
    loss = ""
    if isinstance(last_loss, float):
        loss = f"{config.get('loss', '')}, last value {last_loss:.4f}"
    weights_kept = f"those after step {record.final.step:,d}" if record.final else ""
    named = {
        "Model": model,
        "Trained": trained,
        "Training data": training_data,
        "Evaluation data": short_paths(str(evaluation)),
        "Loss": loss,
        "Weights kept": weights_kept,
        "Strategy": summary.strategy,
        "Mixed precision": summary.precision,
        "Finished": summary.finished[:16].replace("T", " "),
    }
    rows = []
    for name, value in named.items():
        if value:
            rows.append((name, masked(value)))
    return rows


def short_paths(text: str) -> str:
    """Shorten absolute paths to their last parts."""
    # From a slash at the beginning of a word (behind a blank, quotation mark, bracket, comma or colon) to the last
    # slash before a name, so that `a/b` and `https://` stay.
    return re.sub(r"(?<![^\s'\"\[{(,:])/[^\s'\",]*/(?=[^/\s])", "", text)


def format_option(value: Any) -> str:
    """Return a value of the config as text."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _model_name(record: RunRecord) -> str:
    """Return the model's name; of an absolute path the part that identifies the model."""
    model = str(record.config.get("model_name", ""))
    return short_name(model) if model.startswith(("/", "~")) else model


# ---- plots ---------------------------------------------------------------------------------------------------------


def curves(record: RunRecord) -> list[Curve]:
    """Return the recorded curves for the report: of each step where it was recorded, else of each logged line."""
    points: dict[str, list[tuple[float, float]]] = {key: [] for key in QUANTITIES}

    def add(
        step: Any,
        key: str,
        value: Any,
    ) -> None:
        if isinstance(value, int | float) and not isinstance(value, bool):
            points.setdefault(key, []).append((float(step), float(value)))

    has_steps = all(line.get("steps") for line in record.steps)
    for line in record.steps:
        peaks = [process.get("peak_gb") or 0.0 for process in line.get("memory") or []]
        logged = {**line, "memory": max(peaks, default=None)}
        for key, value in logged.items():
            is_of_steps = has_steps and key in STEP_COLUMNS
            if key.startswith("loss/") or (key in QUANTITIES and not is_of_steps):
                add(line["step"], key, value)
        if has_steps:
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
        if key in QUANTITIES:
            title, note, write = QUANTITIES[key]
            from_zero = key not in ("loss", "grad_norm")
            noisy = key not in ("learning_rate", "memory")
            curve = Curve(title, note, steps, values, write, from_zero, noisy)
        elif key.startswith("loss/"):
            title = f"Loss, {key.removeprefix('loss/')}"
            note = "mean between two log lines"
            curve = Curve(title, note, steps, values, "{:.3g}".format, noisy=True)
        else:
            curve = Curve(metric_name(key), "", steps, values, "{:.4f}".format)
        drawn.append(curve)
    return drawn


def _thinned(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Average neighbouring points to fit the screen's width. The last point is kept as it is."""
    size = math.ceil(len(points) / MAX_CURVE_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points) - 1, size)]
    groups.append(points[-1:])
    mean_steps = []
    mean_values = []
    for group in groups:
        steps, values = zip(*group, strict=True)
        mean_steps.append(sum(steps) / len(group))
        mean_values.append(sum(values) / len(group))
    return mean_steps, mean_values


def _dims_plot(record: RunRecord) -> Plot | None:
    """Return the plot of the deciding metric by size, where there are two sizes."""
    dims = []
    keys = []
    for dim in record.dims:
        key = f"dim{dim}/{record.headline}"
        if key in record.after:
            dims.append(dim)
            keys.append(key)
    if len(dims) < 2:
        return None
    after = [record.after[key] for key in keys]
    before = None
    if all(key in record.before for key in keys):
        before = [record.before[key] for key in keys]
    return plot_dims(dims, before, after, metric_name(record.headline))


def stored_points(
    scores: Mapping[str, float],
) -> dict[str, list[tuple[int, int, float]]]:
    """Return (size, bytes per document, nDCG@10) of each form of stored documents, smallest size first."""
    points: dict[str, list[tuple[int, int, float]]] = {form: [] for form in FORMS}
    for key, value in scores.items():
        if key.startswith("compressed/"):
            _, form, name, _ = key.split("/")
            dim = int(name)
            sizes = {"float32": 4 * dim, "int8": dim}
            points[form].append((dim, sizes.get(form, -(-dim // 8)), value))
    return {form: sorted(rows) for form, rows in points.items()}


def stored_table(scores: Mapping[str, float]) -> ReportTable | None:
    """Return a table of the stored forms, with the share of the float score at full size; None without scores."""
    points = stored_points(scores)
    full_score = points["float32"][-1][2] if points["float32"] else 0.0
    rows = []
    for form, of_form in points.items():
        for dim, num_bytes, value in reversed(of_form):
            share = f"{value / full_score:.3f}" if full_score else "-"
            row = (FORMS[form], str(dim), f"{num_bytes:,d}", f"{value:.4f}", share)
            rows.append(row)
    header = ("vectors", "size", "bytes", "nDCG@10", "of float32")
    return ReportTable(header, tuple(rows)) if rows else None


def _power(value: float) -> str:
    """Format 0.0001 as 1e-4."""
    if not value:
        return "0"
    digits, power = f"{value:.1e}".split("e")
    return f"{digits.removesuffix('.0')}e{int(power)}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


QUANTITIES: dict[str, tuple[str, str, Callable[[float], str]]] = {
    "loss": ("Loss", "of the global batch", "{:.3g}".format),
    "learning_rate": ("Learning rate", "", _power),
    "grad_norm": ("Gradient norm", "global, before clipping", "{:.3g}".format),
    "samples_per_second": ("Throughput", "examples per second", _rate),
    "padding_fraction": ("Padding", "share of tokens", "{:.0%}".format),
    "memory": ("Memory", "peak of the fullest process, GiB", "{:.3g}".format),
}
"""Logged quantities with title, note and number format of their curves."""


# ---- the two reports -----------------------------------------------------------------------------------------------


def report_values(record: RunRecord) -> dict[str, Any]:
    """Return what the templates of both reports show."""
    changes = None
    if record.before and record.final is not None:
        # The queries before training against those with the weights kept, where both were recorded.
        first = read_queries(path_of(record.folder, 0))
        last = read_queries(path_of(record.folder, record.final.step))
        changes = compare_results(first, last, record.headline)
    intervals = changes.intervals if changes else None
    key = record.headline
    stored = stored_table(record.after)
    stored_plot = None
    if stored:
        stored_plot = plot_stored(stored_points(record.after), "nDCG@10")
    measured = record.after or record.before
    explanations = []
    for metric in TABLE:
        base, _, cut = metric.partition("@")
        if metric in measured and base in MEANINGS:
            meaning = MEANINGS[base].format(k=cut)
            explanations.append(f"{metric_name(metric)}: {meaning}")
    # As the model's card has them; none before the run has a model.
    calls = []
    card = record.folder / "final" / "README.md"
    if card.is_file():
        text = card.read_text(encoding="utf-8", errors="replace")
        calls = calls_of(text, f"{record.folder.resolve().name}/final")
    settings = []
    for name, value in record.config.items():
        settings.append((name, short_paths(format_option(masked_option(name, value)))))
    # Without folders of the machine and without secrets.
    changed = record.changed_settings() | {"model_name": _model_name(record)}
    changed = {name: masked_option(name, value) for name, value in changed.items()}
    changed_yaml = yaml.safe_dump(changed, sort_keys=False, allow_unicode=True)
    figures = []
    for curve in curves(record):
        last_value = curve.write(curve.values[-1])
        figures.append((curve, plot_curve(curve), last_value))
    steps, values = record.scores_over_steps(key)
    scores_plot = None
    if len(steps) > 2:  # more than a before and an after
        kept_step = record.final.step if record.final else None
        scores_plot = plot_evaluations(steps, values, metric_name(key), kept_step)
    return {
        "title": f"{record.model_name()} - vembed report",
        "name": str(record.config.get("run_name") or record.folder.resolve().name),
        "label": metric_name(key),
        "before": record.before.get(key),
        "after": record.after.get(key),
        # Two losses of different batches are no result.
        "fallback": "Not evaluated" if record.steps else "No step was logged",
        "sentence": sentence(record),
        "warnings": [masked(warning) for warning in record.summary.warnings],
        "verdict": verdict(record, changes),
        "explanations": explanations,
        "scores": score_table(record, TABLE, intervals),
        "all_scores": score_table(record, intervals=intervals),
        "scores_plot": scores_plot,
        "dims": dims_table(record),
        "dims_plot": _dims_plot(record),
        "stored": stored,
        "stored_plot": stored_plot,
        "better": changed_table(changes.better) if changes else None,
        "worse": changed_table(changes.worse) if changes else None,
        "figures": figures,
        "facts": facts(record),
        "calls": calls,
        "changed_settings": short_paths(changed_yaml),
        "settings": settings,
        "versions": record.summary.versions,
    }
