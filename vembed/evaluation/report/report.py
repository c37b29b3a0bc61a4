"""write_report(output_dir): report.html and report.md from a run's folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from vembed.config.places import short_name
from vembed.evaluation.report.page import Figure, Page, render
from vembed.evaluation.report.plots import (
    Curve,
    curve_svg,
    dims_svg,
    evaluations_svg,
    stored_svg,
)
from vembed.evaluation.report.query_changes import (
    NO_DIFFERENCE,
    Changed,
    Comparison,
    Interval,
    compare_queries,
)
from vembed.evaluation.report.record import (
    TABLE,
    RunRecord,
    Table,
    metric_name,
    read_run,
)
from vembed.evaluation.report.stored_forms import points, rows_of
from vembed.evaluation.report.thumbnails import thumbnail
from vembed.progress import duration
from vembed.saving.card import calls_of
from vembed.saving.durability import replace_text

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
PER_STEP = ("loss", "learning_rate", "grad_norm")
"""Curves that are recorded for every step, in this order after the step's number."""
_NONE: Mapping[str, Interval] = {}

MAX_POINTS = 600
"""Largest number of points per curve. More make the page larger without being visible."""


def write_report(output_dir: str | Path) -> Path:
    """Write both reports; return the path of report.html. Only the main process calls it."""
    record = read_run(output_dir)
    path = record.folder / "report.html"
    found = comparison(record)
    for target, text in (
        (record.folder / "report.md", markdown(record, found)),
        (path, html(record, found)),
    ):
        replace_text(target, text)
    return path


def score_table(
    record: RunRecord,
    keys: tuple[str, ...] | None = None,
    intervals: Mapping[str, Interval] = _NONE,
) -> Table:
    """Return a table of metrics before and after: the given ones, or all that were measured. With `intervals`, a column
    of the 95 % intervals of the changes."""
    before, after = record.before, record.after
    measured = after or before
    wanted = keys or tuple(
        key for key in measured if "/" not in key or key.startswith(("guard/", "task/"))
    )
    rows = []
    for key in wanted:
        if key in measured:
            old, new = before.get(key), after.get(key)
            interval = (
                (str(intervals[key]) if key in intervals else "",) if intervals else ()
            )
            rows.append(
                (
                    metric_name(key),
                    number(old),
                    number(new),
                    change(old, new),
                    *interval,
                )
            )
    header = (
        "metric",
        "before",
        "after",
        "change",
        *(("95 % interval of the change",) if intervals else ()),
    )
    return Table(header, tuple(rows))


def comparison(record: RunRecord) -> Comparison | None:
    """Return the comparison of the queries before training and with the weights kept, where both were recorded."""
    if not record.before or record.final is None:
        return None
    return compare_queries(record.folder, 0, record.final.step, record.headline)


def explanations(record: RunRecord, keys: tuple[str, ...]) -> list[str]:
    """Return one sentence for each metric of the first table."""
    found = []
    for key in keys:
        base, _, cut = key.partition("@")
        if key in (record.after or record.before) and base in MEANINGS:
            found.append(f"{metric_name(key)}: {MEANINGS[base].format(k=cut)}")
    return found


def verdict(record: RunRecord, found: Comparison | None) -> str:
    """Return whether the change of the deciding metric is more than chance, in one sentence; empty if not known."""
    interval = found.intervals.get(record.headline) if found else None
    if found is None or interval is None:
        return ""
    counts = f"{found.num_better:,d} of {found.num_queries:,d} queries got better and {found.num_worse:,d} worse"
    if not interval.is_clear:
        return f"{metric_name(record.headline)}: {NO_DIFFERENCE}; {counts}."
    return f"{counts[0].upper()}{counts[1:]}; the change of {metric_name(record.headline)} is more than chance."


def dims_table(record: RunRecord) -> Table:
    """Return a table of the deciding metric by Matryoshka size, with the fraction of the full embedding's score."""
    key = record.headline
    full = record.after.get(key)
    rows = []
    for dim in record.dims:
        name = f"dim{dim}/{key}"
        old, new = record.before.get(name), record.after.get(name)
        kept = f"{new / full:.1%}" if new is not None and full else ""
        rows.append((str(dim), number(old), number(new), change(old, new), kept))
    return Table(("dims", "before", "after", "change", "of full size"), tuple(rows))


def stored_table(record: RunRecord) -> Table | None:
    """Return a table of documents in int8 and as bits; None if they were not scored."""
    rows = rows_of(record.after)
    return (
        Table(("vectors", "size", "bytes", "nDCG@10", "of float32"), tuple(rows))
        if rows
        else None
    )


def number(value: float | None) -> str:
    """Format a score for tables."""
    return "" if value is None else f"{value:.4f}"


def change(before: float | None, after: float | None) -> str:
    """Format a difference with its sign."""
    return "" if before is None or after is None else f"{after - before:+.4f}"


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
    where = (
        f"{summary.num_processes} process{'es' if summary.num_processes > 1 else ''}"
    )
    text += f", {where} on {summary.device}." if summary.device else "."
    if summary.evaluation:
        text += f" Measured on {short_paths(summary.evaluation)}."
    return text


def facts(record: RunRecord) -> list[tuple[str, str]]:
    """Return model, data and settings as name and value."""
    summary, config = record.summary, record.config
    trained = ""
    if summary.num_parameters and summary.num_trainable is not None:
        share = summary.num_trainable / summary.num_parameters
        trained = f"{summary.num_trainable:,d} of {summary.num_parameters:,d} parameters ({share:.0%})"
    last = record.steps[-1] if record.steps else {}
    final = record.final
    pairs = [
        (
            "Model",
            "\n".join(summary.properties)
            or _local_name(str(config.get("model_name", ""))),
        ),
        ("Trained", trained),
        (
            "Training data",
            short_paths("\n".join(line.removeprefix("data: ") for line in summary.data))
            or _paths(config["data_path"]),
        ),
        (
            "Evaluation data",
            short_paths(
                summary.evaluation
                or str(config.get("val_data_path") or f"none ({HOW_TO_EVALUATE})")
            ),
        ),
        (
            "Loss",
            f"{config.get('loss', '')}, last value {last['loss']:.4f}"
            if _is_number(last.get("loss"))
            else "",
        ),
        ("Weights kept", f"those after step {final.step:,d}" if final else ""),
        ("Strategy", summary.strategy),
        ("Mixed precision", summary.precision),
        ("Finished", summary.finished[:16].replace("T", " ")),
    ]
    return [(name, value) for name, value in pairs if value]


def curves(record: RunRecord) -> list[Curve]:
    """Return the recorded curves for the report."""
    wanted: list[tuple[str, str, str, Callable[[float], str]]] = [
        ("loss", "Loss", "of the global batch", "{:.3g}".format),
        ("learning_rate", "Learning rate", "", _power),
        ("grad_norm", "Gradient norm", "global, before clipping", "{:.3g}".format),
        ("samples_per_second", "Throughput", "examples per second", _rate),
        ("padding_fraction", "Padding", "share of tokens", "{:.0%}".format),
        ("memory", "Memory", "peak of the fullest process, GiB", "{:.3g}".format),
    ]
    found = []
    for key, title, note, write in wanted:
        read = _recorded(record, key)
        points = [
            (float(step), float(value))
            for step, value in read
            if value is not None and _is_number(value)
        ]
        # A curve of zeros (no padding, no memory on a CPU) says nothing.
        if len(points) > 1 and any(value for _, value in points):
            steps, values = _thinned(points)
            from_zero, noisy = (
                key not in ("loss", "grad_norm"),
                key not in ("learning_rate", "memory"),
            )
            found.append(Curve(title, note, steps, values, write, from_zero, noisy))
    return found + task_curves(record)


def task_curves(record: RunRecord) -> list[Curve]:
    """Return the loss of each task and term, and the scores of each task and guard, where there are several points."""
    points: dict[str, list[tuple[float, float]]] = {}
    for line in record.steps:
        for key in (
            key for key in line if key.startswith("loss/") and _is_number(line[key])
        ):
            points.setdefault(key, []).append((float(line["step"]), float(line[key])))
    for one in record.evaluations:
        for key in (key for key in one.scores if key.startswith(("task/", "guard/"))):
            points.setdefault(key, []).append((float(one.step), one.scores[key]))
    found = []
    for key, read in points.items():
        if len(read) > 1:
            is_loss = key.startswith("loss/")
            title = (
                f"Loss, {key.removeprefix('loss/')}" if is_loss else metric_name(key)
            )
            note = "mean between two log lines" if is_loss else ""
            write = "{:.3g}".format if is_loss else "{:.4f}".format
            found.append(Curve(title, note, *_thinned(read), write, noisy=is_loss))
    return found


def _recorded(record: RunRecord, key: str) -> list[tuple[Any, Any]]:
    """Return (step, value) of each step where it was recorded, else of each logged line."""
    # A logged line holds the steps since the line before as rows of [step, *PER_STEP].
    if key in PER_STEP and all(line.get("steps") for line in record.steps):
        place = 1 + PER_STEP.index(key)
        return [(one[0], one[place]) for line in record.steps for one in line["steps"]]
    return [
        (line["step"], _peak_memory(line) if key == "memory" else line.get(key))
        for line in record.steps
    ]


def _thinned(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Average neighbouring points to fit the screen's width. The last point is kept as it is."""
    size = -(-len(points) // MAX_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points) - 1, size)]
    kept = [
        (
            sum(step for step, _ in group) / len(group),
            sum(v for _, v in group) / len(group),
        )
        for group in groups
    ]
    kept = [*kept, points[-1]] if size > 1 else points
    return [step for step, _ in kept], [value for _, value in kept]


def html(record: RunRecord, found: Comparison | None) -> str:
    """Return the whole page."""
    key, label = record.headline, metric_name(record.headline)
    before, after = record.before.get(key), record.after.get(key)
    intervals = found.intervals if found else _NONE
    figures = [
        Figure(curve.title, curve.note, curve.write(curve.values[-1]), curve_svg(curve))
        for curve in curves(record)
    ]
    return render(
        Page(
            title=f"{record.model_name()} - vembed report",
            name=str(record.config.get("run_name") or record.folder.resolve().name),
            label=label,
            before="" if before is None else f"{before:.3f}",
            after="" if after is None else f"{after:.3f}",
            change="" if before is None or after is None else f"{after - before:+.3f}",
            is_better=before is None or after is None or after >= before,
            fallback=_fallback(record),
            sentence=sentence(record),
            warnings=record.summary.warnings,
            verdict=verdict(record, found),
            explanations=explanations(record, TABLE),
            better=changed_table(found.better, has_pictures=True)
            if found and found.better
            else None,
            worse=changed_table(found.worse, has_pictures=True)
            if found and found.worse
            else None,
            scores=score_table(record, TABLE, intervals=intervals),
            all_scores=score_table(record),
            dims=dims_table(record) if record.dims else None,
            dims_svg=_dims_svg(record),
            stored=stored_table(record),
            stored_svg=stored_svg(points(record.after), "nDCG@10")
            if stored_table(record)
            else "",
            scores_svg=_evaluations_svg(record),
            figures=figures,
            facts=facts(record),
            changed=changed_yaml(record),
            settings=Table(
                ("option", "value"),
                tuple((k, short_paths(plain(v))) for k, v in record.config.items()),
            ),
            versions=Table(
                ("package", "version"), tuple(record.summary.versions.items())
            ),
            calls=calls(record),
        )
    )


def markdown(record: RunRecord, found: Comparison | None) -> str:
    """Return the same facts as plain Markdown, for a terminal, a pull request or a model card."""
    key = record.headline
    before, after = record.before.get(key), record.after.get(key)
    if after is not None:
        head = f"{metric_name(key)} {f'{before:.3f} -> ' if before is not None else ''}{after:.3f}"
    else:
        head = _fallback(record)
    parts = [f"# {head}", sentence(record)]
    parts += [f"> Warning: {warning}" for warning in record.summary.warnings]
    if not record.headline:
        parts.append(
            "Nothing was evaluated: set `val_split: 0.1`, or give `val_data_path`."
        )
    if record.headline:
        parts += ["## Before and after", *([verdict(record, found)] if found else [])]
        parts.append(
            _markdown_table(
                score_table(record, intervals=found.intervals if found else _NONE)
            )
        )
        parts.append("\n".join(f"- {line}" for line in explanations(record, TABLE)))
        for title, changed in (
            (("better", found.better), ("worse", found.worse)) if found else ()
        ):
            if changed:
                parts += [
                    f"## Queries that got {title}",
                    _markdown_table(changed_table(changed)),
                ]
    if record.dims:
        parts += [
            f"## {metric_name(key)} by number of dimensions",
            _markdown_table(dims_table(record)),
        ]
    stored = stored_table(record)
    if stored is not None:
        parts += ["## Stored vectors", _markdown_table(stored)]
    parts += [
        "## Run",
        "\n".join(
            f"- {name}: {value.replace(chr(10), '; ')}" for name, value in facts(record)
        ),
    ]
    parts += [
        "## Settings",
        f"What differs from the defaults:\n\n```yaml\n{changed_yaml(record)}```",
    ]
    if record.summary.versions:
        parts += [
            "## Versions",
            ", ".join(
                f"{name} {version}" for name, version in record.summary.versions.items()
            ),
        ]
    return "\n\n".join(parts) + "\n"


def calls(record: RunRecord) -> list[str]:
    """Return the calls that use the model, as its card has them; none before the run has a model."""
    card = record.folder / "final" / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    return calls_of(text, f"{record.folder.resolve().name}/final")


def changed_yaml(record: RunRecord) -> str:
    """Return what differs from the defaults as YAML, without folders of the machine."""
    settings = record.changed_settings() | {
        "model_name": _local_name(str(record.config.get("model_name", "")))
    }
    return short_paths(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))


def _local_name(model: str) -> str:
    """Return a model's name; of an absolute path the part that identifies the model."""
    return short_name(model) if model.startswith(("/", "~")) else model


def _fallback(record: RunRecord) -> str:
    if not record.steps:
        return "No step was logged"
    return "Not evaluated"  # two losses of different batches are no result


def changed_table(queries: Sequence[Changed], *, has_pictures: bool = False) -> Table:
    """Return a table of queries with what should be found and what was found first, before and after. `has_pictures`:
    with thumbnails of images."""
    rows, pictures = [], {}
    for number, one in enumerate(queries):
        cells = (
            [one.query],
            one.relevant[:1],
            [item for item, _ in one.found_before[:1]],
            [item for item, _ in one.found_after[:1]],
        )
        for column, items in enumerate(cells if has_pictures else ()):
            found = [
                one.pictures.get(path) or thumbnail(path)
                for item in items
                for path in item["images"]
            ]
            pictures[number, column] = tuple(
                address for address in found if address is not None
            )
        rows.append(
            (
                _shown_items([one.query]),
                _shown_items(one.relevant),
                _first(one.found_before),
                _first(one.found_after),
                f"{one.before:.3f} -> {one.after:.3f}",
            )
        )
    return Table(
        ("query", "relevant", "found before", "found after", "score"),
        tuple(rows),
        pictures,
    )


def _first(found: Sequence[tuple[Mapping[str, Any], bool]]) -> str:
    """Return the first document found, marked if it is relevant."""
    if not found:
        return "nothing"
    item, is_relevant = found[0]
    return f"{'[relevant] ' if is_relevant else ''}{_shown_items([item])}"


def _shown_items(items: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(
        " ".join(
            [*([one["text"]] if one["text"] else []), *map(short_name, one["images"])]
        )
        for one in items
    )


def _dims_svg(record: RunRecord) -> str:
    key = record.headline
    dims = [dim for dim in record.dims if f"dim{dim}/{key}" in record.after]
    if len(dims) < 2:
        return ""
    after = [record.after[f"dim{dim}/{key}"] for dim in dims]
    before = [
        record.before[f"dim{dim}/{key}"]
        for dim in dims
        if f"dim{dim}/{key}" in record.before
    ]
    return dims_svg(
        dims, before if len(before) == len(dims) else None, after, metric_name(key)
    )


def _evaluations_svg(record: RunRecord) -> str:
    """Return the plot, or nothing if only a before and an after were measured."""
    key = record.headline
    points = [
        (one.step, one.scores[key]) for one in record.evaluations if key in one.scores
    ]
    if len(points) < 3:
        return ""
    steps, values = zip(*points, strict=True)
    return evaluations_svg(
        steps, values, metric_name(key), record.final.step if record.final else None
    )


def _peak_memory(line: dict[str, Any]) -> float | None:
    peaks = [
        entry["peak_gb"]
        for entry in line.get("memory") or []
        if _is_number(entry.get("peak_gb"))
    ]
    return max(peaks) if peaks else None


def _power(value: float) -> str:
    """Format 0.0001 as 1e-4."""
    if not value:
        return "0"
    digits, power = f"{value:.1e}".split("e")
    return f"{digits.removesuffix('.0')}e{int(power)}"


def short_paths(text: str) -> str:
    """Shorten absolute paths to their last parts."""
    # From a slash at the beginning of a word (behind a blank, quotation mark, bracket, comma or colon) to the last
    # slash before a name, so that `a/b` and `https://` stay.
    return re.sub(r"(?<![^\s'\"\[{(,:])/[^\s'\",]*/(?=[^/\s])", "", text)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _paths(value: Any) -> str:
    entries = value if isinstance(value, list) else [value]
    return "\n".join(
        short_name(str(entry["path"] if isinstance(entry, dict) else entry))
        for entry in entries
    )


def plain(value: Any) -> str:
    """Format a value of the config."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _markdown_table(table: Table) -> str:
    rows = [
        table.header,
        tuple("---" if i == 0 else "---:" for i in range(len(table.header))),
        *table.rows,
    ]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
        for row in rows
    )
