"""render_page(): an HTML page from a template. All pages of vembed are made here, and every value is escaped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from vembed import __version__


def cell_class(column: str, cell: str) -> str:
    """Return the class of a cell, which chooses its colour; empty for most."""
    if "interval" in column:
        return "interval"
    if column.endswith("before"):
        return "old"
    if column.endswith("after"):
        return "now"
    if column.endswith("change"):
        return {"+": "up", "-": "down"}.get(cell[:1], "")
    return ""


TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.globals |= {"cell_class": cell_class, "version": __version__}


def render_page(template: str, **values: Any) -> str:
    """Return a page: one file without scripts or network access. Of the values, only `Markup` is taken as HTML."""
    return TEMPLATES.get_template(template).render(values)
