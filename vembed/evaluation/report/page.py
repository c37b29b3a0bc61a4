"""render_page(): an HTML page or Markdown from a template. All pages are made here, and every value is escaped. Images
become thumbnails, small JPEG files as data addresses, so that a page stays one file."""

import base64
import io
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from vembed import __version__
from vembed.data.examples import ImageRef
from vembed.data.images.files import load_image
from vembed.errors import UserError

EDGE_PIXELS = 96
"""Of the longer edge; shown at half the size, so that it is sharp on dense screens."""
JPEG_QUALITY = 70


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
TEMPLATES.globals["version"] = __version__


def render_page(template: str, **values: Any) -> str:
    """Return a page: one file without scripts or network access. Of the values, only `Markup` is taken as HTML.
    Templates of Markdown escape by their filters."""
    return TEMPLATES.get_template(template).render(values)


def thumbnail(path: str) -> str | None:
    """Return the data address of an image file, or None if it cannot be read. Addresses are not fetched."""
    if "://" in path:
        return None
    try:
        picture = load_image(ImageRef(path=path))
    except UserError:
        # The report of a run whose images have moved still shows their names.
        return None
    picture.thumbnail((EDGE_PIXELS, EDGE_PIXELS))
    target = io.BytesIO()
    picture.save(target, "JPEG", quality=JPEG_QUALITY)
    content = base64.b64encode(target.getvalue()).decode("ascii")
    return f"data:image/jpeg;base64,{content}"
