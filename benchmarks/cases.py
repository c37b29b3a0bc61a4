"""Benchmark cases for both sides, and their data: docstrings and functions of the running standard library."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vembed.cli.commands.demo import FunctionPair, demo_model, standard_library_pairs
from vembed.data.batching.schedule import BatchSchedule

SEED = 42
MRL_DIMS = (384, 256, 128, 64)
NUM_HARD = 64
"""Pairs at the end, whose functions are hard negatives of the others. None is a row's own, which vembed would mask."""
Row = dict[str, str | list[str]]


@dataclass(frozen=True)
class Case:
    """Training settings, the same on both sides."""

    name: str
    max_length: int
    batch_size: int = 64
    steps: int = 6
    """Number of steps, the first of which is warm-up. Some steps without dropout precede them, to compare losses."""
    uniform: bool = False
    """True if every text fills max_length."""
    negatives: int = 0
    """Hard negatives per row. They repeat from row to row."""
    cached: bool = False
    """True if both sides use Gradient Cache."""
    mrl: bool = False
    ranks: int = 1
    """Processes. Each gets an equal part of the batch and of the cores."""
    num_rows: int = 0
    """Rows of data. 0: as many as the steps need."""
    only_starts: bool = False
    """True to stop when the first batch is ready."""


CASES = (
    Case("natural-128", 128),
    Case("natural-256", 256, steps=5),
    Case("natural-512", 512, steps=3),
    Case("uniform-128", 128, steps=4, uniform=True),
    Case("uniform-192", 192, steps=4, uniform=True),
    Case("negatives-128", 128, steps=4, negatives=3),
    Case("mrl-128", 128, mrl=True),
    Case("cached-1024", 128, batch_size=1024, steps=2, cached=True),
    Case("ranks-2", 128, ranks=2),
)
QUICK_CASES = (
    Case("natural-128", 128, batch_size=24, steps=3),
    Case("natural-256", 256, batch_size=16, steps=3),
    Case("uniform-128", 128, batch_size=8, steps=3, uniform=True),
    Case("cached-48", 128, batch_size=48, steps=2, cached=True),
)
QUICK_MATRYOSHKA = Case("mrl-128", 128, batch_size=24, steps=3, mrl=True)
"""Smaller cases, about three minutes in all."""

START_UP = Case("start-up", 128, steps=1, num_rows=2000, only_starts=True)


@cache
def shuffled_pairs() -> list[FunctionPair]:
    """Return all pairs in the order in which every case takes them."""
    pairs = standard_library_pairs()
    random.Random(SEED).shuffle(pairs)
    return pairs


def rows_of(case: Case, steps: int, *, skip: int = 0) -> list[Row]:
    """Return the rows of `batches` batches in training order, after `skip` batches."""
    pairs = shuffled_pairs()
    draw = random.Random(SEED)
    trained = {
        text for pair in pairs[:-NUM_HARD] for text in (pair.query, pair.positive)
    }
    hard = [pair.positive for pair in pairs[-NUM_HARD:] if pair.positive not in trained]
    rows: list[Row] = []
    for number in range(
        skip * case.batch_size, max((skip + steps) * case.batch_size, case.num_rows)
    ):
        pair = pairs[number % len(pairs)]
        row: Row = {"query": pair.query, "positive": pair.positive}
        if case.uniform:
            row = {
                key: " ".join([str(value)] * (1 + case.max_length // 4))
                for key, value in row.items()
            }
        if case.negatives:
            row["negatives"] = draw.sample(hard, case.negatives)
        rows.append(row)
    return rows


def write_rows(rows: list[Row], batch_size: int, path: Path) -> None:
    """Write a JSONL file ordered so that vembed's shuffling yields batches 0, 1, 2, ... of the rows."""
    batch_schedule = BatchSchedule([len(rows)], batch_size, SEED)
    order = [
        int(index)
        for step in range(batch_schedule.batches_per_epoch)
        for index in batch_schedule.batch(0, step)
    ]
    order += sorted(set(range(len(rows))) - set(order))  # rows that do not fill a batch
    placed: list[Row] = [{} for _ in rows]
    for row, index in zip(rows, order, strict=True):
        placed[index] = row
    path.write_text("".join(json.dumps(row) + "\n" for row in placed), encoding="utf-8")


def model_without_dropout(folder: Path) -> Path:
    """Copy the model with dropout 0, so that the losses of both sides can be compared."""
    target = folder / "no-dropout"
    shutil.copytree(demo_model(), target)
    config = json.loads((target / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (target / "config.json").write_text(json.dumps(config))
    return target
