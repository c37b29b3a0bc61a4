"""Examples as the model reads them: their lengths in tokens, and samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vembed.config.schema import ModelSection
from vembed.data.examples import Example
from vembed.data.features import Featuriser
from vembed.data.overlap import short_item
from vembed.data_tools.init.sections import (
    NUM_SAMPLES,
    PageSection,
    kinds_of,
    parts_of,
    shortened,
)
from vembed.models.families.decisions import describe
from vembed.models.families.description import ModelDescription
from vembed.models.processors import load_tokenizer


def lengths_and_samples(
    model: ModelSection, examples: Sequence[Example]
) -> list[PageSection]:
    """Return the parts of the page that need the model's tokenizer."""
    description = describe(model)
    featuriser = Featuriser(description)
    return [
        _lengths(examples, featuriser, description),
        _samples(examples, featuriser, description),
    ]


def _lengths(
    examples: Sequence[Example], featuriser: Featuriser, description: ModelDescription
) -> PageSection:
    lengths_by_kind = {}
    for name, items in kinds_of(examples):
        texts = [
            feature
            for feature in featuriser.features(items)
            if feature.modality == "text"
        ]
        if not texts:
            continue
        lengths = np.asarray([text.length for text in texts])
        middle, most = np.quantile(lengths, [0.5, 0.99])
        full = (
            int((lengths >= description.max_length).sum())
            if not description.traits.has_fixed_length
            else 0
        )
        lengths_by_kind[name] = {
            "median": round(middle),
            "at_most_99_percent": round(most),
            "longest": int(lengths.max()),
            "fill_max_length": full,
            "measured": len(texts),
        }
    lines = [
        f"{name}: median {length['median']:,d}, 99 % at most {length['at_most_99_percent']:,d}, longest {length['longest']:,d}; "
        f"{length['fill_max_length']:,d} of {length['measured']:,d} fill max_length, and what is longer is cut there"
        for name, length in lengths_by_kind.items()
    ]
    title = f"lengths in tokens, with prompts and special tokens (at most {description.max_length:,d})"
    return PageSection(
        title,
        tuple(lines),
        figures={"lengths": lengths_by_kind, "max_length": description.max_length},
    )


def _samples(
    examples: Sequence[Example], featuriser: Featuriser, description: ModelDescription
) -> PageSection:
    tokenizer: Any = (
        load_tokenizer(description) if description.modalities[0] != "image" else None
    )
    lines = []
    for example in examples[:NUM_SAMPLES]:
        lines.append(example.where)
        for name, item, kind in parts_of(example):
            feature = featuriser.features([(item, kind)])[0]
            read = short_item(item)
            if feature.token_ids is not None and tokenizer is not None:
                read = tokenizer.decode(feature.token_ids, skip_special_tokens=False)
            lines.append(f"{name} ({feature.length:,d} tokens): {shortened(read)}")
    return PageSection("samples, as the model reads them", tuple(lines))
