"""The loss on the device: time and memory of tiles against a plain matrix of scores; tiles alone at many rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_record import Record, Values, require
from benchmarks.loss import make_batch, plain_loss
from vembed.config.schema import TrainConfig
from vembed.losses.batch import LossBatch
from vembed.losses.build import build_loss
from vembed.parallel.step_memory import GIB

ROWS = (1024, 4096, 16_384, 65_536)
ROWS_ALONE = 131_072
DIM = 256
REPEATS = 5
SAME = 1e-4
"""Largest relative difference of the two losses and of their gradients."""


def loss_rows(record: Record) -> None:
    """Compare tiles with the plain matrix, each with a hard negative per row, so that columns are twice the rows."""
    for rows in (64, 256) if record.is_small else ROWS:
        record.row(
            "speed", f"loss, {rows:,d} rows", partial(compare, record, rows), limit=40
        )


def loss_alone_row(record: Record) -> None:
    """Measure tiles where the plain matrix would take 128 GiB for its scores alone."""
    rows = 512 if record.is_small else ROWS_ALONE
    record.row(
        "memory",
        f"loss alone, {rows:,d} rows",
        partial(loss_alone, record, rows),
        limit=60,
    )


def compare(record: Record, rows: int) -> Values:
    """Return seconds, and memory beyond the embeddings, of both; out of memory is a result too."""
    config = TrainConfig(model_name="", data_path="")
    batch = on_device(record, rows)
    loss = build_loss(config).to(record.device)
    makers: dict[str, Callable[[], Tensor]] = {
        "tiled": lambda: loss(batch),
        "plain": lambda: plain_loss(batch, config),
    }
    values: Values = {}
    results: dict[str, tuple[float, Tensor]] = {}
    for name, make in makers.items():
        try:
            seconds, beyond, value, gradient = _measured(record, batch, make)
            results[name] = value, gradient
            values |= {f"{name}_seconds": seconds, f"{name}_gb": beyond}
        except torch.OutOfMemoryError:
            values[f"{name}_seconds"] = "out of memory"
        record.free()
    require("tiled" in results, f"{rows:,d} rows do not fit in tiles")
    if "plain" in results:
        tiled, gradient = results["tiled"]
        plain, expected = results["plain"]
        off = max(
            abs(tiled / plain - 1),
            float((gradient - expected).norm() / expected.norm()),
        )
        require(
            off < SAME,
            f"the losses {tiled} and {plain} or their gradients are off by {off:.1e}",
        )
        values |= {
            "ratio": values["plain_seconds"] / values["tiled_seconds"],
            "off": off,
        }
    return values


def loss_alone(record: Record, rows: int) -> Values:
    """Measure time and memory of the loss and its gradient, beyond the embeddings and their gradient."""
    batch = on_device(record, rows)
    loss = build_loss(TrainConfig(model_name="", data_path="")).to(record.device)
    seconds, beyond, value, _ = _measured(record, batch, lambda: loss(batch), repeats=1)
    require(math.isfinite(value), "the loss is not finite")
    return {
        "loss": value,
        "seconds": seconds,
        "gb_beyond_embeddings_and_gradient": beyond,
    }


def on_device(record: Record, rows: int) -> LossBatch:
    """Return a batch on the device, its embeddings a leaf."""
    batch = make_batch(rows, DIM)
    names = ("content", "query", "positive", "example", "negative", "negative_example")
    moved = {name: getattr(batch, name).to(record.device) for name in names}
    return replace(
        batch,
        embeddings=batch.embeddings.detach().to(record.device).requires_grad_(),
        **moved,
    )


def _measured(
    record: Record, batch: LossBatch, make: Callable[[], Tensor], repeats: int = REPEATS
) -> tuple[float, float | None, float, Tensor]:
    """Return the least seconds, the GiB beyond embeddings and gradient, the loss and the gradient."""
    on_gpu = record.device.type == "cuda"
    best = float("inf")
    before = 0
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    gradient = batch.embeddings
    value = float("nan")
    for _ in range(repeats):
        del gradient  # that of the repeat before: not part of what one needs
        began = time.perf_counter()
        loss = make()
        (gradient,) = torch.autograd.grad(loss, batch.embeddings)
        value = float(loss.detach())
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
        del loss
    beyond = (
        (torch.cuda.max_memory_allocated() - before - batch.embeddings.nbytes) / GIB
        if on_gpu
        else None
    )
    return best, beyond, value, gradient
