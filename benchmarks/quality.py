"""python -m benchmarks.quality: retrieval quality after equal training steps on both sides, over several seeds; with
--teachers, of a student with and without its teacher and of false negatives with and without a guide."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import distillation
from benchmarks.cases import Case, Row
from benchmarks.sides import SIDES
from benchmarks.train import machine
from vembed.cli.commands.demo import (
    demo_model,
    split_by_module,
    standard_library_pairs,
    write_pairs,
)

CASE = Case("quality", 128, batch_size=64, steps=12)
SIDES_BY_DEFAULT = ("vembed", "vembed-float32", "sentence-transformers")
NUM_VAL = 600
MARK = "RESULT "


def score_of_run(side: str, seed: int) -> float:
    """Return nDCG@10 on modules outside the training data, after training with one seed."""
    import vembed

    train, val = split_by_module(
        standard_library_pairs(), CASE.batch_size * CASE.steps, NUM_VAL
    )
    random.Random(seed).shuffle(train)
    rows: list[Row] = [
        {"query": pair.query, "positive": pair.positive} for pair in train
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_pairs(val, folder / "val.jsonl")
        trained = SIDES[side](CASE, demo_model(), folder, rows, CASE.steps)
        scores = vembed.evaluate(
            trained.folder, folder / "val.jsonl", torch_dtype="float32"
        )
    return float(scores["ndcg@10"])


def main() -> None:
    """Print nDCG@10 of both sides by seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--side",
        action="append",
        choices=SIDES,
        help=f"default: {', '.join(SIDES_BY_DEFAULT)}",
    )
    parser.add_argument(
        "--teachers", action="store_true", help="benchmarks.distillation"
    )
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments, others = parser.parse_known_args()
    if arguments.teachers:
        distillation.main(["--seeds", str(arguments.seeds), *others])
        return
    if others:
        parser.error(f"unknown arguments: {' '.join(others)}")
    if arguments.one:
        print(MARK + json.dumps(score_of_run(arguments.one[0], int(arguments.one[1]))))
        return
    print(machine() + "\n", flush=True)
    scores_by_side: dict[str, list[float]] = {
        side: [] for side in arguments.side or SIDES_BY_DEFAULT
    }
    print(
        "| seed | "
        + " | ".join(f"{side} nDCG@10" for side in scores_by_side)
        + " |\n|---|"
        + "---|" * len(scores_by_side)
    )
    for seed in range(arguments.seeds):
        for side, scores in scores_by_side.items():
            command = [
                sys.executable,
                "-m",
                "benchmarks.quality",
                "--one",
                side,
                str(seed),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            line = next(
                line for line in done.stdout.splitlines() if line.startswith(MARK)
            )
            scores.append(json.loads(line.removeprefix(MARK)))
        print(
            "| "
            + " | ".join(
                [
                    str(seed),
                    *(f"{scores[-1]:.4f}" for scores in scores_by_side.values()),
                ]
            )
            + " |",
            flush=True,
        )
    print(
        "| mean | "
        + " | ".join(
            f"{statistics.mean(scores):.4f}" for scores in scores_by_side.values()
        )
        + " |"
    )


if __name__ == "__main__":
    main()
