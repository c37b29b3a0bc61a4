"""render_page(): an HTML page or Markdown from a template. All pages are made here, and every value is escaped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import (
    Environment,
    FileSystemLoader,
    StrictUndefined,
    select_autoescape,
)

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


def markdown_text(text: str) -> str:
    """Return a text as Markdown without HTML and without images from other places."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("![", "!\\[")


def markdown_cell(text: str) -> str:
    """Return a text as a cell of a Markdown table."""
    return markdown_text(text.replace("\n", " ")).replace("|", "\\|")


def code_block(text: str) -> str:
    """Return YAML as a Markdown block, behind a fence that the text does not have."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}yaml\n{text}{fence}"


TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=select_autoescape(["html.j2"]),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters |= {
    "md": markdown_text,
    "md_cell": markdown_cell,
    "code_block": code_block,
}
TEMPLATES.globals |= {"cell_class": cell_class, "version": __version__}


def render_page(template: str, **values: Any) -> str:
    """Return a page: one file without scripts or network access. Of the values, only `Markup` is taken as HTML.
    Templates of Markdown escape by their filters."""
    return TEMPLATES.get_template(template).render(values)
