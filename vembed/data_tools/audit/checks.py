"""Checks of training data: duplicates, near-duplicates, leakage, contradictions, images, and ranks by a model."""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vembed.data.examples import Example, Item
from vembed.errors import UserError
from vembed.mining.candidates import Candidates, CandidateStore
from vembed.mining.choice import Calibration, calibrate
from vembed.mining.config import MineConfig
from vembed.mining.documents import content_key
from vembed.mining.mine import Inputs
from vembed.mining.minhash import near_pairs
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


LOW_RANK = 10
"""A positive below so many other documents is looked at."""


@dataclass(frozen=True)
class Ranks:
    """Ranks of the known positives of each query, and the documents above them."""

    best: np.ndarray
    """[Q] how many candidates are above the best known positive; the number of candidates where all are."""
    best_score: np.ndarray
    """[Q] of the best known positive; -inf where none is known."""
    deepest: np.ndarray
    """[Q] the score of the last candidate."""
    first: np.ndarray
    """[Q] the candidate with the highest score."""
    first_score: np.ndarray

    @classmethod
    def of(cls, chunks: Sequence[Candidates]) -> Ranks:
        """From what was found."""
        best, best_score, deepest, first, first_score = [], [], [], [], []
        for one in chunks:
            own = np.full(len(one), -np.inf)
            # ufunc.at, not fancy indexing: a query with several positives occurs several times.
            np.maximum.at(own, one.positives.queries, one.positive_scores)
            there = np.isfinite(one.scores)
            # Known positives are no candidates, so that all above are others.
            best.append((one.scores > own[:, None]).sum(axis=1))
            best_score.append(own)
            deepest.append(
                np.where(there, one.scores, np.inf).min(axis=1, initial=np.inf)
            )
            first.append(one.documents[:, 0])
            first_score.append(one.scores[:, 0])
        return cls(
            *(
                np.concatenate(parts)
                for parts in (best, best_score, deepest, first, first_score)
            )
        )


def rank_findings(
    inputs: Inputs,
    store: CandidateStore,
    data: Texts,
    config: MineConfig,
    num_examples: int,
    words: str,
) -> tuple[list[Finding], dict[str, object], dict[str, set[int]]]:
    """Statements of a model about the data: findings, figures by source, and rows that may be dropped."""
    chunks = list(store.chunks())
    ranks = Ranks.of(chunks)
    query_of_row = inputs.known.query_of_row
    low = np.flatnonzero(ranks.best[query_of_row] >= LOW_RANK)
    weak = np.flatnonzero((ranks.best_score < ranks.deepest)[query_of_row])
    findings = [
        _low_finding(inputs, ranks, data, low, num_examples, words),
        _weak_finding(inputs, ranks, data, weak, num_examples, words, config.top_k),
        _false_negatives(inputs, ranks, chunks, config, num_examples),
    ]
    dropped = {"low_positives": set(low.tolist()), "weak_queries": set(weak.tolist())}
    return (
        [one for one in findings if one is not None],
        _by_source(inputs, ranks, data),
        dropped,
    )


def _low_finding(
    inputs: Inputs,
    ranks: Ranks,
    data: Texts,
    rows: np.ndarray,
    num_examples: int,
    words: str,
) -> Finding | None:
    if not len(rows):
        return None
    worst = rows[
        np.argsort(-ranks.best[inputs.known.query_of_row[rows]], kind="stable")
    ]
    return Finding(
        "low_positives",
        "warning",
        f"Positives that rank below {LOW_RANK} or more other documents",
        "The model finds other documents more similar to the query than each of its known positives: these rows are "
        "hard, or wrong.",
        len(rows),
        len(rows) / max(len(data), 1),
        f"vembed audit {words} cleaned_path=cleaned.jsonl drop=[low_positives]",
        [_row(inputs, ranks, data, int(row)) for row in worst[:num_examples]],
    )


def _weak_finding(
    inputs: Inputs,
    ranks: Ranks,
    data: Texts,
    rows: np.ndarray,
    num_examples: int,
    words: str,
    top_k: int,
) -> Finding | None:
    if not len(rows):
        return None
    return Finding(
        "weak_queries",
        "warning",
        "Queries without any positive that looks relevant",
        f"None of the known positives is among the {top_k} documents that are most similar to the query.",
        len(rows),
        len(rows) / max(len(data), 1),
        f"vembed audit {words} cleaned_path=cleaned.jsonl drop=[weak_queries]",
        [_row(inputs, ranks, data, int(row)) for row in rows[:num_examples]],
    )


def _false_negatives(
    inputs: Inputs,
    ranks: Ranks,
    chunks: Sequence[Candidates],
    config: MineConfig,
    num_examples: int,
) -> Finding | None:
    """Estimated number of relevant documents among the best candidates, with those nearest above a positive."""
    estimate: Calibration | None = None
    text = "Too few queries with known positives for an estimate of the rate."
    with suppress(UserError):  # too few queries
        estimate = calibrate(chunks, config)
    if estimate is not None:
        margin = estimate.limits.relative_margin
        threshold = (
            f"relative_margin={margin:.3f}"
            if margin is not None
            else f"max_score={estimate.limits.max_score:.3f}"
        )
        text = (
            f"An estimated {estimate.rate_without:.1%} of the best {config.num_negatives} candidates of each query are "
            f"in truth relevant ({estimate.num_hidden:,d} known positives were hidden for the estimate); {threshold} "
            f"brings the rate to {estimate.rate:.1%}."
        )
    above = np.flatnonzero((ranks.best > 0) & np.isfinite(ranks.best_score))
    if estimate is None and not len(above):
        return None
    order = above[
        np.argsort(-(ranks.first_score - ranks.best_score)[above], kind="stable")
    ]
    examples = [
        {
            "query": shown(inputs.known.item(int(query))),
            "known positive scores": f"{ranks.best_score[query]:.3f}",
            "candidate scores": f"{ranks.first_score[query]:.3f}",
            "candidate": shown(inputs.documents.item(int(ranks.first[query]))),
        }
        for query in order[:num_examples]
    ]
    return Finding(
        "false_negatives",
        "warning",
        "Documents above the known positive: candidates for false negatives",
        text,
        len(above),
        len(above) / max(inputs.known.num_queries, 1),
        f"vembed mine model_name={config.model_name} data_path={_first_path(config)} output_path=mined.jsonl "
        f"threshold=auto",
        examples,
    )


def _by_source(inputs: Inputs, ranks: Ranks, data: Texts) -> dict[str, object]:
    """Per source: rows, the share whose positive the model ranks first, among the first ten, and the median
    number of documents above it."""
    found: dict[str, object] = {}
    sources, above = np.array(data.sources), ranks.best[inputs.known.query_of_row]
    for number, name in enumerate(data.names):
        own = above[sources == number]
        found[name] = {
            "rows": len(own),
            "found_first": float((own == 0).mean()),
            "found_in_10": float((own < 10).mean()),
            "median_above": float(np.median(own)),
        }
    return found


def _row(inputs: Inputs, ranks: Ranks, data: Texts, row: int) -> dict[str, str]:
    query, one = int(inputs.known.query_of_row[row]), data.examples[row]
    return {
        "row": str(row + 1),
        "query": shown(one.query),
        "positive": shown(one.positives[0]),
        "documents above it": f"{ranks.best[query]:,d}",
        "the first of them": shown(inputs.documents.item(int(ranks.first[query])))
        if ranks.first[query] >= 0
        else "",
    }


def _first_path(config: MineConfig) -> str:
    first = (
        config.data_path[0] if isinstance(config.data_path, list) else config.data_path
    )
    return first if isinstance(first, str) else first.path
