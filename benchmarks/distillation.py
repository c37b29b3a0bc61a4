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


def losses_of(teacher: str) -> dict[str, list[dict[str, Any]] | None]:
    """Return the losses of each student."""
    infonce = {"loss": "infonce"}
    kl = {"loss": "kl", "teacher": teacher, "distill_candidates": "batch"}
    relational = {"loss": "relational", "teacher": teacher, "weight": 30.0}
    embedding = {"loss": "embedding", "teacher": teacher, "weight": 10.0}
    return {
        "infonce": None,
        "infonce, kl": [infonce, {**kl, "weight": 3.0}],
        "infonce, relational, kl": [infonce, relational, kl],
        "infonce, embedding, kl": [infonce, embedding, kl],
    }


def main(words: Sequence[str] | None = None) -> None:
    """Print nDCG@10 of each variant by seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=96, help="of a student; a quarter of it with false negatives")
    parser.add_argument("--pairs", type=int, default=512, help="pairs that a student learns from, in several epochs")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--variant", action="append", type=int, help="numbers of lines of the table; default: all")
    arguments = parser.parse_args(words)
    print(machine() + "\n", flush=True)
    teacher, few = str(demo_model()), arguments.steps // 4
    pairs, val = split_by_module(standard_library_pairs(), max(arguments.pairs, arguments.batch * few), NUM_VAL)
    plain: list[Row] = [{"query": pair.query, "positive": pair.positive} for pair in pairs[: arguments.pairs]]
    wrong = with_false_negatives(pairs[: arguments.batch * few])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        student = str(student_of(Path(teacher), folder / "student"))
        variants: dict[str, tuple[list[Row], dict[str, Any]]] = {
            f"student, {label}": (plain, {"max_steps": arguments.steps, "losses": losses})
            for label, losses in losses_of(teacher).items()
        }
        guided = {"guide": teacher, "guide_margin": 0.1}
        variants["false negatives, no guide"] = (wrong, {"max_steps": few})
        variants["false negatives, guide"] = (wrong, {"max_steps": few, **guided})
        common = {"batch_size": arguments.batch, "model_name": student, "learning_rate": 5e-4}
        print("| variant | " + " | ".join(f"seed {seed}" for seed in range(arguments.seeds)) + " | mean |")
        print("|---|" + "---|" * (arguments.seeds + 1), flush=True)
        for number, (label, (rows, options)) in enumerate(variants.items(), 1):
            if arguments.variant and number not in arguments.variant:
                continue
            scores = []
            print(f"| {label} |", end="", flush=True)
            for seed in range(arguments.seeds):
                scores.append(train(folder, rows, val, seed, **common, **options))
                print(f" {scores[-1]:.4f} |", end="", flush=True)
            print(f" {statistics.mean(scores):.4f} |", flush=True)


if __name__ == "__main__":
    main()
