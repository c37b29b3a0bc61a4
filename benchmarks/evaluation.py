"""python -m benchmarks.evaluation: time and memory of an evaluation as the corpus grows.

The model is a table of token vectors, which costs little: what is measured is reading, tokenising and searching.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.train import machine
from tests.tiny import tiny_bert_st
from vembed.config.schema import TrainConfig
from vembed.data.features import Featuriser
from vembed.evaluation.dataset import open_eval_data
from vembed.evaluation.scores import evaluate_model
from vembed.models.families.description import describe

WORDS = (
    "red",
    "green",
    "blue",
    "small",
    "large",
    "old",
    "new",
    "fast",
    "slow",
    "warm",
    "cold",
    "cat",
    "dog",
    "bird",
)
WIDTH = 384
MARK = "RESULT "
GIB = 2**30


class TokenVectors(nn.Module):
    """A model whose embeddings are means of token vectors."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vectors = nn.EmbeddingBag(vocabulary, WIDTH, mode="sum")

    def forward(self, parts: list[tuple[str, dict[str, Tensor]]]) -> list[Tensor]:
        """Return [n, WIDTH] for each part."""
        return [
            self.vectors(
                inputs["input_ids"], per_sample_weights=inputs["attention_mask"].float()
            )
            if "attention_mask" in inputs
            else self.vectors(inputs["input_ids"])
            for _, inputs in parts
        ]


def write_folder(folder: Path, num_documents: int, num_queries: int) -> None:
    """Write a BEIR-style folder of texts of 4 to 24 words and a number."""
    draw = random.Random(0)
    bodies = [" ".join(draw.choices(WORDS, k=draw.randint(4, 24))) for _ in range(4096)]
    with (folder / "corpus.jsonl").open("w") as file:
        for row in range(num_documents):
            file.write(f'{{"_id": "d{row}", "text": "{bodies[row % 4096]} {row}"}}\n')
    with (folder / "queries.jsonl").open("w") as file:
        for row in range(num_queries):
            file.write(
                f'{{"_id": "q{row}", "text": "{bodies[row % 4096]} {row} {row}"}}\n'
            )
    (folder / "qrels").mkdir()
    lines = (f"q{row}\td{row}\t1\n" for row in range(num_queries))
    (folder / "qrels" / "test.tsv").write_text("".join(lines))


def result(folder: Path) -> dict[str, float]:
    """Evaluate in this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tiny_bert_st(folder / "model")
    config = TrainConfig(model_name=str(folder / "model"), data_path="-")
    featuriser = Featuriser(describe(config.model))
    began = time.perf_counter()
    data = open_eval_data(config.data, str(folder))
    opened = time.perf_counter()
    vocabulary = json.loads((folder / "model" / "config.json").read_text())[
        "vocab_size"
    ]
    scores = evaluate_model(
        TokenVectors(vocabulary),
        featuriser,
        data,
        config.evaluation,
        None,
        ks=[10, 100],
    )
    return {
        "open": opened - began,
        "evaluate": time.perf_counter() - opened,
        "gib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20,
        "ndcg": scores["ndcg@10"],
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each number of documents."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--documents", type=int, nargs="+", default=[50_000, 500_000, 5_000_000]
    )
    parser.add_argument("--queries", type=int, default=256)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.folder is not None:
        print(MARK + json.dumps(result(arguments.folder)))
        return
    print(
        f"{machine()}\n\n| documents | embeddings, GiB | opened, s | evaluated, s | peak beyond the start, GiB |"
    )
    print("|---|---|---|---|---|", flush=True)
    for num_documents in arguments.documents:
        with tempfile.TemporaryDirectory() as name:
            write_folder(Path(name), num_documents, arguments.queries)
            command = [sys.executable, "-m", "benchmarks.evaluation", "--folder", name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
        if not lines:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        measured = json.loads(lines[-1].removeprefix(MARK))
        print(
            f"| {num_documents:,d} | {4 * WIDTH * num_documents / GIB:.2f} | {measured['open']:.1f} | "
            f"{measured['evaluate']:.1f} | {measured['gib']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
