"""Findings: what an audit says, and the texts of a data set that its checks look at."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from vembed.data.examples import Example, Item
from vembed.mining.contents import content_key
from vembed.mining.record_tables import Rows

Severity = Literal["error", "warning", "note"]
SHOWN_CHARACTERS = 300
SCRIPT_SAMPLE = 20_000


@dataclass(frozen=True)
class Finding:
    """One thing to look at."""

    kind: str
    severity: Severity
    title: str
    text: str
    count: int
    share: float
    """Of the rows, or of what the text says."""
    mend: str = ""
    """The command that mends it."""
    examples: list[dict[str, str]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Texts:
    """The rows of a data set, with the contents of their parts as numbers."""

    examples: tuple[Example, ...]
    sources: tuple[int, ...]
    """Number of each row's source."""
    names: tuple[str, ...]

    @classmethod
    def of(cls, rows: Rows) -> Texts:
        """Read all rows."""
        numbers = [
            number
            for number, table in enumerate(rows.tables)
            for _ in range(len(table))
        ]
        return cls(
            tuple(rows.example(row) for row in range(len(rows))),
            tuple(numbers),
            tuple(table.name for table in rows.tables),
        )

    def __len__(self) -> int:
        return len(self.examples)

    def query_keys(self) -> np.ndarray:
        """The content of each row's query."""
        return np.array([content_key(one.query) for one in self.examples], np.int64)

    def positive_keys(self) -> list[list[int]]:
        """The contents of each row's positives."""
        return [[content_key(item) for item in one.positives] for one in self.examples]

    def negative_keys(self) -> list[list[int]]:
        """The contents of each row's negatives."""
        return [[content_key(item) for item in one.negatives] for one in self.examples]


def shown(item: Item) -> str:
    """An item for the page: its text, cut, and its images' names."""
    parts = [f"[{image.path or 'image'}]" for image in item.images]
    text = item.text or ""
    parts.append(
        text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..."
    )
    return " ".join(part for part in parts if part)


def lengths(items: Sequence[Item]) -> dict[str, float]:
    """Count, mean and quantiles of the words of texts."""
    words = np.array(
        [len(item.text.split()) for item in items if item.text], np.float64
    )
    if not len(words):
        return {"count": float(len(items))}
    quantiles = dict(
        zip(
            ("p5", "median", "p95", "longest"),
            np.quantile(words, [0.05, 0.5, 0.95, 1.0]),
            strict=True,
        )
    )
    found = {"count": float(len(items)), "mean": float(words.mean())}
    return found | {name: float(value) for name, value in quantiles.items()}


def scripts(items: Sequence[Item]) -> dict[str, float]:
    """The share of each script among the letters of a sample: LATIN, CYRILLIC, CJK, ..."""
    step = max(1, len(items) // SCRIPT_SAMPLE)
    counts: Counter[str] = Counter()
    for item in items[::step]:
        counts.update(letter for letter in (item.text or "")[:1000] if letter.isalpha())
    by_script: Counter[str] = Counter()
    for letter, count in counts.items():
        by_script[unicodedata.name(letter, "OTHER").partition(" ")[0]] += count
    total = sum(by_script.values())
    return {name: count / total for name, count in by_script.most_common(8)}
