"""Pages for programs: docs/llms.txt is current, and docs/agents.md names every command with `--json`."""

import re

from tests.docs.llms import FILE, llms_text
from tests.docs.pages import ROOT, text_of
from vembed.cli.main import COMMANDS, load_command


def headings_and_links(text):
    return re.findall(r"^#.*|^>.*|^- \[.*?\]\([^)]*\)", text, re.MULTILINE)


def test_llms_txt_is_current():
    """`python -m tests.docs.llms` writes it. The sentences are those of the day it was written."""
    text = text_of(FILE)
    assert headings_and_links(text) == headings_and_links(llms_text())
    pages = re.findall(r"\]\(([\w-]+)/\)", text)
    for path in (ROOT / "docs").glob("*.md"):
        assert path.stem in pages or path.stem == "index"


def test_the_page_for_agents_names_the_commands_with_json():
    page = text_of(ROOT / "docs" / "agents.md")
    table = page[page.index("## Commands with --json") : page.index("## Files")]
    names = set(re.findall(r"^\| `(\w[\w-]*)` ", table, re.MULTILINE))
    for name in COMMANDS:
        options = [parameter.name for parameter in load_command(name).params]
        assert (name in names) == ("json_file" in options), name
