"""The data of a config on one page: samples as the model reads them, lengths, duplicates, overlap, columns not used.

`vembed data` prints it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vembed.config.schema import TrainConfig
from vembed.data.datasets import open_sets, run_length, short_item
from vembed.data.examples import Example, spread
from vembed.data.near_duplicates import normal_key
from vembed.data_tools.starter import local_model
from vembed.evaluation.report.page import render_page

if TYPE_CHECKING:
    from vembed.data.features import BaseFeaturiser

MAX_READ = 20_000
"""Examples that are counted; of more, a sample spread over all."""
MAX_MEASURED = 2_000
NUM_SAMPLES = 2
SAMPLE_CHARACTERS = 300


def data_facts(
    config: TrainConfig, world_size: int | None = None
) -> tuple[str, dict[str, Any]]:
    """Return the page, and the same figures for programs. `world_size`: of a run, whose steps are counted.

    Reads the data, and of the model only its tokenizer, if it is on this machine.
    """
    name = config.model.model_name
    # Of a file `describe` says that it is no model.
    is_here = Path(name).expanduser().is_file() or local_model(name) is not None
    length = None
    with unlogged():
        sets = open_sets(
            config.data,
            config.objective,
            model_name=name,
            seed=config.run.seed,
            compares=True,
        )
        is_open = not config.optimizer.sets_length()
        if world_size is not None and (is_here or not is_open):
            length = run_length(
                sets.examples,
                config.data,
                config.batch,
                config.model,
                config.optimizer,
                seed=config.run.seed,
                world_size=world_size,
            )
    store = sets.examples
    validation = None
    if sets.evaluation is not None:
        validation = sets.evaluation.summary()
    sizes = zip(store.names, store.sizes, strict=True)
    sample = [store[number] for number in spread(len(store), MAX_READ)]
    figures = {
        "num_examples": len(store),
        "sources": [{"name": name, "num_examples": size} for name, size in sizes],
        "validation": validation,
        "warnings": list(sets.warnings),
        "num_counted": len(sample),
        "repetitions": _repetitions(sample, config.model.task == "rerank"),
        **_negatives(sample),
    }
    featuriser = None
    if is_here:
        # These import torch, which takes seconds.
        from vembed.data.features import build_featuriser
        from vembed.evaluation.scores import check_metric
        from vembed.models.families.description import describe_trained

        description = describe_trained(
            config.model, config.matryoshka, config.objective, config.adapters
        )
        if sets.evaluation is not None:
            check_metric(
                config.evaluation,
                config.objective.quantize_embeddings,
                sets.evaluation,
                description,
            )
        featuriser = build_featuriser(description)
        figures["lengths"] = _lengths(sample, featuriser)
        figures["max_length"] = featuriser.description.max_length
    page = render_page(
        "data.txt.j2",
        model_name=name,
        summary=store.summary(),
        counts_steps=world_size is not None,
        length=length,
        samples=_samples(sample[:NUM_SAMPLES], featuriser),
        **figures,
    )
    return page, figures


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


def _repetitions(
    examples: Sequence[Example],
    reads_pairs: bool,
) -> dict[str, dict[str, int]]:
    contents: dict[str, list[Any]] = {"queries": [], "positives": [], "pairs": []}
    positives_of: dict[int, set[int]] = {}
    split_queries = set()
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
    figures = {}
    for name, keys in contents.items():
        different = len(set(keys))
        figures[name] = {"different": different, "repeated": len(keys) - different}
    figures["queries_with_several_records"] = {"queries": len(split_queries)}
    return figures


def _negatives(examples: Sequence[Example]) -> dict[str, Any]:
    counts = Counter(len(example.negatives) for example in examples)
    num_wrong = 0
    for example in examples:
        positives = set(map(normal_key, example.positives))
        num_wrong += any(normal_key(item) in positives for item in example.negatives)
    return {
        "negatives_per_example": dict(sorted(counts.items())),
        "positives_among_negatives": num_wrong,
    }


def _lengths(
    examples: Sequence[Example], featuriser: BaseFeaturiser
) -> dict[str, dict[str, int]]:
    units_by_name: dict[str, list[Any]] = {"queries": [], "documents": [], "pairs": []}
    for number in spread(len(examples), MAX_MEASURED):
        units = featuriser.units(examples[number])
        if featuriser.reads_pairs:
            units_by_name["pairs"] += units
        else:
            units_by_name["queries"].append(units.pop(0))
            units_by_name["documents"] += units
    figures = {}
    for name, units in units_by_name.items():
        features = featuriser.features(units)
        lengths = [each.length for each in features if each.modality == "text"]
        if not lengths:
            continue
        median, most = np.quantile(lengths, [0.5, 0.99])
        limit = featuriser.description.max_length
        num_full = 0
        if not featuriser.description.family_traits.has_fixed_length:
            num_full = sum(length >= limit for length in lengths)
        figures[name] = {
            "median": round(median),
            "at_most_99_percent": round(most),
            "longest": max(lengths),
            "measured": len(lengths),
            "fill_max_length": num_full,
        }
    return figures


def _samples(
    examples: Sequence[Example], featuriser: BaseFeaturiser | None
) -> list[str]:
    """Return examples as the model reads them, or as they are without a featuriser."""
    lines = []
    for example in examples:
        lines.append(example.where)
        # The first positive and the first negative.
        shortened = replace(
            example,
            positives=example.positives[:1],
            negatives=example.negatives[:1],
        )
        names = ["query", "positive", "negative"]
        texts = list(map(short_item, shortened.items))
        if featuriser is not None:
            if featuriser.reads_pairs:
                names = ["query and positive", "query and negative"]
                texts.pop(0)
            features = featuriser.features(featuriser.units(shortened))
            for number, feature in enumerate(features):
                names[number] += f" ({feature.length:,d} tokens)"
                if feature.token_ids is not None and featuriser.texts is not None:
                    texts[number] = featuriser.texts.decoded(feature.token_ids)
        for name, text in zip(names, texts, strict=False):
            short_text = text
            if len(text) > SAMPLE_CHARACTERS:
                short_text = text[: SAMPLE_CHARACTERS - 3] + "..."
            lines.append(f"{name}: {short_text}")
    return lines
