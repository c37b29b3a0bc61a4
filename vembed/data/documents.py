"""Documents: records that are one text or image each, as corpora hold them. One table of their fields for all commands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vembed.data.examples import (
    LONE_SURROGATE,
    BadRecord,
    ImageRef,
    Item,
    has_lone_surrogate,
)
from vembed.data.formats.base import Format, LineFormat
from vembed.data.formats.opening import open_reader
from vembed.data.images.files import ImageRoot
from vembed.data.messages import listed
from vembed.data.records import image_ref
from vembed.files import cache_folder

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
PLAIN_TEXT_ENDINGS = (".txt", ".text")


class TextLines(LineFormat):
    """A plain text file: every line that is not blank is one record, a string."""

    endings = PLAIN_TEXT_ENDINGS
    title = "plain text"

    def record(self, line: bytes) -> str | BadRecord:
        """See LineFormat."""
        try:
            return line.decode().strip()
        except UnicodeDecodeError:
            return BadRecord("not UTF-8: save the file as UTF-8")


def open_document_reader(path: Path) -> Format:
    """Return the reader of documents: of any source of data, or of a plain text file."""
    if path.suffix.lower() in PLAIN_TEXT_ENDINGS and path.is_file():
        return TextLines(path)
    return open_reader(str(path), None, "train", cache_folder())


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
    record: Any, images: ImageRoot, fields: Sequence[str] = TEXT_FIELDS
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
