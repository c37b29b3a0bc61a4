"""Checks of training data without a model: duplicates, near-duplicates, leakage, contradictions, repeated images."""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

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
FIX_IN_TRAINING = "vembed train cfg.yaml no_duplicates=true"


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


class AuditedRows:
    """The rows of a data set in memory, with the contents of their queries and positives as numbers."""

    def __init__(self, rows: Rows) -> None:
        self.examples = [rows.example(row) for row in range(len(rows))]
        self.names = tuple(table.name for table in rows.tables)
        self.sizes = tuple(len(table) for table in rows.tables)
        self.sources = np.repeat(np.arange(len(self.sizes)), self.sizes)
        """Number of each row's source."""
        self.query_keys = [content_key(example.query) for example in self.examples]
        self.positive_keys = [
            list(map(content_key, example.positives)) for example in self.examples
        ]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int, /) -> Example:
        return self.examples[index]

    def source_of(self, index: int) -> int:
        """Return the number of the source of a row."""
        return int(self.sources[index])

    def queries(self) -> list[str]:
        """The text of each row's query."""
        return [example.query.text or "" for example in self.examples]

    def preview(self, row: int) -> dict[str, str]:
        """A row for the page."""
        example = self.examples[row]
        return {
            "row": str(row + 1),
            "query": preview(example.query),
            "positive": preview(example.positives[0]),
        }


class Findings:
    """The findings about some rows, and which rows each of them would leave out."""

    def __init__(self, num_rows: int, num_examples: int, arguments: str) -> None:
        """`num_examples`: shown of each finding. `arguments`: of the command that reads the same data, for advice."""
        self.found: list[Finding] = []
        self.rows_to_drop: dict[str, set[int]] = {}
        self.num_examples = num_examples
        self.arguments = arguments
        self._num_rows = num_rows

    def add(
        self,
        kind: str,
        severity: Severity,
        title: str,
        text: str,
        examples: Iterable[dict[str, str]],
        *,
        rows: Collection[int] | None = None,
        count: int = 0,
        num_all: int | None = None,
        fix: str = "",
    ) -> None:
        """Add a finding about `rows`, or about `count` of `num_all` things (by default rows), if there are any."""
        if rows is not None:
            self.rows_to_drop[kind] = set(rows)
            count = len(rows)
            fix = f"vembed audit {self.arguments} cleaned_path=cleaned.jsonl drop=[{kind}]"
        if count:
            share = count / max(self._num_rows if num_all is None else num_all, 1)
            first = list(islice(examples, self.num_examples))
            finding = Finding(kind, severity, title, text, count, share, fix, first)
            self.found.append(finding)


def check_rows(
    data: AuditedRows,
    validation: AuditedRows | None,
    near_duplicate: float | None,
    findings: Findings,
) -> None:
    """Look for all that needs no model."""
    _check_duplicates(data, findings)
    _check_popular(data, findings)
    _check_contradictions(data, findings)
    _check_images(data, findings)
    if near_duplicate is not None:
        _check_near_duplicates(data, near_duplicate, findings)
    if validation is not None:
        _check_leakage(data, validation, near_duplicate, findings)


def _check_duplicates(data: AuditedRows, findings: Findings) -> None:
    """Rows that say again what another row says."""
    first_rows: dict[tuple[int, ...], int] = {}
    copies: dict[int, int] = {}
    for row, query in enumerate(data.query_keys):
        first = first_rows.setdefault((query, *sorted(data.positive_keys[row])), row)
        if first != row:
            copies[row] = first
    findings.add(
        "duplicates",
        "warning",
        "Rows that occur more than once",
        "Query and positives are equal, apart from case and spaces. Each copy is trained on again.",
        (
            data.preview(row) | {"the same as row": str(first + 1)}
            for row, first in copies.items()
        ),
        rows=copies,
    )


def _check_popular(data: AuditedRows, findings: Findings) -> None:
    """Documents that are the positive of very many rows."""
    num_rows: Counter[int] = Counter()
    items: dict[int, Item] = {}
    for keys, example in zip(data.positive_keys, data.examples, strict=True):
        num_rows.update(set(keys))
        items.update(zip(keys, example.positives, strict=True))
    # In small data two rows with one positive are nothing to look at.
    limit = max(POPULAR_SHARE_OF_ROWS * len(data), 2)
    popular = [(key, count) for key, count in num_rows.most_common() if count > limit]
    findings.add(
        "popular_documents",
        "note",
        "Documents that are the positive of many rows",
        f"More than {limit:,.0f} rows share one positive. Inside one batch they are no negatives of each other.",
        (
            {"document": preview(items[key]), "rows": f"{count:,d}"}
            for key, count in popular
        ),
        count=len(popular),
        fix=FIX_IN_TRAINING,
    )


def _check_contradictions(data: AuditedRows, findings: Findings) -> None:
    """Pairs that one row calls relevant and another one not."""
    positive_row: dict[tuple[int, int], int] = {}
    for row, query in enumerate(data.query_keys):
        for key in data.positive_keys[row]:
            positive_row.setdefault((query, key), row)
    examples: list[dict[str, str]] = []
    rows: set[int] = set()
    by_source: Counter[str] = Counter()
    for row, query in enumerate(data.query_keys):
        example = data.examples[row]
        for item in example.negatives:
            earlier = positive_row.get((query, content_key(item)))
            if earlier is None:
                continue
            rows.add(row)
            positive_in = data.names[data.sources[earlier]]
            negative_in = data.names[data.sources[row]]
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
    findings.add(
        "contradictions",
        "error",
        "Pairs that are positive in one row and negative in another",
        f"By source: {', '.join(where)}.",
        examples,
        rows=rows,
    )


def _check_images(data: AuditedRows, findings: Findings) -> None:
    """Images of positives that occur under several names, by their bytes."""
    rows: dict[bytes, set[int]] = defaultdict(set)
    names: dict[bytes, set[str]] = defaultdict(set)
    digest_of: dict[str, bytes] = {}
    for row, example in enumerate(data.examples):
        for item in example.positives:
            for image in item.images:
                # Each file is read once. An image inside the data has no name.
                name = image.path or ""
                if not name or name not in digest_of:
                    content = image.data
                    if content is None:
                        path = Path(name)
                        content = path.read_bytes() if path.is_file() else name.encode()
                    digest = hashlib.blake2b(content, digest_size=16).digest()
                    digest_of[name] = digest
                rows[digest_of[name]].add(row)
                names[digest_of[name]].add(name)
    copies = [digest for digest in names if len(names[digest]) > 1]
    findings.add(
        "repeated_images",
        "warning",
        "Images that occur under several names",
        "The same bytes are the positive of different rows. In one batch one is a false negative of the other.",
        (
            {
                "image": ", ".join(sorted(names[digest])[:5]),
                "rows": f"{len(rows[digest]):,d}",
            }
            for digest in copies
        ),
        count=len(copies),
        fix=FIX_IN_TRAINING,
    )


def _check_near_duplicates(
    data: AuditedRows, threshold: float, findings: Findings
) -> None:
    """Rows that, query and positive together, are near-duplicates of an earlier row that stays."""
    texts = []
    for example in data.examples:
        texts.append(f"{example.query.text or ''}\n{example.positives[0].text or ''}")
    index = NearIndex(feature_arrays(map(ngrams, texts)), threshold)
    near: dict[int, int] = {}
    for row in range(len(texts)):
        if row in findings.rows_to_drop["duplicates"]:
            continue
        earlier = next(index.near(row), None)
        if earlier is None:
            index.add(row)
        else:
            near[row] = earlier
    examples = []
    for row, earlier in islice(near.items(), findings.num_examples):
        other = data.preview(earlier)
        text = f"{other['row']}: {other['query']} -> {other['positive']}"
        examples.append(data.preview(row) | {"near row": text})
    findings.add(
        "near_duplicates",
        "note",
        "Rows that are nearly the same",
        f"At least {threshold:.0%} of the word 3-grams of one are in the other.",
        examples,
        rows=near,
    )


def _check_leakage(
    data: AuditedRows,
    validation: AuditedRows,
    threshold: float | None,
    findings: Findings,
) -> None:
    """Training rows whose query is in the validation data too, or nearly."""
    held_out = set(validation.query_keys)
    near_text: dict[int, str] = {}
    if threshold is not None:
        # Each query once: rows of one query leak together.
        queries = dict(zip(data.query_keys, data.queries(), strict=True))
        texts = [*validation.queries(), *queries.values()]
        index = NearIndex(feature_arrays(map(ngrams, texts)), threshold)
        for number in range(len(validation)):
            index.add(number)
        for number, key in enumerate(queries, len(validation)):
            other = None if key in held_out else next(index.near(number), None)
            if other is not None:
                near_text[key] = texts[other]
    in_validation: dict[int, str] = {}
    num_equal = 0
    for row, key in enumerate(data.query_keys):
        if key in held_out:
            num_equal += 1
            in_validation[row] = "the same query"
        elif key in near_text:
            in_validation[row] = near_text[key]
    findings.add(
        "leakage",
        "error",
        "Queries of the validation data in the training data",
        f"{num_equal:,d} are equal and {len(in_validation) - num_equal:,d} nearly so. Scores on these say what was "
        "memorised.",
        (
            data.preview(row) | {"in validation": text}
            for row, text in in_validation.items()
        ),
        rows=in_validation,
    )


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
        quantiles = {"p5": 0.05, "median": 0.5, "p95": 0.95, "longest": 1.0}
        result["mean"] = float(np.mean(counts))
        for name, share in quantiles.items():
            result[name] = float(np.quantile(counts, share))
    return result


def scripts(items: Sequence[Item]) -> Mapping[str, float]:
    """The share of each script among the letters of a sample: LATIN, CYRILLIC, CJK, ..."""
    step = max(1, len(items) // SCRIPT_SAMPLE_ITEMS)
    letters: Counter[str] = Counter()
    for item in items[::step]:
        text = (item.text or "")[:SCRIPT_SAMPLE_CHARACTERS]
        letters.update(filter(str.isalpha, text))
    by_script: Counter[str] = Counter()
    for letter, count in letters.items():
        by_script[unicodedata.name(letter, "OTHER").partition(" ")[0]] += count
    return {name: count / by_script.total() for name, count in by_script.most_common(8)}
