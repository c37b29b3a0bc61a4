"""The same training in Sentence Transformers on a GPU: the same rows in the same order, at its own best settings."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Row
from benchmarks.gpu_models import Shape
from benchmarks.gpu_record import NotMeasuredError, Record

MINI_BATCH_TOKENS = (16_384, 65_536)
"""Sizes of the peer's mini-batches that are tried where it has Gradient Cache; the fastest counts."""


@dataclass
class Elsewhere:
    """Measurements of the other side."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    settings: str = ""


def train_elsewhere(
    record: Record,
    shape: Shape,
    model: Path,
    rows: list[Row],
    images: Path,
    folder: Path,
    steps: int,
) -> Elsewhere:
    """Train with each of the peer's settings and return the fastest."""
    for package in ("sentence_transformers", "datasets"):  # its trainer needs both
        if find_spec(package) is None:
            raise NotMeasuredError(f"{package} is not installed")
    # Without Gradient Cache first, as vembed: the peer's cached loss runs every forward pass twice.
    settings = [0, *MINI_BATCH_TOKENS]
    if dict(shape.options).get("use_gradient_cache"):
        settings.remove(0)
    runs: list[Elsewhere] = []
    out_of_memory = 0
    for tokens in settings:
        if record.left() < 20:
            break
        room = folder / str(tokens)
        try:
            run = _train(record, shape, model, rows, images, room, steps, tokens)
        except torch.OutOfMemoryError:
            out_of_memory += 1
        else:
            runs.append(run)
            # One setting is enough where the graphs of the batch fit, and on a CPU.
            if tokens == 0 or record.is_small:
                break
        record.free()
    if not runs:
        reason = "it ran out of memory" if out_of_memory else "no time was left"
        raise NotMeasuredError(reason)
    return min(runs, key=lambda run: min(run.seconds))


def _train(
    record: Record,
    shape: Shape,
    model: Path,
    rows: list[Row],
    images: Path,
    folder: Path,
    steps: int,
    tokens: int,
) -> Elsewhere:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers import losses as st_losses
    from sentence_transformers.base.sampler import DefaultBatchSampler
    from torch.utils.data import SequentialSampler
    from transformers import TrainerCallback

    on_gpu = record.device.type == "cuda"
    flash = on_gpu and not shape.images and find_spec("flash_attn") is not None
    kernel = "flash_attention_2" if flash else "sdpa"
    lora = bool(dict(shape.options).get("use_lora"))
    # As vembed: weights that are trained in float32, frozen ones in the dtype of the file.
    arguments: dict[str, Any] = {"attn_implementation": kernel}
    arguments["torch_dtype"] = torch.bfloat16 if lora and on_gpu else torch.float32
    network = SentenceTransformer(
        str(model), device=str(record.device), model_kwargs=arguments
    )
    if not shape.images:
        network.max_seq_length = shape.max_length
    if lora:
        from peft import LoraConfig, TaskType

        rank = int(dict(shape.options)["lora_r"])
        network.add_adapter(
            LoraConfig(
                task_type=TaskType.FEATURE_EXTRACTION,
                r=rank,
                target_modules="all-linear",
            )
        )
    loss: Any
    if tokens:
        loss = st_losses.CachedMultipleNegativesRankingLoss(
            network, scale=20.0, mini_batch_num_tokens=tokens
        )
    else:
        loss = st_losses.MultipleNegativesRankingLoss(network, scale=20.0)
    clock = Elsewhere(
        settings=f"{kernel}, mini_batch_num_tokens={tokens}" if tokens else kernel
    )

    class Clock(TrainerCallback):  # type: ignore[misc]
        began = 0.0

        def on_step_begin(self, *arguments: Any, **options: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            self.began = time.perf_counter()

        def on_step_end(self, *arguments: Any, **options: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            clock.seconds.append(time.perf_counter() - self.began)

    def in_order(
        dataset: Any, batch_size: int, drop_last: bool, **_: Any
    ) -> DefaultBatchSampler:
        return DefaultBatchSampler(
            SequentialSampler(dataset), batch_size=batch_size, drop_last=drop_last
        )

    positives: list[Any] = [row["positive"] for row in rows]
    columns = Dataset.from_dict(
        {
            "anchor": [row["query"] for row in rows],
            "positive": [str(images / str(image)) for image in positives]
            if shape.images
            else positives,
        }
    )
    if shape.images:
        from datasets import Image

        columns = columns.cast_column("positive", Image())
    trainer = SentenceTransformerTrainer(
        model=network,
        args=SentenceTransformerTrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=shape.batch,
            max_steps=steps,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            bf16=on_gpu,
            use_cpu=not on_gpu,
            disable_tqdm=True,
            batch_sampler=in_order,
            dataloader_num_workers=0,
        ),
        train_dataset=columns,
        loss=loss,
        callbacks=[Clock()],
    )
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    clock.losses = [
        entry["loss"] for entry in trainer.state.log_history if "loss" in entry
    ]
    clock.peak_bytes = torch.cuda.max_memory_allocated() if on_gpu else 0
    return clock
