"""Conversion of one record to an Example (`RecordFormat`) or to a document, or a BadRecord with the reason.

Opens no file or image.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any, Literal

from vembed.data.columns import (
    INSIDE,
    POSITIVE_MESSAGES,
    Columns,
    RecordLayout,
    as_fields,
    is_conversation,
)
from vembed.data.examples import (
    LONE_SURROGATE,
    BadRecord,
    Example,
    ImageRef,
    Item,
    has_lone_surrogate,
)
from vembed.data.images.files import ImageRoot
from vembed.errors import listed, printable
from vembed.losses.table import LOSSES

Mode = Literal["auto", "t2t", "t2i", "i2t", "i2i", "m2i", "m2t"]

LARGEST_SCORE = 3.4e38
"""Larger scores are infinite in float32, and all the same."""
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")
_ITEM_KEYS = frozenset({"text", "title", "image", "images", "bytes", "path"})


class RecordFormat:
    """Converter from the records of one source to examples."""

    def __init__(
        self,
        columns: Columns,
        images: ImageRoot,
        *,
        mode: Mode = "auto",
        losses: Collection[str] = (),
        max_negatives: int | None = None,
        numbers_in_text: bool = False,
        bounded_scores: bool = False,
        gets_negatives: bool = False,
    ) -> None:
        """`losses`: refuse records that one of these cannot use. `gets_negatives`: records without a negative get some
        before they are used (mining). `numbers_in_text`: accept numbers as text (CSV).
        `bounded_scores`: refuse scores that no cosine can have."""
        self._images = images
        self._query_is_path = mode in ("i2t", "i2i")
        self._document_is_path = mode in ("t2i", "i2i", "m2i")
        self.columns = columns
        self.losses = tuple(losses)
        self.max_negatives = max_negatives
        self._numbers_in_text = numbers_in_text
        self._gets_negatives = gets_negatives
        self._null = "empty" if numbers_in_text else "null"  # a cell without a text
        self._bounded_scores = bounded_scores

    @property
    def takes_matches(self) -> bool:
        """True if pairs without scores are taken for matches: by a loss, or by an evaluation."""
        return not self.losses or any(
            LOSSES[loss].records == "matches" for loss in self.losses
        )

    def plain_example(self, records: Sequence[Any]) -> Example | None:
        """Return the example of the first record, if all are pairs of good texts in the same columns, so that `example`
        accepts either all or none; None if that cannot be said of all together."""
        if self._query_is_path or self._document_is_path:
            return None
        if set(map(type, records)) != {dict} or len(set(map(tuple, records))) > 1:
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
        if is_conversation(record):
            record = as_fields(record)
        layout = self.columns.layout(tuple(record))
        if layout.problem:
            raise BadRecord(layout.problem)
        query = self._query(record, layout)
        if layout.label is not None:
            # Its positive is chosen where the other examples are known.
            label = record[layout.label]
            is_name = isinstance(label, str | int) and not isinstance(label, bool)
            if not is_name or not str(label).strip():
                description = self._null if label is None else described(label)
                raise BadRecord(
                    f"{layout.label} is {description}, not the name or number of a class"
                )
            self._check_losses(layout, (), None)
            example = Example(query, (query,), where=where, label=str(label))
            return example.naming_images()
        positives = self._documents(record, layout.positive, layout.positive_image)
        if not positives:
            name = layout.positive or layout.positive_image or ""
            raise BadRecord(
                f"{name} is {self._null if record[name] is None else 'an empty list'}"
            )
        negatives: tuple[Item, ...] = ()
        if layout.negatives or layout.negative_image:
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
        return Example(
            query, positives, negatives, scores, where, negative_scores
        ).naming_images()

    def _query(self, record: dict[str, Any], layout: RecordLayout) -> Item:
        name = layout.query
        value = record[name] if name is not None else None
        if isinstance(value, list):
            raise BadRecord(f"{name} is a list, and one item is expected")
        images: tuple[ImageRef, ...] = ()
        if layout.query_image:
            images = self._image_list(record[layout.query_image], layout.query_image)
        if value is None and not images:
            raise BadRecord(f"{name or layout.query_image} is {self._null}")
        query = self._item(value, images, self._query_is_path, str(name))
        if layout.query_prompt is None:
            return query
        # The record's own prompt. An empty cell of a table is none; `""` in JSON is a prompt.
        prompt = record[layout.query_prompt]
        if prompt is None or (prompt == "" and self._numbers_in_text):
            return query
        if not isinstance(prompt, str):
            raise BadRecord(f"{layout.query_prompt} is {described(prompt)}, not a text")
        return replace(query, prompt=prompt)

    def _documents(
        self,
        record: dict[str, Any],
        name: str | None,
        image_name: str | None,
    ) -> tuple[Item, ...]:
        """Return the items of a column, each with its images if a second column has images."""
        value = record[name] if name is not None else None
        values = _as_list(value)
        images: list[tuple[ImageRef, ...]] = [()] * len(values)
        if image_name is not None and record[image_name] is not None:
            images = []
            for image_value in _as_list(record[image_name]):
                images.append(self._image_list(image_value, image_name))
            if value is None:
                values = [None] * len(images)
            if len(values) != len(images):
                raise BadRecord(
                    f"{name} and {image_name} belong together, but they are {len(values):,d} and {len(images):,d}"
                )
        items = []
        for number, item_value in enumerate(values):
            item_name = str(name) if len(values) == 1 else f"{name} {number + 1}"
            items.append(
                self._item(
                    item_value, images[number], self._document_is_path, item_name
                )
            )
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
            return Item(images=(self._image(value, name), *images))
        if isinstance(value, bytes):
            return Item(images=(ImageRef(data=value), *images))
        if isinstance(value, dict):
            return self._object(value, images, name)
        if value is None and images:
            return Item(images=images)
        if value is None:
            raise BadRecord(f"{name} is {self._null}")
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
            images = (*images, self._image(value, name))
        for key in ("image", "images"):
            images = (*images, *self._image_list(value.get(key), name))
        text = value.get("text")
        title = value.get("title")
        if type(text) is str and type(title) is str:
            text = f"{title} {text}".strip()  # as in a BEIR-style corpus
        if images and (text is None or (isinstance(text, str) and not text.strip())):
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
        return tuple(self._image(image, name) for image in _as_list(value))

    def _image(self, value: Any, name: str) -> ImageRef:
        return image_ref(value, name, self._images)

    def _all_scores(
        self,
        record: dict[str, Any],
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
            self._scores(value, str(name), num_positives, "positive"),
            self._scores(negative_value, str(negative_name), num_negatives, "negative"),
        )

    def _scores(
        self,
        value: Any,
        name: str,
        count: int,
        what: str,
    ) -> tuple[float, ...] | None:
        if value is None:
            return None
        values = _as_list(value)
        if len(values) != count:
            numbers = "number" if len(values) == 1 else "numbers"
            items = what if count == 1 else f"{what}s"
            raise BadRecord(
                f"{name} has {len(values):,d} {numbers} for {count:,d} {items}"
            )
        return tuple(self._score(score, name) for score in values)

    def _score(self, value: Any, name: str) -> float:
        if (
            self._numbers_in_text
            and isinstance(value, str)
            and _NUMBER.fullmatch(value)
        ):
            value = float(value)
        if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
            description = described(value)
            if isinstance(value, str):
                description = f"the text {printable(value)!r}"
            raise BadRecord(f"{name} is {description}, not a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        # False for NaN too.
        if not abs(number) <= LARGEST_SCORE:
            raise BadRecord(
                f"{name} is {number:g}, and losses compute with finite numbers up to {LARGEST_SCORE:.1e}: scale it"
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
                raise BadRecord(f"no score, which loss: {loss} needs for every pair")
            if reads_matches and layout.are_sentences and scores is not None:
                raise BadRecord(
                    f"a scored sentence pair, and loss: {loss} would take each pair for a match whatever its score: "
                    "use loss: cosent or cosine"
                )
            if (
                declared.negatives == "each"
                and not negatives
                and not self._gets_negatives
            ):
                missing = "no negative"
                if self.max_negatives == 0:
                    missing = "max_negatives: 0 leaves no negative"
                raise BadRecord(
                    f"{missing}, which loss: {loss} needs in every record: add negatives, take the source out, or use "
                    "loss: infonce, which takes the others of the batch"
                )
        for score in scores or ():
            if self._bounded_scores and abs(score) > 1:
                raise BadRecord(
                    f"{layout.score} is {score:g}, and loss: cosine compares it with a cosine, which is in [-1, 1]: "
                    "scale the scores (ratings from 0 to 5 by 1/5), or use loss: cosent"
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
        is_short = isinstance(value, float) or abs(value) < 10**15
        return f"a number ({value if is_short else 'a large one'})"
    names: dict[type, str] = {
        str: "a text",
        list: "a list",
        dict: "an object",
        bytes: "bytes",
    }
    kind: type = type(value)
    return names.get(kind, f"a {kind.__name__}")


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
    for name in fields:
        text = record.get(name)
        if isinstance(text, str):
            break
    else:
        name = "text"
        text = ""
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
        if value is not None and not refs:
            values = value if isinstance(value, list) else [value]
            refs = [image_ref(image, name, images) for image in values]
    if not refs and not text:
        names = f"{', '.join(fields)} and image are read"
        raise BadRecord(
            f"no text and no image ({names}, and it has {listed(record) or 'no fields'})"
        )
    return Item(text=text or None, images=tuple(refs))
