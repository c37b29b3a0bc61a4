"""compressed_table() and compressed_picture(): quality against bytes per document."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure
from rich.table import Table

from vembed.report.stored_forms import NAMES, points, rows_of


def compressed_table(scores: Mapping[str, float]) -> Table:
    """Return a table of all forms and sizes."""
    table = Table("vectors", box=None, pad_edge=False)
    for name in ("size", "bytes", "nDCG@10", "of float32"):
        table.add_column(name, justify="right")
    for row in rows_of(scores):
        table.add_row(*row)
    return table


def compressed_picture(scores: Mapping[str, float], path: Path) -> None:
    """Write one picture (.png or .svg): nDCG@10 against bytes per document, one line per form."""
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for (form, found), marker in zip(points(scores).items(), "os^D", strict=True):
        axes.plot([size for _, size, _ in found], [value for _, _, value in found], marker=marker, label=NAMES[form])
        for dim, size, value in found:
            axes.annotate(str(dim), (size, value), xytext=(4, 4), textcoords="offset points", fontsize=7)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes per document")
    axes.set_ylabel("nDCG@10")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
