"""Memory on the device: the figure of `vembed plan` against the measured peak, and that of the loss alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu_loss import loss_alone_row
from benchmarks.gpu_models import (
    QWEN_LARGE,
    SHAPES,
    Shape,
    make_model,
    make_rows,
    remove,
    small,
    write_data,
)
from benchmarks.gpu_record import NotMeasuredError, Record, Values, require, train
from vembed.config.loading import resolve_run
from vembed.parallel.environment import RankInfo
from vembed.parallel.placement import place
from vembed.parallel.step_memory import GIB, MemoryEstimate

WITHIN = 0.15
"""Largest relative difference of the predicted and the measured peak."""
LIMITS = {"qwen3-8b-lora": 40.0, "qwen3-8b-qlora": 24.0}
"""GB that a training may take."""
MICRO_BATCH_TOKENS = 8192


def run_memory(record: Record, folder: Path) -> None:
    """Measure every row of this part."""
    quantized = replace(
        QWEN_LARGE,
        name="qwen3-8b-qlora",
        options=(("use_qlora", True), ("lora_dropout", 0.0)),
    )
    loss_alone_row(record)
    for whole in (*SHAPES, quantized):
        shape = small(whole) if record.is_small else whole
        record.row(
            "memory",
            shape.name,
            partial(peak, record, shape, folder),
            limit=110 if "8b" in shape.name else 45,
        )
        remove(folder / shape.name)


def peak(record: Record, shape: Shape, folder: Path) -> Values:
    """Compare the prediction with the peak of a training in micro-batches of a fixed size."""
    steps = 2
    room = folder / shape.name
    # A few micro-batches show the peak; a whole batch of the speed part would only take longer.
    shape = replace(shape, batch=min(shape.batch, 64))
    options = {
        **dict(shape.options),
        "global_batch_size": shape.batch,
        "max_length": shape.max_length,
        "micro_batch_tokens": MICRO_BATCH_TOKENS,
        "use_gradient_cache": True,
    }
    if dict(shape.options).get("use_qlora"):
        from importlib.util import find_spec

        if find_spec("bitsandbytes") is None:
            raise NotMeasuredError("bitsandbytes is not installed")
    model = make_model(shape, room / "model", record.device)
    data = write_data(shape, make_rows(shape, steps), room / "data")
    record.free()
    on_gpu = record.device.type == "cuda"
    available = (
        torch.cuda.get_device_properties(record.device).total_memory
        if on_gpu
        else 8 * GIB
    )
    run = resolve_run({"model_name": str(model), "data_path": str(data), **options})
    placement = place(run, RankInfo(0, 1, 0, 1), record.device, available)
    predicted = MemoryEstimate(placement).in_step().total / GIB
    trained = train(record, model, data, room / "out", max_steps=steps, **options)
    if not on_gpu:
        return {
            "predicted_gb": predicted,
            "measured_gb": "no GPU, so no peak",
            "losses": trained.losses,
        }
    measured = trained.peak_bytes / GIB
    limit = LIMITS.get(shape.name, float("inf"))
    values = {
        "predicted_gb": predicted,
        "measured_gb": measured,
        "off": predicted / measured - 1,
    }
    require(measured <= limit, f"{values}: at most {limit} GB are allowed")
    require(
        abs(values["off"]) <= WITHIN,
        f"{values}: the prediction is off by more than {WITHIN:.0%}",
    )
    return values
