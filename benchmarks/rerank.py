"""python -m benchmarks.rerank: a reranker trained by vembed and by CrossEncoder's trainer, alternately, as a table."""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cases import SEED, Case, Row, rows_of, write_rows
from benchmarks.sides import LEARNING_RATE, Trained
from benchmarks.train import AGREEMENT, machine, ratio_cell

MARK = "ANSWER "
NO_DROPOUT_STEPS = 2
"""Steps without dropout, by whose losses the two sides are compared before anything is timed."""


@dataclass(frozen=True)
class RerankCase:
    """Training settings, the same on both sides."""

    name: str
    loss: str
    documents: int
    """Documents of each query: one positive, and negatives."""
    queries: int
    """Queries of a batch."""
    steps: int = 5
    """The first is warm-up."""
    max_length: int = 256
    memory_gib: float = 0.0
    """Limit of the process's data, in GiB. 0: none."""

    def rows(self, steps: int, skip: int = 0) -> list[Row]:
        """Return the rows of so many batches."""
        case = Case(
            self.name,
            self.max_length,
            batch_size=self.queries,
            negatives=self.documents - 1,
        )
        return rows_of(case, steps, skip=skip)


CASES = (
    RerankCase("bce, lists of 8", "bce", documents=8, queries=8),
    RerankCase("lambda, lists of 8", "lambda", documents=8, queries=8),
)
IN_LITTLE_MEMORY = RerankCase(
    "lambda, 4 lists of 64, at most 6 GiB",
    "lambda",
    documents=64,
    queries=4,
    steps=2,
    memory_gib=6.0,
)


def save_model(folder: Path, dropout: bool) -> Path:
    """Save the demo's model with one new label, the same one for both sides."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from vembed.cli.commands.demo import demo_model

    torch.manual_seed(SEED)
    rates = {} if dropout else dict.fromkeys(("hidden", "attention_probs"), 0.0)
    settings = {f"{part}_dropout_prob": rate for part, rate in rates.items()}
    model = AutoModelForSequenceClassification.from_pretrained(
        demo_model(), num_labels=1, **settings
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(demo_model()).save_pretrained(folder)
    return folder


def run_vembed(
    case: RerankCase,
    model: Path,
    folder: Path,
    rows: list[Row],
    steps: int,
    precision: str,
) -> Trained:
    """Train the way a user does."""
    import logging

    import vembed

    write_rows(rows, case.queries, folder / "data.jsonl")
    trained = Trained()

    class Clock(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("step "):
                trained.ends.append(time.perf_counter())

    clock = Clock()
    logging.getLogger("vembed").addHandler(clock)
    try:
        vembed.train(
            {
                "task": "rerank",
                "model_name": str(model),
                "data_path": str(folder / "data.jsonl"),
                "output_dir": str(folder / "out"),
                "loss": case.loss,
                "global_batch_size": case.queries,
                "max_steps": steps,
                "max_length": case.max_length,
                "learning_rate": LEARNING_RATE,
                "lr_scheduler_type": "constant",
                "warmup_ratio": 0.0,
                "weight_decay": 0.0,
                "seed": SEED,
                "mixed_precision": precision,
                "logging_steps": 1,
                "report_to": [],
            }
        )
    finally:
        logging.getLogger("vembed").removeHandler(clock)
    for line in (folder / "out" / "metrics.jsonl").read_text().splitlines():
        figures = json.loads(line)
        if "loss" in figures:
            trained.losses.append(figures["loss"])
    return trained


def run_cross_encoder(
    case: RerankCase,
    model: Path,
    folder: Path,
    rows: list[Row],
    steps: int,
    precision: str,
) -> Trained:
    """Train the way its documentation says: its trainer, the same loss, and its defaults."""
    from datasets import Dataset
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.sampler import DefaultBatchSampler
    from sentence_transformers.cross_encoder import (
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments,
        losses,
    )
    from torch.utils.data import SequentialSampler
    from transformers import TrainerCallback

    network = CrossEncoder(str(model), device="cpu", max_length=case.max_length)
    labels = [1.0] + [0.0] * (case.documents - 1)
    documents = [[row["positive"], *row["negatives"]] for row in rows]
    columns: dict[str, list[Any]]
    if case.loss == "bce":  # takes pairs
        loss: Any = losses.BinaryCrossEntropyLoss(network)
        batch_size = case.queries * case.documents
        columns = {
            "query": [row["query"] for row in rows for _ in labels],
            "document": [text for texts in documents for text in texts],
            "label": labels * len(rows),
        }
    else:  # takes lists
        loss = losses.LambdaLoss(network)
        batch_size = case.queries
        columns = {
            "query": [row["query"] for row in rows],
            "documents": documents,
            "labels": [labels for _ in rows],
        }
    trained = Trained()

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            trained.ends.append(time.perf_counter())

    def in_order(
        dataset: Any, batch_size: int, drop_last: bool, **_: Any
    ) -> DefaultBatchSampler:
        return DefaultBatchSampler(
            SequentialSampler(dataset), batch_size=batch_size, drop_last=drop_last
        )

    trainer = CrossEncoderTrainer(
        model=network,
        args=CrossEncoderTrainingArguments(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=batch_size,
            max_steps=steps,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            seed=SEED,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=precision == "bf16",
            disable_tqdm=True,
            batch_sampler=in_order,
        ),
        train_dataset=Dataset.from_dict(columns),
        loss=loss,
        callbacks=[Clock()],
    )
    trainer.train()
    trained.losses = [
        line["loss"] for line in trainer.state.log_history if "loss" in line
    ]
    return trained


SIDES = {
    "vembed": (run_vembed, "auto"),
    "cross-encoder": (run_cross_encoder, "no"),
    "cross-encoder-bf16": (run_cross_encoder, "bf16"),
}
"""How a side trains, and its precision in the timed steps. Losses are compared in float32."""


def measure(side: str, case: RerankCase) -> dict[str, Any]:
    """Return the losses without dropout, and samples per second and peak memory of the timed steps."""
    if case.memory_gib:
        limit = int(case.memory_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    run, precision = SIDES[side]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("exact", "timed"):
            (folder / part).mkdir()
        losses: list[float] = []
        if not case.memory_gib:
            model = save_model(folder / "no-dropout", dropout=False)
            rows = case.rows(NO_DROPOUT_STEPS)
            losses = run(
                case, model, folder / "exact", rows, NO_DROPOUT_STEPS, "no"
            ).losses
        model = save_model(folder / "model", dropout=True)
        rows = case.rows(case.steps, skip=NO_DROPOUT_STEPS)
        ends = run(case, model, folder / "timed", rows, case.steps, precision).ends
    seconds = float(np.diff(ends).mean())
    return {
        "losses": losses,
        "samples_per_second": case.queries * case.documents / seconds,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def ask(side: str, case: RerankCase) -> dict[str, Any]:
    """Measure a case in a fresh process. Return {"error": its last line} if it fails."""
    task = json.dumps([side, asdict(case)])
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.rerank", "--task", task],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"},
    )
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return answer
    return {"error": (done.stderr.strip().splitlines() or ["killed"])[-1]}


def compare(case: RerankCase, peer: str, repeats: int) -> str:
    """Run both sides alternately and return the row of the table."""
    ours = []
    theirs = []
    for _ in range(repeats):
        ours.append(ask("vembed", case))
        theirs.append(ask(peer, case))
        for side in (ours[-1], theirs[-1]):
            if "error" in side:
                raise SystemExit(f"{case.name}: {side['error']}")
    pairs = zip(ours[0]["losses"], theirs[0]["losses"], strict=True)
    off = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
    if off > AGREEMENT:
        raise SystemExit(
            f"{case.name}: losses {ours[0]['losses']} and {theirs[0]['losses']}: not the same work"
        )
    pairs = zip(ours, theirs, strict=True)
    ratios = [
        ours["samples_per_second"] / theirs["samples_per_second"]
        for ours, theirs in pairs
    ]
    cells = [case.name, str(case.queries * case.documents)]
    for side in (ours, theirs):
        rate = statistics.median(answer["samples_per_second"] for answer in side)
        cells.append(f"{rate:.1f}, {max(answer['peak_gb'] for answer in side):.2f} GB")
    return f"| {' | '.join([*cells, ratio_cell(ratios), f'{off:.0e}'])} |"


def main() -> None:
    """Parse the arguments, run the cases, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", choices=list(SIDES)[1:], default="cross-encoder")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        side, settings = json.loads(arguments.task)
        print("\n" + MARK + json.dumps(measure(side, RerankCase(**settings))))
        return
    print(f"{machine()}. Ratios above 1: vembed is faster.\n")
    print(
        f"| case | pairs a batch | vembed pairs/s | {arguments.peer} pairs/s | ratio (each run) | loss difference |"
    )
    print("|---|---|---|---|---|---|")
    for case in CASES:
        print(compare(case, arguments.peer, arguments.repeats), flush=True)
    print(f"\n{IN_LITTLE_MEMORY.name}:")
    for side in ("vembed", arguments.peer):
        answer = ask(side, IN_LITTLE_MEMORY)
        rate = answer.get("samples_per_second")
        print(f"- {side}: {answer['error'] if rate is None else f'{rate:.1f} pairs/s'}")


if __name__ == "__main__":
    main()
