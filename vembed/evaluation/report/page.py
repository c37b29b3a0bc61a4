"""Layout of report.html: one file without scripts or network access, for wide, narrow, light and dark screens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from vembed import __version__
from vembed.evaluation.report.record import Table


@dataclass(frozen=True)
class Figure:
    """A plot with its heading."""

    title: str
    note: str
    last: str
    """Newest value, as text."""
    svg: str


@dataclass(frozen=True)
class Page:
    """Contents of the page as formatted text."""

    title: str
    name: str
    label: str
    before: str
    after: str
    change: str
    is_better: bool
    fallback: str
    """Headline for a run without an evaluation."""
    sentence: str
    warnings: Sequence[str]
    verdict: str
    """True if the change is more than chance; empty if not known."""
    explanations: Sequence[str]
    """One sentence for each metric."""
    better: Table | None
    worse: Table | None
    """Queries that changed most."""
    scores: Table
    all_scores: Table
    dims: Table | None
    dims_svg: str
    stored: Table | None
    """Scores of documents in int8 and as bits, where they were measured."""
    stored_svg: str
    scores_svg: str
    """Plot of the deciding metric over the run; empty with only a before and an after."""
    figures: Sequence[Figure]
    facts: Sequence[tuple[str, str]]
    changed: str
    settings: Table
    versions: Table
    calls: Sequence[str]
    """Calls that use the model, one text for each library; none without a model."""


STYLE = """
:root { color-scheme: light dark;
  --page: #fcfcfb; --card: #ffffff; --ink: #1b1d20; --ink-soft: #666c75; --line: #e4e5e2; --accent: #1f5fbf;
  --before: #a3a8ae; --good: #16734a; --bad: #ad3a2e; --warn: #fdf5e2; --warn-line: #e2c988; }
@media (prefers-color-scheme: dark) { :root {
  --page: #15171a; --card: #1b1e22; --ink: #e9eaec; --ink-soft: #9aa1ab; --line: #2d3238; --accent: #7fb0ff;
  --before: #6d757f; --good: #5cc795; --bad: #f08a7d; --warn: #2b2517; --warn-line: #6a5826; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 3.2rem 1.5rem 4rem; }
.eyebrow { margin: 0; color: var(--ink-soft); font-size: .85rem; letter-spacing: .02em; overflow-wrap: anywhere; }
h1 { margin: .9rem 0 .8rem; font-weight: 650; font-size: clamp(1.9rem, 6.4vw, 3.3rem); line-height: 1.12;
  letter-spacing: -.022em; font-variant-numeric: tabular-nums; }
h1 .metric { display: block; font-size: clamp(1rem, 2.6vw, 1.3rem); font-weight: 550; letter-spacing: 0;
  color: var(--ink-soft); margin-bottom: .3rem; }
h1 .old { color: var(--before); font-weight: 500; }
h1 .arrow { color: var(--before); font-weight: 400; padding: 0 .12em; }
.delta { display: inline-block; vertical-align: .42em; margin-left: .5em; padding: .14em .6em; border-radius: 1em;
  font-size: clamp(.85rem, 2vw, 1.05rem); font-weight: 600; letter-spacing: 0; color: var(--good);
  background: color-mix(in srgb, var(--good) 12%, transparent); }
.delta.worse { color: var(--bad); background: color-mix(in srgb, var(--bad) 12%, transparent); }
.lead { max-width: 46rem; margin: 0; color: var(--ink-soft); font-size: 1.06rem; overflow-wrap: anywhere; }
section > .lead { margin-bottom: .9rem; }
.warning { margin: 1.4rem 0 0; padding: .7rem 1rem; border: 1px solid var(--warn-line); border-radius: .5rem;
  background: var(--warn); }
.warning p { margin: .2rem 0; overflow-wrap: anywhere; }
section { margin-top: 3rem; }
h2 { margin: 0 0 .9rem; font-size: 1.12rem; font-weight: 650; letter-spacing: -.005em; }
h3 { margin: 0 0 .5rem; font-size: .95rem; font-weight: 600; }
h3 { display: flex; align-items: baseline; gap: .5em; }
h3 { line-height: 1.35; }
h3 small { font-size: .85em; font-weight: 400; color: var(--ink-soft); }
h3 b { margin-left: auto; font-weight: 600; font-variant-numeric: tabular-nums; }
.pair { display: grid; gap: 2.2rem; align-items: start; }
.grid { display: grid; gap: 1.8rem 2.2rem; }
@media (min-width: 46rem) { .grid { grid-template-columns: 1fr 1fr; } }
@media (min-width: 60rem) { .pair { grid-template-columns: 1fr 1fr; } }
.pair > *, .grid > * { min-width: 0; }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { padding: .35rem 0 .35rem .9rem; color: var(--ink-soft); font-size: .84rem; font-weight: 500; text-align: right;
  vertical-align: bottom; }
td { padding: .46rem 0 .46rem .9rem; border-top: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { padding-left: 0; text-align: left; }
td.now { font-weight: 650; }
td.old { color: var(--ink-soft); }
td.up { color: var(--good); } td.down { color: var(--bad); }
svg { display: block; width: 100%; height: auto; overflow: visible; stroke-linejoin: round; font-family: inherit; }
dl { margin: 0; display: grid; grid-template-columns: minmax(6.5rem, max-content) 1fr; }
dt, dd { margin: 0; padding: .5rem 0; border-top: 1px solid var(--line); overflow-wrap: anywhere; min-width: 0; }
dt { padding-right: 1.6rem; color: var(--ink-soft); }
dd div { padding-left: 1em; text-indent: -1em; }
pre { margin: 0; padding: .9rem 1.1rem; overflow-x: auto; border: 1px solid var(--line); border-radius: .5rem;
  background: var(--card); font: .84rem/1.6 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
pre + pre { margin-top: .8rem; }
details { margin-top: 1rem; }
summary { cursor: pointer; color: var(--accent); font-size: .92rem; }
details table { margin-top: .6rem; font-size: .9rem; }
.plain td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.plain td:first-child { white-space: nowrap; color: var(--ink-soft); padding-right: 1rem; }
.plain th { text-align: left; }
td.interval { white-space: normal; min-width: 8.6rem; }
.queries { table-layout: fixed; }
.queries td { vertical-align: top; text-align: left; white-space: normal; overflow-wrap: anywhere; }
.queries td:first-child { white-space: normal; color: var(--ink); padding-right: 0; }
.queries th { text-align: left; } .queries th:last-child { width: 7.4rem; }
td img { display: block; max-width: 4.5rem; max-height: 4.5rem; margin-bottom: .25rem; border-radius: .25rem; }
footer { margin-top: 3.5rem; padding-top: 1rem; border-top: 1px solid var(--line); color: var(--ink-soft);
  font-size: .85rem; }
@media (max-width: 30rem) { main { padding: 2rem 1.1rem 3rem; } section { margin-top: 2.4rem; }
  dl { grid-template-columns: 1fr; } dt { padding-bottom: 0; } dd { border-top: 0; padding-top: .1rem; }
  table { font-size: .94rem; } th, td { padding-left: .55rem; } .plain td:first-child { white-space: normal; }
  td.interval { min-width: 4.6rem; } }
@media (max-width: 46rem) { .queries thead { display: none; } .queries tr { display: block; padding: .6rem 0;
  border-top: 1px solid var(--line); } .queries td { display: block; padding: .2rem 0; border: 0; }
  .queries td::before { content: attr(data-name); display: block; color: var(--ink-soft); font-size: .8rem; } }
@media print { main { max-width: none; padding: 0; } section, figure { break-inside: avoid; } }
"""


def render(page: Page) -> str:
    """Return the page as HTML."""
    parts = [
        _header(page),
        _warnings(page.warnings),
        _scores(page),
        _dims(page),
        _stored(page),
        section("Queries that got better", queries_html(page.better))
        if page.better
        else "",
        section("Queries that got worse", queries_html(page.worse))
        if page.worse
        else "",
        section("Over time", _figures(page.figures)) if page.figures else "",
        section("The run", _facts(page.facts)),
        section("Use the model", _use(page.calls)) if page.calls else "",
        section("Settings", _settings(page)),
    ]
    return document(page.title, parts)


def document(title: str, parts: Sequence[str], style: str = "") -> str:
    """Return a page of its own: the parts that are not empty, in the common style, to which `style` is added."""
    return (
        "<!doctype html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + f"\n<footer>Written by vembed {__version__}. This page is one file and needs no network.</footer>\n"
        "</main>\n</body>\n</html>\n"
    )


def _header(page: Page) -> str:
    if page.after:
        old = (
            f'<span class="old">{page.before}</span> <span class="arrow">&rarr;</span> '
            if page.before
            else ""
        )
        chip = (
            f' <span class="delta{"" if page.is_better else " worse"}">{page.change}</span>'
            if page.change
            else ""
        )
        headline = (
            f'<span class="metric">{escape(page.label)}</span>{old}{page.after}{chip}'
        )
    else:
        headline = escape(page.fallback)
    return (
        f'<header>\n<p class="eyebrow">vembed report &middot; {escape(page.name)}</p>\n<h1>{headline}</h1>\n'
        f'<p class="lead">{escape(page.sentence)}</p>\n</header>'
    )


def _warnings(warnings: Sequence[str]) -> str:
    if not warnings:
        return ""
    lines = "\n".join(f"<p>{escape(warning)}</p>" for warning in warnings)
    return f'<div class="warning">\n{lines}\n</div>'


def _scores(page: Page) -> str:
    if not page.scores.rows:
        return section(
            "Scores",
            '<p class="lead">Nothing was evaluated: set <code>val_split: 0.1</code>, or give '
            "<code>val_data_path</code>.</p>",
        )
    more = ""
    if len(page.all_scores.rows) > len(page.scores.rows):
        every = table_html(page.all_scores)
        more = f"<details><summary>All {len(page.all_scores.rows)} metrics</summary>{every}</details>"
    tables = table_html(page.scores) + more
    if page.explanations:
        lines = "".join(f"<li>{escape(line)}</li>" for line in page.explanations)
        tables += f'<details><summary>What the metrics mean</summary><ul class="meanings">{lines}</ul></details>'
    if page.scores_svg:
        heading = f"<h3>{escape(page.label)}<small>over the steps; the ring marks the weights kept</small></h3>"
        tables = f'<div class="pair"><div>{tables}</div><div>{heading}{page.scores_svg}</div></div>'
    verdict = f'<p class="lead">{escape(page.verdict)}</p>' if page.verdict else ""
    return section("Before and after", verdict + tables)


def _dims(page: Page) -> str:
    if page.dims is None:
        return ""
    plot = f"<div>{page.dims_svg}</div>" if page.dims_svg else ""
    return section(
        f"{page.label} by number of dimensions",
        f'<div class="pair">{table_html(page.dims)}{plot}</div>',
    )


def _stored(page: Page) -> str:
    if page.stored is None:
        return ""
    return section(
        "Stored vectors",
        f'<div class="pair">{table_html(page.stored)}<div>{page.stored_svg}</div></div>',
    )


def _figures(figures: Sequence[Figure]) -> str:
    blocks = []
    for one in figures:
        note = f"<small>{escape(one.note)}</small>" if one.note else ""
        blocks.append(
            f"<div><h3>{escape(one.title)}{note}<b>{escape(one.last)}</b></h3>{one.svg}</div>"
        )
    return f'<div class="grid">{"".join(blocks)}</div>'


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    rows = []
    for name, value in facts:
        lines = value.split("\n")
        text = (
            escape(value)
            if len(lines) == 1
            else "".join(f"<div>{escape(line.strip())}</div>" for line in lines)
        )
        rows.append(f"<dt>{escape(name)}</dt><dd>{text}</dd>")
    return f"<dl>{''.join(rows)}</dl>"


def _use(calls: Sequence[str]) -> str:
    return "\n".join(f"<pre>{escape(one)}</pre>" for one in calls)


def _settings(page: Page) -> str:
    versions = f"<details><summary>Versions</summary>{table_html(page.versions, plain=True)}</details>"
    return (
        f"<pre>{escape(page.changed)}</pre>\n"
        f"<details><summary>All {len(page.settings.rows)} settings</summary>"
        f"{table_html(page.settings, plain=True)}</details>"
        + (versions if page.versions.rows else "")
    )


def section(title: str, body: str) -> str:
    """Return a section with its heading. `body` is HTML."""
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>"


def table_html(table: Table, *, plain: bool = False) -> str:
    """Return a table as HTML. `plain`: texts that wrap, and no colours by column."""
    header = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    classes = (
        [""] * len(table.header)
        if plain
        else [_cell_class(name) for name in table.header]
    )
    rows = []
    for row in table.rows:
        cells = []
        for cell, name in zip(row, classes, strict=True):
            kind = (
                {"+": "up", "-": "down"}.get(cell[:1], "") if name == "change" else name
            )
            # chr(34) is a quotation mark, which may not stand in the braces of an f-string before Python 3.12.
            cells.append(
                f"<td{f' class={chr(34)}{kind}{chr(34)}' if kind else ''}>{escape(cell)}</td>"
            )
        rows.append(f"<tr>{''.join(cells)}</tr>")
    body = f"<thead><tr>{header}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="scroll"><table{" class=" + chr(34) + "plain" + chr(34) if plain else ""}>{body}</table></div>'


def queries_html(table: Table) -> str:
    """Return a table of queries as HTML, with thumbnails; on narrow screens the cells of a row stand below each
    other."""
    rows = []
    for number, row in enumerate(table.rows):
        cells = []
        for column, (name, cell) in enumerate(zip(table.header, row, strict=True)):
            addresses = table.pictures.get((number, column), ())
            pictures = "".join(
                f'<img src="{one}" alt="{escape(cell)}">' for one in addresses
            )
            cells.append(
                f'<td data-name="{escape(name)}">{pictures}{escape(cell)}</td>'
            )
        rows.append(f"<tr>{''.join(cells)}</tr>")
    header = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    return f'<table class="queries"><thead><tr>{header}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _cell_class(header: str) -> str:
    if "interval" in header:
        return "interval"
    for word, kind in (("before", "old"), ("after", "now"), ("change", "change")):
        if header.endswith(word):
            return kind
    return ""
