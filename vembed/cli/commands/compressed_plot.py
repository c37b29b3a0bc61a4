"""compressed_table() and compressed_picture(): quality against bytes per document."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.table import Table

from vembed.evaluation.report.pictures import write_picture
from vembed.evaluation.report.plots import stored_svg
from vembed.evaluation.report.stored_forms import points, rows_of


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
    write_picture(path, stored_svg(points(scores), "nDCG@10"), "nDCG@10")
