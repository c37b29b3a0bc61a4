"""The page of an audit: one HTML file without scripts or network access, in the look of a run's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from vembed.data_tools.audit.checks import Finding
from vembed.data_tools.init.data_page import as_html
from vembed.data_tools.init.sections import Section
from vembed.evaluation.report.page import document, section

OWN_STYLE = """
.finding { border-top: 1px solid var(--line); padding-top: 1.2rem; margin-top: 1.6rem; }
.finding p { margin: .3rem 0 .7rem; max-width: 46rem; }
.tag { padding: .1em .6em; border-radius: 1em; font-size: .8rem; font-weight: 600; border: 1px solid var(--line); }
section li { margin: .25rem 0; overflow-wrap: anywhere; }
.tag.error { color: var(--bad); border-color: var(--bad); } .tag.warning { background: var(--warn); }
"""
ORDER = {"error": 0, "warning": 1, "note": 2}


def render(
    name: str,
    report: Mapping[str, Any],
    page: Sequence[Section],
    findings: Sequence[Finding],
) -> str:
    """Return the page: first what `vembed data` shows (`page`), then the findings."""
    errors = sum(one.severity == "error" for one in findings)
    headline = f"{len(findings)} findings" + (
        f", {errors} of them errors" if errors else ""
    )
    ordered = sorted(findings, key=lambda one: (ORDER[one.severity], -one.share))
    parts = [
        f'<header>\n<p class="eyebrow">vembed audit &middot; {escape(name)}</p>\n<h1>{headline}</h1>\n'
        f'<p class="lead">{escape(report["summary"])}</p>\n</header>',
        as_html(page),
        section(
            "Findings",
            "".join(_finding(one) for one in ordered) or "<p>Nothing was found.</p>",
        ),
        section("Words", _lengths(report["lengths"])),
        section("Scripts", _shares(report["scripts"])),
        section("Sources and the model", _sources(report["sources"]))
        if _has_scores(report["sources"])
        else "",
    ]
    return document(f"Audit of {name}", parts, OWN_STYLE)


def _finding(one: Finding) -> str:
    mend = f"<pre>{escape(one.mend)}</pre>" if one.mend else ""
    examples = ""
    if one.examples:
        names = list(
            dict.fromkeys(name for example in one.examples for name in example)
        )
        rows = [[example.get(name, "") for name in names] for example in one.examples]
        examples = f"<details><summary>{len(rows)} examples</summary>{_table(names, rows, plain=True)}</details>"
    return (
        f'<div class="finding"><h3>{escape(one.title)} <span class="tag {one.severity}">{one.severity}</span>'
        f"<b>{one.count:,d} ({one.share:.1%})</b></h3><p>{escape(one.text)}</p>{mend}{examples}</div>"
    )


def _lengths(lengths: Mapping[str, Mapping[str, float]]) -> str:
    names = ("count", "mean", "p5", "median", "p95", "longest")
    rows = [
        [part, *(f"{values[name]:,.0f}" if name in values else "" for name in names)]
        for part, values in lengths.items()
    ]
    return _table(["words", *names], rows)


def _shares(scripts: Mapping[str, Mapping[str, float]]) -> str:
    rows = [
        [part, ", ".join(f"{name} {share:.1%}" for name, share in found.items())]
        for part, found in scripts.items()
    ]
    return _table(["letters of", "scripts"], rows, plain=True)


def _sources(sources: Mapping[str, Mapping[str, float]]) -> str:
    names = list(dict.fromkeys(name for values in sources.values() for name in values))
    heads = {
        "rows": "rows",
        "found_first": "positive found first",
        "found_in_10": "among the first 10",
        "median_above": "documents above it (median)",
    }
    rows = [
        [
            source,
            *(
                f"{values[name]:.1%}"
                if name.startswith("found")
                else f"{values[name]:,.0f}"
                for name in names
            ),
        ]
        for source, values in sources.items()
    ]
    return _table(["source", *(heads[name] for name in names)], rows)


def _has_scores(sources: Mapping[str, Mapping[str, float]]) -> bool:
    return any(values.keys() - {"rows"} for values in sources.values())


def _table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, plain: bool = False
) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for row in rows
    )
    kind = ' class="plain"' if plain else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
