"""Section: one part of the page of the data, and what is looked at of the examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vembed.data.examples import Example, Item, Kind

NUM_SAMPLES = 2
MOST_MEASURED = 2_000
SHOWN_LENGTH = 300

Row = tuple[str, ...]


@dataclass(frozen=True)
class PageSection:
    """One part of the page."""

    title: str
    lines: tuple[str, ...]
    table: tuple[Row, ...] = ()
    """Rows; the first has the heads."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """The same for programs, by name."""


def spread(count: int, most: int) -> range:
    """Return at most so many numbers, spread over all."""
    return range(0, count, max(-(-count // most), 1))


def kinds_of(examples: Sequence[Example]) -> list[tuple[str, list[tuple[Item, Kind]]]]:
    """Return the queries and the documents of some examples, with how the model reads them."""
    chosen = [examples[index] for index in spread(len(examples), MOST_MEASURED)]
    queries: list[tuple[Item, Kind]] = []
    documents: list[tuple[Item, Kind]] = []
    for example in chosen:
        queries.append((example.query, "query"))
        for item in (*example.positives, *example.negatives):
            documents.append((item, "document"))
    return [("queries", queries), ("documents", documents)]


def parts_of(example: Example) -> list[tuple[str, Item, Kind]]:
    """Return what is shown of an example: its query, a positive and a negative."""
    named: list[tuple[str, Item, Kind]] = [("query", example.query, "query")]
    named += [("positive", item, "document") for item in example.positives[:1]]
    return named + [("negative", item, "document") for item in example.negatives[:1]]


def shortened(text: str) -> str:
    """Return the beginning of a long text."""
    return text if len(text) <= SHOWN_LENGTH else text[: SHOWN_LENGTH - 3] + "..."
