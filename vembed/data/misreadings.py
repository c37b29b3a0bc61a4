"""Misreadings: sentences on data that are read, but probably not as they are meant."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from vembed.data.columns import INSIDE, plain_name, quoted
from vembed.data.examples import Example, Item
from vembed.data.images.files import IMAGE_PATH
from vembed.data.messages import listed

JUDGEMENTS = frozenset(
    [
        "label",
        "labels",
        "gold",
        "duplicate",
        "match",
        "relevance",
        "relevant",
        "relatedness",
        "rating",
        "similarity",
        "sim",
        "entailment",
        "paraphrase",
        "judgment",
        "judgement",
        "judgments",
        "judgements",
    ]
)
"""Words in likely names of columns that say which pairs match. None of them is read beside a query and a positive."""
_NO_JUDGEMENTS = frozenset(["id", "ids", "text", "name", "names", "url", "date"])
"""Words in names of columns that only tell something about a judgement."""
_NEGATIVES = frozenset(["neg", "negs", "negative", "negatives", "rejected"])
"""Words in likely names of columns with negatives."""
_NO_NEGATIVES = frozenset(
    [
        "id",
        "ids",
        "name",
        "names",
        "url",
        "date",
        "is",
        "num",
        "count",
        "score",
        "scores",
    ]
)
PROMPTS = frozenset(["prompt", "instruction", "query_instruction", "instruct"])
"""Likely names of columns with a prompt of the query, beside a query."""
NUM_CLASSES = range(3, 11)
"""Numbers of different whole numbers that look like classes, not like scores."""
_LIST = re.compile(r"""\[\s*['"{].*['"}]\s*\]""", re.DOTALL)
_OBJECT = re.compile(
    r"""\{\s*['"](text|title|image|images|bytes|path)['"]\s*:.*\}""", re.DOTALL
)
_PLACE = "<image>"
"""Place of an image in the texts of other programs."""


def judgement_column(unused: Iterable[str]) -> str | None:
    """Return the first column that probably says which pairs match; None without one."""
    return next(iter(_named(unused, JUDGEMENTS, _NO_JUDGEMENTS)), None)


def unread_judgement(unused: Iterable[str]) -> str | None:
    """Return what is wrong with pairs whose columns that are not read include a likely judgement; None without one."""
    name = judgement_column(unused)
    if name is None:
        return None
    return (
        f"{name} is not read, and every pair is taken for a match: if {name} says how well a pair matches, set "
        f"column_mapping: {{{name}: score}} and loss: cosent, or leave out the pairs that do not match"
    )


def classes_as_scores(values: Collection[float]) -> str | None:
    """Return a doubt about the values, once each, of a column `label` that is read as a score; None without one."""
    are_whole = all(value >= 0 and float(value).is_integer() for value in values)
    if len(values) not in NUM_CLASSES or not are_whole:
        return None
    return (
        f"label ({', '.join(f'{value:.0f}' for value in sorted(values))}) is taken for a score, the higher the more "
        "similar; if its numbers are classes, such as those of entailment, keep the pairs that match alone and leave "
        "the column out"
    )


def unread_negatives(unused: Iterable[str]) -> str | None:
    """Return what is wrong where columns that are not read probably hold negatives; None without one."""
    names = _named(unused, _NEGATIVES, _NO_NEGATIVES)
    if not names:
        return None
    entries = ", ".join(f"{quoted(name)}: negative" for name in names)
    return (
        f"not read: {listed(names)}. For negatives, set column_mapping: {{{entries}}}"
    )


def unread_prompt(unused: Iterable[str]) -> str | None:
    """Return what is wrong where a column that is not read probably holds prompts; None without one."""
    for name in unused:
        if plain_name(name) in PROMPTS:
            return (
                f"{name} is not read: if it goes before the query, set column_mapping: "
                f"{{{quoted(name)}: query_prompt}}"
            )
    return None


def _named(
    names: Iterable[str], words: frozenset[str], others: frozenset[str]
) -> list[str]:
    """Return the names of columns with one of the words and none of the others. A number at the end does not count."""
    named = []
    for name in names:
        words_of_name = set(plain_name(name).rstrip("0123456789").split("_"))
        is_named = words_of_name & words and not words_of_name & others
        if is_named and not name.endswith(INSIDE):
            named.append(name)
    return named


def taken_for_texts(examples: Sequence[Example], unused: Collection[str]) -> list[str]:
    """Return sentences on plain texts of these examples that look like paths of images, lists, objects, or have places
    of images. `unused`: columns that are not read."""
    items_of: dict[str, list[Item]] = {"queries": [], "positives": [], "negatives": []}
    for example in examples:
        items_of["queries"].append(example.query)
        items_of["positives"] += example.positives
        items_of["negatives"] += example.negatives
    sentences = []
    with_paths = []
    for name, items in items_of.items():
        texts = [item.text or "" for item in items]
        if texts and all(map(IMAGE_PATH.fullmatch, texts)):
            with_paths.append(name)
        for kind, form in (("lists", _LIST), ("objects", _OBJECT)):
            if texts and all(map(form.fullmatch, texts)):
                sentences.append(
                    f"its {name} look like {kind} ({texts[0]!r:.60}), and each is taken for one text: write JSON Lines "
                    f"or Parquet with fields that are {kind}, not texts, or a column for each"
                )
        for item in items:
            if item.text and _PLACE in item.text and not item.images:
                column = ""
                if "images" in unused:
                    column = "; the column images is not read"
                sentences.append(
                    f"its {name} have {_PLACE} in them and no image ({item.text!r:.60}){column}: write text and images "
                    'into one object, {"text": ..., "images": [...]}'
                )
                break
    sides = [name for name in ("queries", "positives") if name in with_paths]
    if sides:
        query = "i" if "queries" in sides else "t"
        document = "i" if "positives" in sides else "t"
        sentences.append(
            f"its {' and '.join(sides)} look like paths of images ({items_of[sides[-1]][0].text!r:.80}), and are taken "
            f"for texts: if they are paths, set retrieval_mode: {query}2{document}"
        )
    return sentences
