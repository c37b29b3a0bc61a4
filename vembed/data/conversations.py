"""Conversations: conversion of records with chat messages to the fields that vembed reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vembed.data.examples import BadRecord

QUERY = "messages"
POSITIVE_MESSAGES = "positive_messages"
_SIDES = (
    (QUERY, "images", "query"),
    (POSITIVE_MESSAGES, "positive_images", "positive"),
    ("negative_messages", "negative_images", "negatives"),
)
_IMAGE = "<image>"


def is_conversation(record: dict[str, Any]) -> bool:
    """Return True if a record has its query and its positives as messages."""
    return isinstance(record.get(QUERY), list) and POSITIVE_MESSAGES in record


def fields_of(columns: Iterable[str]) -> dict[str, str]:
    """Return the field as which each column of a table is read: its own name, except in a table of conversations."""
    names = list(columns)
    known: dict[str, str] = {}
    if QUERY in names and POSITIVE_MESSAGES in names:
        known = {
            name: field
            for messages, images, field in _SIDES
            for name in (messages, images)
        } | {"label": "score"}
    return {name: known.get(name, name) for name in names}


def as_fields(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with `query`, `positive`, `negatives` and `score`. Other fields are kept."""
    fields = dict(record)
    for side in _SIDES:
        for name in side[:2]:
            fields.pop(name, None)
    if fields.pop("label", None) is not None:
        fields["score"] = record["label"]
    for name, images_name, field in _SIDES:
        conversations = record.get(name)
        images = record.get(images_name)
        if conversations is None:
            continue
        if field == "query":
            fields[field] = _item(conversations, images, name)
            continue
        if not isinstance(conversations, list):
            raise BadRecord(
                f"{name} is {conversations!r:.60}, and a list of messages is needed"
            )
        if not isinstance(images, list | None):
            raise BadRecord(
                f"{images_name} is {images!r:.60}, and a list of images is needed"
            )
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
        items = [] if items is None else items
        fields[field] = list(items) if isinstance(items, list) else [items]
        for conversation, its_images in zip(conversations, images, strict=True):
            fields[field].append(_item(conversation, its_images, name))
    return fields


def _item(messages: Any, images: Any, name: str) -> dict[str, Any]:
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
