"""python -m benchmarks.defaults: vembed's defaults against a small search by hand, or against sentence-transformers.

    python -m benchmarks.defaults search  --collection docstrings --size 300 --family encoder
    python -m benchmarks.defaults peers   --collection characters --size 300

`search`: the gain of the four-line config over the model as it is, as a share of the best gain among the searched
values. `peers`: the same training data by the four-line config and by sentence-transformers at its documented settings
(one epoch, batches of 16 without duplicates, learning rate 2e-5, 10 % warm-up). Both are scored on a test set that
neither has seen; vembed chooses its checkpoint on the validation set. Each line is printed and appended to a JSONL.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.collections_here import COLLECTIONS, Collection
from benchmarks.tiny_models import MODELS
from benchmarks.train import machine

Options = dict[str, Any]

LORA: Options = {"use_lora": True}
SEARCHED: dict[str, list[Options]] = {
    "rate": [{"learning_rate": value} for value in (1e-5, 2e-5, 1e-4, 2e-4)],
    "scratch": [{"learning_rate": value} for value in (1e-4, 2e-3, 5e-3)],
    "lora": [{**LORA, "learning_rate": value} for value in (2e-4, 1e-3)],
    "lora_r": [{**LORA, "lora_r": value} for value in (4, 64)],
    "epochs": [{"epochs": value} for value in (1, 3, 12)],
    "temperature": [{"temperature": value} for value in (0.02, 0.1)],
    "batch": [{"batch_size": value} for value in (16, 128)],
    "warmup": [{"warmup_ratio": value} for value in (0.0, 0.3)],
    "negatives": [{"bidirectional": True}],
    "decay": [{"weight_decay": value} for value in (0.0, 0.1)],
}
"""Values that are tried by hand, one option at a time."""


def parts(name: str, size: int, num_val: int) -> tuple[Collection, Collection]:
    """Return a collection and one with the same training data whose validation rows are the test set."""
    both = COLLECTIONS[name](size, 2 * num_val)
    val, test = both.val[::2], both.val[1::2]
    return Collection(both.train, val, both.loss), Collection(both.train, test, both.loss)


def train(data: Collection, folder: Path, model: Path, options: Options, max_length: int, seed: int) -> Path:
    """Train by the four-line config with `options`; return the model."""
    import vembed

    train_file, val_file = data.write(folder / "data")
    config = {
        "model_name": str(model),
        "data_path": str(train_file),
        "val_data_path": str(val_file),
        "output_dir": str(folder / "run"),
        "loss": data.loss,
        "max_length": max_length,
        "seed": seed,
        "report_to": "none",
        "console": "quiet",
        **options,
    }
    return vembed.train(config).model_dir


def train_with_peer(data: Collection, folder: Path, model: Path, max_length: int, seed: int) -> Path:
    """Train by sentence-transformers as its documentation does; return the model."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers import losses as st_losses
    from sentence_transformers.training_args import BatchSamplers

    network = SentenceTransformer(str(model), device="cpu")
    network.max_seq_length = max_length
    is_scored = data.loss == "cosent"
    loss: Any = st_losses.CoSENTLoss(network) if is_scored else st_losses.MultipleNegativesRankingLoss(network)
    columns = {name: [row[name] for row in data.train] for name in data.train[0]}
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder / "out"),
        num_train_epochs=1,
        per_device_train_batch_size=16,
        learning_rate=2e-5,
        warmup_ratio=0.1,
        batch_sampler=BatchSamplers.BATCH_SAMPLER if is_scored else BatchSamplers.NO_DUPLICATES,
        seed=seed,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = SentenceTransformerTrainer(
        model=network, args=arguments, train_dataset=Dataset.from_dict(columns), loss=loss
    )
    trainer.train()
    network.save_pretrained(str(folder / "final"))
    return folder / "final"


def score(model: Path, data: Collection, folder: Path) -> float:
    """Return the score on a test set."""
    import vembed

    _, file = data.write(folder / "test")
    return float(vembed.evaluate(model, file)[data.metric])


def peers(arguments: argparse.Namespace) -> Iterator[Options]:
    """Yield the scores of both sides by seed."""
    data, test = parts(arguments.collection, arguments.size, arguments.val)
    model = MODELS[arguments.family](Path(tempfile.mkdtemp()))
    for seed in range(arguments.seeds):
        found: Options = {"collection": arguments.collection, "size": arguments.size, "seed": seed}
        folder = Path(tempfile.mkdtemp())
        if seed == 0:
            found["before"] = score(model, test, folder)
        ours = train(data, folder / "ours", model, dict(arguments.option), arguments.max_length, seed)
        found["vembed"] = score(ours, test, folder)
        theirs = train_with_peer(data, folder / "theirs", model, arguments.max_length, seed)
        found["sentence-transformers"] = score(theirs, test, folder)
        shutil.rmtree(folder)
        yield found


def search(arguments: argparse.Namespace) -> Iterator[Options]:
    """Yield the mean scores on the validation data of the defaults and of each searched value, over the seeds."""
    data, test = parts(arguments.collection, arguments.size, arguments.val)
    model = MODELS[arguments.family](Path(tempfile.mkdtemp()))
    folder = Path(tempfile.mkdtemp())
    before = score(model, test, folder)
    tried: list[Options] = [{}, *(one for group in arguments.groups for one in SEARCHED[group])]
    gains: list[float] = []
    for options in tried:
        scores = []
        for seed in range(arguments.seeds):
            own = folder / "run"
            scores.append(score(train(data, own, model, options, arguments.max_length, seed), test, folder))
            shutil.rmtree(own)
        gains.append(statistics.mean(scores) - before)
        yield {
            "collection": arguments.collection, "size": arguments.size, "family": arguments.family, "options": options,
            "before": before, "scores": scores, "gain": gains[-1],
            "defaults_to_best": gains[0] / max(gains) if max(gains) > 0 else None,
        }  # fmt: skip
    shutil.rmtree(folder)


def main() -> None:
    """Run one comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["search", "peers"])
    parser.add_argument("--collection", choices=list(COLLECTIONS), default="docstrings")
    parser.add_argument("--family", choices=list(MODELS), default="encoder")
    parser.add_argument("--size", type=int, default=300)
    parser.add_argument("--val", type=int, default=150, help="rows of the validation set and of the test set")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-length", type=int, default=32)
    parser.add_argument("--groups", nargs="*", default=list(SEARCHED), choices=list(SEARCHED))
    parser.add_argument("--option", nargs="*", default=[], type=lambda text: tuple(text.split("=", 1)))
    parser.add_argument("--output", default="defaults.jsonl")
    arguments = parser.parse_args()
    print(machine(), flush=True)
    for line in peers(arguments) if arguments.what == "peers" else search(arguments):
        print(json.dumps(line), flush=True)
        with Path(arguments.output).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
