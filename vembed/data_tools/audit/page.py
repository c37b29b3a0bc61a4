"""The page of an audit, in the look of a run's report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vembed.evaluation.report.page import render_page

SEVERITY_ORDER = ("error", "warning", "note")
LENGTH_COLUMNS = ("count", "mean", "p5", "median", "p95", "longest")
SOURCE_COLUMNS = [
    "source",
    "rows",
    "positive found first",
    "among the first 10",
    "documents above it (median)",
]


def render(report: Mapping[str, Any]) -> str:
    """Return the page: first what `vembed data` prints, then the findings."""
    ordered = sorted(
        report["findings"],
        key=lambda found: (SEVERITY_ORDER.index(found["severity"]), -found["share"]),
    )
    findings = []
    for finding in ordered:
        columns: dict[str, None] = {}
        for example in finding["examples"]:
            columns |= dict.fromkeys(example)
        examples = []
        for example in finding["examples"]:
            examples.append([example.get(name, "") for name in columns])
        shown = {
            "count": f"{finding['count']:,d} ({finding['share']:.1%})",
            "columns": list(columns),
            "examples": examples,
        }
        findings.append(finding | shown)

    words = []
    for part, values in report["lengths"].items():
        row = [part]
        for key in LENGTH_COLUMNS:
            row.append(f"{values[key]:,.0f}" if key in values else "")
        words.append(row)
    letters = []
    for part, shares in report["scripts"].items():
        names = [f"{name} {share:.1%}" for name, share in shares.items()]
        letters.append([part, ", ".join(names)])
    sources = []
    for source, values in report["sources"].items():
        row = [source]
        for key, value in values.items():
            row.append(f"{value:.1%}" if key.startswith("found") else f"{value:,.0f}")
        sources.append(row)
    # Title, header, rows, and whether the texts wrap.
    tables = [
        ("Words", ["words", *LENGTH_COLUMNS], words, False),
        ("Scripts", ["letters of", "scripts"], letters, True),
    ]
    if any(len(row) > 2 for row in sources):
        tables.append(("Sources and the model", SOURCE_COLUMNS, sources, False))
    return render_page(
        "audit.html.j2",
        title=f"Audit of {report['name']}",
        name=report["name"],
        summary=report["summary"],
        data_sections=report["data"],
        num_errors=sum(finding["severity"] == "error" for finding in findings),
        findings=findings,
        tables=tables,
    )
