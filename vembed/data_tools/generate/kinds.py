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


def title_body(
    record: dict[str, Any],
    item: Item,  # noqa: ARG001
    random: np.random.Generator,  # noqa: ARG001
) -> list[Pair]:
    """The title, and the text below it."""
    title = record.get("title")
    text = record.get("text")
    if not isinstance(title, str) or not isinstance(text, str) or not title.strip():
        return []
    return [(title.strip(), text.strip())] if _is_long(text, SHORTEST_REST) else []


def heading_section(
    record: dict[str, Any],  # noqa: ARG001
    item: Item,
    random: np.random.Generator,  # noqa: ARG001
) -> list[Pair]:
    """Each heading of a Markdown text, and its section."""
    text = item.text or ""
    headings = list(_HEADING.finditer(text))
    if not headings:
        return []
    ends = [match.start() for match in headings[1:]] + [len(text)]
    pairs = [
        (match[1].strip(), text[match.end() : end].strip())
        for match, end in zip(headings, ends, strict=True)
    ]
    return [
        (heading, section)
        for heading, section in pairs
        if _is_long(section, SHORTEST_REST)
    ]


def first_sentence(
    record: dict[str, Any],  # noqa: ARG001
    item: Item,
    random: np.random.Generator,  # noqa: ARG001
) -> list[Pair]:
    """The first sentence, and the rest."""
    first, *rest = _SENTENCE.split((item.text or "").strip(), maxsplit=1)
    if (
        not rest
        or not _is_long(first, SHORTEST_QUERY)
        or not _is_long(rest[0], SHORTEST_REST)
    ):
        return []
    return [(first, rest[0])]


def docstring_function(
    record: dict[str, Any],  # noqa: ARG001
    item: Item,
    random: np.random.Generator,  # noqa: ARG001
) -> list[Pair]:
    """The first paragraph of each Python function's docstring, and the function without it."""
    text = item.text or ""
    if "def " not in text:
        return []
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    pairs: list[Pair] = []
    for node in ast.walk(tree):
        if (
            not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            or len(node.body) < 2
        ):
            continue
        docstring = ast.get_docstring(node)
        if docstring and _is_long(docstring, SHORTEST_QUERY):
            lines = re.split(
                r"\r\n?|\n", text
            )  # as Python counts them: a form feed ends no line
            # From `def` on, without decorators, to the line before the docstring; then all behind it.
            head = lines[node.lineno - 1 : node.body[0].lineno - 1]
            body = lines[
                (node.body[0].end_lineno or node.body[0].lineno) : node.end_lineno
            ]
            pairs.append(
                (
                    " ".join(docstring.partition("\n\n")[0].split()),
                    "\n".join(head + body),
                )
            )
    return pairs


def caption_image(
    record: dict[str, Any],
    item: Item,
    random: np.random.Generator,  # noqa: ARG001
) -> list[Pair]:
    """The text beside an image, and the image."""
    caption = record.get("caption") or item.text
    if not item.images or not isinstance(caption, str) or not caption.strip():
        return []
    images = record.get("image") or record.get("images") or record.get("image_path")
    return [(caption.strip(), {"image": images})]


def crop(record: dict[str, Any], item: Item, random: np.random.Generator) -> list[Pair]:  # noqa: ARG001
    """Two spans of the text, drawn independently."""
    words = (item.text or "").split()
    if len(words) < 2 * CROP_WORDS[0]:
        return []
    spans = []
    for _ in range(2):
        size = int(
            random.integers(CROP_WORDS[0], min(CROP_WORDS[1], len(words) // 2) + 1)
        )
        start = int(random.integers(0, len(words) - size + 1))
        spans.append(" ".join(words[start : start + size]))
    return [(spans[0], spans[1])] if spans[0] != spans[1] else []


KINDS: dict[str, Callable[[dict[str, Any], Item, np.random.Generator], list[Pair]]] = {
    "docstring_function": docstring_function,
    "caption_image": caption_image,
    "title_body": title_body,
    "heading_section": heading_section,
    "first_sentence": first_sentence,
    "crop": crop,
}
"""In the order in which they are tried where nobody chooses; cropping says least, and comes last."""


def pairs_of(
    record: Any, item: Item, kinds: Sequence[str], random: np.random.Generator
) -> list[tuple[str, Pair]]:
    """(kind, pair) of a document: by all of `kinds`, or without any by the first one that fits."""
    fields = record if isinstance(record, dict) else {"text": document_text(record)}
    pairs: list[tuple[str, Pair]] = []
    for kind in kinds or KINDS:
        pairs += [(kind, pair) for pair in KINDS[kind](fields, item, random)]
        if pairs and not kinds:
            break
    return pairs


def _is_long(text: str, num_words: int) -> bool:
    return len(text.split()) >= num_words
