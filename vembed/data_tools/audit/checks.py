"""Checks of training data without a model: duplicates, near-duplicates, leakage, contradictions, repeated images."""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vembed.data.examples import Example, Item
from vembed.data.near_duplicates import NearIndex, feature_arrays, ngrams
from vembed.mining.documents import content_key
from vembed.mining.record_tables import Rows

Severity = Literal["error", "warning", "note"]
SHOWN_CHARACTERS = 300
SCRIPT_SAMPLE_ITEMS = 20_000
SCRIPT_SAMPLE_CHARACTERS = 1000
POPULAR_SHARE_OF_ROWS = 0.01
"""A document that is the positive of more than this share of the rows is named."""


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
    fix: str = ""
    """The command that fixes it."""
    examples: list[dict[str, str]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class AuditedRows:
    """The rows of a data set, with the contents of their parts as numbers."""

    examples: tuple[Example, ...]
    sources: tuple[int, ...]
    """Number of each row's source."""
    names: tuple[str, ...]

    @classmethod
    def of(cls, rows: Rows) -> AuditedRows:
        """Read all rows."""
        sources: list[int] = []
        for number, table in enumerate(rows.tables):
            sources += [number] * len(table)
        return cls(
            tuple(rows.example(row) for row in range(len(rows))),
            tuple(sources),
            tuple(table.name for table in rows.tables),
        )

    def __len__(self) -> int:
        return len(self.examples)

    @cached_property
    def query_keys(self) -> list[int]:
        """The content of each row's query."""
        return [content_key(example.query) for example in self.examples]

    @cached_property
    def positive_keys(self) -> list[list[int]]:
        """The contents of each row's positives."""
        return [list(map(content_key, example.positives)) for example in self.examples]

    def queries(self) -> list[str]:
        """The text of each row's query."""
        return [example.query.text or "" for example in self.examples]

    def items_by_part(self) -> dict[str, list[Item]]:
        """All queries, positives and negatives; parts that no row has are left out."""
        parts: dict[str, list[Item]] = {
            "queries": [example.query for example in self.examples],
            "positives": [],
            "negatives": [],
        }
        for example in self.examples:
            parts["positives"] += example.positives
            parts["negatives"] += example.negatives
        return {name: items for name, items in parts.items() if items}

    def rows_of_sources(self) -> dict[str, int]:
        """Rows of each source."""
        counts = np.bincount(
            np.array(self.sources, np.int64), minlength=len(self.names)
        )
        return dict(zip(self.names, counts.tolist(), strict=True))

    def preview(self, row: int) -> dict[str, str]:
        """A row for the page."""
        example = self.examples[row]
        return {
            "row": str(row + 1),
            "query": preview(example.query),
            "positive": preview(example.positives[0]),
        }


class DataChecks:
    """Runs the checks on training data, and on validation data beside them. Keeps which rows to drop."""

    def __init__(
        self,
        train: AuditedRows,
        validation: AuditedRows | None,
        *,
        near_duplicate: float | None,
        num_examples: int,
        arguments: str,
    ) -> None:
        """`arguments`: of the command that reads the same data, for advice."""
        self.train = train
        self.validation = validation
        self.near_duplicate = near_duplicate
        self.num_examples = num_examples
        self.arguments = arguments
        self.rows_to_drop: dict[str, set[int]] = {}

    def findings(self) -> list[Finding]:
        """Return all findings."""
        findings = [
            self._duplicates(),
            self._popular(),
            self._contradictions(),
            self._images(),
        ]
        if self.near_duplicate is not None:
            findings.append(self._near_duplicates(self.near_duplicate))
        if self.validation is not None:
            findings.append(self._leakage(self.validation))
        return [finding for finding in findings if finding is not None]

    def _duplicates(self) -> Finding | None:
        """Rows that say again what another row says."""
        first_rows: dict[tuple[int, ...], int] = {}
        copies: dict[int, int] = {}
        for row, query in enumerate(self.train.query_keys):
            content = (query, *sorted(self.train.positive_keys[row]))
            first = first_rows.setdefault(content, row)
            if first != row:
                copies[row] = first
        return self._finding(
            "duplicates",
            "warning",
            "Rows that occur more than once",
            "Query and positives are equal, apart from case and spaces. Each copy is trained on again.",
            drop=copies,
            examples=[
                self.train.preview(row) | {"the same as row": str(first + 1)}
                for row, first in self._sample(copies.items())
            ],
        )

    def _near_duplicates(self, threshold: float) -> Finding | None:
        """Rows that, query and positive together, are near-duplicates of an earlier row that stays."""
        texts = []
        for example in self.train.examples:
            texts.append(
                f"{example.query.text or ''}\n{example.positives[0].text or ''}"
            )
        index = NearIndex(feature_arrays(map(ngrams, texts)), threshold)
        near: dict[int, int] = {}
        for row in range(len(texts)):
            if row in self.rows_to_drop["duplicates"]:
                continue
            earlier = next(index.near(row), None)
            if earlier is None:
                index.add(row)
            else:
                near[row] = earlier
        examples = []
        for row, earlier in self._sample(near.items()):
            other = self.train.examples[earlier]
            text = f"{earlier + 1}: {preview(other.query)} -> {preview(other.positives[0])}"
            examples.append(self.train.preview(row) | {"near row": text})
        return self._finding(
            "near_duplicates",
            "note",
            "Rows that are nearly the same",
            f"At least {threshold:.0%} of the word 3-grams of one are in the other.",
            drop=near,
            examples=examples,
        )

    def _leakage(self, validation: AuditedRows) -> Finding | None:
        """Training rows whose query is in the validation data too, or nearly."""
        held_out = set(validation.query_keys)
        keys = self.train.query_keys
        equal = {row for row, key in enumerate(keys) if key in held_out}
        near: dict[int, str] = {}
        if self.near_duplicate is not None:
            # Each query once: rows of one query leak together.
            queries = dict(zip(keys, self.train.queries(), strict=True))
            texts = [*validation.queries(), *queries.values()]
            index = NearIndex(feature_arrays(map(ngrams, texts)), self.near_duplicate)
            for number in range(len(validation)):
                index.add(number)
            near_text: dict[int, str] = {}
            for number, key in enumerate(queries, len(validation)):
                other = None if key in held_out else next(index.near(number), None)
                if other is not None:
                    near_text[key] = texts[other]
            for row, key in enumerate(keys):
                if key in near_text:
                    near[row] = near_text[key]
        rows = sorted(equal | near.keys())
        return self._finding(
            "leakage",
            "error",
            "Queries of the validation data in the training data",
            f"{len(equal):,d} are equal and {len(near):,d} nearly so. Scores on these say what was memorised.",
            drop=rows,
            examples=[
                self.train.preview(row)
                | {"in validation": near.get(row, "the same query")}
                for row in self._sample(rows)
            ],
        )

    def _popular(self) -> Finding | None:
        """Documents that are the positive of very many rows."""
        num_rows: Counter[int] = Counter()
        items: dict[int, Item] = {}
        for keys, example in zip(
            self.train.positive_keys, self.train.examples, strict=True
        ):
            num_rows.update(set(keys))
            items.update(zip(keys, example.positives, strict=True))
        # In small data two rows with one positive are nothing to look at.
        limit = max(POPULAR_SHARE_OF_ROWS * len(self.train), 2)
        popular = [
            (key, count) for key, count in num_rows.most_common() if count > limit
        ]
        return self._finding(
            "popular_documents",
            "note",
            "Documents that are the positive of many rows",
            f"More than {limit:,.0f} rows share one positive. Inside one batch they are no negatives of each other.",
            count=len(popular),
            examples=[
                {"document": preview(items[key]), "rows": f"{count:,d}"}
                for key, count in self._sample(popular)
            ],
            fix="vembed train cfg.yaml no_duplicates=true",
        )

    def _contradictions(self) -> Finding | None:
        """Pairs that one row calls relevant and another one not."""
        positive_row: dict[tuple[int, int], int] = {}
        for row, query in enumerate(self.train.query_keys):
            for key in self.train.positive_keys[row]:
                positive_row.setdefault((query, key), row)
        examples: list[dict[str, str]] = []
        rows: set[int] = set()
        by_source: Counter[str] = Counter()
        for row, query in enumerate(self.train.query_keys):
            example = self.train.examples[row]
            for item in example.negatives:
                earlier = positive_row.get((query, content_key(item)))
                if earlier is None:
                    continue
                rows.add(row)
                positive_in = self.train.names[self.train.sources[earlier]]
                negative_in = self.train.names[self.train.sources[row]]
                by_source[" and ".join(dict.fromkeys((positive_in, negative_in)))] += 1
                examples.append(
                    {
                        "query": preview(example.query),
                        "document": preview(item),
                        "positive in": positive_in,
                        "negative in": negative_in,
                    }
                )
        where = [f"{name}: {count:,d}" for name, count in by_source.most_common(5)]
        return self._finding(
            "contradictions",
            "error",
            "Pairs that are positive in one row and negative in another",
            f"By source: {', '.join(where)}.",
            drop=rows,
            examples=self._sample(examples),
        )

    def _images(self) -> Finding | None:
        """Images of positives that occur under several names, by their bytes."""
        rows: dict[bytes, set[int]] = defaultdict(set)
        paths: dict[bytes, set[str]] = defaultdict(set)
        digest_of: dict[str, bytes] = {}
        for row, example in enumerate(self.train.examples):
            for item in example.positives:
                for image in item.images:
                    # Each file is read once. An image inside the data has no name.
                    name = image.path or ""
                    digest = digest_of.get(name) or _digest(image.data, name)
                    if name:
                        digest_of[name] = digest
                    rows[digest].add(row)
                    paths[digest].add(name)
        copies = [digest for digest, names in paths.items() if len(names) > 1]
        return self._finding(
            "repeated_images",
            "warning",
            "Images that occur under several names",
            "The same bytes are the positive of different rows. In one batch one is a false negative of the other.",
            count=len(copies),
            examples=[
                {
                    "image": ", ".join(sorted(paths[digest])[:5]),
                    "rows": f"{len(rows[digest]):,d}",
                }
                for digest in self._sample(copies)
            ],
            fix="vembed train cfg.yaml no_duplicates=true",
        )

    def _sample(self, values: Any) -> list[Any]:
        return list(values)[: self.num_examples]

    def _finding(
        self,
        kind: str,
        severity: Severity,
        title: str,
        text: str,
        *,
        examples: Sequence[dict[str, str]],
        drop: Any = None,
        count: int = 0,
        fix: str = "",
    ) -> Finding | None:
        """Return a finding of rows that `drop` holds, or of `count` things; None if there are none."""
        if drop is not None:
            self.rows_to_drop[kind] = set(drop)
            count = len(self.rows_to_drop[kind])
            fix = cleaning_command(self.arguments, kind)
        if not count:
            return None
        share = count / max(len(self.train), 1)
        return Finding(kind, severity, title, text, count, share, fix, list(examples))


def cleaning_command(arguments: str, kind: str) -> str:
    """The command that writes the data without the rows of a finding."""
    return f"vembed audit {arguments} cleaned_path=cleaned.jsonl drop=[{kind}]"


def preview(item: Item) -> str:
    """An item for the page: its text, cut, and the names of its images."""
    parts = [f"[{image.path or 'image'}]" for image in item.images]
    text = item.text or ""
    if len(text) > SHOWN_CHARACTERS:
        text = f"{text[:SHOWN_CHARACTERS]} ..."
    return " ".join(part for part in [*parts, text] if part)


def lengths(items: Sequence[Item]) -> dict[str, float]:
    """Count, mean and quantiles of the words of texts."""
    counts = [len(item.text.split()) for item in items if item.text]
    result = {"count": float(len(items))}
    if counts:
        result["mean"] = float(np.mean(counts))
        for name, share in {
            "p5": 0.05,
            "median": 0.5,
            "p95": 0.95,
            "longest": 1.0,
        }.items():
            result[name] = float(np.quantile(counts, share))
    return result


def scripts(items: Sequence[Item]) -> Mapping[str, float]:
    """The share of each script among the letters of a sample: LATIN, CYRILLIC, CJK, ..."""
    step = max(1, len(items) // SCRIPT_SAMPLE_ITEMS)
    letters: Counter[str] = Counter()
    for item in items[::step]:
        letters.update(
            filter(str.isalpha, (item.text or "")[:SCRIPT_SAMPLE_CHARACTERS])
        )
    by_script: Counter[str] = Counter()
    for letter, count in letters.items():
        by_script[unicodedata.name(letter, "OTHER").partition(" ")[0]] += count
    return {name: count / by_script.total() for name, count in by_script.most_common(8)}


def _digest(data: bytes | None, path: str) -> bytes:
    if data is None:
        data = Path(path).read_bytes() if Path(path).is_file() else path.encode()
    return hashlib.blake2b(data, digest_size=16).digest()
