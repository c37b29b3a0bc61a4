"""QueryResults: metrics and first documents of every query of one evaluation, for comparisons before and after."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vembed.data.examples import Item
from vembed.evaluation.dataset import RetrievalData

NUM_FOUND = 3
"""Documents that are kept per query, the first of its ranking."""
MAX_TEXTS = 2_000
"""Queries whose texts are kept. Metrics are kept of all queries."""
TEXT_LENGTH = 300
EMBEDDED = "image of "
"""Beginning of the name of an image that the data hold themselves."""


@dataclass
class QueryResults:
    """Results of every query. An evaluation fills an empty one."""

    names: list[str] = field(default_factory=list)
    values: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    """[queries, metrics]."""
    found: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    """[queries, NUM_FOUND] indices of the first documents; -1: none."""

    def content(self, data: RetrievalData, metrics: Sequence[str]) -> dict[str, Any]:
        """Return the metrics of all queries and the texts of the first MAX_TEXTS ones, as JSON values."""
        chosen = [name for name in metrics if name in self.names]
        columns = [self.names.index(name) for name in chosen]

        def contents(documents: Sequence[int]) -> list[dict[str, Any]]:
            shortened = []
            for document in documents:
                item = data.documents[document]
                shortened.append(item_content(item, f"document {document}"))
            return shortened

        texts = []
        for number, row in enumerate(self.found[:MAX_TEXTS]):
            relevant = data.relevance[number]
            documents = [int(document) for document in row if document >= 0]
            texts.append(
                {
                    "query": item_content(data.queries[number], f"query {number}"),
                    # One relevant document is enough to read what was asked for. Some queries have hundreds.
                    "relevant": contents(list(relevant)[:1]),
                    "found": contents(documents),
                    "is_relevant": [document in relevant for document in documents],
                }
            )
        return {
            "metrics": chosen,
            "values": np.round(self.values[:, columns], 6).tolist(),
            "queries": texts,
        }


def write_content(path: Path, content: dict[str, Any]) -> None:
    """Write the content as a whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    partial.replace(path)


def named(data: RetrievalData, image: str) -> Item:
    """Return the item of an embedded image, by its name in the content."""
    kind, number = image.removeprefix(EMBEDDED).split()
    items = data.queries if kind == "query" else data.documents
    return items[int(number)]


def item_content(item: Item, name: str) -> dict[str, Any]:
    """Return text and images of an item, short enough for a report: paths, or EMBEDDED and the item's name."""
    text = " ".join((item.text or "").split())
    if len(text) > TEXT_LENGTH:
        text = text[: TEXT_LENGTH - 3] + "..."
    images = []
    for image in item.images:
        images.append(f"{EMBEDDED}{name}" if image.path is None else image.path)
    return {"text": text, "images": images}
