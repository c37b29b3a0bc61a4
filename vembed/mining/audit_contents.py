"""Checks that need no model: duplicates, near-duplicates, leakage, contradictions between sources, images."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vembed.data.examples import Item
from vembed.mining.findings import Finding, Severity, Texts, shown
from vembed.mining.minhash import near_pairs

MANY_ROWS = 0.01
"""A document that is the positive of more than this share of the rows is named."""


class Checker:
    """Runs the checks on training data, and on validation data beside them; remembers which rows to drop."""

    def __init__(
        self,
        train: Texts,
        validation: Texts | None,
        *,
        near_duplicate: float | None,
        num_examples: int,
        words: str,
    ) -> None:
        """`words`: of the command that reads the same data, for advice."""
        self.train, self.validation = train, validation
        self.near_duplicate, self.num_examples, self.words = (
            near_duplicate,
            num_examples,
            words,
        )
        self.rows_to_drop: dict[str, set[int]] = {}

    def findings(self) -> list[Finding]:
        """Everything that was found."""
        found = [
            self._duplicates(),
            self._popular(),
            self._contradictions(),
            self._images(),
        ]
        if self.near_duplicate is not None:
            found.append(self._near_duplicates(self.near_duplicate))
        if self.validation is not None:
            found.append(self._leakage(self.validation))
        return [one for one in found if one is not None]

    def _duplicates(self) -> Finding | None:
        """Rows that say again what another row says."""
        first: dict[tuple[int, ...], int] = {}
        again: dict[int, int] = {}
        pairs = zip(self.train.query_keys(), self.train.positive_keys(), strict=True)
        for row, (query, positives) in enumerate(pairs):
            before = first.setdefault((int(query), *sorted(positives)), row)
            if before != row:
                again[row] = before
        self.rows_to_drop["duplicates"] = set(again)
        examples = [
            self._row_shown(row) | {"the same as row": str(before + 1)}
            for row, before in again.items()
        ]
        return self._finding(
            "duplicates",
            "warning",
            "Rows that occur more than once",
            "Query and positives are equal, apart from case and spaces. Each copy is trained on again.",
            len(again),
            examples,
        )

    def _near_duplicates(self, threshold: float) -> Finding | None:
        """Rows whose query and positive are both near-duplicates of another row's."""
        texts = [
            f"{one.query.text or ''}\n{one.positives[0].text or ''}"
            for one in self.train.examples
        ]
        known = self.rows_to_drop["duplicates"]
        pairs = [pair for pair in near_pairs(texts, threshold) if not known & set(pair)]
        later = {row for _, row in pairs}
        self.rows_to_drop["near_duplicates"] = later
        examples = [
            self._row_shown(row) | {"near row": self._text_of(before)}
            for before, row in pairs
        ]
        return self._finding(
            "near_duplicates",
            "note",
            "Rows that are nearly the same",
            f"At least {threshold:.0%} of the word 3-grams of one are in the other.",
            len(later),
            examples,
        )

    def _leakage(self, validation: Texts) -> Finding | None:
        """Training rows whose query is in the validation data too, or nearly."""
        held_out = set(validation.query_keys().tolist())
        leaked = {
            row
            for row, key in enumerate(self.train.query_keys().tolist())
            if key in held_out
        }
        near: dict[int, str] = {}
        if self.near_duplicate is not None:
            train = [one.query.text or "" for one in self.train.examples]
            texts = train + [one.query.text or "" for one in validation.examples]
            for first, later in near_pairs(texts, self.near_duplicate):
                if first < len(train) <= later and first not in leaked:
                    near.setdefault(first, texts[later])
        rows = leaked | set(near)
        self.rows_to_drop["leakage"] = rows
        examples = [
            self._row_shown(row) | {"in validation": near.get(row, "the same query")}
            for row in sorted(rows)
        ]
        return self._finding(
            "leakage",
            "error",
            "Queries of the validation data in the training data",
            f"{len(leaked):,d} are equal and {len(near):,d} nearly so: scores on these say what was learned by heart.",
            len(rows),
            examples,
        )

    def _popular(self) -> Finding | None:
        """Documents that are the positive of very many rows."""
        counts = Counter(
            key for keys in self.train.positive_keys() for key in set(keys)
        )
        # In small data two rows with one positive are nothing to look at.
        limit = max(MANY_ROWS * len(self.train), 2)
        popular = {key: count for key, count in counts.items() if count > limit}
        item_of = {
            key: item
            for keys, one in zip(
                self.train.positive_keys(), self.train.examples, strict=True
            )
            for key, item in zip(keys, one.positives, strict=True)
            if key in popular
        }
        examples = [
            {"document": shown(item_of[key]), "rows": f"{count:,d}"}
            for key, count in sorted(popular.items(), key=lambda one: -one[1])
        ]
        return self._finding(
            "popular_documents",
            "note",
            "Documents that are the positive of many rows",
            f"More than {limit:,.0f} rows share one positive. Inside one batch they are no negatives of each other.",
            len(popular),
            examples,
            mend="vembed train cfg.yaml no_duplicates=true",
        )

    def _contradictions(self) -> Finding | None:
        """Pairs that one row calls relevant and another one not."""
        positive: dict[tuple[int, int], int] = {}
        queries = self.train.query_keys().tolist()
        for row, (query, keys) in enumerate(
            zip(queries, self.train.positive_keys(), strict=True)
        ):
            for key in keys:
                positive.setdefault((query, key), row)
        found: list[dict[str, str]] = []
        rows: set[int] = set()
        by_source: Counter[str] = Counter()
        for row, (query, keys) in enumerate(
            zip(queries, self.train.negative_keys(), strict=True)
        ):
            for key, item in zip(keys, self.train.examples[row].negatives, strict=True):
                before = positive.get((query, key))
                if before is not None:
                    rows.add(row)
                    names = [
                        self.train.names[self.train.sources[one]]
                        for one in (before, row)
                    ]
                    by_source[" and ".join(dict.fromkeys(names))] += 1
                    found.append(
                        {
                            "query": shown(self.train.examples[row].query),
                            "document": shown(item),
                            "positive in": names[0],
                            "negative in": names[1],
                        }
                    )
        self.rows_to_drop["contradictions"] = rows
        where = "; ".join(
            f"{name}: {count:,d}" for name, count in by_source.most_common(5)
        )
        return self._finding(
            "contradictions",
            "error",
            "Pairs that are positive in one row and negative in another",
            f"By source: {where}.",
            len(rows),
            found,
        )

    def _images(self) -> Finding | None:
        """Images of positives that occur under several names, by their bytes."""
        queries: dict[bytes, set[int]] = defaultdict(set)
        paths: dict[bytes, set[str]] = defaultdict(set)
        known: dict[str, bytes] = {}
        for row, one in enumerate(self.train.examples):
            # Each file is read once; an image inside the data has no name to remember its content by.
            for image in (image for item in one.positives for image in item.images):
                name = image.path or ""
                content = known.get(name) or _digest(image.data, name)
                if name:
                    known[name] = content
                queries[content].add(row)
                paths[content].add(name)
        copies = {key: names for key, names in paths.items() if len(names) > 1}
        examples = [
            {"image": ", ".join(sorted(names)[:5]), "rows": f"{len(queries[key]):,d}"}
            for key, names in copies.items()
        ]
        return self._finding(
            "repeated_images",
            "warning",
            "Images that occur under several names",
            "The same bytes are the positive of different rows: in one batch one is a false negative of the other.",
            len(copies),
            examples,
            mend="vembed train cfg.yaml no_duplicates=true",
        )

    def _finding(
        self,
        kind: str,
        severity: Severity,
        title: str,
        text: str,
        count: int,
        examples: Sequence[dict[str, str]],
        *,
        mend: str | None = None,
    ) -> Finding | None:
        if not count:
            return None
        command = (
            f"vembed audit {self.words} cleaned_path=cleaned.jsonl drop=[{kind}]"
            if mend is None
            else mend
        )
        share = count / max(len(self.train), 1)
        return Finding(
            kind,
            severity,
            title,
            text,
            count,
            share,
            command,
            list(examples[: self.num_examples]),
        )

    def _row_shown(self, row: int) -> dict[str, str]:
        one = self.train.examples[row]
        return {
            "row": str(row + 1),
            "query": shown(one.query),
            "positive": shown(one.positives[0]),
        }

    def _text_of(self, row: int) -> str:
        one = self.train.examples[row]
        return f"{row + 1}: {shown(one.query)} -> {shown(one.positives[0])}"


def items_by_part(data: Texts) -> dict[str, list[Item]]:
    """Queries, positives and negatives."""
    return {
        "queries": [one.query for one in data.examples],
        "positives": [item for one in data.examples for item in one.positives],
        "negatives": [item for one in data.examples for item in one.negatives],
    }


def _digest(data: bytes | None, path: str) -> bytes:
    content = (
        data
        if data is not None
        else Path(path).read_bytes()
        if Path(path).is_file()
        else path.encode()
    )
    return hashlib.blake2b(content, digest_size=16).digest()


def per_source(data: Texts) -> dict[str, int]:
    """Rows of each source."""
    counts = np.bincount(np.array(data.sources, np.int64), minlength=len(data.names))
    return {name: int(count) for name, count in zip(data.names, counts, strict=True)}
