"""python -m benchmarks.forgetting: a task's score against a guard's, for each means against forgetting.

The task is the demo's: docstrings -> functions of the standard library. The guard is made of the installation's own
texts: one-line descriptions of packages -> their descriptions."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import vembed
from benchmarks.collections_here import docstrings, packages
from benchmarks.train import machine
from vembed.cli.commands.demo import demo_model

NUM_VAL = 200
NUM_TEXTS = 256
"""Texts of the guard's kind, of other packages, for the anchor."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument(
        "--variant",
        action="append",
        type=int,
        help="numbers of trainings; default: all",
    )
    parser.add_argument(
        "--rate", type=float, default=1e-3, help="a learning rate that is too high"
    )
    arguments = parser.parse_args()
    print(machine() + "\n", flush=True)
    task = docstrings(arguments.steps * arguments.batch, NUM_VAL)
    guard = packages(NUM_TEXTS, NUM_VAL)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train, val = task.write(folder / "task")
        _, guard_val = guard.write(folder / "guard")
        texts = folder / "texts.jsonl"
        texts.write_text(
            "".join(json.dumps({"text": row["positive"]}) + "\n" for row in guard.train)
        )
        common = {
            "model_name": str(demo_model()),
            "data_path": str(train),
            "val_data_path": str(val),
            "report_to": [],
            "batch_size": arguments.batch,
            "max_steps": arguments.steps,
            "max_length": 64,
            "learning_rate": arguments.rate,
            "eval_steps": arguments.steps,
            "save_steps": arguments.steps,
            "console": "quiet",
            "guards": [{"path": str(guard_val), "name": "packages", "max_drop": 1.0}],
        }
        anchored = {
            "path": str(texts),
            "name": "texts",
            "losses": [{"loss": "anchor", "weight": 5.0}],
        }
        variants: dict[str, dict[str, Any]] = {
            "nothing": {},
            "`learning_rate` a tenth": {"learning_rate": arguments.rate / 10},
            "`loss: anchor`, weight 2": {
                "losses": [{"loss": "infonce"}, {"loss": "anchor", "weight": 2.0}]
            },
            "anchor on other package descriptions": {
                "data_path": [str(train), anchored],
                "homogeneous_batches": True,
                "max_steps": 2 * arguments.steps,
                "eval_steps": 2 * arguments.steps,
                "save_steps": 2 * arguments.steps,
                "sampling": "round_robin",
            },
        }
        print("| means | task nDCG@10 | guard nDCG@10 |\n|---|---|---|", flush=True)
        for number, (label, options) in enumerate(variants.items()):
            if arguments.variant and number not in arguments.variant:
                continue
            output = folder / f"run-{number}"
            scores = vembed.train(
                {**common, **options, "output_dir": str(output)}
            ).metrics
            if number == min(arguments.variant or [0]):
                show(
                    "before training",
                    scores["before/ndcg@10"],
                    scores["before/guard/packages/ndcg@10"],
                )
            show(label, scores["ndcg@10"], scores["guard/packages/ndcg@10"])
        for share in (0.75, 0.5) if (folder / "run-0").is_dir() else ():
            merged = vembed.merge(
                [str(folder / "run-0" / "final")],
                str(folder / f"merged-{share}"),
                interpolate=share,
            )
            both = (
                vembed.evaluate(merged.model_dir, data)["ndcg@10"]
                for data in (val, guard_val)
            )
            show(f"`vembed merge --interpolate {share:g}`", *both)


def show(label: str, task: float, guard: float) -> None:
    """Print one line of the table."""
    print(f"| {label} | {task:.4f} | {guard:.4f} |", flush=True)


if __name__ == "__main__":
    main()
