"""docs/llms.txt: the pages of mkdocs.yml with a sentence each. `python -m tests.docs.llms` writes it."""

import re
import textwrap

import yaml

from tests.docs.pages import ROOT, text_of

FILE = ROOT / "docs" / "llms.txt"
NOTE = """\
One YAML file describes a run. `vembed train cfg.yaml` trains and writes a model that Sentence Transformers loads.
Agents start with [Agents](agents/). In the repository the page `NAME/` is `docs/NAME.md`.
"""


def llms_text():
    """Return the file's text."""
    site = yaml.safe_load(text_of(ROOT / "mkdocs.yml"))
    sections = {"Start": []}
    for entry in site["nav"]:
        for title, target in entry.items():
            if isinstance(target, str):
                sections["Start"].append(link(title, target))
                continue
            sections[title] = []
            for page in target:
                sections[title] += [link(name, path) for name, path in page.items()]
    lines = [f"# {site['site_name']}", "", f"> {site['site_description']}", "", NOTE]
    for title, links in sections.items():
        lines += [f"## {title}", "", *links, ""]
    return "\n".join(lines).rstrip() + "\n"


def link(title, page):
    address = page.removesuffix(".md").removesuffix("index")
    sentence = first_sentence(text_of(ROOT / "docs" / page))
    return f"- [{title}]({address + '/' if address else './'}): {sentence}"


def first_sentence(page):
    """Return the first sentence of a page's first paragraph of plain text."""
    text = re.sub(r"^```.*?^```|^<!--.*?-->", "", page, flags=re.MULTILINE | re.DOTALL)
    for part in text.split("\n\n"):
        paragraph = " ".join(part.split())
        if paragraph and paragraph[0] not in "#|!-*<>`":
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
            sentence = re.split(r"(?<=[.:]) ", plain)[0].rstrip(":")
            return textwrap.shorten(sentence, 200, placeholder=" ...")
    return title_of(page)


def title_of(page):
    return page.partition("\n")[0].removeprefix("# ")


if __name__ == "__main__":
    FILE.write_text(llms_text(), encoding="utf-8")
