"""The data of a config on one page: samples as the model reads them, lengths, duplicates, overlap, columns not used.

`vembed data` prints it. The page of `vembed audit` begins with it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vembed.config.schema import ModelSection, TrainConfig
from vembed.data.datasets import open_sets, short_item
from vembed.data.example_store import ExampleStore
from vembed.data.examples import Example, Item
from vembed.data.near_duplicates import normal_key
from vembed.data_tools.starter import local_model

if TYPE_CHECKING:
    from vembed.data.features import BaseFeaturiser
    from vembed.data_tools.audit import AuditedRows

MAX_READ = 20_000
"""Examples that are counted; of more, a sample spread over all."""
MAX_MEASURED = 2_000
NUM_SAMPLES = 2
SAMPLE_CHARACTERS = 300


@dataclass(frozen=True)
class PageSection:
    """One part of the page."""

    title: str
    lines: Sequence[str] = ()
    table: Sequence[tuple[str, ...]] = ()
    """Rows; the first has the heads."""
    figures: dict[str, Any] = field(default_factory=dict)
    """The same for programs, by name."""


def data_facts(config: TrainConfig) -> tuple[str, dict[str, Any]]:
    """Return the page, and the same figures for programs.

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
    lines = [*sets.examples.summary()]
    validation = None
    if sets.evaluation is not None:
        validation = sets.evaluation.summary()
        lines.append(f"validation: {validation}")
    lines += [f"warning: {warning}" for warning in sets.warnings]
    sizes = zip(sets.examples.names, sets.examples.sizes, strict=True)
    figures = {
        "num_examples": len(sets.examples),
        "sources": [{"name": name, "num_examples": size} for name, size in sizes],
        "validation": validation,
        "warnings": list(sets.warnings),
    }
    blocks = []
    for section in sections(sets.examples, lines, config.model):
        figures |= section.figures
        blocks.append("\n  ".join([f"{section.title}:", *section.lines]))
    return "\n\n".join(blocks) + "\n", figures


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
    examples: ExampleStore | AuditedRows,
    lines: Sequence[str],
    model: ModelSection | None,
) -> list[PageSection]:
    """Return the parts of the page. `lines`: on what was read, left out and found in the validation data too.
    `model`: None where no model is named."""
    sample = [examples[number] for number in _spread(len(examples), MAX_READ)]
    reads_pairs = model is not None and model.task == "rerank"
    page = [
        PageSection("what was read", list(lines)),
        _repetitions(sample, len(examples), reads_pairs),
        _negatives(sample),
    ]
    reason = "no model is named"
    featuriser = None
    if model is not None:
        reason = f"{model.model_name} is not on this machine yet"
        # Of a file `describe` says that it is no model.
        is_file = Path(model.model_name).expanduser().is_file()
        if is_file or local_model(model.model_name) is not None:
            # These import torch, which takes seconds.
            from vembed.data.features import build_featuriser
            from vembed.models.families.description import describe

            featuriser = build_featuriser(describe(model))
    page.append(_lengths(sample, featuriser, reason, reads_pairs))
    page.append(_samples(sample[:NUM_SAMPLES], featuriser, reason, reads_pairs))
    return page


def _inputs(example: Example, reads_pairs: bool) -> list[tuple[str, Any]]:
    """Return what a model reads of an example: its texts and images, or pairs of its query and a document. Each is a unit
    of the featuriser, with its name."""
    inputs: list[tuple[str, Any]] = []
    if not reads_pairs:
        inputs.append(("query", (example.query, "query")))
    documents = [("positive", item) for item in example.positives]
    documents += [("negative", item) for item in example.negatives]
    for role, item in documents:
        if reads_pairs:
            inputs.append((f"query and {role}", (example.query, item)))
        else:
            inputs.append((role, (item, "document")))
    return inputs


def _items(unit: tuple[Any, Any]) -> list[Item]:
    return [part for part in unit if isinstance(part, Item)]


def _repetitions(
    examples: Sequence[Example],
    total: int,
    reads_pairs: bool,
) -> PageSection:
    contents: dict[str, list[Any]] = {"queries": [], "positives": [], "pairs": []}
    positives_of: dict[int, set[int]] = {}
    split_queries = set()
    num_equal = 0
    for example in examples:
        query = normal_key(example.query)
        positives = [normal_key(item) for item in example.positives]
        # A reranker compares the documents of one record. Scores and labels tell which pairs match.
        has_matches = example.scores is None and example.label is None
        if has_matches and not reads_pairs:
            first_positives = positives_of.setdefault(query, set(positives))
            if first_positives != set(positives):
                split_queries.add(query)
        contents["queries"].append(query)
        contents["positives"] += positives
        contents["pairs"] += [(query, positive) for positive in positives]
        num_equal += query in positives
    figures = {}
    lines = []
    for name, keys in contents.items():
        different = len(set(keys))
        repeated = len(keys) - different
        figures[name] = {"different": different, "repeated": repeated}
        plural = "" if repeated == 1 else "s"
        lines.append(
            f"{name}: {different:,d} different, {repeated:,d} repetition{plural}"
        )
    if num_equal:
        lines.append(f"{num_equal:,d} examples have their own query as a positive")
    figures["queries_that_are_their_positive"] = {"examples": num_equal}
    if split_queries:
        lines.append(
            f"warning: queries with other positives in another record: {len(split_queries):,d}. Where such records meet "
            "in a batch, each takes the other's positives for negatives: write them into one record, or set "
            "no_duplicates: true"
        )
    figures["queries_with_several_records"] = {"queries": len(split_queries)}
    of = ""
    if len(examples) < total:
        of = f" (of {len(examples):,d} examples spread over all {total:,d})"
    return PageSection(
        f"repetitions{of}, where case, spaces and punctuation do not count",
        lines,
        figures={"num_counted": len(examples), "repetitions": figures},
    )


def _negatives(examples: Sequence[Example]) -> PageSection:
    counts = Counter(len(example.negatives) for example in examples)
    num_wrong = 0
    for example in examples:
        positives = set(map(normal_key, example.positives))
        num_wrong += any(normal_key(item) in positives for item in example.negatives)
    lines = [
        "none given; the other documents of the batch serve (vembed mine finds hard ones)"
    ]
    by_number = sorted(counts.items())
    if set(counts) != {0}:
        lines = [
            ", ".join(
                f"{number} in {count:,d} examples" for number, count in by_number[:8]
            )
        ]
    if num_wrong:
        lines.append(
            f"warning: {num_wrong:,d} examples have one of their positives among their negatives"
        )
    figures = {"negatives_per_example": dict(by_number)}
    return PageSection("negatives", lines, figures=figures)


def _spread(count: int, limit: int) -> range:
    """Return at most `limit` numbers, spread over all."""
    return range(0, count, max(-(-count // limit), 1))


def _lengths(
    examples: Sequence[Example],
    featuriser: BaseFeaturiser | None,
    reason: str,
    reads_pairs: bool,
) -> PageSection:
    """Return lengths in tokens, or in words where `reason` says why."""
    units_by_name: dict[str, list[Any]] = {}
    for number in _spread(len(examples), MAX_MEASURED):
        for role, unit in _inputs(examples[number], reads_pairs):
            name = "pairs" if reads_pairs else "documents"
            if role == "query":
                name = "queries"
            units_by_name.setdefault(name, []).append(unit)
    limit = None if featuriser is None else featuriser.description.max_length
    lines = []
    figures: dict[str, Any] = {}
    for name, units in units_by_name.items():
        if featuriser is None:
            lengths = []
            for unit in units:
                words = [len((item.text or "").split()) for item in _items(unit)]
                if sum(words):
                    lengths.append(sum(words))
        else:
            features = featuriser.features(units)
            lengths = [each.length for each in features if each.modality == "text"]
        if not lengths:
            continue
        median, most = np.quantile(lengths, [0.5, 0.99])
        line = f"{name}: median {median:,.0f}, 99 % at most {most:,.0f}, longest {max(lengths):,d}"
        figures[name] = {
            "median": round(median),
            "at_most_99_percent": round(most),
            "longest": max(lengths),
            "measured": len(lengths),
        }
        if featuriser is not None and limit is not None:
            num_full = 0
            if not featuriser.description.traits.has_fixed_length:
                num_full = sum(length >= limit for length in lengths)
            figures[name]["fill_max_length"] = num_full
            line += (
                f"; {num_full:,d} of {len(lengths):,d} fill max_length, "
                "and what is longer is cut there"
            )
        lines.append(line)
    figures = {"lengths": figures, "length_unit": "words"}
    title = f"lengths in words, not in tokens, since {reason}"
    if limit is not None:
        figures |= {"length_unit": "tokens", "max_length": limit}
        title = (
            f"lengths in tokens, with prompts and special tokens (at most {limit:,d})"
        )
    return PageSection(title, lines, figures=figures)


def _samples(
    examples: Sequence[Example],
    featuriser: BaseFeaturiser | None,
    reason: str,
    reads_pairs: bool,
) -> PageSection:
    """Return examples as the model reads them, or as they are where `reason` says why."""
    lines = []
    for example in examples:
        lines.append(example.where)
        # The first positive and the first negative.
        first: dict[str, Any] = {}
        for name, unit in _inputs(example, reads_pairs):
            first.setdefault(name, unit)
        for name, unit in first.items():
            note = ""
            if featuriser is None:
                texts = [item.text or short_item(item) for item in _items(unit)]
                text = " ".join(" ".join(texts).split())
            else:
                (feature,) = featuriser.features([unit])
                note = f" ({feature.length:,d} tokens)"
                text = " ".join(map(short_item, _items(unit)))
                if feature.token_ids is not None and featuriser.texts is not None:
                    text = featuriser.texts.decoded(feature.token_ids)
            if len(text) > SAMPLE_CHARACTERS:
                text = text[: SAMPLE_CHARACTERS - 3] + "..."
            lines.append(f"{name}{note}: {text}")
    title = "samples, as the model reads them"
    if featuriser is None:
        title = f"samples, without prompts and special tokens, since {reason}"
    return PageSection(title, lines)
