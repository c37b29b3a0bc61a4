"""Pairs without any language model: what a document's own form says about itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vembed.data.documents import document_text
from vembed.data.examples import Item

SHORTEST_QUERY = 2
SHORTEST_REST = 5
"""Words that a query and what is left of the document need."""
CROP_WORDS = (8, 64)
_SENTENCE = re.compile(r"(?<=[.!?\u3002\uff01\uff1f])\s+")
# `## Title ##`: spaces and closing marks are no part of the title.
_HEADING = re.compile(r"^#{1,6}[ \t]+(.+?)[ \t#]*$", re.MULTILINE)

Pair = tuple[str, Any]
"""A query, and the positive as a row holds it: a text, or {"image": ...}."""


def title_body(record: dict[str, Any]) -> list[Pair]:
    """The title, and the text below it."""
    title = record.get("title")
    text = record.get("text")
    if not isinstance(title, str) or not isinstance(text, str) or not title.strip():
        return []
    return [(title.strip(), text.strip())] if _is_long(text, SHORTEST_REST) else []


def heading_section(text: str) -> list[Pair]:
    """Each heading of a Markdown text, and its section."""
    headings = list(_HEADING.finditer(text))
    ends = [match.start() for match in headings[1:]] + [len(text)]
    pairs: list[Pair] = []
    for match, end in zip(headings, ends, strict=False):
        section = text[match.end() : end].strip()
        if _is_long(section, SHORTEST_REST):
            pairs.append((match[1].strip(), section))
    return pairs


def first_sentence(text: str) -> list[Pair]:
    """The first sentence, and the rest."""
    first, *rest = _SENTENCE.split(text.strip(), maxsplit=1)
    if not rest or not _is_long(first, SHORTEST_QUERY):
        return []
    return [(first, rest[0])] if _is_long(rest[0], SHORTEST_REST) else []


def docstring_function(text: str) -> list[Pair]:
    """The first paragraph of each Python function's docstring, and the function without it."""
    if "def " not in text:
        return []
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    # As Python counts them: a form feed ends no line.
    lines = re.split(r"\r\n?|\n", text)
    pairs: list[Pair] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node)
        if len(node.body) < 2 or not docstring:
            continue
        if _is_long(docstring, SHORTEST_QUERY):
            first = node.body[0]
            # From `def` on, without decorators, to the line before the docstring; then all behind it.
            head = lines[node.lineno - 1 : first.lineno - 1]
            body = lines[first.end_lineno or first.lineno : node.end_lineno]
            summary = " ".join(docstring.partition("\n\n")[0].split())
            pairs.append((summary, "\n".join(head + body)))
    return pairs


def caption_image(record: dict[str, Any], item: Item) -> list[Pair]:
    """The text beside an image, and the image."""
    caption = record.get("caption") or item.text
    if not item.images or not isinstance(caption, str) or not caption.strip():
        return []
    images = record.get("image") or record.get("images") or record.get("image_path")
    return [(caption.strip(), {"image": images})]


def crop(text: str, random: np.random.Generator) -> list[Pair]:
    """Two spans of the text, drawn independently."""
    words = text.split()
    if len(words) < 2 * CROP_WORDS[0]:
        return []
    spans = []
    longest = min(CROP_WORDS[1], len(words) // 2)
    for _ in range(2):
        size = int(random.integers(CROP_WORDS[0], longest + 1))
        start = int(random.integers(0, len(words) - size + 1))
        spans.append(" ".join(words[start : start + size]))
    return [(spans[0], spans[1])] if spans[0] != spans[1] else []


def pairs_of(
    record: Any, item: Item, kinds: Sequence[str], random: np.random.Generator
) -> list[tuple[str, Pair]]:
    """(kind, pair) of a document: by all of `kinds`, or without any by the first one that fits."""
    fields = record if isinstance(record, dict) else {"text": document_text(record)}
    text = item.text or ""
    # In the order in which they are tried where nobody chooses. Cropping says least, and comes last.
    makers: dict[str, Callable[[], list[Pair]]] = {
        "docstring_function": lambda: docstring_function(text),
        "caption_image": lambda: caption_image(fields, item),
        "title_body": lambda: title_body(fields),
        "heading_section": lambda: heading_section(text),
        "first_sentence": lambda: first_sentence(text),
        "crop": lambda: crop(text, random),
    }
    pairs: list[tuple[str, Pair]] = []
    for kind in kinds or makers:
        pairs += [(kind, pair) for pair in makers[kind]()]
        if pairs and not kinds:
            break
    return pairs


def _is_long(text: str, num_words: int) -> bool:
    return len(text.split()) >= num_words
