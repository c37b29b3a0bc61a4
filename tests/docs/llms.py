"""docs/llms.txt: the pages of mkdocs.yml with a sentence each. `python -m tests.docs.llms` writes it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Any

import yaml

from tests.docs.pages import ROOT

FILE = ROOT / "docs" / "llms.txt"
NOTE = """\
One YAML file describes a run. `vembed train cfg.yaml` trains and writes a model that Sentence Transformers loads.
Agents start with [Agents](agents/). In the repository the page `NAME/` is `docs/NAME.md`.
"""


def llms_text() -> str:
    """Return the file's text."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    lines = [f"# {site['site_name']}", "", f"> {site['site_description']}", "", NOTE]
    alone = [one for one in site["nav"] if isinstance(next(iter(one.values())), str)]
    sections = [
        ("Start", alone),
        *(next(iter(one.items())) for one in site["nav"] if one not in alone),
    ]
    for title, pages in sections:
        lines += [f"## {title}", "", *_links(pages), ""]
    return "\n".join(lines).rstrip() + "\n"


def _links(pages: list[dict[str, Any]]) -> Iterator[str]:
    for one in pages:
        ((title, page),) = one.items()
        address = page.removesuffix(".md").removesuffix("index")
        about = first_sentence((ROOT / "docs" / page).read_text(encoding="utf-8"))
        yield f"- [{title}]({address + '/' if address else './'})" + (
            f": {about}" if about else ""
        )


def first_sentence(page: str) -> str:
    """Return the first sentence of a page's first paragraph of plain text."""
    text = re.sub(r"^```.*?^```|^<!--.*?-->", "", page, flags=re.MULTILINE | re.DOTALL)
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    plain = next(
        (part for part in paragraphs if part and part[0] not in "#|!-*<>`"), ""
    )
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain)
    return textwrap.shorten(
        re.split(r"(?<=[.:]) ", plain)[0].rstrip(":"), 200, placeholder=" ..."
    )


if __name__ == "__main__":
    FILE.write_text(llms_text(), encoding="utf-8")
