"""Hours of a run, estimated from its tokens, its operations per token, and a GPU's data sheet or a product here."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from vembed.config.run_intervals import decide_epochs
from vembed.config.schema import (
    BatchSection,
    DataSection,
    ModelSection,
    OptimizerSection,
)
from vembed.data.columns import Columns
from vembed.data_tools.init.sample import read_sample, texts_of
from vembed.errors import UserError
from vembed.models.families.decisions import describe
from vembed.models.processors import load_tokenizer
from vembed.parallel.estimate import ModelSize
from vembed.parallel.hardware import Gpu
from vembed.parallel.placement import DTYPES, Placement
from vembed.progress import duration

USED_SHARE = {True: 0.35, False: 0.6}
"""Assumed share of the peak that training reaches: in 16 bits, and in float32."""
SECONDS_PER_HOUR = 3600.0
PRODUCT = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the matrices whose product is timed."""


@dataclass(frozen=True, slots=True)
class DataSize:
    """Sizes of the training data, from the first records of each source."""

    num_examples: int
    tokens: float
    """Mean tokens of an example: its query, positives and negatives."""
    length: float
    """Mean tokens of a text."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Arithmetic of one process."""

    tflops: float | None
    source: str
    unit: str = "GPU"
    basis: str = "a table of data sheets"


def speed_of(placement: Placement, gpu: Gpu | None) -> Speed:
    """Return the speed of a GPU by its data sheet; without one, that of a matrix product on the device."""
    if gpu is not None:
        return Speed(
            gpu.tflops(in_half=placement.computes_in_half),
            f"of {gpu.name}'s data sheet",
        )
    device = placement.device
    # The processes of a machine without GPUs share its processor.
    sharing = placement.ranks.local_world_size if device.type == "cpu" else 1
    side = PRODUCT[device.type]
    seconds = _fastest_product(side, DTYPES[placement.precision.value], device)
    return Speed(
        2.0 * side**3 / seconds / 1e12 / sharing,
        f"of a matrix product here ({device.type})",
        "process",
        "a test",
    )


@cache
def _fastest_product(side: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the seconds of the fastest of three products, timed once: all stages of a plan are reckoned alike."""
    factor = torch.ones(side, side, dtype=dtype, device=device)
    # The first one warms up caches and the GPU's clock.
    return min(_product_seconds(factor) for _ in range(3))


def _product_seconds(factor: torch.Tensor) -> float:
    began = time.perf_counter()
    float((factor @ factor)[0, 0])  # reading a value waits for a GPU
    return time.perf_counter() - began


def training_time(
    placement: Placement, size: ModelSize, speed: Speed
) -> tuple[float | None, str]:
    """Return the estimated seconds and a line with what they rest on; without an estimate None, and why."""
    config = placement.run.config
    in_half = placement.computes_in_half
    peak = speed.tflops
    if peak is None:
        return (
            None,
            "hours: not estimated, since --memory names no GPU; --gpu 2xA100-80GB does",
        )
    try:
        data = data_size(config.model, config.data)
    except UserError as error:
        return None, f"hours: not estimated ({error})"
    if data is None:
        return (
            None,
            "hours: not estimated; for that, data_path must be files of texts that are here",
        )
    world = placement.ranks.world_size
    per_step = placement.rows * world * config.batch.gradient_accumulation_steps
    steps = num_steps(
        config.optimizer,
        config.batch,
        config.model,
        data.num_examples,
        per_step,
        val_split=config.data.val_split,
    )
    tokens = steps * per_step * data.tokens
    operations = operations_per_token(placement, size, data)
    # Every process has this peak.
    seconds = tokens * operations / (peak * 1e12 * USED_SHARE[in_half] * world)
    work = f"{steps:,d} steps x {per_step:,d} examples x {data.tokens:,.0f} tokens"
    work += f", {operations / 1e9:,.3g} GFLOP per token"
    assumed = f"{USED_SHARE[in_half]:.0%} of the {peak:.4g} TFLOPS {speed.source}"
    line = (
        f"hours: about {seconds / SECONDS_PER_HOUR:.2g} ({duration(seconds)}). This is an estimate from {speed.basis} "
        f"with an assumed 35-60 % of the peak, often off by a factor of two: {work}, at {assumed} "
        f"({'16 bits' if in_half else 'float32'}), on {world} {speed.unit}(s); without evaluations and loading"
    )
    return seconds, line


def encoding_seconds(
    placement: Placement, size: ModelSize, speed: Speed, data_path: str
) -> float | None:
    """Return the estimated seconds in which one process encodes the texts of a file; None where that is not known."""
    try:
        config = placement.run.config.changed(**{"data_path": data_path})
        data = data_size(config.model, config.data)
    except UserError:
        return None
    if data is None or speed.tflops is None:
        return None
    operations = (
        data.num_examples * data.tokens * _forward_operations(size, data.length)
    )
    return operations / (speed.tflops * 1e12 * USED_SHARE[placement.computes_in_half])


def num_steps(
    optimizer: OptimizerSection,
    batch: BatchSection,
    model: ModelSection,
    num_examples: int,
    per_step: int,
    *,
    val_split: float | None,
) -> int:
    """Return the steps of the run."""
    if optimizer.max_steps is not None:
        return optimizer.max_steps
    micro_steps = batch.gradient_accumulation_steps
    rows = per_step // micro_steps
    train = num_examples * (1.0 - (val_split or 0.0))
    epochs = decide_epochs(
        optimizer,
        model,
        int(train),
        has_scale=describe(model).traits.has_scale_and_bias,
    ).value
    return max(
        math.ceil(epochs * (train // rows) / micro_steps),
        1,
    )


def operations_per_token(
    placement: Placement, size: ModelSize, data: DataSize
) -> float:
    """Return the floating-point operations of one token in a step, forward and backward."""
    config = placement.run.config
    forward = _forward_operations(size, data.length)
    # Counted in forward passes: one, and in the backward pass the products for the inputs' gradients and those for the
    # trained weights' gradients, each as many as a forward pass has.
    count = 2.0 + size.trained / max(size.total, 1)
    count += 1.0 if placement.recomputation.value else 0.0
    _, kept = placement.tokens(placement.demand(size), size.max_length)
    tokens = placement.rows * data.tokens
    cache = config.batch.use_gradient_cache
    repeats = tokens > kept if cache == "auto" else cache
    return forward * (
        count + (1.0 if repeats else 0.0)
    )  # Gradient Cache runs the forward pass twice


def _forward_operations(size: ModelSize, length: float) -> float:
    """Return the floating-point operations of one token of a text of `length` tokens."""
    inside_layers = size.layer_parameters * size.num_layers or size.total
    # A multiplication and an addition for each weight; attention has two products of `length` x `hidden` per token.
    return 2.0 * inside_layers + 4.0 * size.num_layers * size.hidden * length


def data_size(model: ModelSection, data: DataSection) -> DataSize | None:
    """Return the sizes of the training data; None where it is not here, or is not text alone."""
    description = describe(model)
    if description.modalities == ("image",):
        return None
    tokenizer: Any = load_tokenizer(description)
    num_examples = 0
    tokens = 0.0
    num_texts = 0
    num_looked = 0
    for source in data.sources():
        mapping = source.column_mapping or data.column_mapping
        sample = read_sample(Path(source.path).expanduser())
        if not sample.records:
            return None
        texts: list[str] = []
        for record in sample.records:
            record_texts = list(_texts(record, mapping, data.max_negatives))
            if None in record_texts:
                return None
            texts += [text for text in record_texts if text is not None]
        ids = (
            tokenizer(texts, truncation=True, max_length=description.max_length)[
                "input_ids"
            ]
            if texts
            else []
        )
        # The sample stands for the whole file.
        share = sample.num_records / len(sample.records)
        num_examples += sample.num_records
        tokens += share * sum(map(len, ids))
        num_texts += round(share * len(texts))
        num_looked += len(texts)
    if not num_looked:
        return None
    return DataSize(num_examples, tokens / num_examples, tokens / max(num_texts, 1))


def _texts(
    record: Mapping[str, Any], mapping: Mapping[str, str] | None, most: int | None
) -> Iterator[str | None]:
    """Yield the texts of a record; None for an input that is not text alone."""
    layout = Columns(mapping).layout(tuple(record))
    yield from (
        None
        for name in (layout.query_image, layout.positive_image, layout.negative_image)
        if name
    )
    for name in (layout.query, layout.positive):
        yield from texts_of(record.get(name) if name else None)
    negatives = [
        text for name in layout.negatives for text in texts_of(record.get(name))
    ]
    yield from negatives[:most]
