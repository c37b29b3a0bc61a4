"""The data of a config on one page: samples as the model reads them, lengths, duplicates, overlap, columns not used.

`vembed data` prints it. The page of `vembed audit` begins with it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from vembed.config.schema import ModelSection, TrainConfig
from vembed.data.examples import Example
from vembed.data.normal_form import normal_key
from vembed.data.overlap import short_item
from vembed.data_tools.init.datasets import open_sets
from vembed.data_tools.init.sections import (
    NUM_SAMPLES,
    PageSection,
    Row,
    kinds_of,
    parts_of,
    shortened,
    spread,
)
from vembed.data_tools.init.values import local_model

MOST_READ = 20_000
"""Examples that are counted; of more, a sample spread over all."""
SHORT = 100
"""Columns up to which a part with one line stands on one line of the console."""


class SourceExamples(Protocol):
    """Examples of one or several sources, by number."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sources."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of examples of each."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...

    def source_of(self, index: int) -> int:
        """Return the number of the source that an example comes from."""
        ...


@dataclass(frozen=True)
class DataFacts:
    """The data of a config: the page, and the same figures for programs."""

    page: str
    figures: dict[str, Any]


def data_facts(config: TrainConfig) -> DataFacts:
    """Return the page and the figures on it.

    Reads the data, and of the model only its tokenizer, if it is on this machine.
    """
    with unlogged():
        sets = open_sets(config, compares=True)
    read = [*sets.examples.summary()]
    if sets.evaluation is not None:
        read.append(f"validation: {sets.evaluation.summary()}")
    read += [f"warning: {warning}" for warning in sets.warnings]
    page = sections(sets.examples, read, config.model)
    sizes = zip(sets.examples.names, sets.examples.sizes, strict=True)
    figures: dict[str, Any] = {
        "num_examples": len(sets.examples),
        "sources": [{"name": name, "num_examples": size} for name, size in sizes],
        "validation": None if sets.evaluation is None else sets.evaluation.summary(),
        "warnings": list(sets.warnings),
    }
    for section in page:
        figures |= section.figures
    return DataFacts(as_text(page), figures)


@contextmanager
def unlogged() -> Iterator[None]:
    """Keep the log's lines from the console: the page has the same ones. Without a handler Python prints warnings."""
    log = logging.getLogger("vembed")
    silent = logging.NullHandler()
    log.addHandler(silent)
    try:
        yield
    finally:
        log.removeHandler(silent)


def sections(
    examples: SourceExamples, read: Sequence[str], model: ModelSection | None
) -> list[PageSection]:
    """Return the parts of the page. `read`: lines on what was read, left out and found in the validation data too.
    `model`: None where no model is named."""
    sample = [examples[index] for index in spread(len(examples), MOST_READ)]
    page = [
        PageSection("what was read", tuple(read)),
        _repetitions(sample, len(examples)),
        _negatives(sample),
    ]
    if len(examples.names) > 1:
        page.append(PageSection("sources side by side", (), _side_by_side(examples)))
    if model is not None and local_model(model.model_name) is not None:
        from vembed.data_tools.init.model_inputs import (
            lengths_and_samples,  # imports torch, which takes seconds
        )

        return [*page, *lengths_and_samples(model, sample)]
    why = (
        "no model is named"
        if model is None
        else f"{model.model_name} is not on this machine yet"
    )
    return [*page, _words(sample, why), _raw_samples(sample, why)]


def as_text(page: Sequence[PageSection]) -> str:
    """Return the page for a console."""
    blocks = []
    for section in page:
        lines = [*section.lines, *_aligned(section.table)]
        short = len(lines) == 1 and len(lines[0]) + len(section.title) < SHORT
        blocks.append(
            f"{section.title}: {lines[0]}"
            if short
            else "\n  ".join([f"{section.title}:", *lines])
        )
    return "\n\n".join(blocks) + "\n"


def _aligned(table: Sequence[Row]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(
                    cell.rjust(wide)
                    for cell, wide in zip(row[1:], widths[1:], strict=True)
                ),
            ]
        )
        for row in table
    ]


def _repetitions(examples: Sequence[Example], total: int) -> PageSection:
    queries = Counter(normal_key(example.query) for example in examples)
    positives = Counter(
        normal_key(item) for example in examples for item in example.positives
    )
    pairs = Counter(
        (normal_key(example.query), normal_key(item))
        for example in examples
        for item in example.positives
    )
    named: list[tuple[str, Counter[Any]]] = [
        ("queries", queries),
        ("positives", positives),
        ("pairs", pairs),
    ]
    counts_by_name = {
        name: {"different": len(each), "repeated": sum(each.values()) - len(each)}
        for name, each in named
    }
    num_own_positive = sum(
        normal_key(example.query) in {normal_key(item) for item in example.positives}
        for example in examples
    )
    of = (
        f" (of {len(examples):,d} examples spread over all {total:,d})"
        if len(examples) < total
        else ""
    )
    lines = [
        f"{name}: {example['different']:,d} different, {example['repeated']:,d} repetition{'' if example['repeated'] == 1 else 's'}"
        for name, example in counts_by_name.items()
    ]
    if num_own_positive:
        lines.append(
            f"{num_own_positive:,d} examples have their own query as a positive"
        )
    figures = {
        "num_counted": len(examples),
        "repetitions": {
            **counts_by_name,
            "queries_that_are_their_positive": {"examples": num_own_positive},
        },
    }
    return PageSection(
        f"repetitions{of}, where case, spaces and punctuation do not count",
        tuple(lines),
        figures=figures,
    )


def _side_by_side(examples: SourceExamples) -> tuple[Row, ...]:
    """Return a table with a column per source."""
    groups: list[list[Example]] = [[] for _ in examples.names]
    for index in spread(len(examples), MOST_READ):
        groups[examples.source_of(index)].append(examples[index])
    columns = [
        _column(*source)
        for source in zip(examples.names, examples.sizes, groups, strict=True)
    ]
    heads = (
        "source",
        "examples",
        "repeated queries",
        "repeated positives",
        "negatives each",
        "query characters",
        "document characters",
    )
    return tuple(zip(heads, *columns, strict=True))


def _column(name: str, size: int, examples: Sequence[Example]) -> tuple[str, ...]:
    """Return the figures of one source."""
    if not examples:
        return (name, f"{size:,d}", "", "", "", "", "")
    documents = [item for example in examples for item in example.positives]
    return (
        name,
        f"{size:,d}",
        f"{1 - len({normal_key(example.query) for example in examples}) / len(examples):.0%}",
        f"{1 - len({normal_key(item) for item in documents}) / len(documents):.0%}",
        f"{sum(len(example.negatives) for example in examples) / len(examples):.1f}",
        f"{np.median([len(example.query.text or '') for example in examples]):,.0f}",
        f"{np.median([len(item.text or '') for item in documents]):,.0f}",
    )


def _negatives(examples: Sequence[Example]) -> PageSection:
    counts = Counter(len(example.negatives) for example in examples)
    if set(counts) == {0}:
        lines = [
            "none given; the other documents of the batch serve (vembed mine finds hard ones)"
        ]
    else:
        lines = [
            ", ".join(
                f"{number} in {count:,d} examples"
                for number, count in sorted(counts.items())[:8]
            )
        ]
    wrong = sum(
        bool(
            {normal_key(item) for item in example.negatives}
            & {normal_key(item) for item in example.positives}
        )
        for example in examples
    )
    if wrong:
        lines.append(
            f"warning: {wrong:,d} examples have one of their positives among their negatives"
        )
    return PageSection(
        "negatives",
        tuple(lines),
        figures={"negatives_per_example": dict(sorted(counts.items()))},
    )


def _words(examples: Sequence[Example], why: str) -> PageSection:
    lines = []
    for name, items in kinds_of(examples):
        lengths = [len(item.text.split()) for item, _ in items if item.text is not None]
        if lengths:
            middle, most = np.quantile(lengths, [0.5, 0.99])
            lines.append(
                f"{name}: median {middle:,.0f}, 99 % at most {most:,.0f}, longest {max(lengths):,d}"
            )
    return PageSection(
        f"lengths in words, not in tokens, since {why}",
        tuple(lines),
        figures={"lengths": None},
    )


def _raw_samples(examples: Sequence[Example], why: str) -> PageSection:
    lines = []
    for example in examples[:NUM_SAMPLES]:
        lines.append(example.where)
        lines += [
            f"{name}: {shortened(' '.join((item.text or short_item(item)).split()))}"
            for name, item, _ in parts_of(example)
        ]
    return PageSection(
        f"samples, without prompts and special tokens, since {why}", tuple(lines)
    )
