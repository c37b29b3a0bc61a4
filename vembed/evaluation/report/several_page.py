"""write_comparison(runs, file): one HTML page about several runs, in the look of a run's report."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from vembed.errors import UserError
from vembed.evaluation.report.page import document, queries_html, section
from vembed.evaluation.report.plots import RUNS, runs_svg
from vembed.evaluation.report.query_changes import NO_DIFFERENCE, Interval
from vembed.evaluation.report.record import Table, metric_name
from vembed.evaluation.report.report import changed_table, plain, short_paths
from vembed.evaluation.report.several_runs import Against, Entrant, SeveralRuns
from vembed.progress import duration
from vembed.saving.durability import replace_text

COLOURS_LIGHT = (
    "#1f5fbf",
    "#c2571a",
    "#16734a",
    "#8a3fa8",
    "#9c7a00",
    "#0f7f92",
    "#b5305f",
    "#5d646c",
)
COLOURS_DARK = (
    "#7fb0ff",
    "#f2a06a",
    "#5cc795",
    "#cf9be6",
    "#e0c050",
    "#62c9da",
    "#f28bae",
    "#a9b0b8",
)
"""Of the runs' lines, in this order; readable on the page in both modes."""

OWN_STYLE = """
.legend { display: flex; flex-wrap: wrap; gap: .35rem 1.4rem; margin: 0 0 1.3rem; padding: 0; list-style: none; }
.legend li, .run { overflow-wrap: anywhere; }
.swatch { display: inline-block; width: 1.15em; height: 0; margin-right: .5em; vertical-align: .28em;
  border-top: .2em solid; border-radius: .1em; }
.swatch.again { border-top-style: dashed; }
.runs td, .runs th { vertical-align: top; }
.runs td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 6.5rem; }
.runs small { display: block; color: var(--ink-soft); font-size: .82em; white-space: nowrap; }
.runs small.up { color: var(--good); } .runs small.down { color: var(--bad); }
.runs td.best { font-weight: 650; } .runs td.best small { font-weight: 400; }
.values td { white-space: normal; overflow-wrap: anywhere; min-width: 5.5rem; }
.values th { overflow-wrap: anywhere; min-width: 5.5rem; }
@media (max-width: 40rem) { .runs small { white-space: normal; }
  .scores td:first-child { white-space: nowrap; min-width: 0; } }
details.group { margin-top: .9rem; } .group summary { cursor: pointer; font-weight: 600; padding: .3rem 0; }
.bar { display: flex; height: .55rem; margin: .2rem 0 1.2rem; overflow: hidden; border-radius: .3rem; gap: 2px; }
.bar span { display: block; min-width: 2px; }
.bar .won { background: var(--good); } .bar .lost { background: var(--bad); } .bar .same { background: var(--line); }
"""


def write_comparison(runs: SeveralRuns, target: str | Path) -> Path:
    """Write the page; return its path."""
    path = Path(target)
    if not path.absolute().parent.is_dir():
        raise UserError(
            f"{path.absolute().parent} is not a folder, so {path.name} cannot be written"
        )
    replace_text(path, comparison_html(runs))
    return path


def comparison_html(runs: SeveralRuns) -> str:
    """Return the page as HTML."""
    parts = [
        _header(runs),
        _warnings(runs),
        _section("Scores", _scores(runs)),
        _section("Settings that differ", _settings(runs)),
        _section("Over time", _charts(runs)),
        *(
            _section(
                f"Queries: {one.name} against {runs.entrants[0].name}",
                _queries(one, runs),
            )
            for one in runs.against
        ),
        _section("The runs", _facts(runs)),
    ]
    return document(
        f"{len(runs.entrants)} runs - vembed compare", parts, OWN_STYLE + _colours()
    )


def score_lines(runs: SeveralRuns) -> str:
    """Return each run's scores as lines of plain text, with the interval of its difference in the deciding metric."""
    lines = []
    for number, one in enumerate(runs.entrants):
        scores = [
            f"{metric_name(key)} {one.record.after[key]:.4f}"
            for key in runs.metrics
            if key in one.record.after
        ]
        interval = _interval(runs, number, runs.metric)
        against = (
            f" ({interval.difference:+.4f}, 95 % interval {interval})"
            if interval is not None
            else ""
        )
        lines.append(f"{one.name}: {', '.join(scores) or 'not evaluated'}{against}\n")
    return "".join(lines)


def _header(runs: SeveralRuns) -> str:
    best = runs.best
    if best is None:
        headline, sentence = (
            f"{len(runs.entrants)} runs",
            "None of them was evaluated after a step.",
        )
    else:
        value = best.record.after[runs.metric]
        highest = "" if runs.is_alone(best) else "Highest "
        headline = (
            f'<span class="metric">{highest}{escape(metric_name(runs.metric))}</span>'
            f'<span class="run">{escape(best.name)}</span> <span class="old">{value:.3f}</span>'
        )
        sentence = _verdict(runs, best)
    return (
        f'<header>\n<p class="eyebrow">vembed compare &middot; {len(runs.entrants)} runs</p>\n<h1>{headline}</h1>\n'
        f'<p class="lead">{escape(sentence)}</p>\n</header>'
    )


def _verdict(runs: SeveralRuns, best: Entrant) -> str:
    """Return whether the highest score is more than chance against the first run."""
    first = runs.entrants[0]
    name = metric_name(runs.metric)
    if best is first:
        clear = [one for one in runs.against if _is_clear(one, runs.metric)]
        paired = [one for one in runs.against if one.comparison is not None]
        if not paired:
            return f"{first.name} is the run that the others are compared with; their queries could not be paired."
        return (
            f"{first.name} is the run that the others are compared with. {len(clear)} of {len(paired)} differ from it "
            f"in {name} by more than chance."
        )
    # `against` leaves out the first run.
    against = runs.against[list(runs.entrants).index(best) - 1]
    interval = (
        against.comparison.intervals.get(runs.metric) if against.comparison else None
    )
    if against.comparison is None or interval is None:
        reason = f": {against.reason}" if against.reason else ""
        return f"Whether the difference from {first.name} is more than chance is not known{reason}."
    counts = f"{against.comparison.num_better:,d} of {against.comparison.num_queries:,d} queries are better than with "
    counts += f"{first.name}, {against.comparison.num_worse:,d} worse"
    said = "the difference is more than chance" if interval.is_clear else NO_DIFFERENCE
    bounds = f"{interval.low:+.4f} to {interval.high:+.4f}"
    return (
        f"{counts}. {name} {interval.difference:+.4f} (95 % interval {bounds}): {said}."
    )


def _is_clear(one: Against, metric: str) -> bool:
    interval = one.comparison.intervals.get(metric) if one.comparison else None
    return interval is not None and interval.is_clear


def _warnings(runs: SeveralRuns) -> str:
    lines = [
        f"{one.name}: {one.state}." for one in runs.entrants if not one.is_finished
    ]
    lines += [
        f"Not paired: {one.reason}."
        for one in runs.against
        if one.reason and runs.metric
    ]
    body = "\n".join(f"<p>{escape(line)}</p>" for line in lines)
    return f'<div class="warning">\n{body}\n</div>' if lines else ""


def _scores(runs: SeveralRuns) -> str:
    if not runs.metrics:
        advice = "set <code>val_split: 0.1</code>, or give <code>val_data_path</code>"
        return f'<p class="lead">Nothing was evaluated: {advice}.</p>'
    rows = []
    for key in runs.metrics:
        values = [one.record.after.get(key) for one in runs.entrants]
        top = max(
            (
                one
                for at, one in enumerate(values)
                if one is not None and runs.comparable(at)
            ),
            default=None,
        )
        cells = [f"<td>{escape(metric_name(key))}</td>"]
        for number, value in enumerate(values):
            text = "" if value is None else f"{value:.4f}"
            best = (
                ' class="best"'
                if value is not None and value == top and runs.comparable(number)
                else ""
            )
            cells.append(f"<td{best}>{text}{_difference(runs, number, key)}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    head = f"<thead><tr><th>metric</th>{_run_headings(runs)}</tr></thead>"
    first = escape(runs.entrants[0].name)
    note = (
        f'<p class="lead">Under each score: its difference from {first}, with the 95 % interval of the paired '
        "bootstrap over the queries. Green and red: more than chance.</p>"
    )
    return f'{note}<div class="scroll"><table class="runs scores">{head}<tbody>{"".join(rows)}</tbody></table></div>'


def _difference(runs: SeveralRuns, number: int, key: str) -> str:
    first, value = (
        runs.entrants[0].record.after.get(key),
        runs.entrants[number].record.after.get(key),
    )
    if (
        number == 0
        or first is None
        or value is None
        or runs.against[number - 1].has_other_data
    ):
        return ""
    interval = _interval(runs, number, key)
    if interval is None:
        return f"<small>{value - first:+.4f}</small>"
    kind = ("up" if interval.low > 0 else "down") if interval.is_clear else ""
    colour = f' class="{kind}"' if kind else ""
    return f"<small{colour}>{interval.difference:+.4f}</small><small>{interval.low:+.4f} to {interval.high:+.4f}</small>"


def _interval(runs: SeveralRuns, number: int, key: str) -> Interval | None:
    found = runs.against[number - 1].comparison if number else None
    return found.intervals.get(key) if found else None


def _charts(runs: SeveralRuns) -> str:
    charts = runs.charts()
    if not charts:
        return ""
    entries = "".join(
        f"<li>{_swatch(number)}{escape(one.name)}</li>"
        for number, one in enumerate(runs.entrants)
    )
    blocks = []
    for chart in charts:
        note = f"<small>{escape(chart.note)}</small>" if chart.note else ""
        svg = runs_svg(
            chart.lines, chart.title, chart.write, has_points=chart.has_points
        )
        blocks.append(f"<div><h3>{escape(chart.title)}{note}</h3>{svg}</div>")
    return f'<ul class="legend">{entries}</ul><div class="grid">{"".join(blocks)}</div>'


def _queries(one: Against, runs: SeveralRuns) -> str:
    found, first = one.comparison, runs.entrants[0].name
    if found is None or not runs.metric:
        return ""
    same = found.num_queries - found.num_better - found.num_worse
    counts = (
        f"{found.num_better:,d} won, {found.num_worse:,d} lost and {same:,d} equal of {found.num_queries:,d} queries, "
        f"by {metric_name(runs.metric)}."
    )
    parts = [
        f'<p class="lead">{escape(counts)}</p>',
        _bar(found.num_better, same, found.num_worse),
    ]
    for title, changed in (("Won", found.better), ("Lost", found.worse)):
        if changed:
            table = changed_table(changed, has_pictures=True)
            header = (
                "query",
                "relevant",
                f"found by {first}",
                f"found by {one.name}",
                "score",
            )
            named = Table(header, table.rows, table.pictures)
            summary = (
                f"{title}: the {len(changed)} with the largest difference"
                if len(changed) > 1
                else title
            )
            parts.append(
                f'<details class="group"><summary>{summary}</summary>{queries_html(named)}</details>'
            )
    return "".join(parts)


def _bar(won: int, same: int, lost: int) -> str:
    shares = (("won", won), ("same", same), ("lost", lost))
    spans = "".join(
        f'<span class="{name}" style="flex-grow:{count}"></span>'
        for name, count in shares
        if count
    )
    return f'<div class="bar" role="img" aria-label="{won} won, {same} equal, {lost} lost">{spans}</div>'


def _settings(runs: SeveralRuns) -> str:
    differing = runs.differing_settings()
    if not differing:
        return '<p class="lead">None: all runs have the same settings.</p>'
    rows = [
        (name, [short_paths(plain(value)) or "-" for value in values])
        for name, values in differing.items()
    ]
    return _by_run(runs, "option", rows)


def _facts(runs: SeveralRuns) -> str:
    rows: list[tuple[str, list[str]]] = [
        ("Model", [one.record.model_name() for one in runs.entrants]),
        ("State", [one.state for one in runs.entrants]),
        ("Scored weights", [_scored(one) for one in runs.entrants]),
        (
            "Examples",
            [_count(one.record.summary.num_examples) for one in runs.entrants],
        ),
        (
            "Trained parameters",
            [_count(one.record.summary.num_trainable) for one in runs.entrants],
        ),
        ("Time", [_time(one) for one in runs.entrants]),
        (
            "Processes",
            [
                str(one.record.summary.num_processes) if one.is_finished else ""
                for one in runs.entrants
            ],
        ),
        ("Device", [one.record.summary.device for one in runs.entrants]),
        ("Strategy", [one.record.summary.strategy for one in runs.entrants]),
        ("Mixed precision", [one.record.summary.precision for one in runs.entrants]),
        ("Folder", [one.record.folder.resolve().name for one in runs.entrants]),
    ]
    versions = dict.fromkeys(
        name for one in runs.entrants for name in one.record.summary.versions
    )
    for name in versions:
        values = [one.record.summary.versions.get(name, "") for one in runs.entrants]
        if len({value for value in values if value}) > 1:
            rows.append((f"{name} version", values))
    return _by_run(runs, "", [(name, values) for name, values in rows if any(values)])


def _by_run(
    runs: SeveralRuns, first: str, rows: Sequence[tuple[str, Sequence[str]]]
) -> str:
    head = f"<thead><tr><th>{escape(first)}</th>{_run_headings(runs)}</tr></thead>"
    body = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for name, values in rows
    )
    return f'<div class="scroll"><table class="runs values">{head}<tbody>{body}</tbody></table></div>'


def _run_headings(runs: SeveralRuns) -> str:
    return "".join(
        f"<th>{_swatch(number)}{escape(one.name)}</th>"
        for number, one in enumerate(runs.entrants)
    )


def _swatch(number: int) -> str:
    again = " again" if number >= len(RUNS) else ""
    return f'<span class="swatch{again}" style="border-color:var(--run-{number % len(RUNS)})"></span>'


def _colours() -> str:
    light, dark = (
        " ".join(f"--run-{number}: {colour};" for number, colour in enumerate(colours))
        for colours in (COLOURS_LIGHT, COLOURS_DARK)
    )
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"


def _section(title: str, body: str) -> str:
    return section(title, body) if body else ""


def _scored(one: Entrant) -> str:
    return f"after step {one.record.final.step:,d}" if one.record.final else ""


def _time(one: Entrant) -> str:
    return (
        ""
        if one.record.summary.seconds is None
        else duration(one.record.summary.seconds)
    )


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,d}"
