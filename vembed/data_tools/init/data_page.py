"""The data of a config on one page: samples as the model reads them, lengths, duplicates, overlap, columns not used.

`vembed data` prints it. The page of `vembed audit` begins with it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from vembed.config.schema import ModelSection, TrainConfig
from vembed.data.examples import Example, Item, Kind
from vembed.data.normal_form import normal_key
from vembed.data.overlap import short_item
from vembed.data_tools.init.datasets import open_sets
from vembed.data_tools.init.values import local_model

MOST_READ = 20_000
"""Examples that are counted; of more, a sample spread over all."""
MOST_MEASURED = 2_000
NUM_SAMPLES = 2
SHOWN_LENGTH = 300
SHORT = 100
"""Columns up to which a part with one line stands on one line of the console."""
SOURCE_HEADS = (
    "source",
    "examples",
    "repeated queries",
    "repeated positives",
    "negatives each",
    "query characters",
    "document characters",
)

Row = tuple[str, ...]


@dataclass(frozen=True)
class PageSection:
    """One part of the page."""

    title: str
    lines: Sequence[str] = ()
    table: Sequence[Row] = ()
    """Rows; the first has the heads."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """The same for programs, by name."""


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
        sets = open_sets(
            config.data,
            config.objective,
            model_name=config.model.model_name,
            seed=config.run.seed,
            compares=True,
        )
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
    numbers = _spread(len(examples), MOST_READ)
    sample = [examples[index] for index in numbers]
    page = [
        PageSection("what was read", list(read)),
        _repetitions(sample, len(examples)),
        _negatives(sample),
    ]
    if len(examples.names) > 1:
        groups: list[list[Example]] = [[] for _ in examples.names]
        for index, example in zip(numbers, sample, strict=True):
            groups[examples.source_of(index)].append(example)
        columns: list[Row] = [SOURCE_HEADS]
        for name, size, group in zip(
            examples.names, examples.sizes, groups, strict=True
        ):
            columns.append(_source_column(name, size, group))
        table = list(zip(*columns, strict=True))
        page.append(PageSection("sources side by side", table=table))
    if model is None:
        return [*page, *_raw_inputs(sample, "no model is named")]
    if local_model(model.model_name) is None:
        why = f"{model.model_name} is not on this machine yet"
        return [*page, *_raw_inputs(sample, why)]
    return [*page, *_model_inputs(sample, model)]


def as_text(page: Sequence[PageSection]) -> str:
    """Return the page for a console."""
    blocks = []
    for section in page:
        lines = list(section.lines)
        widths = [max(map(len, column)) for column in zip(*section.table, strict=True)]
        for name, *cells in section.table:
            padded = [name.ljust(widths[0])]
            for cell, width in zip(cells, widths[1:], strict=True):
                padded.append(cell.rjust(width))
            lines.append("  ".join(padded))
        if len(lines) == 1 and len(lines[0]) + len(section.title) < SHORT:
            blocks.append(f"{section.title}: {lines[0]}")
        else:
            blocks.append("\n  ".join([f"{section.title}:", *lines]))
    return "\n\n".join(blocks) + "\n"


def _repetitions(examples: Sequence[Example], total: int) -> PageSection:
    contents: dict[str, list[Hashable]] = {"queries": [], "positives": [], "pairs": []}
    num_own_positive = 0
    for example in examples:
        query = normal_key(example.query)
        positives = [normal_key(item) for item in example.positives]
        contents["queries"].append(query)
        contents["positives"] += positives
        contents["pairs"] += [(query, positive) for positive in positives]
        num_own_positive += query in positives
    figures: dict[str, dict[str, int]] = {}
    lines = []
    for name, keys in contents.items():
        different = len(set(keys))
        repeated = len(keys) - different
        figures[name] = {"different": different, "repeated": repeated}
        plural = "" if repeated == 1 else "s"
        lines.append(
            f"{name}: {different:,d} different, {repeated:,d} repetition{plural}"
        )
    if num_own_positive:
        lines.append(
            f"{num_own_positive:,d} examples have their own query as a positive"
        )
    figures["queries_that_are_their_positive"] = {"examples": num_own_positive}
    of = ""
    if len(examples) < total:
        of = f" (of {len(examples):,d} examples spread over all {total:,d})"
    return PageSection(
        f"repetitions{of}, where case, spaces and punctuation do not count",
        lines,
        figures={"num_counted": len(examples), "repetitions": figures},
    )


def _source_column(name: str, size: int, examples: Sequence[Example]) -> Row:
    """Return the figures of one source."""
    if not examples:
        return (name, f"{size:,d}", "", "", "", "", "")
    queries = [example.query for example in examples]
    documents = [item for example in examples for item in example.positives]
    num_negatives = sum(len(example.negatives) for example in examples)
    repeated = []
    characters = []
    for items in (queries, documents):
        num_different = len({normal_key(item) for item in items})
        repeated.append(f"{1 - num_different / len(items):.0%}")
        median = np.median([len(item.text or "") for item in items])
        characters.append(f"{median:,.0f}")
    each = f"{num_negatives / len(examples):.1f}"
    return (name, f"{size:,d}", *repeated, each, *characters)


def _negatives(examples: Sequence[Example]) -> PageSection:
    counts = Counter(len(example.negatives) for example in examples)
    lines = [
        "none given; the other documents of the batch serve (vembed mine finds hard ones)"
    ]
    if set(counts) != {0}:
        most_frequent = sorted(counts.items())[:8]
        lines = [", ".join(f"{n} in {count:,d} examples" for n, count in most_frequent)]
    num_wrong = 0
    for example in examples:
        positives = {normal_key(item) for item in example.positives}
        num_wrong += any(normal_key(item) in positives for item in example.negatives)
    if num_wrong:
        lines.append(
            f"warning: {num_wrong:,d} examples have one of their positives among their negatives"
        )
    figures = {"negatives_per_example": dict(sorted(counts.items()))}
    return PageSection("negatives", lines, figures=figures)


def _inputs(examples: Sequence[Example]) -> dict[str, list[tuple[Item, Kind]]]:
    """Return the queries and the documents of some examples, with how the model reads them."""
    queries: list[tuple[Item, Kind]] = []
    documents: list[tuple[Item, Kind]] = []
    for index in _spread(len(examples), MOST_MEASURED):
        example = examples[index]
        queries.append((example.query, "query"))
        for item in (*example.positives, *example.negatives):
            documents.append((item, "document"))
    return {"queries": queries, "documents": documents}


def _shown_parts(example: Example) -> list[tuple[str, Item, Kind]]:
    """Return what is shown of an example: its query, a positive and a negative."""
    parts: list[tuple[str, Item, Kind]] = [("query", example.query, "query")]
    parts += [("positive", item, "document") for item in example.positives[:1]]
    return parts + [("negative", item, "document") for item in example.negatives[:1]]


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN_LENGTH else text[: SHOWN_LENGTH - 3] + "..."


def _spread(count: int, most: int) -> range:
    """Return at most so many numbers, spread over all."""
    return range(0, count, max(-(-count // most), 1))


def _raw_inputs(examples: Sequence[Example], why: str) -> list[PageSection]:
    """Return lengths and samples without a tokenizer."""
    lengths = []
    for name, items in _inputs(examples).items():
        words = [len(item.text.split()) for item, _ in items if item.text is not None]
        if words:
            median, most = np.quantile(words, [0.5, 0.99])
            lengths.append(
                f"{name}: median {median:,.0f}, 99 % at most {most:,.0f}, longest {max(words):,d}"
            )
    samples = []
    for example in examples[:NUM_SAMPLES]:
        samples.append(example.where)
        for name, item, _ in _shown_parts(example):
            text = " ".join((item.text or short_item(item)).split())
            samples.append(f"{name}: {_shortened(text)}")
    return [
        PageSection(
            f"lengths in words, not in tokens, since {why}",
            lengths,
            figures={"lengths": None},
        ),
        PageSection(
            f"samples, without prompts and special tokens, since {why}", samples
        ),
    ]


def _model_inputs(
    examples: Sequence[Example], model: ModelSection
) -> list[PageSection]:
    """Return lengths and samples as the model's tokenizer makes them."""
    # These import torch, which takes seconds.
    from vembed.data.features import Featuriser
    from vembed.models.families.description import describe
    from vembed.models.processors import load_tokenizer

    description = describe(model)
    featuriser = Featuriser(description)
    limit = description.max_length
    figures = {}
    lines = []
    for name, items in _inputs(examples).items():
        features = featuriser.features(items)
        lengths = [each.length for each in features if each.modality == "text"]
        if not lengths:
            continue
        median, most = np.quantile(lengths, [0.5, 0.99])
        num_full = 0
        if not description.traits.has_fixed_length:
            num_full = sum(length >= limit for length in lengths)
        figures[name] = {
            "median": round(median),
            "at_most_99_percent": round(most),
            "longest": max(lengths),
            "fill_max_length": num_full,
            "measured": len(lengths),
        }
        lines.append(
            f"{name}: median {round(median):,d}, 99 % at most {round(most):,d}, longest {max(lengths):,d}; "
            f"{num_full:,d} of {len(lengths):,d} fill max_length, and what is longer is cut there"
        )
    tokenizer: Any = None
    if description.modalities[0] != "image":
        tokenizer = load_tokenizer(description)
    samples = []
    for example in examples[:NUM_SAMPLES]:
        samples.append(example.where)
        for name, item, kind in _shown_parts(example):
            feature = featuriser.features([(item, kind)])[0]
            read = short_item(item)
            if feature.token_ids is not None and tokenizer is not None:
                read = tokenizer.decode(feature.token_ids, skip_special_tokens=False)
            samples.append(f"{name} ({feature.length:,d} tokens): {_shortened(read)}")
    title = f"lengths in tokens, with prompts and special tokens (at most {limit:,d})"
    return [
        PageSection(title, lines, figures={"lengths": figures, "max_length": limit}),
        PageSection("samples, as the model reads them", samples),
    ]
