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
from vembed.cli.commands.demo import (
    FunctionPair,
    demo_model,
    split_by_module,
    standard_library_pairs,
    write_pairs,
)

NUM_VAL = 300
NUM_FUNCTIONS = 2500
"""Functions of the training modules: some of them with their docstrings are the pairs, and all of them the texts."""
MAX_LENGTH = 32
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


def with_false_negatives(pairs: list[FunctionPair]) -> list[Row]:
    """Return rows whose hard negative is an answer too: the same function with its docstring."""
    rows = []
    for pair in pairs:
        head, _, body = pair.positive.partition("\n")
        again = f'{head}\n    """{pair.query}"""\n{body}'
        rows.append(
            {"query": pair.query, "positive": pair.positive, "negatives": [again]}
        )
    return rows


def train(
    folder: Path, rows: list[Row], val: list[FunctionPair], seed: int, **options: Any
) -> float:
    """Return nDCG@10 on modules outside the training data."""
    rows = list(rows)
    random.Random(seed).shuffle(rows)
    write(rows, folder / "train.jsonl")
    write_pairs(val, folder / "val.jsonl")
    output = folder / "out"
    shutil.rmtree(output, ignore_errors=True)
    settings = {
        "data_path": str(folder / "train.jsonl"),
        "val_data_path": str(folder / "val.jsonl"),
        "output_dir": str(output),
        "max_length": MAX_LENGTH,
        "console": "quiet",
        "eval_before": False,
        "eval_steps": None,
        "save_steps": None,
        "report_to": [],
        "seed": seed,
        **options,
    }
    return float(vembed.train(settings).metrics["ndcg@10"])


def write(rows: list[Row], path: Path) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def students(folder: Path, teacher: str, batch: int) -> dict[str, dict[str, Any]]:
    """Return the options of each student: without a teacher, with one on the same pairs, and with one on texts too."""
    embedding = {"loss": "embedding", "weight": 20.0}
    losses = [{"loss": "infonce"}, embedding]
    taught = {"teachers": [{"model": teacher, "max_length": MAX_LENGTH}]}
    sources = [
        {"path": str(folder / "train.jsonl"), "name": "pairs", "losses": losses},
        {
            "path": str(folder / "texts.jsonl"),
            "name": "texts",
            "losses": [embedding],
            "batch_size": 2 * batch,
        },
    ]
    return {
        "infonce": {},
        "infonce and embedding": {**taught, "losses": losses},
        "the same, and texts without pairs": {
            **taught,
            "data_path": sources,
            "homogeneous_batches": True,
            "sampling": "round_robin",
        },
    }


def main(words: Sequence[str] | None = None) -> None:
    """Print nDCG@10 of each variant by seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--steps",
        type=int,
        default=48,
        help="of a student; a third of it with false negatives",
    )
    parser.add_argument(
        "--pairs",
        type=int,
        default=64,
        help="pairs that a student learns from, in several epochs",
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument(
        "--variant",
        action="append",
        type=int,
        help="numbers of lines of the table; default: all",
    )
    arguments = parser.parse_args(words)
    print(machine() + "\n", flush=True)
    teacher = str(demo_model())
    few = arguments.steps // 3
    functions, val = split_by_module(standard_library_pairs(), NUM_FUNCTIONS, NUM_VAL)
    plain: list[Row] = [
        {"query": pair.query, "positive": pair.positive}
        for pair in functions[:: NUM_FUNCTIONS // arguments.pairs][: arguments.pairs]
    ]
    wrong = with_false_negatives(
        random.Random(0).sample(functions, arguments.batch * few)
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        student = str(student_of(Path(teacher), folder / "student"))
        write(
            [
                {"text": text}
                for pair in functions
                for text in (pair.query, pair.positive)
            ],
            folder / "texts.jsonl",
        )
        variants: dict[str, tuple[list[Row], dict[str, Any]]] = {
            f"student, {label}": (plain, {"max_steps": arguments.steps, **options})
            for label, options in students(folder, teacher, arguments.batch).items()
        }
        guided = {
            "teachers": [{"model": teacher, "name": "guide", "max_length": MAX_LENGTH}],
            "guide": "guide",
        }
        variants["false negatives, no guide"] = (wrong, {"max_steps": few})
        variants["false negatives, guide"] = (
            wrong,
            {
                "max_steps": few,
                "losses": [{"loss": "infonce", "guide_margin": 0.05}],
                **guided,
            },
        )
        common = {
            "batch_size": arguments.batch,
            "model_name": student,
            "learning_rate": 5e-4,
        }
        print(
            "| variant | "
            + " | ".join(f"seed {seed}" for seed in range(arguments.seeds))
            + " | mean |"
        )
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
