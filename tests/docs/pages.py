"""What the documentation says: its pages, blocks of code, commands, spans of code and links."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "examples" / "README.md",
    ROOT / "examples" / "data" / "README.md",
    ROOT / "tests" / "acceptance" / "README.md",
]

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)
_SPAN = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
_LINK = re.compile(r"!?\[(?:[^\]]|\](?!\())*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def text_of(page):
    """The page."""
    return page.read_text(encoding="utf-8")


def blocks(*languages):
    """All blocks of these languages, in order."""
    matching = []
    for page in PAGES:
        text = text_of(page)
        for match in _FENCE.finditer(text):
            if match["language"] in languages:
                indent = match["indent"]
                lines = [
                    line.removeprefix(indent) for line in match["text"].splitlines()
                ]
                number = text.count("\n", 0, match.start()) + 1
                matching.append(
                    Block(page, number, match["language"], "\n".join(lines) + "\n")
                )
    return matching


def prose(page):
    """The page without its blocks."""
    return _FENCE.sub("", text_of(page))


def spans(page):
    """Code within the prose of a page; one that runs over two lines as one line."""
    return [" ".join(span.split()) for span in _SPAN.findall(prose(page))]


def links(page):
    """Targets of the links of a page."""
    return _LINK.findall(_SPAN.sub("", prose(page)))


def anchors(page):
    """What a link to a part of the page may name, as Python-Markdown makes it."""
    slugs = set()
    for heading in _HEADING.findall(prose(page)):
        slug = re.sub(r"[^\w\s-]", "", heading).strip().lower()
        slugs.add(re.sub(r"[-\s]+", "-", slug))
    return slugs


def commands():
    """(location, arguments) of every command in shell blocks and of whole commands in spans."""
    found_commands = []
    for block in blocks("bash"):
        text = block.text.replace("\\\n", " ")
        for number, line in enumerate(text.splitlines(), block.line + 1):
            for part in re.split(r"\s(?:&&|\|)\s", line):
                if arguments := shlex.split(part, comments=True):
                    location = f"{block.page.relative_to(ROOT)}:{number}"
                    found_commands.append((location, arguments))
    for page in PAGES:
        for span in spans(page):
            starts = span.startswith(
                ("vembed ", "accelerate launch ", "torchrun ", "bash ")
            )
            if starts and re.search(r"\.(yaml|sh|py)\b", span) and "..." not in span:
                found_commands.append((str(page.relative_to(ROOT)), shlex.split(span)))
    return found_commands
