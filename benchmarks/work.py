"""Useful arithmetic of a step, cost of padding, and the machine's speed on a plain matrix product."""

from __future__ import annotations

import json
import time

import torch

from benchmarks.cases import Case, rows_of
from vembed.cli.commands.demo import demo_model
from vembed.config.schema import ModelSection
from vembed.data.batching import rank_batch
from vembed.data.examples import Item, Kind
from vembed.data.features import Featuriser
from vembed.models.families.description import describe
from vembed.parallel.devices import bf16_instructions
from vembed.parallel.placement import Precision, precision_of_use
from vembed.parallel.step_memory import CPU_MICRO_BATCH_TOKENS


def precision() -> Precision:
    """Return the precision that `mixed_precision: auto` takes for the model of the cases on this machine."""
    return precision_of_use(
        str(demo_model()), torch.device("cpu"), bf16_instructions()
    ).value


def matrix_peak(dtype: torch.dtype = torch.float32) -> float:
    """Return the FLOP/s of a matrix product of the model's feed-forward size; the best of a few runs."""
    left = torch.randn(4096, 384, dtype=dtype)
    right = torch.randn(384, 1536, dtype=dtype)
    best = float("inf")
    for _ in range(30):
        began = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - began)
    return 2 * 4096 * 384 * 1536 / best


def useful_work(case: Case, skip: int = 0) -> tuple[float, float, tuple[float, float]]:
    """Return, per timed step (after `skip` others): distinct tokens without padding; their FLOPs forward and
    backward, and with Gradient Cache's extra forward; the fraction of padding in sorted micro-batches, for models
    that pad, and in whole columns."""
    settings = json.loads((demo_model() / "config.json").read_text())
    hidden = settings["hidden_size"]
    inner = settings["intermediate_size"]
    layers = settings["num_hidden_layers"]
    featuriser = Featuriser(
        describe(
            ModelSection(
                model_name=str(demo_model()),
                max_length=case.max_length,
            )
        )
    )
    rows = rows_of(case, case.steps - 1, skip=skip)
    tokens = flops = padded = by_column = 0.0
    steps = len(rows) // case.batch_size
    for start in range(0, steps * case.batch_size, case.batch_size):
        batch = rows[start : start + case.batch_size]
        columns: list[list[tuple[Item, Kind]]] = [
            [(Item(str(row["query"])), "query") for row in batch],
            [(Item(str(row["positive"])), "document") for row in batch],
            *[
                [(Item(row["negatives"][number]), "document") for row in batch]
                for number in range(case.negatives)
            ],
        ]
        lengths = [
            [features.length for features in featuriser.features(column)]
            for column in columns
        ]
        by_column += sum(len(column) * max(column) for column in lengths)
        distinct = {
            features.key: features.length
            for column in columns
            for features in featuriser.features(column)
        }
        flat = list(distinct.values())
        padded += rank_batch.padded_tokens(
            flat, rank_batch.split_by_length(flat, CPU_MICRO_BATCH_TOKENS)
        )
        tokens += sum(flat)
        per_token = 2 * (4 * hidden * hidden + 2 * hidden * inner)
        flops += layers * sum(
            length * per_token + 4 * length * length * hidden for length in flat
        )
    passes = 4 if case.cached else 3
    return (
        tokens / steps,
        passes * flops / steps,
        (1 - tokens / padded, 1 - tokens / by_column),
    )
