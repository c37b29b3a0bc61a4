"""Columns: assignment of column names to the parts of a record, by a fixed table or the user's column_mapping.

And misreadings: sentences on data that are read, but probably not as they are meant.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vembed.data.examples import BadRecord, Example, Item
from vembed.data.images.files import IMAGE_PATH
from vembed.errors import UserError, listed, printable

COLUMNS: dict[str, tuple[str, ...]] = {
    role: tuple(names.split())
    for role, names in {
        "query": "query anchor question sentence1",
        "query_image": "query_image query_images",
        "query_prompt": "query_prompt",
        "positive": (
            "positive positives pos positive_passages document passage answer response sentence2"
        ),
        "positive_image": "positive_image positive_images document_image image",
        "negative": (
            "negative negatives neg hard_negatives negative_passages rejected_response"
        ),
        "negative_image": "negative_image negative_images",
        "score": "score scores similarity_score positive_scores pos_scores",
        "negative_score": "negative_score negative_scores neg_scores",
        "text": "text",
        "label": "label",
    }.items()
}
"""Accepted column names of each part of a record. If a record has several columns for one part, the first is read; all
are read for negatives, and `negative_1`, `negative_2` ... are negatives too. `label` is a score beside sentence1 and
sentence2, a class beside a text or image without a pair, and not read elsewhere."""

GUESSES: dict[str, tuple[str, ...]] = {
    role: tuple(names.split())
    for role, names in {
        "query": (
            "instruction search title subject caption prompt source query_text text1 premise input question_text q "
            "question1 sentence_a text_a sent1"
        ),
        "positive": (
            "context text content body description resolution solution target text2 hypothesis output completion doc a "
            "question2 sentence_b text_b sent2"
        ),
        "positive_image": "image_path image_file file_name filename img picture photo",
    }.items()
}
"""Likely column names that are not read automatically; used for advice and by `vembed init`."""

INSIDE = " (inside of an item)"
"""Behind the name of a field that an object for a query or document has, in lists of what is not read."""

TEXT = "text"
"""Column of records that are one text, for runs without pairs and for labelled data."""
LABEL = "label"
"""Column of the class of a text or image."""
_NUMBERED_NEGATIVE = re.compile(r"(neg|negative)_(\d+)")
_LAYOUTS_KEPT = 1024
_ROLE_OF = {name: role for role, names in COLUMNS.items() for name in names}


QUERY = "messages"
POSITIVE_MESSAGES = "positive_messages"
_SIDES = (
    (QUERY, "images", "query"),
    (POSITIVE_MESSAGES, "positive_images", "positive"),
    ("negative_messages", "negative_images", "negatives"),
)
_IMAGE = "<image>"


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Columns of a record by part."""

    query: str | None
    query_image: str | None
    query_prompt: str | None
    positive: str | None
    positive_image: str | None
    negative_image: str | None
    score: str | None
    negative_score: str | None
    negatives: tuple[str, ...]
    label: str | None
    """Class of the query; there is no positive then."""
    are_sentences: bool
    problem: str | None
    read: tuple[str, ...]
    """All columns that are read, once each."""


class Columns:
    """Assignment of a source's columns to the parts of a record, with a list of unused columns."""

    def __init__(
        self,
        mapping: Mapping[str, str] | None = None,
        *,
        may_miss: bool = False,
        texts_alone: bool = False,
        reads_all: bool = False,
    ) -> None:
        """`mapping`: column_mapping, names in the file -> names in COLUMNS. `may_miss`: the mapping serves several
        sources, and a table need not have all of its names. `texts_alone`: a record may be a single `text`, which is
        query and positive then. `reads_all`: columns of a table that are no part of an example are kept."""
        self._mapping = _roles(mapping or {})
        self._reads_all = reads_all
        self._texts_alone = texts_alone
        self._layouts: dict[tuple[str, ...], RecordLayout] = {}
        self._unused: dict[str, None] = {}
        self.may_miss = may_miss
        self._not_seen = set(self._mapping)

    @property
    def unused(self) -> list[str]:
        """Columns of records that are not read."""
        return sorted(self._unused)

    @property
    def mapped_but_missing(self) -> list[str]:
        """Names in column_mapping that no record has."""
        return sorted(self._not_seen)

    @property
    def layouts(self) -> list[tuple[str, ...]]:
        """The columns of the records that were seen, once each."""
        return list(self._layouts)

    def note(self, layouts: Iterable[tuple[str, ...]], unused: Iterable[str]) -> None:
        """Take in what another process has seen of the same source."""
        for columns in layouts:
            self.layout(columns)
        self._unused.update(dict.fromkeys(unused))

    def check(self, columns: Iterable[str]) -> None:
        """Raise UserError if a table's header lacks a required column, or has two of one name."""
        counts = Counter(columns)
        repeated = [name for name, count in counts.items() if name and count > 1]
        if repeated:
            raise UserError(f"more than one column named {listed(repeated)}")
        names = tuple(dict.fromkeys(fields_of(counts).values()))
        layout = self.layout(names)
        if self._not_seen and not self.may_miss:
            raise UserError(
                f"column_mapping names {listed(self.mapped_but_missing)}, but the file has {listed(names)}"
                f"{self.nearest()}"
            )
        if layout.problem:
            raise UserError(layout.problem)

    def nearest(self) -> str:
        """Return a hint at the column that the first missing name of column_mapping may mean, or nothing."""
        # Each name once, in the order of the records.
        names: dict[str, None] = {}
        for layout in self._layouts:
            names |= dict.fromkeys(layout)
        missing = min(self._not_seen, default="")
        near = difflib.get_close_matches(missing, names, n=1, cutoff=0.4)
        if not near:
            return ""
        return f"; for {printable(missing)} did you mean {near[0]!r}?"

    def needed(self, columns: Iterable[str]) -> list[str]:
        """Return the columns of a table that are read, in the table's order."""
        if self._reads_all:
            return list(columns)
        fields = fields_of(columns)
        read = self.layout(tuple(dict.fromkeys(fields.values()))).read
        return [name for name, field in fields.items() if field in read]

    def layout(self, columns: tuple[str, ...]) -> RecordLayout:
        """Return the layout of a record with these columns (cached)."""
        return self._layouts.get(columns) or self._find(columns)

    def note_unused(self, name: str) -> None:
        """Record a name that is not read."""
        if len(self._unused) < _LAYOUTS_KEPT:
            self._unused[printable(name)] = None

    def _find(self, columns: tuple[str, ...]) -> RecordLayout:
        names_of: dict[str, list[str]] = {role: [] for role in COLUMNS}
        free = []
        for name in columns:
            if name in self._mapping:
                names_of[self._mapping[name]].append(name)
            else:
                free.append(name)
        has_sentences = "sentence1" in columns and "sentence2" in columns
        are_sentences = has_sentences and not names_of["query"]
        is_label_mapped = bool(names_of[LABEL])
        for role, names in COLUMNS.items():
            # A mapped column takes precedence over the table; of negatives all are read.
            if not names_of[role] or role == "negative":
                names_of[role] += [name for name in names if name in free]
        numbered = [name for name in free if _NUMBERED_NEGATIVE.fullmatch(name)]
        names_of["negative"] += sorted(
            numbered, key=lambda name: int(name.rpartition("_")[2])
        )
        text = names_of.pop(TEXT)
        labels = names_of.pop(LABEL)
        queries = names_of["query"] + names_of["query_image"]
        images = names_of["positive_image"]
        label = None
        if names_of["positive"] or (queries and images):
            # Many data sets have a column `label`; it is a score only beside sentence1 and sentence2.
            if are_sentences or is_label_mapped:
                names_of["score"] += labels
        elif labels and (text or queries or images) and not self._texts_alone:
            # A record that has a class and is no pair.
            label = labels[0]
            names_of = {role: [] for role in names_of} | {
                "query": text or names_of["query"],
                "query_image": names_of["query_image"] or images,
                "query_prompt": names_of["query_prompt"],
            }
        if self._texts_alone:
            if not queries:
                names_of["query"] = text
            if not names_of["positive"] and not images:
                names_of["positive"] = names_of["query"]
                names_of["positive_image"] = names_of["query_image"]
        negatives = tuple(names_of["negative"])
        single: dict[str, Any] = {}
        for role, role_names in names_of.items():
            if role != "negative":
                single[role] = role_names[0] if role_names else None
        named = dict.fromkeys([*single.values(), label, *negatives])
        read = tuple(name for name in named if name is not None)
        problem = None if label is not None else _problem(names_of, columns)
        layout = RecordLayout(
            **single,
            negatives=negatives,
            label=label,
            are_sentences=are_sentences and names_of["query"] == ["sentence1"],
            problem=problem,
            read=read,
        )
        self._not_seen.difference_update(columns)
        # Of a record that cannot be read, nothing is called unused.
        if not problem:
            for name in columns:
                if name not in read:
                    self.note_unused(name)
        # Bounded: in JSON every record may have other fields.
        if len(self._layouts) < _LAYOUTS_KEPT:
            self._layouts[columns] = layout
        return layout


def is_negative_name(name: str) -> bool:
    """Return True for the name of a field that holds negatives."""
    names = (*COLUMNS["negative"], *COLUMNS["negative_image"])
    return name in names or _NUMBERED_NEGATIVE.fullmatch(name) is not None


def _roles(mapping: Mapping[str, str]) -> dict[str, str]:
    """Return the column mapping with each target name replaced by its part of a record."""
    roles: dict[str, str] = {}
    for name, target in mapping.items():
        role = _ROLE_OF.get(target)
        entry = f"column_mapping: {{{name}: {target}}}"
        if role is None:
            near = difflib.get_close_matches(target, _ROLE_OF, n=1, cutoff=0.7)
            if name in _ROLE_OF and not near:
                raise UserError(
                    f"{entry} is the wrong way round: the name in the file comes first, {{{quoted_column(target)}: {name}}}"
                )
            hint = (
                f"did you mean {near[0]!r}?" if near else f"it reads {listed(COLUMNS)}"
            )
            raise UserError(
                f"{entry} leads to a name that vembed does not read; {hint}"
            )
        for other, known in roles.items():
            if known == role != "negative":
                raise UserError(
                    f"column_mapping: {other} and {name} both become {role}, which can be one column alone"
                )
        roles[name] = role
    return roles


def _problem(names_of: dict[str, list[str]], columns: tuple[str, ...]) -> str | None:
    """Return what a record without a query or a positive lacks, and how to say which column it is."""
    missing = []
    for role in ("query", "positive"):
        if not names_of[role] and not names_of[f"{role}_image"]:
            missing.append(role)
    if not missing:
        return None
    if QUERY in columns and "query" in missing:
        return (
            f"{QUERY} without {POSITIVE_MESSAGES} (it has {listed(columns)}): a record of messages needs both, "
            "or write query and positive"
        )
    used: set[str] = set()
    for names in names_of.values():
        used.update(names)
    free = [name for name in columns if name not in used]
    images = names_of["positive_image"]
    if missing == ["query"] and names_of["positive"] and images:
        # Two columns of documents, of which one must be the query.
        example = {images[0]: "query_image"}
    elif missing == ["query"] and TEXT in free:
        example = {TEXT: "query"}
    else:
        example = guess_mapping(free, missing)
    for role in missing:
        is_guessed = any(target.startswith(role) for target in example.values())
        if not is_guessed:
            # No column is named: any would be a guess by its position alone.
            example[f"your_{role}"] = role
    entries = ", ".join(
        f"{quoted_column(name)}: {role}" for name, role in example.items()
    )
    hint = ""
    may_be_texts = "query" in missing and not images
    if may_be_texts and len(columns) == 1:
        hint = ", or make pairs of texts alone with `vembed generate`"
    elif may_be_texts and {TEXT, LABEL} & {*columns}:
        hint = ", or, if these are texts and their classes, call the columns text and label"
    return (
        f"no {' and no '.join(missing)} (it has {listed(columns) or 'no fields'}): say which column it is with "
        f"column_mapping: {{{entries}}}{hint}"
    )


def guess_mapping(columns: Iterable[str], missing: Iterable[str]) -> dict[str, str]:
    """Return a column mapping for the missing parts (query, positive), guessed from the column names."""
    free = list(columns)
    mapping = dict[str, str]()
    for role in missing:
        for target in (role, f"{role}_image"):
            # The names of the table too: `Question`, ` Answer ` and `sentence1` without its partner are near misses.
            likely = {*GUESSES.get(target, ()), *COLUMNS[target]}
            names = [name for name in free if normalised_name(name) in likely]
            if names and target in GUESSES:
                mapping[names[0]] = target
                free.remove(names[0])
                break
    return mapping


def quoted_column(name: str) -> str:
    """Return a column's name for YAML: in quotes if spaces around it would get lost."""
    return repr(name) if name != name.strip() else printable(name)


def normalised_name(name: str) -> str:
    """Return a column's name as the tables of names write it."""
    return "_".join(name.strip(" \"'").lower().replace("-", " ").split())


# ---- conversations ---------------------------------------------------------------


def is_conversation(record: dict[str, Any]) -> bool:
    """Return True if a record has its query and its positives as messages."""
    return isinstance(record.get(QUERY), list) and POSITIVE_MESSAGES in record


def fields_of(columns: Iterable[str]) -> dict[str, str]:
    """Return the field as which each column of a table is read: its own name, except in a table of conversations."""
    names = list(columns)
    known: dict[str, str] = {}
    if QUERY in names and POSITIVE_MESSAGES in names:
        for messages, images, field in _SIDES:
            known[messages] = field
            known[images] = field
        known["label"] = "score"
    return {name: known.get(name, name) for name in names}


def as_fields(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with `query`, `positive`, `negatives` and `score`. Other fields are kept."""
    fields = dict(record)
    for side in _SIDES:
        for name in side[:2]:
            fields.pop(name, None)
    if fields.pop("label", None) is not None:
        fields["score"] = record["label"]
    fields["query"] = _item(record[QUERY], record.get("images"), QUERY)
    for name, images_name, field in _SIDES[1:]:
        conversations = record.get(name)
        if conversations is None:
            continue
        images = record.get(images_name) or []
        if not isinstance(conversations, list) or not isinstance(images, list):
            raise BadRecord(f"{name} and {images_name} have to be lists")
        if conversations and isinstance(conversations[0], dict):
            # One conversation instead of a list of them.
            conversations = [conversations]
            images = images and [images]
        images = images or [None] * len(conversations)
        if len(images) != len(conversations):
            raise BadRecord(
                f"{name} has {len(conversations):,d} conversations, and {images_name} {len(images):,d} lists"
            )
        # Of negatives all are read.
        items = fields.get(field) if field == "negatives" else None
        if not isinstance(items, list):
            items = [] if items is None else [items]
        fields[field] = list(items)
        for conversation, its_images in zip(conversations, images, strict=True):
            fields[field].append(_item(conversation, its_images, name))
    return fields


def _item(
    messages: Any,
    images: Any,
    name: str,
) -> dict[str, Any]:
    """Return the user's messages as one item. Image markers are removed, since an item lists its images."""
    texts = []
    for message in messages if isinstance(messages, list) else [messages]:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise BadRecord(f"{name} has a message without a text in `content`")
        if message.get("role", "user") != "user":
            raise BadRecord(
                f"{name} has a message of role {message['role']!r:.40}, and only what the user says is embedded; "
                "instructions belong into query_prompt and document_prompt"
            )
        texts.append(message["content"])
    if images is None:
        images = []
    if not isinstance(images, list):
        images = [images]
    text = "\n".join(texts)
    num_marks = text.count(_IMAGE)
    if num_marks not in (0, len(images)):
        raise BadRecord(
            f"{name} has {num_marks:,d} {_IMAGE} and {len(images):,d} images"
        )
    if not images:
        return {"text": text}
    text = text.replace(_IMAGE, "").strip()
    return {"text": text, "images": images} if text else {"images": images}


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
PROMPT_COLUMNS = frozenset(["prompt", "instruction", "query_instruction", "instruct"])
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
    entries = ", ".join(f"{quoted_column(name)}: negative" for name in names)
    return (
        f"not read: {listed(names)}. For negatives, set column_mapping: {{{entries}}}"
    )


def unread_prompt(unused: Iterable[str]) -> str | None:
    """Return what is wrong where a column that is not read probably holds prompts; None without one."""
    for name in unused:
        if normalised_name(name) in PROMPT_COLUMNS:
            return (
                f"{name} is not read: if it goes before the query, set column_mapping: "
                f"{{{quoted_column(name)}: query_prompt}}"
            )
    return None


def _named(
    names: Iterable[str],
    words: frozenset[str],
    others: frozenset[str],
) -> list[str]:
    """Return the names of columns with one of the words and none of the others. A number at the end does not count."""
    named = []
    for name in names:
        words_of_name = set(normalised_name(name).rstrip("0123456789").split("_"))
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
