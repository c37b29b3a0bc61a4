"""The data of a config on one page: samples as the model reads them, lengths, duplicates, overlap, columns not used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vembed.config.schema import TrainConfig
from vembed.data.examples import Example, Item, Kind
from vembed.data.features import Featuriser
from vembed.data.normal_form import normal_key
from vembed.data.overlap import shown
from vembed.data.sources import ExampleStore
from vembed.families.decisions import describe
from vembed.families.description import ModelDescription
from vembed.models.processors import load_tokenizer
from vembed.start.values import local_model
from vembed.training.datasets import Sets, open_sets

NUM_SAMPLES = 2
MOST_READ = 20_000
"""Examples that are counted; of more, a sample spread over all."""
MOST_MEASURED = 2_000
SHOWN_LENGTH = 300


@dataclass(frozen=True)
class DataFacts:
    """The data of a config: the page, and the same figures for programs."""

    page: str
    figures: dict[str, Any]


def data_page(config: TrainConfig) -> str:
    """Return the page. Reads the data; of the model only its tokenizer, if it is on this machine."""
    return data_facts(config).page


def data_facts(config: TrainConfig) -> DataFacts:
    """Return the page and the figures on it."""
    sets = open_sets(config, compares=True)
    description = describe(config) if local_model(config.model_name) is not None else None
    lines = [*sets.examples.summary()]
    if sets.evaluation is not None:
        lines.append(f"validation: {sets.evaluation.summary()}")
    lines += [f"warning: {one}" for one in sets.warnings]
    examples = _spread(sets.examples, MOST_READ)
    repetitions = _repetitions(examples)
    lines += ["", *_repetition_lines(repetitions, len(examples), len(sets.examples)), *_negatives(examples)]
    sizes = zip(sets.examples.names, sets.examples.sizes, strict=True)
    figures: dict[str, Any] = {
        "num_examples": len(sets.examples),
        "num_counted": len(examples),
        "sources": [{"name": name, "num_examples": size} for name, size in sizes],
        "validation": None if sets.evaluation is None else sets.evaluation.summary(),
        "warnings": list(sets.warnings),
        "repetitions": repetitions,
        "negatives_per_example": dict(sorted(Counter(len(one.negatives) for one in examples).items())),
        "lengths": None,
    }
    if len(sets.examples.names) > 1:
        lines += ["", *_side_by_side(sets.examples)]
    if description is None:
        lines += ["", f"samples and lengths: not shown, since {config.model_name} is not on this machine yet"]
        return DataFacts("\n".join(lines) + "\n", figures)
    featuriser = Featuriser(description)
    lengths = _lengths(examples, featuriser, description)
    figures |= {"lengths": lengths, "max_length": description.max_length}
    lines += ["", *_length_lines(lengths, description), "", *_samples(sets, featuriser, description)]
    return DataFacts("\n".join(lines) + "\n", figures)


def _spread(store: ExampleStore, most: int) -> list[Example]:
    step = -(-len(store) // most)
    return [store[index] for index in range(0, len(store), step)]


def _repetitions(examples: Sequence[Example]) -> dict[str, dict[str, int]]:
    """Return the different queries, positives and pairs, and their repetitions."""
    queries = Counter(normal_key(one.query) for one in examples)
    positives = Counter(normal_key(item) for one in examples for item in one.positives)
    pairs = Counter((normal_key(one.query), normal_key(item)) for one in examples for item in one.positives)
    named: list[tuple[str, Counter[Any]]] = [("queries", queries), ("positives", positives), ("pairs", pairs)]
    found = {name: {"different": len(each), "repeated": sum(each.values()) - len(each)} for name, each in named}
    own = sum(normal_key(one.query) in {normal_key(item) for item in one.positives} for one in examples)
    return {**found, "queries_that_are_their_positive": {"examples": own}}


def _repetition_lines(counts: dict[str, dict[str, int]], num_counted: int, total: int) -> list[str]:
    of = f" (of {num_counted:,d} examples spread over all {total:,d})" if num_counted < total else ""
    lines = [f"repetitions{of}: case, spaces and punctuation do not count"]
    for name in ("queries", "positives", "pairs"):
        lines.append(f"  {name}: {counts[name]['different']:,d} different, {counts[name]['repeated']:,d} repetitions")
    own = counts["queries_that_are_their_positive"]["examples"]
    if own:
        lines.append(f"  {own:,d} examples have their own query as a positive")
    return lines


def _side_by_side(store: ExampleStore) -> list[str]:
    """Return a table with a column per source."""
    step = -(-len(store) // MOST_READ)
    groups: list[list[Example]] = [[] for _ in store.names]
    for index in range(0, len(store), step):
        groups[store.source_of(index)].append(store[index])
    columns = [_column(*one) for one in zip(store.names, store.sizes, groups, strict=True)]
    heads = ("source", "examples", "repeated queries", "repeated positives", "negatives each", "query characters",
             "document characters")  # fmt: skip
    widths = [max(map(len, column)) for column in columns]
    left = max(map(len, heads))
    return [
        "  ".join([head.ljust(left), *(column[row].rjust(wide) for column, wide in zip(columns, widths, strict=True))])
        for row, head in enumerate(heads)
    ]


def _column(name: str, size: int, examples: Sequence[Example]) -> tuple[str, ...]:
    """Return the figures of one source."""
    if not examples:
        return (name, f"{size:,d}", "", "", "", "", "")
    documents = [item for one in examples for item in one.positives]
    return (
        name,
        f"{size:,d}",
        f"{1 - len({normal_key(one.query) for one in examples}) / len(examples):.0%}",
        f"{1 - len({normal_key(item) for item in documents}) / len(documents):.0%}",
        f"{sum(len(one.negatives) for one in examples) / len(examples):.1f}",
        f"{np.median([len(one.query.text or '') for one in examples]):,.0f}",
        f"{np.median([len(item.text or '') for item in documents]):,.0f}",
    )


def _negatives(examples: Sequence[Example]) -> list[str]:
    counts = Counter(len(one.negatives) for one in examples)
    if set(counts) == {0}:
        return ["negatives: none given; the other documents of the batch serve (vembed mine finds hard ones)"]
    given = ", ".join(f"{number}: {count:,d}" for number, count in sorted(counts.items())[:8])
    wrong = sum(
        bool({normal_key(item) for item in one.negatives} & {normal_key(item) for item in one.positives})
        for one in examples
    )
    lines = [f"negatives per example: {given}"]
    if wrong:
        lines.append(f"warning: {wrong:,d} examples have one of their positives among their negatives")
    return lines


def _lengths(
    examples: Sequence[Example], featuriser: Featuriser, description: ModelDescription
) -> dict[str, dict[str, int]]:
    """Return the lengths of queries and documents in tokens; of images there are none."""
    step = -(-len(examples) // MOST_MEASURED)
    chosen = examples[::step]
    kinds: list[tuple[str, list[tuple[Item, Kind]]]] = [
        ("queries", [(one.query, "query") for one in chosen]),
        ("documents", [(item, "document") for one in chosen for item in (*one.positives, *one.negatives)]),
    ]
    found = {}
    for name, items in kinds:
        texts = [one for one in featuriser.features(items) if one.modality == "text"]
        if not texts:
            continue
        lengths = np.asarray([one.length for one in texts])
        middle, most = np.quantile(lengths, [0.5, 0.99])
        full = int((lengths >= description.max_length).sum()) if not description.traits.has_fixed_length else 0
        found[name] = {
            "median": round(middle), "at_most_99_percent": round(most), "longest": int(lengths.max()),
            "fill_max_length": full, "measured": len(texts),
        }  # fmt: skip
    return found


def _length_lines(found: dict[str, dict[str, int]], description: ModelDescription) -> list[str]:
    lines = [f"lengths in tokens, with prompts and special tokens (at most {description.max_length:,d}):"]
    for name, one in found.items():
        lines.append(
            f"  {name}: median {one['median']:,d}, 99 % at most {one['at_most_99_percent']:,d}, longest "
            f"{one['longest']:,d}; {one['fill_max_length']:,d} of {one['measured']:,d} fill max_length, and what is "
            "longer is cut there"
        )
    return lines


def _samples(sets: Sets, featuriser: Featuriser, description: ModelDescription) -> list[str]:
    tokenizer: Any = load_tokenizer(description) if description.modalities[0] != "image" else None
    lines = ["samples, as the model reads them:"]
    for number in range(min(NUM_SAMPLES, len(sets.examples))):
        example = sets.examples[number]
        lines.append(f"  {example.where}")
        named: list[tuple[str, Item, Kind]] = [("query", example.query, "query")]
        named += [("positive", item, "document") for item in example.positives[:1]]
        named += [("negative", item, "document") for item in example.negatives[:1]]
        for name, item, kind in named:
            feature = featuriser.features([(item, kind)])[0]
            read = shown(item)
            if feature.token_ids is not None and tokenizer is not None:
                read = tokenizer.decode(feature.token_ids, skip_special_tokens=False)
            short = read if len(read) <= SHOWN_LENGTH else read[: SHOWN_LENGTH - 3] + "..."
            lines.append(f"    {name} ({feature.length:,d} tokens): {short}")
    return lines
