"""Speed on the device: samples and useful tokens per second, share of the peak, memory, and the same work elsewhere."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.cases import Row
from benchmarks.gpu_loss import loss_rows
from benchmarks.gpu_models import (
    BERT,
    QWEN_SMALL,
    SHAPES,
    Shape,
    count_parameters,
    make_model,
    make_rows,
    remove,
    small,
    write_data,
)
from benchmarks.gpu_record import (
    NotMeasuredError,
    Record,
    Values,
    quick_compiler,
    train,
)
from benchmarks.gpu_sides import train_elsewhere
from vembed.config.schema import TrainConfig
from vembed.data.examples import ImageRef, Item, Kind
from vembed.data.features import Featuriser
from vembed.models.families.description import describe

STEPS = 6
WARM_UP = 2
SAME_LOSS = 0.03
"""Largest relative difference of the first losses of the two sides, both in 16 bits and without dropout."""


def run_speed(record: Record, folder: Path) -> None:
    """Measure every row of this part."""
    peak = record.row(
        "speed", "matrix product", lambda: matrix_peak(record), limit=30
    ).get("flops", 0.0)
    for whole in SHAPES:
        shape = small(whole) if record.is_small else whole
        seconds = 150.0 if "8b" in shape.name else 75.0
        record.row(
            "speed",
            shape.name,
            partial(speed, record, shape, peak, folder),
            limit=seconds,
        )
        remove(folder / shape.name)
    loss_rows(record)
    # Last, so that a lack of time takes no other row: compiling takes a while, and long runs do it by default.
    for whole in (BERT, QWEN_SMALL):
        shape = replace(
            small(whole) if record.is_small else whole,
            options=(*whole.options, ("torch_compile", True)),
        )
        measure = partial(speed, record, shape, peak, folder, with_peer=False)
        with quick_compiler(record):
            record.row("speed", f"{shape.name}, compiled", measure, limit=100)
        remove(folder / shape.name)


def matrix_peak(record: Record) -> Values:
    """Return the FLOP/s of a large product, in bfloat16 on a GPU; the best of several runs."""
    on_gpu = record.device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if on_gpu else (512, torch.float32)
    left, right = (
        torch.randn(size, size, device=record.device, dtype=dtype) for _ in range(2)
    )
    best = float("inf")
    for _ in range(20):
        _wait(record)
        began = time.perf_counter()
        left @ right
        _wait(record)
        best = min(best, time.perf_counter() - began)
    return {"size": size, "dtype": str(dtype), "flops": 2 * size**3 / best}


def _wait(record: Record) -> None:
    if record.device.type == "cuda":
        torch.cuda.synchronize()


def speed(
    record: Record, shape: Shape, peak: float, folder: Path, *, with_peer: bool = True
) -> Values:
    """Train the same rows with vembed and, `with_peer`, with Sentence Transformers."""
    steps = 2 if record.is_small else STEPS
    room = folder / shape.name
    model = make_model(shape, room / "model", record.device)
    rows = make_rows(shape, steps)
    data = write_data(shape, rows, room / "data")
    options: Values = {
        "global_batch_size": shape.batch,
        "max_length": shape.max_length,
        **dict(shape.options),
    }
    ours = train(record, model, data, room / "out", max_steps=steps, **options)
    skipped = min(WARM_UP, steps - 1)
    seconds = statistics.median(ours.seconds[skipped:])
    work = useful_work(shape, model, rows[skipped * shape.batch :], data.parent)
    each = steps - skipped
    values: Values = {
        "samples_per_second": shape.batch / seconds,
        "useful_tokens_per_second": work["tokens"] / each / seconds,
        "share_of_peak": work["flops"] / each / seconds / peak if peak else None,
        "peak_gb": ours.peak_bytes / 2**30,
        "losses": ours.losses,
        "step_seconds": ours.seconds,
    }
    record.free()
    if not with_peer:
        return values
    try:
        theirs = train_elsewhere(
            record, shape, model, rows, data.parent, room / "peer", steps
        )
    except NotMeasuredError as reason:
        return {**values, "peer": f"skipped: {reason}"}
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
        # The figures of this side stay, whatever the peer cannot do.
        return {**values, "peer": f"failed: {type(error).__name__}: {error}"[:500]}
    off = abs(ours.losses[0] - theirs.losses[0]) / abs(theirs.losses[0])
    ratio = statistics.median(theirs.seconds[skipped:]) / seconds
    values |= {
        "peer_samples_per_second": shape.batch
        / statistics.median(theirs.seconds[skipped:]),
        "peer_peak_gb": theirs.peak_bytes / 2**30,
        "peer_settings": theirs.settings,
        "first_losses_differ_by": off,
    }
    # Without equal losses the two did not do the same work, and their times are no comparison.
    return {
        **values,
        **({"ratio": ratio} if off < SAME_LOSS else {"ratio": "the losses differ"}),
    }


def useful_work(shape: Shape, model: Path, rows: list[Row], images: Path) -> Values:
    """Return the distinct tokens of these rows and the arithmetic that they need: one forward and one backward pass
    without padding. Frozen weights (LoRA) need no gradient: two thirds."""
    config = TrainConfig(
        model_name=str(model), data_path="none", max_length=shape.max_length
    )
    featuriser = Featuriser(describe(config.model))
    items: list[tuple[Item, Kind]] = [
        (Item(str(row["query"])), "query") for row in rows
    ]
    items += [
        (
            Item(images=(ImageRef(path=str(images / str(row["positive"]))),))
            if shape.images
            else Item(str(row["positive"])),
            "document",
        )
        for row in rows
    ]
    text, vision = count_parameters(model)
    passes = 4.0 if dict(shape.options).get("use_lora") else 6.0
    patches = (shape.image_size // 16) ** 2
    tokens = flops = 0.0
    for features in {
        feature.key: feature for feature in featuriser.features(items)
    }.values():
        tokens += features.length
        if features.modality == "image":
            flops += passes * features.length * vision + _attention(
                features.length, *shape.vision[:2], passes
            )
            continue
        flops += passes * features.length * text + _attention(
            features.length, shape.layers, shape.heads * shape.head, passes
        )
        if features.modality == "multimodal":
            flops += passes * patches * vision + _attention(
                patches, *shape.vision[:2], passes
            )
    return {"tokens": tokens, "flops": flops}


def _attention(length: int, layers: int, width: int, passes: float) -> float:
    """Return the arithmetic of the products of attention: two of 2 * length**2 * width per layer and pass."""
    return layers * 2 * passes * length * length * width
