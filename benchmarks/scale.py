"""python -m benchmarks.scale: time and memory as batch size, data size and the number of processes grow."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES
from benchmarks.loss import measure
from benchmarks.train import machine, train_once
from benchmarks.worker import ask_once
from vembed.cli.commands.demo import demo_model
from vembed.config.schema import TrainConfig
from vembed.data.batching.schedule import BatchSchedule
from vembed.data.batching.stream import RankBatchStream
from vembed.data.example_store import open_examples
from vembed.data.features import Featuriser
from vembed.models.families.description import describe

LOSS_ROWS = (64, 1024, 8192, 65536)
LOSS_DIM = 1024
DATA_ROWS = (1_000, 100_000, 1_000_000, 10_000_000)
BATCH_SIZE = 64
NUM_BATCHES = 50
MARK = "RESULT "


def loss_result(num_rows: int) -> dict[str, float]:
    """Measure loss and gradient with three Matryoshka sizes and one hard negative per row."""
    size = measure(
        num_rows, num_rows, LOSS_DIM, [LOSS_DIM, LOSS_DIM // 2, LOSS_DIM // 4]
    )
    return {"seconds": size.seconds, "gib": size.beyond_gib}


def write_data(num_rows: int, path: Path) -> None:
    """Write short distinct pairs."""
    with path.open("w", encoding="utf-8") as file:
        for row in range(num_rows):
            file.write(
                json.dumps(
                    {
                        "query": f"what is number {row}",
                        "positive": f"it is the one after {row - 1}",
                    }
                )
                + "\n"
            )


def data_result(path: Path, num_rows: int) -> dict[str, float]:
    """Return seconds until the data is open, seconds per batch read and tokenised, and the memory of both."""
    config = TrainConfig(
        model_name=str(demo_model()), data_path=str(path), max_length=64
    )
    featuriser = Featuriser(describe(config.model))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    store = open_examples(config.data, str(path))
    opened = time.perf_counter()
    batch_schedule = BatchSchedule([num_rows], BATCH_SIZE, 0)
    stream = RankBatchStream(store, batch_schedule, featuriser, 0, 1, 0)
    stream.rank_batch(0)
    first = time.perf_counter()
    batches = min(NUM_BATCHES, batch_schedule.batches_per_epoch - 1)
    for number in range(1, batches + 1):
        stream.rank_batch(number)
    ended = time.perf_counter()
    return {
        "open": opened - began,
        "first": first - opened,
        "per_batch": (ended - first) / batches,
        "gib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20,
    }


def apart(**task: Any) -> dict[str, float]:
    """Run a task in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scale", "--task", json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(lines[-1].removeprefix(MARK))
    return result


def print_loss(most: int) -> None:
    """Print time and memory of the loss as the batch grows."""
    print(
        f"| rows, {LOSS_DIM:,d} dims, 3 sizes, a hard negative each | loss and gradient, s | GiB beyond them |"
    )
    print("|---|---|---|")
    for rows in (rows for rows in LOSS_ROWS if rows <= most):
        measured = apart(loss=rows)
        print(
            f"| {rows:,d} | {measured['seconds']:.2f} | {measured['gib']:.2f} |",
            flush=True,
        )


def print_data(most: int) -> None:
    """Print time and memory of the input side as the data grows. Each file is opened twice; the second time the
    index exists."""
    print(
        "| rows of data | opened first, s | opened again, s | a batch of 64 read and tokenised, ms | GiB |"
    )
    print("|---|---|---|---|---|")
    for rows in (rows for rows in DATA_ROWS if rows <= most):
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "data.jsonl"
            write_data(rows, path)
            first = apart(path=str(path), rows=rows)
            again = apart(path=str(path), rows=rows)
        print(
            f"| {rows:,d} | {first['open']:.1f} | {again['open']:.1f} | {1000 * again['per_batch']:.1f} "
            f"| {first['gib']:.2f} |",
            flush=True,
        )


def print_ranks() -> None:
    """Print the same global batch on more processes of one machine."""
    case = replace(
        next(case for case in CASES if case.name == "natural-128"),
        batch_size=60,
        steps=3,
    )
    print("| processes | samples/s | peak GB of the first |")
    print("|---|---|---|")
    for ranks in (1, 2, 3):
        measured = train_once(ask_once, "vembed", replace(case, ranks=ranks), 1)
        print(
            f"| {ranks} | {measured['samples_per_second']:.1f} | {measured['peak_gb']:.2f} |",
            flush=True,
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["loss", "data", "ranks"])
    parser.add_argument("--most-loss-rows", type=int, default=LOSS_ROWS[-1])
    parser.add_argument("--most-data-rows", type=int, default=DATA_ROWS[-1])
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        task = json.loads(arguments.task)
        result = (
            loss_result(task["loss"])
            if "loss" in task
            else data_result(Path(task["path"]), task["rows"])
        )
        print(MARK + json.dumps(result), flush=True)
        return
    print(machine() + "\n", flush=True)
    if arguments.only in (None, "loss"):
        print_loss(arguments.most_loss_rows)
    if arguments.only in (None, "data"):
        print_data(arguments.most_data_rows)
    if arguments.only in (None, "ranks"):
        print_ranks()


if __name__ == "__main__":
    main()
