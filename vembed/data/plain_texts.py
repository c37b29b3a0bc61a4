"""Plain texts that are probably meant as something else: paths of images, lists, objects, places of images."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from vembed.data.examples import Example, Item
from vembed.data.images.files import IMAGE_PATH

_LIST = re.compile(r"""\[\s*['"{].*['"}]\s*\]""", re.DOTALL)
_OBJECT = re.compile(
    r"""\{\s*['"](text|title|image|images|bytes|path)['"]\s*:.*\}""", re.DOTALL
)
_PLACE = "<image>"
"""Place of an image in the texts of other programs."""


def taken_for_texts(examples: Sequence[Example], unused: Collection[str]) -> list[str]:
    """Return sentences on texts of these examples that look like something else. `unused`: columns not read."""
    parts = {
        "queries": [example.query for example in examples],
        "positives": [item for example in examples for item in example.positives],
        "negatives": [item for example in examples for item in example.negatives],
    }
    return (
        _paths(parts["queries"], parts["positives"])
        + _values(parts)
        + _places(parts, unused)
    )


def _values(parts: dict[str, list[Item]]) -> list[str]:
    sentences = []
    for name, items in parts.items():
        texts = [item.text or "" for item in items]
        for kind, form in (("lists", _LIST), ("objects", _OBJECT)):
            if texts and all(form.fullmatch(text) for text in texts):
                sentences.append(
                    f"its {name} look like {kind} ({texts[0]!r:.60}), and each is taken for one text: write JSON Lines "
                    f"or Parquet with fields that are {kind}, not texts, or a column for each"
                )
    return sentences


def _places(parts: dict[str, list[Item]], unused: Collection[str]) -> list[str]:
    sentences = []
    for name, items in parts.items():
        text = next(
            (
                item.text
                for item in items
                if item.text and _PLACE in item.text and not item.images
            ),
            None,
        )
        if text is not None:
            column = "; the column images is not read" if "images" in unused else ""
            sentences.append(
                f"its {name} have {_PLACE} in them and no image ({text!r:.60}){column}: write text and images into one "
                'object, {"text": ..., "images": [...]}'
            )
    return sentences


def _paths(queries: list[Item], documents: list[Item]) -> list[str]:
    are_paths = [
        bool(items) and all(IMAGE_PATH.fullmatch(item.text or "") for item in items)
        for items in (queries, documents)
    ]
    if not any(are_paths):
        return []
    mode = "2".join("i" if is_path else "t" for is_path in are_paths)
    which = " and ".join(
        name
        for name, is_path in zip(("queries", "documents"), are_paths, strict=True)
        if is_path
    )
    example = (documents if are_paths[1] else queries)[0].text
    return [
        f"its {which} look like paths of images ({example!r:.80}), and are taken for texts: if they are paths, set "
        f"retrieval_mode: {mode}"
    ]
