"""python -m benchmarks.distillation: a two-layer student with and without its teacher, and false negatives with and
without a guide; nDCG@10 after equal steps, over several seeds."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vembed
from benchmarks.train import machine
from vembed.tools.demo import demo_model
from vembed.tools.demo_data import Pair, split_by_module, standard_library_pairs, write_pairs

NUM_VAL = 300
Row = dict[str, Any]


def student_of(model: Path, folder: Path, num_layers: int = 2) -> Path:
    """Write a student with the first layers of a model, and its other files."""
    from transformers import AutoModel

    shutil.copytree(model, folder)
    network = AutoModel.from_pretrained(model)
    network.encoder.layer = network.encoder.layer[:num_layers]
    network.config.num_hidden_layers = num_layers
    for path in folder.glob("*.safetensors"):
        path.unlink()
    network.save_pretrained(folder)
    return folder


def with_false_negatives(pairs: list[Pair]) -> list[Row]:
    """Return rows whose hard negative is their positive in other words: the same function, its lines joined."""
    return [
        {
            "query": pair.query,
            "positive": pair.positive,
            "negatives": [" ; ".join(pair.positive.split("\n")[1:]) or "pass"],
        }
        for pair in pairs
    ]


def train(folder: Path, rows: list[Row], val: list[Pair], seed: int, **options: Any) -> float:
    """Return nDCG@10 on modules outside the training data."""
    rows = list(rows)
    random.Random(seed).shuffle(rows)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    write_pairs(val, folder / "val.jsonl")
    output = folder / "out"
    shutil.rmtree(output, ignore_errors=True)
    settings = {
        "data_path": str(folder / "train.jsonl"), "val_data_path": str(folder / "val.jsonl"), "output_dir": str(output),
        "max_length": 64, "console": "quiet", "eval_before": False, "report_to": [], "seed": seed, **options,
    }  # fmt: skip
    return float(vembed.train(settings).metrics["ndcg@10"])


def main(words: Sequence[str] | None = None) -> None:
    """Print nDCG@10 of each variant by seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--variant", action="append", type=int, help="numbers of lines of the table; default: all")
    arguments = parser.parse_args(words)
    print(machine() + "\n", flush=True)
    teacher = demo_model()
    pairs, val = split_by_module(standard_library_pairs(), arguments.batch * arguments.steps, NUM_VAL)
    plain: list[Row] = [{"query": pair.query, "positive": pair.positive} for pair in pairs]
    common = {"batch_size": arguments.batch, "max_steps": arguments.steps}
    distilled = [
        {"loss": "infonce"},
        {"loss": "embedding", "teacher": str(teacher), "weight": 5.0},
        {"loss": "kl", "teacher": str(teacher), "distill_candidates": "batch"},
    ]
    guided = {"guide": str(teacher), "guide_margin": 0.1}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        student = str(student_of(teacher, folder / "student"))
        small = {**common, "model_name": student, "learning_rate": 2e-4}
        variants = {
            "student, infonce": (plain, small),
            "student, infonce + teacher": (plain, {**small, "losses": distilled}),
            "false negatives, no guide": (with_false_negatives(pairs), small),
            "false negatives, guide": (with_false_negatives(pairs), {**small, **guided}),
        }
        print("| variant | " + " | ".join(f"seed {seed}" for seed in range(arguments.seeds)) + " | mean |")
        print("|---|" + "---|" * (arguments.seeds + 1), flush=True)
        for number, (label, (rows, options)) in enumerate(variants.items(), 1):
            if arguments.variant and number not in arguments.variant:
                continue
            scores = []
            print(f"| {label} |", end="", flush=True)
            for seed in range(arguments.seeds):
                scores.append(train(folder, rows, val, seed, **options))
                print(f" {scores[-1]:.4f} |", end="", flush=True)
            print(f" {statistics.mean(scores):.4f} |", flush=True)


if __name__ == "__main__":
    main()
