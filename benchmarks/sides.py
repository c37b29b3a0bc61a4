"""Sides of a comparison. Each trains the given rows in the given order, the way its own users would."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.cases import MRL_DIMS, SEED, Case, Row, write_rows

LEARNING_RATE = 2e-5
TEMPERATURE = 0.05
ST_MINI_BATCH_TOKENS = 4096
"""Fastest value of 1,024 to 16,384 for the peer on two cores; also vembed's own default."""


@dataclass
class Trained:
    """Measurements of one side's training."""

    began: float = 0.0
    """Start of the loop, by time.perf_counter()."""
    first_batch: float = 0.0
    """Time at which the first batch was ready to be computed."""
    ends: list[float] = field(default_factory=list)
    """End time of each step."""
    losses: list[float] = field(default_factory=list)
    padding: list[float] = field(default_factory=list)
    """Fraction of padding in each step's tokens, if the side reports it."""
    folder: str = ""
    """Folder of the trained model."""
    stop_at_first_batch: bool = False

    def batch_is_ready(self) -> None:
        """Note that a batch is about to be computed. Call it before each batch."""
        self.first_batch = self.first_batch or time.perf_counter()
        if self.stop_at_first_batch:
            raise FirstBatch(self.first_batch)


class FirstBatch(BaseException):
    """Raised once the first batch is ready to be computed, with the time."""


Side = Callable[[Case, Path, Path, list[Row], int], Trained]
"""Function (case, model, empty folder, rows, steps) -> measurements."""


def run_vembed(
    case: Case,
    model: Path,
    folder: Path,
    rows: list[Row],
    steps: int,
    precision: str = "auto",
) -> Trained:
    """Train the way a user does, with `vembed.train`."""
    import vembed
    from vembed.training.step import TrainingStep

    if os.environ.get("RANK", "0") == "0":
        write_rows(rows, case.batch_size, folder / "data.jsonl")
    trained = Trained(stop_at_first_batch=case.only_starts)

    class Clock(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("set-up took"):
                trained.began = time.perf_counter()
            elif record.getMessage().startswith("step "):
                trained.ends.append(time.perf_counter())

    accumulate = TrainingStep.accumulate

    def noticed(*args: Any, **options: Any) -> Any:
        trained.batch_is_ready()
        return accumulate(*args, **options)

    clock = Clock()
    logging.getLogger("vembed").addHandler(clock)
    TrainingStep.accumulate = noticed  # type: ignore[method-assign]
    try:
        result = vembed.train(
            {
                "model_name": str(model),
                "data_path": str(folder / "data.jsonl"),
                "output_dir": str(folder / "out"),
                "global_batch_size": case.batch_size,
                "max_steps": steps,
                "max_length": case.max_length,
                "learning_rate": LEARNING_RATE,
                "temperature": TEMPERATURE,
                "lr_scheduler_type": "constant",
                "warmup_ratio": 0.0,
                "weight_decay": 0.0,
                "seed": SEED,
                "mixed_precision": precision,
                "logging_steps": 1,
                "report_to": [],
                "use_gradient_cache": True if case.cached else "auto",
                **({"mrl_dims": list(MRL_DIMS)} if case.mrl else {}),
            }
        )
    finally:
        TrainingStep.accumulate = accumulate  # type: ignore[method-assign]
        logging.getLogger("vembed").removeHandler(clock)
    lines = [
        json.loads(line)
        for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    trained.losses = [line["loss"] for line in lines if "loss" in line]
    trained.padding = [
        line["padding_fraction"] for line in lines if "padding_fraction" in line
    ]
    trained.folder = str(result.model_dir)
    return trained


def run_sentence_transformers(
    case: Case,
    model: Path,
    folder: Path,
    rows: list[Row],
    steps: int,
    bf16: bool = False,
) -> Trained:
    """Train the way its documentation says: its trainer, matching loss, collator and defaults."""
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

    network = SentenceTransformer(str(model), device="cpu")
    network.max_seq_length = case.max_length
    shared: dict[str, Any] = {
        "scale": 1 / TEMPERATURE,
        "gather_across_devices": case.ranks > 1,
    }
    loss: Any
    if case.cached:
        loss = st_losses.CachedMultipleNegativesRankingLoss(
            network, mini_batch_num_tokens=ST_MINI_BATCH_TOKENS, **shared
        )
    else:
        loss = st_losses.MultipleNegativesRankingLoss(network, **shared)
    if case.mrl:
        loss = st_losses.MatryoshkaLoss(network, loss, list(MRL_DIMS))
    columns: dict[str, list[Any]] = {
        "anchor": [row["query"] for row in rows],
        "positive": [row["positive"] for row in rows],
    }
    for number in range(case.negatives):
        columns[f"negative_{number + 1}"] = [row["negatives"][number] for row in rows]
    trained = Trained(stop_at_first_batch=case.only_starts)

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            trained.began = time.perf_counter()

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            trained.batch_is_ready()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            trained.ends.append(time.perf_counter())

    def in_order(
        dataset: Any, batch_size: int, drop_last: bool, **_: Any
    ) -> DefaultBatchSampler:
        return DefaultBatchSampler(
            SequentialSampler(dataset), batch_size=batch_size, drop_last=drop_last
        )

    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=case.batch_size // case.ranks,
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        seed=SEED,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=bf16,
        disable_tqdm=True,
        batch_sampler=in_order,
    )
    trainer = SentenceTransformerTrainer(
        model=network,
        args=arguments,
        train_dataset=Dataset.from_dict(columns),
        loss=loss,
        callbacks=[Clock()],
    )
    trainer.train()
    trained.losses = [
        entry["loss"] for entry in trainer.state.log_history if "loss" in entry
    ]
    if arguments.process_index == 0:
        network.save_pretrained(str(folder / "final"))
    trained.folder = str(folder / "final")
    return trained


def run_plain(
    case: Case, model: Path, folder: Path, rows: list[Row], steps: int
) -> Trained:
    """Train with a minimal loop: pad each column, one forward per column, cross entropy, AdamW."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModel.from_pretrained(model, add_pooling_layer=False).train()
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=LEARNING_RATE, weight_decay=0.0
    )

    def embed(texts: list[str]) -> torch.Tensor:
        inputs = tokenizer(
            texts,
            padding=True,
            truncation=True,
            max_length=case.max_length,
            return_tensors="pt",
        )
        hidden = network(**inputs).last_hidden_state
        mask = inputs["attention_mask"][:, :, None]
        return torch.nn.functional.normalize(
            (hidden * mask).sum(1) / mask.sum(1), dim=1
        )

    trained = Trained(began=time.perf_counter(), folder=str(folder))
    trained.first_batch = trained.began
    for start in range(0, steps * case.batch_size, case.batch_size):
        batch = rows[start : start + case.batch_size]
        texts = [str(row["positive"]) for row in batch]
        texts += [
            str(row["negatives"][number])
            for number in range(case.negatives)
            for row in batch
        ]
        scores = (
            embed([str(row["query"]) for row in batch]) @ embed(texts).T / TEMPERATURE
        )
        loss = torch.nn.functional.cross_entropy(scores, torch.arange(len(batch)))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        trained.ends.append(time.perf_counter())
        trained.losses.append(loss.item())
    return trained


SIDES: dict[str, Side] = {
    "vembed": run_vembed,
    "vembed-float32": partial(run_vembed, precision="no"),
    "sentence-transformers": run_sentence_transformers,
    "sentence-transformers-bf16": partial(run_sentence_transformers, bf16=True),
    "plain": run_plain,
}
IN_FLOAT32 = {
    "vembed": "vembed-float32",
    "sentence-transformers-bf16": "sentence-transformers",
}
"""The side that does the same in float32, by which losses are compared before anything is timed."""


def encode_vembed(
    model: Path,
    texts: list[str],
    max_length: int,
    precision: Literal["auto", "no"] = "auto",
) -> tuple[float, np.ndarray]:
    """Return the seconds for the texts with a loaded model, and their embeddings."""
    import vembed

    embedder = vembed.Embedder(
        with_max_length(model, max_length), mixed_precision=precision
    )
    embedder.encode(texts[:32])
    began = time.perf_counter()
    return_value = embedder.encode(texts)
    return time.perf_counter() - began, return_value


def encode_sentence_transformers(
    model: Path, texts: list[str], max_length: int, dtype: str = "float32"
) -> tuple[float, np.ndarray]:
    """Return the same for the peer. Its `encode` sorts by length, in batches of 32."""
    from sentence_transformers import SentenceTransformer

    network = SentenceTransformer(
        str(with_max_length(model, max_length)),
        device="cpu",
        model_kwargs={"dtype": dtype},
    )
    network.encode(texts[:32])
    began = time.perf_counter()
    embeddings = network.encode(texts)
    return time.perf_counter() - began, embeddings


def with_max_length(model: Path, max_length: int) -> Path:
    """Set another maximum text length in the folder's config and return the folder."""
    settings = model / "sentence_bert_config.json"
    settings.write_text(
        json.dumps(json.loads(settings.read_text()) | {"max_seq_length": max_length})
    )
    return model


ENCODERS: dict[str, Callable[[Path, list[str], int], tuple[float, np.ndarray]]] = {
    "vembed": encode_vembed,
    "vembed-float32": partial(encode_vembed, precision="no"),
    "sentence-transformers": encode_sentence_transformers,
    "sentence-transformers-bf16": partial(
        encode_sentence_transformers, dtype="bfloat16"
    ),
}
