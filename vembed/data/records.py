"""Records: which column is which part of a record, and the conversion of a record to an Example or a document.

`RecordFormat` converts, or raises BadRecord with the reason. `Columns` finds the parts, by a fixed table or the user's
column_mapping. Opens no file or image.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from vembed.config.values import RetrievalMode
from vembed.data.examples import (
    IMAGE_KEYS,
    LONE_SURROGATE,
    BadRecord,
    Example,
    ImageRef,
    ImageRoot,
    Item,
    has_lone_surrogate,
)
from vembed.errors import UserError, listed, nearest, printable
from vembed.losses.table import LOSSES

Record = dict[str, Any]
"""A record of the data: its values by field."""
LARGEST_SCORE = 3.4e38
"""Larger scores are infinite in float32, and all the same."""
NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")
_ITEM_KEYS = IMAGE_KEYS | {"text", "title", "bytes"}
_QUERY_PATHS = ("i2t", "i2i")
_DOCUMENT_PATHS = ("t2i", "i2i", "m2i")
"""Modes in which bare strings of queries and of documents are paths of images."""


@dataclass(frozen=True)
class RecordFormat:
    """Converter from the records of one source to examples."""

    columns: Columns
    images: ImageRoot
    mode: RetrievalMode = "auto"
    losses: Sequence[str] = ()
    """Records that one of these cannot use are refused."""
    max_negatives: int | None = None
    numbers_in_text: bool = False
    """Numbers may be text, and a cell without text is empty (CSV)."""
    score_ranges: Sequence[tuple[str, float, float]] = ()
    """A loss, and the smallest and the largest score that it can follow. Others are refused."""
    gets_negatives: bool = False
    """Records without a negative get some before they are used (mining)."""
    keeps_keys: bool = False
    """The first pass keeps the content keys of all examples, for the detection of duplicates."""

    def example_of_plain_block(self, records: Sequence[Any]) -> Example | None:
        """Return the first record's example, which stands for all: the fast path for pairs of good texts in the same
        columns, of which `example` accepts either all or none. None: check them one by one."""
        if self.mode not in ("auto", "t2t", "m2t") or self.keeps_keys:
            return None
        if set(map(type, records)) != {dict}:
            return None
        layouts = set(map(tuple, records))  # the names of each record, in their order
        if len(layouts) > 1:
            return None
        layout = self.columns.layout(tuple(records[0]))
        texts = {layout.query, layout.positive, *layout.negatives}
        # Scores, images, prompts and conversations are looked at one by one.
        if (
            None in texts
            or texts != set(layout.read)
            or POSITIVE_MESSAGES in records[0]
        ):
            return None
        values = [record[name] for name in texts for record in records]
        if set(map(type, values)) != {str} or not all(values):
            return None
        if any(map(str.isspace, values)):
            return None
        joined = "".join(values)
        if "\0" in joined or has_lone_surrogate(joined):
            return None
        try:
            return self.example(records[0], "")
        except BadRecord:
            return None

    def example(self, record: Any, where: str) -> Example:
        """Return the example of a record. Raise BadRecord with the reason if it is invalid."""
        if type(record) is not dict:
            raise BadRecord(
                f"{described(record)}, and a record is an object with named fields"
            )
        # Before the columns are looked at: a conversation brings its own.
        record = as_fields(record)
        layout = self.columns.layout(tuple(record))
        if layout.problem:
            raise BadRecord(layout.problem)
        query_name = layout.query
        value = record[query_name] if query_name is not None else None
        if isinstance(value, list):
            raise BadRecord(f"{query_name} is a list, and one item is expected")
        images: tuple[ImageRef, ...] = ()
        if layout.query_image:
            images = self._image_list(record[layout.query_image], layout.query_image)
        is_path = self.mode in _QUERY_PATHS
        name = str(query_name or layout.query_image)
        query = self._item(value, images, is_path, name)
        if layout.query_prompt is not None:
            # The record's own prompt. An empty cell of a table is none; `""` in JSON is a prompt.
            prompt = record[layout.query_prompt]
            if prompt is not None and not isinstance(prompt, str):
                raise BadRecord(
                    f"{layout.query_prompt} is {described(prompt)}, not a text"
                )
            if not (prompt == "" and self.numbers_in_text):
                query = replace(query, prompt=prompt)
        if layout.label is not None:
            # As a positive it has no prompt of the query. The record's own is chosen where the other examples are known.
            label = record[layout.label]
            is_name = isinstance(label, str | int) and not isinstance(label, bool)
            if not is_name or not str(label).strip():
                raise BadRecord(
                    f"{layout.label} is {described(label)}, not the name or number of a class"
                )
            self._check_losses(layout, (), None)
            document = replace(query, prompt=None)
            return Example(query, (document,), where=where, label=str(label))
        positives = self._documents(record, layout.positive, layout.positive_image)
        if not positives:
            name = layout.positive or layout.positive_image or ""
            raise BadRecord(f"{name} is empty")
        first, *others = layout.negatives or (None,)
        negatives = self._documents(record, first, layout.negative_image)
        for other in others:
            negatives += self._documents(record, other, None)
        scores, negative_scores = self._all_scores(
            record, layout, len(positives), len(negatives)
        )
        # After the scores: a list of scores counts all negatives of the record.
        negatives = negatives[: self.max_negatives]
        if negative_scores is not None:
            negative_scores = negative_scores[: self.max_negatives]
        self._check_losses(layout, negatives, scores)
        return Example(query, positives, negatives, scores, where, negative_scores)

    def renamed(self, record: Record, root: ImageRoot) -> Record:
        """Return a record with its images named as those of another root. Where that changes names, a conversation becomes
        the fields that it is read as."""
        if root.folder == self.images.folder:
            return record
        fields = dict(as_fields(record))
        layout = self.columns.layout(tuple(fields))
        paths = {layout.query_image, layout.positive_image, layout.negative_image}
        if self.mode in _QUERY_PATHS:
            paths.add(layout.query)
        if self.mode in _DOCUMENT_PATHS:
            paths |= {layout.positive, *layout.negatives}
        for name in layout.read:
            is_path = name in paths
            fields[name] = self.images.renamed(fields[name], root, is_path=is_path)
        return fields

    def _documents(
        self,
        record: Record,
        name: str | None,
        image_name: str | None,
    ) -> tuple[Item, ...]:
        """Return the items of a column, each with its images if a second column has images."""
        value = record[name] if name is not None else None
        values = _as_list(value)
        images: list[tuple[ImageRef, ...]] = [()] * len(values)
        if image_name is not None and record[image_name] is not None:
            images = [
                self._image_list(image_value, image_name)
                for image_value in _as_list(record[image_name])
            ]
            if value is None:
                values = [None] * len(images)
            if len(values) != len(images):
                raise BadRecord(
                    f"{name} and {image_name} belong together, but they are {len(values):,d} and {len(images):,d}"
                )
        is_path = self.mode in _DOCUMENT_PATHS
        items = []
        for number, item_value in enumerate(values):
            item_name = str(name) if len(values) == 1 else f"{name} {number + 1}"
            items.append(self._item(item_value, images[number], is_path, item_name))
        return tuple(items)

    def _item(
        self,
        value: Any,
        images: tuple[ImageRef, ...],
        is_path: bool,
        name: str,
    ) -> Item:
        """Return one item of any form. `images` come from a separate column."""
        if isinstance(value, str) and not is_path:
            return Item(_text(value, name), images)
        if isinstance(value, str):
            return Item(images=(image_ref(value, name, self.images), *images))
        if isinstance(value, bytes):
            return Item(images=(ImageRef(data=value), *images))
        if isinstance(value, dict):
            return self._object(value, images, name)
        if value is None and images:
            return Item(images=images)
        if value is None:
            raise BadRecord(f"{name} is empty")
        if isinstance(value, list):
            raise BadRecord(f"{name} is a list inside of a list")
        way_out = "; write it as text, in quotes" if type(value) in (int, float) else ""
        raise BadRecord(
            f"{name} is {described(value)}, not a text, an image or both{way_out}"
        )

    def _object(
        self,
        value: dict[str, Any],
        images: tuple[ImageRef, ...],
        name: str,
    ) -> Item:
        for key in value.keys() - _ITEM_KEYS:
            self.columns.note_unused(key + INSIDE)
        if value.get("bytes") is not None or value.get("path") is not None:
            images = (*images, image_ref(value, name, self.images))
        for key in ("image", "images"):
            images = (*images, *self._image_list(value.get(key), name))
        text = value.get("text")
        title = value.get("title")
        if type(text) is str and type(title) is str:
            text = f"{title} {text}".strip()  # as in a BEIR-style corpus
        is_blank = isinstance(text, str) and not text.strip()
        if images and (text is None or is_blank):
            return Item(images=images)
        if text is None:
            raise BadRecord(
                f"{name} is an object without text or image (it has {listed(value) or 'no fields'})"
            )
        if not isinstance(text, str):
            raise BadRecord(f"{name} is {described(text)}, not a text")
        return Item(_text(text, name), images)

    def _image_list(self, value: Any, name: str) -> tuple[ImageRef, ...]:
        if value == []:
            raise BadRecord(f"{name} has an empty list of images")
        return tuple(image_ref(image, name, self.images) for image in _as_list(value))

    def _all_scores(
        self,
        record: Record,
        layout: RecordLayout,
        num_positives: int,
        num_negatives: int,
    ) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
        """Scores of the positives and of the negatives. One column may have both, the positives' first."""
        name = layout.score
        value = None if name is None else record[name]
        negative_name = layout.negative_score
        negative_value = None if negative_name is None else record[negative_name]
        if (
            isinstance(value, list)
            and num_negatives
            and len(value) == num_positives + num_negatives
        ):
            if negative_value is None:
                negative_name = name
                negative_value = value[num_positives:]
            value = value[:num_positives]
        return (
            self._scores(value, str(name), num_positives, "positives"),
            self._scores(
                negative_value, str(negative_name), num_negatives, "negatives"
            ),
        )

    def _scores(
        self,
        value: Any,
        name: str,
        count: int,
        items: str,
    ) -> tuple[float, ...] | None:
        if value is None:
            return None
        values = _as_list(value)
        if len(values) != count:
            raise BadRecord(
                f"{name} has {len(values):,d} numbers for {count:,d} {items}"
            )
        return tuple(self._score(score, name) for score in values)

    def _score(self, value: Any, name: str) -> float:
        if self.numbers_in_text and isinstance(value, str) and NUMBER.fullmatch(value):
            value = float(value)
        if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
            raise BadRecord(f"{name} is {printable(repr(value))}, not a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        # False for NaN too.
        if not abs(number) <= LARGEST_SCORE:
            raise BadRecord(
                f"{name} is {number:g}, and losses compute with finite numbers up to {LARGEST_SCORE:.1e}: scale it"
            )
        for loss, smallest, largest in self.score_ranges:
            if not smallest <= number <= largest:
                raise BadRecord(
                    f"{name} is {number:g}, and loss: {loss} takes scores from {smallest:g} to {largest:g}: scale "
                    "them (ratings from 0 to 5 by 1/5), or use a loss that reads their order: cosent, ranknet"
                )
        return number

    def _check_losses(
        self,
        layout: RecordLayout,
        negatives: tuple[Item, ...],
        scores: tuple[float, ...] | None,
    ) -> None:
        for loss in self.losses:
            declared = LOSSES[loss]
            reads_matches = declared.records == "matches"
            if declared.records == "scores" and scores is None:
                names = sorted(self.columns.unused)
                hint = f" (not read: {listed(names)})" if names else ""
                near = nearest("score", names)
                if near is not None:
                    hint += f": set column_mapping: {{{quoted_column(near)}: score}}"
                raise BadRecord(
                    f"no score, which loss: {loss} needs for every pair{hint}"
                )
            if reads_matches and layout.are_sentences and scores is not None:
                raise BadRecord(
                    f"a scored sentence pair, and loss: {loss} would take each pair for a match whatever its score: "
                    "use loss: cosent or cosine"
                )
            if (
                declared.negatives == "each"
                and not negatives
                and not self.gets_negatives
            ):
                raise BadRecord(
                    f"no negative, which loss: {loss} needs in every record: add negatives, take the source out, or use "
                    "loss: infonce, which takes the others of the batch"
                )


def image_ref(
    value: Any,
    name: str,
    images: ImageRoot,
) -> ImageRef:
    """Return the reference of an image: a path, bytes, or an object with one of them, as `datasets` stores images."""
    if isinstance(value, dict):
        data = value.get("bytes")
        value = value.get("path") if data is None else data
        if value is None:
            raise BadRecord(f"{name} has an image without bytes and path")
    if isinstance(value, bytes):
        return ImageRef(data=value)
    if not isinstance(value, str):
        raise BadRecord(f"{name} has {described(value)} for an image")
    try:
        return images.reference(_text(value, "an image path"))
    except BadRecord as error:
        raise BadRecord(f"{name}: {error}") from error


def _text(value: str, name: str) -> str:
    """Return the text. Raise BadRecord if it cannot be embedded."""
    if not value or value.isspace():
        raise BadRecord(f"{name} is empty")
    if "\0" in value:
        raise BadRecord(f"{name} has a NUL character in it")
    if has_lone_surrogate(value):
        raise BadRecord(f"{name} {LONE_SURROGATE}")
    return value


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def described(value: Any) -> str:
    """Return the type of a value in JSON's terms, for messages."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float):
        return f"a number ({printable(str(value))})"
    names = {"str": "a text", "list": "a list", "dict": "an object", "bytes": "bytes"}
    kind = type(value).__name__
    return names.get(kind, f"a {kind}")


ID_FIELDS = ("_id", "id", "doc_id", "document_id", "docid", "pid")
"""Names of the id of a document; the first one that is there."""
TEXT_FIELDS = (
    "text",
    "document",
    "positive",
    "passage",
    "content",
    "contents",
    "body",
    "abstract",
    "sentence",
)
"""Names of the text of a document; the first one that is there. A title goes before `text`, as BEIR encodes them."""
IMAGE_FIELDS = ("image", "images", "image_path")
DOCUMENT_FIELDS = (*ID_FIELDS, *TEXT_FIELDS, *IMAGE_FIELDS, "title")


def document_id(record: Any) -> str | None:
    """Return the id of a document, if it has one."""
    if not isinstance(record, dict):
        return None
    for name in ID_FIELDS:
        value = record.get(name)
        if value is not None:
            is_id = isinstance(value, str | int) and not isinstance(value, bool)
            return str(value) if is_id else None
    return None


def document_text(record: Any, fields: Sequence[str] = TEXT_FIELDS) -> str:
    """Return the text of a document; title and `text` are joined by a space. Empty: it has none."""
    if isinstance(record, str):
        return record.strip()
    if not isinstance(record, dict):
        return ""
    name = "text"
    text = ""
    for field in fields:
        value = record.get(field)
        if isinstance(value, str):
            name = field
            text = value
            break
    title = record.get("title")
    if name == "text" and isinstance(title, str) and title:
        text = f"{title} {text}"
    return text.strip()


def document_item(
    record: Any,
    images: ImageRoot,
    fields: Sequence[str] = TEXT_FIELDS,
) -> Item:
    """Return a document as it is encoded. Raise BadRecord with the reason if it is none."""
    if isinstance(record, BadRecord):
        raise record
    if not isinstance(record, str | dict):
        raise BadRecord("neither an object nor a text")
    if isinstance(record, dict):
        name = next((name for name in fields if record.get(name) is not None), "")
        documents = record.get(name)
        if isinstance(documents, list):
            if len(documents) != 1:
                raise BadRecord(
                    f"{name} has {len(documents):,d} documents, and a record is one here: write each on a line of its own"
                )
            return document_item(documents[0], images)
        if isinstance(documents, dict):
            return document_item(documents, images)
    text = document_text(record, fields)
    if has_lone_surrogate(text):
        raise BadRecord(f"the text {LONE_SURROGATE}")
    if isinstance(record, str):
        if not text:
            raise BadRecord("an empty text")
        return Item(text=text)
    refs: list[ImageRef] = []
    for name in IMAGE_FIELDS:
        value = record.get(name)
        if not refs:
            refs = [image_ref(image, name, images) for image in _as_list(value)]
    if not refs and not text:
        names = f"{', '.join(fields)} and image are read"
        raise BadRecord(
            f"no text and no image ({names}, and it has {listed(record) or 'no fields'}): rename a column"
        )
    return Item(text=text or None, images=tuple(refs))


# ---- columns ------------------------------------------------------------------------

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

INSIDE = " (inside of an item)"
"""Behind the name of a field that an object for a query or document has, in lists of what is not read."""

TEXT = "text"
"""Column of records that are one text, for runs without pairs and for labelled data."""
LABEL = "label"
"""Column of the class of a text or image."""
_NUMBERED_NEGATIVE = re.compile(r"(neg|negative)_(\d+)")
_LAYOUTS_KEPT = 1024
ROLE_OF = {name: role for role, names in COLUMNS.items() for name in names}
"""Part of a record by the name of its column."""


QUERY_MESSAGES = "messages"
POSITIVE_MESSAGES = "positive_messages"
_SIDES = (
    (QUERY_MESSAGES, "images", "query"),
    (POSITIVE_MESSAGES, "positive_images", "positive"),
    ("negative_messages", "negative_images", "negatives"),
)
IMAGE_MARK = "<image>"
"""Place of an image in the texts of other programs."""


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
        self._mapping = _roles(mapping) if mapping else {}
        self._reads_all = reads_all
        self._texts_alone = texts_alone
        self.may_miss = may_miss
        self.layouts: dict[tuple[str, ...], RecordLayout] = {}
        """By the columns of the records that were seen."""
        self.unused: set[str] = set()
        """Columns of records that are not read."""
        self.missing = set(self._mapping)
        """Names in column_mapping that no record has."""

    def of_table(self, columns: Sequence[str]) -> Sequence[str]:
        """Return the columns of a table that are read, in its order. Raise UserError if a required one is missing, or two
        have one name."""
        counts = Counter(columns)
        repeated = [name for name, count in counts.items() if name and count > 1]
        if repeated:
            raise UserError(f"more than one column named {listed(repeated)}")
        fields = fields_of(counts)
        names = tuple(dict.fromkeys(fields.values()))
        layout = self.layout(names)
        if self.missing and not self.may_miss:
            raise UserError(
                f"column_mapping names {listed(sorted(self.missing))}, but the file has {listed(map(repr, names))}"
            )
        if layout.problem:
            raise UserError(layout.problem)
        if self._reads_all:
            return columns
        return [name for name, field in fields.items() if field in layout.read]

    def layout(self, columns: tuple[str, ...]) -> RecordLayout:
        """Return the layout of a record with these columns (cached), and note which columns were seen and not read."""
        known = self.layouts.get(columns)
        if known is not None:
            return known
        layout = self._layout_of(columns)
        self.missing.difference_update(columns)
        # Of a record that cannot be read, nothing is called unused.
        if not layout.problem:
            for name in columns:
                if name not in layout.read:
                    self.note_unused(name)
        # Bounded: in JSON every record may have other fields.
        if len(self.layouts) < _LAYOUTS_KEPT:
            self.layouts[columns] = layout
        return layout

    def _layout_of(self, columns: tuple[str, ...]) -> RecordLayout:
        names_of: dict[str, list[str]] = {role: [] for role in COLUMNS}
        free = []
        for name in columns:
            if name in self._mapping:
                names_of[self._mapping[name]].append(name)
            else:
                free.append(name)
        has_sentences = {"sentence1", "sentence2"} <= {*columns}
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
            names_of["query"] = text or names_of["query"]
            names_of["query_image"] = names_of["query_image"] or images
            for role in names_of:
                if not role.startswith("query"):
                    names_of[role] = []
        if self._texts_alone:
            if not queries:
                names_of["query"] = text
            if not names_of["positive"] and not images:
                names_of["positive"] = names_of["query"]
                names_of["positive_image"] = names_of["query_image"]
        problem = None
        missing = [
            role
            for role in ("query", "positive")
            if not names_of[role] and not names_of[f"{role}_image"]
        ]
        if label is None and missing:
            problem = _problem(missing, columns)
        negatives = tuple(names_of.pop("negative"))
        single = {role: next(iter(names), None) for role, names in names_of.items()}
        named = dict.fromkeys([*single.values(), label, *negatives])
        read = tuple(name for name in named if name is not None)
        return RecordLayout(
            **single,
            negatives=negatives,
            label=label,
            are_sentences=are_sentences and single["query"] == "sentence1",
            problem=problem,
            read=read,
        )

    def merge(self, other: Columns) -> None:
        """Add what another process has seen of the same source."""
        self.layouts |= other.layouts
        self.unused |= other.unused
        self.missing &= other.missing

    def note_unused(self, name: str) -> None:
        """Record a name that is not read."""
        if len(self.unused) < _LAYOUTS_KEPT:
            self.unused.add(printable(name))


def role_of(name: str) -> str | None:
    """Return the part of a record by the name of its column; None for a column that is not read."""
    return "negative" if _NUMBERED_NEGATIVE.fullmatch(name) else ROLE_OF.get(name)


def _roles(mapping: Mapping[str, str]) -> dict[str, str]:
    """Return the column mapping with each target name replaced by its part of a record."""
    roles: dict[str, str] = {}
    for name, target in mapping.items():
        role = ROLE_OF.get(target)
        entry = f"column_mapping: {{{name}: {target}}}"
        if role is None:
            near = nearest(target, ROLE_OF, cutoff=0.7)
            if name in ROLE_OF and not near:
                raise UserError(
                    f"{entry} is the wrong way round: the name in the file comes first, {{{quoted_column(target)}: {name}}}"
                )
            hint = f"did you mean {near!r}?" if near else f"it reads {listed(COLUMNS)}"
            raise UserError(
                f"{entry} leads to a name that vembed does not read; {hint}"
            )
        for other, known in roles.items():
            if known == role and role != "negative":
                raise UserError(
                    f"column_mapping: {other} and {name} both become {role}, which can be one column alone"
                )
        roles[name] = role
    return roles


def _problem(missing: Sequence[str], columns: Sequence[str]) -> str:
    """Return what a record without a query or a positive lacks, and how to say which column it is."""
    entries = ", ".join(f"your_{role}: {role}" for role in missing)
    hint = ""
    if "query" in missing and {TEXT, LABEL} & {*columns}:
        hint = "; `vembed generate` makes pairs of texts alone, and texts with classes have the columns text and label"
    return (
        f"no {' and no '.join(missing)} (it has {listed(columns) or 'no fields'}): say which column it is with "
        f"column_mapping: {{{entries}}}, or let `vembed init` guess it{hint}"
    )


def quoted_column(name: str) -> str:
    """Return a column's name for YAML: in quotes if spaces around it would get lost."""
    return repr(name) if name != name.strip() else printable(name)


# ---- conversations ---------------------------------------------------------------


def fields_of(columns: Iterable[str]) -> dict[str, str]:
    """Return the field as which each column of a table is read: its own name, except in a table of conversations."""
    names = list(columns)
    known = {}
    if QUERY_MESSAGES in names and POSITIVE_MESSAGES in names:
        for messages, images, field in _SIDES:
            known[messages] = field
            known[images] = field
        known["label"] = "score"
    return {name: known.get(name, name) for name in names}


def as_fields(record: Record) -> Record:
    """Return a record whose query and positives are messages with `query`, `positive`, `negatives` and `score` instead, and
    its other fields. Another record stays as it is."""
    is_conversation = isinstance(record.get(QUERY_MESSAGES), list)
    if not is_conversation or POSITIVE_MESSAGES not in record:
        return record
    fields = dict(record)
    for side in _SIDES:
        for name in side[:2]:
            fields.pop(name, None)
    if fields.pop("label", None) is not None:
        fields["score"] = record["label"]
    fields["query"] = _message_item(
        record[QUERY_MESSAGES], record.get("images"), QUERY_MESSAGES
    )
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
        fields[field] = list(_as_list(items))
        for conversation, its_images in zip(conversations, images, strict=True):
            fields[field].append(_message_item(conversation, its_images, name))
    return fields


def _message_item(
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
    images = _as_list(images)
    text = "\n".join(texts)
    num_marks = text.count(IMAGE_MARK)
    if num_marks not in (0, len(images)):
        raise BadRecord(
            f"{name} has {num_marks:,d} {IMAGE_MARK} and {len(images):,d} images"
        )
    if not images:
        return {"text": text}
    text = text.replace(IMAGE_MARK, "").strip()
    return {"text": text, "images": images} if text else {"images": images}


# ---- columns that are probably not read as they are meant ----------------------------

JUDGEMENTS = (
    "label labels gold duplicate match relevance relevant relatedness "
    "rating similarity sim entailment paraphrase judgment judgement judgments judgements "
    "bewertung relevanz"
)
"""Words in likely names of columns that say which pairs match. None of them is read beside a query and a positive."""
_NO_JUDGEMENTS = "id ids text name names url date"
"""Words in names of columns that only tell something about a judgement."""
_NEGATIVES = (
    "neg negs negative negatives rejected wrong incorrect distractor distractors "
    "falsch falsche negativ"
)
"""Words in likely names of columns with negatives."""
_NO_NEGATIVES = "id ids name names url date is num count score scores"
NUM_CLASSES = range(3, 11)
"""Numbers of different whole numbers that look like classes, not like scores."""


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


def negative_columns(names: Iterable[str]) -> list[str]:
    """Return the columns that probably hold negatives."""
    return _named(names, _NEGATIVES, _NO_NEGATIVES)


def _named(
    names: Iterable[str],
    words: str,
    others: str,
) -> list[str]:
    """Return the names of columns with one of the words and none of the others."""
    named = []
    for name in names:
        # As the lists of words write it, without a number at the end.
        plain_name = name.strip(" \"'").rstrip("0123456789").lower()
        words_of_name = set(re.split(r"[-_\s]+", plain_name))
        is_named = not words_of_name.isdisjoint(words.split())
        is_other = not words_of_name.isdisjoint(others.split())
        if is_named and not is_other and not name.endswith(INSIDE):
            named.append(name)
    return named
