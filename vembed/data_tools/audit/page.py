"""The page of an audit, in the look of a run's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vembed.data_tools.audit.checks import Finding
from vembed.data_tools.init.sections import PageSection
from vembed.evaluation.report.page import render_page

SEVERITY_ORDER = ("error", "warning", "note")
LENGTH_COLUMNS = ("count", "mean", "p5", "median", "p95", "longest")
SOURCE_COLUMNS = {
    "rows": "rows",
    "found_first": "positive found first",
    "found_in_10": "among the first 10",
    "median_above": "documents above it (median)",
}

PageTable = tuple[str, list[str], list[list[str]], bool]
"""Title, header, rows, and whether its texts wrap."""


def render(
    name: str,
    report: Mapping[str, Any],
    page: Sequence[PageSection],
    findings: Sequence[Finding],
) -> str:
    """Return the page: first what `vembed data` prints (`page`), then the findings."""
    ordered = sorted(
        findings,
        key=lambda finding: (SEVERITY_ORDER.index(finding.severity), -finding.share),
    )
    tables = [_lengths(report["lengths"]), _scripts(report["scripts"])]
    if any(values.keys() - {"rows"} for values in report["sources"].values()):
        tables.append(_sources(report["sources"]))
    return render_page(
        "audit.html.j2",
        title=f"Audit of {name}",
        name=name,
        summary=report["summary"],
        data_sections=page,
        num_errors=sum(finding.severity == "error" for finding in findings),
        findings=[_finding_values(finding) for finding in ordered],
        tables=tables,
    )


def _finding_values(finding: Finding) -> dict[str, Any]:
    columns: dict[str, None] = {}
    for example in finding.examples:
        columns |= dict.fromkeys(example)
    rows = [[row.get(name, "") for name in columns] for row in finding.examples]
    return {
        "title": finding.title,
        "severity": finding.severity,
        "count": f"{finding.count:,d} ({finding.share:.1%})",
        "text": finding.text,
        "fix": finding.fix,
        "columns": list(columns),
        "examples": rows,
    }


def _lengths(lengths: Mapping[str, Mapping[str, float]]) -> PageTable:
    rows = []
    for field, values in lengths.items():
        cells = [
            f"{values[key]:,.0f}" if key in values else "" for key in LENGTH_COLUMNS
        ]
        rows.append([field, *cells])
    return "Words", ["words", *LENGTH_COLUMNS], rows, False


def _scripts(scripts: Mapping[str, Mapping[str, float]]) -> PageTable:
    rows = []
    for field, shares in scripts.items():
        named = [f"{name} {share:.1%}" for name, share in shares.items()]
        rows.append([field, ", ".join(named)])
    return "Scripts", ["letters of", "scripts"], rows, True


def _sources(sources: Mapping[str, Mapping[str, float]]) -> PageTable:
    keys: dict[str, None] = {}
    for values in sources.values():
        keys |= dict.fromkeys(values)
    rows = []
    for source, values in sources.items():
        cells = [source]
        for key in keys:
            is_share = key.startswith("found")
            cells.append(f"{values[key]:.1%}" if is_share else f"{values[key]:,.0f}")
        rows.append(cells)
    header = ["source", *(SOURCE_COLUMNS[key] for key in keys)]
    return "Sources and the model", header, rows, False
