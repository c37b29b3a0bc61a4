"""python -m benchmarks.mining: hard negatives by vembed and sentence-transformers, with half of the positives hidden.

The documents are halves of real texts (the first lines of a function and the rest, the first sentences of a package's
description and the rest), so a docstring or a package's line about itself has two positives. One of them is known, the
other one is hidden in the corpus: a miner that takes it has mined a false negative.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.collections_here import PACKAGES
from vembed.cli.commands.demo import (
    FunctionPair,
    demo_model,
    split_by_module,
    standard_library_pairs,
)

NUM_NEGATIVES = 5
BATCH_SIZE = 16
MIN_LINES = 6
MIN_SENTENCES = 2
MIN_WORDS = 12
MAX_LENGTH = 128
NUM_VAL = 400
NUM_VAL_PACKAGES = 150


@dataclass(frozen=True)
class Case:
    """Rows with one known positive each, the corpus, and the hidden positive of each query."""

    rows: list[dict[str, str]]
    corpus: list[str]
    hidden: dict[str, str]


@dataclass(frozen=True)
class Mined:
    """Result of a side: negatives per row, and how long it took."""

    negatives: list[list[str]]
    seconds: float
    processor_seconds: float
    """The same on a busy machine: time in which a processor worked for it, over all threads."""


def in_lines(text: str) -> list[str]:
    """Return the halves of a function, or nothing if it is short."""
    lines = text.splitlines()
    return (
        []
        if len(lines) < MIN_LINES
        else ["\n".join(part).strip() for part in halved(lines)]
    )


def in_sentences(text: str) -> list[str]:
    """Return the halves of a description, or nothing if it is short."""
    sentences = re.split(r"(?<=[.!?])\s+", text)
    return (
        []
        if len(sentences) < MIN_SENTENCES
        else [" ".join(part).strip() for part in halved(sentences)]
    )


def halved(parts: list[str]) -> tuple[list[str], list[str]]:
    """Return the first half and the rest."""
    return parts[: len(parts) // 2], parts[len(parts) // 2 :]


def collection(
    name: str, num_rows: int
) -> tuple[list[tuple[str, list[str]]], list[FunctionPair]]:
    """Return (query, halves) of a kind of text, and whole pairs of other modules or packages to evaluate on."""
    if name == "functions":
        train, val = split_by_module(standard_library_pairs(), num_rows, NUM_VAL)
        return [(pair.query, in_lines(pair.positive)) for pair in train], val
    pairs = sorted(
        package_texts(), key=lambda pair: hashlib.sha256(pair[0].encode()).digest()
    )
    val = [
        FunctionPair("", query, text)
        for query, text in pairs[:: len(pairs) // NUM_VAL_PACKAGES]
    ]
    val_queries = {pair.query for pair in val}
    return [
        (query, in_sentences(text)) for query, text in pairs if query not in val_queries
    ][:num_rows], val


def package_texts() -> list[tuple[str, str]]:
    """Return (line about itself, description) of Debian's and Python's packages that are installed here."""
    texts: dict[str, str] = {}
    for block in (
        PACKAGES.read_text(encoding="utf-8").split("\n\n") if PACKAGES.is_file() else ()
    ):
        about = re.search(r"^Description: (.+)\n((?: .+\n?)+)", block, re.MULTILINE)
        if about is not None:
            texts.setdefault(
                about.group(1), " ".join(about.group(2).replace("\n .\n", "\n").split())
            )
    for package in metadata.distributions():
        parts = [
            " ".join(part.split())
            for part in str(package.metadata.get_payload()).split("\n\n")
        ]
        long = [
            part
            for part in parts
            if len(part.split()) >= MIN_WORDS and part[:1].isalpha()
        ][:2]
        if package.metadata["Summary"] and long:
            texts.setdefault(package.metadata["Summary"], " ".join(long))
    return list(texts.items())


def case(texts: list[tuple[str, list[str]]], seed: int) -> Case:
    """Return each text in halves; which half is known is drawn."""
    draw = random.Random(seed)
    rows = []
    corpus = dict[str, None]()
    hidden = {}
    for query, halves in texts:
        if len(set(halves)) < 2 or query in hidden:
            continue
        corpus |= dict.fromkeys(halves)
        draw.shuffle(halves)
        rows.append({"query": query, "positive": halves[0]})
        hidden[query] = halves[1]
    return Case(rows, list(corpus), hidden)


def by_vembed(task: Case, folder: Path, options: dict[str, Any]) -> Mined:
    """`vembed.mine` on files, as a user calls it."""
    from vembed.mining.mine import mine

    write(folder / "rows.jsonl", task.rows)
    write(folder / "corpus.jsonl", [{"text": text} for text in task.corpus])
    began = time.perf_counter()
    worked = time.process_time()
    result = mine(
        {
            "model_name": demo_model(),
            "data_path": folder / "rows.jsonl",
            "corpus_path": folder / "corpus.jsonl",
            "output_path": folder / "out.jsonl",
            "num_negatives": NUM_NEGATIVES,
            "max_length": MAX_LENGTH,
            **options,
        }
    )
    seconds = time.perf_counter() - began
    processor_seconds = time.process_time() - worked
    lines = result.output_path.read_text(encoding="utf-8").splitlines()
    return Mined(
        [json.loads(line)["negatives"] for line in lines], seconds, processor_seconds
    )


def by_sentence_transformers(
    task: Case, folder: Path, options: dict[str, Any]
) -> Mined:
    """`mine_hard_negatives` on the same model, texts and length."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import mine_hard_negatives

    began = time.perf_counter()
    worked = time.process_time()
    model = SentenceTransformer(str(demo_model()), device="cpu")
    model.max_seq_length = MAX_LENGTH
    data = Dataset.from_list(task.rows)
    mined_rows = mine_hard_negatives(
        data,
        model,
        corpus=task.corpus,
        num_negatives=NUM_NEGATIVES,
        output_format="n-tuple",
        range_max=100,
        batch_size=32,
        verbose=False,
        **options,
    )
    by_query = {
        row["query"]: [
            row[f"negative_{number}"] for number in range(1, NUM_NEGATIVES + 1)
        ]
        for row in mined_rows
    }
    negatives = [by_query.get(row["query"], []) for row in task.rows]
    return Mined(negatives, time.perf_counter() - began, time.process_time() - worked)


SIDES: dict[str, tuple[Any, dict[str, Any]]] = {
    "vembed": (by_vembed, {}),
    "vembed, relative_margin 0.05": (by_vembed, {"relative_margin": 0.05}),
    "vembed, threshold: auto": (by_vembed, {"threshold": "auto"}),
    "sentence-transformers": (by_sentence_transformers, {}),
    "sentence-transformers, relative_margin 0.05": (
        by_sentence_transformers,
        {"relative_margin": 0.05},
    ),
}
"""The same number of negatives and of candidates for each."""
TRAINED = (
    "vembed",
    "sentence-transformers",
    "sentence-transformers, relative_margin 0.05",
)


def all_mined(task: Case, sides: list[str], kept_file: Path | None) -> dict[str, Mined]:
    """Mine on all sides, or read what was mined before."""
    if kept_file is not None and kept_file.is_file():
        return {
            name: Mined(*values)
            for name, values in json.loads(
                kept_file.read_text(encoding="utf-8")
            ).items()
        }
    mined = {}
    for name in sides:
        mine, options = SIDES[name]
        with tempfile.TemporaryDirectory() as folder:
            mined[name] = mine(task, Path(folder), options)
        print(
            f"{name}: mined in {mined[name].seconds:.1f} s ({mined[name].processor_seconds:.1f} of a processor)",
            flush=True,
        )
    if kept_file is not None:
        values = {
            name: [side.negatives, side.seconds, side.processor_seconds]
            for name, side in mined.items()
        }
        kept_file.write_text(json.dumps(values), encoding="utf-8")
    return mined


def measure(
    task: Case, mined: Mined, scores: dict[tuple[str, str], float]
) -> dict[str, float]:
    """Share of the negatives that are hidden positives, of the hidden positives that were mined, and the mean score."""
    pairs = [
        (row["query"], negative)
        for row, negatives in zip(task.rows, mined.negatives, strict=True)
        for negative in negatives
    ]
    num_false = sum(task.hidden[query] == negative for query, negative in pairs)
    of_true = [scores[pair] for pair in pairs if task.hidden[pair[0]] != pair[1]]
    return {
        "negatives": len(pairs),
        "false": num_false / max(len(pairs), 1),
        "hidden_mined": num_false / len(task.hidden),
        "mean_score": statistics.fmean(scores[pair] for pair in pairs)
        if pairs
        else 0.0,
        "mean_score_of_true": statistics.fmean(of_true) if of_true else 0.0,
        "seconds": mined.seconds,
        "processor_seconds": mined.processor_seconds,
    }


def all_scores(task: Case, sides: list[Mined]) -> dict[tuple[str, str], float]:
    """The model's similarity of every mined pair."""
    import vembed

    embedder = vembed.Embedder(demo_model(), device="cpu")
    place = {text: number for number, text in enumerate(task.corpus)}
    documents = embedder.encode(task.corpus)
    queries = embedder.encode([row["query"] for row in task.rows], kind="query")
    scores = {}
    for mined in sides:
        for number, negatives in enumerate(mined.negatives):
            for negative in negatives:
                scores[task.rows[number]["query"], negative] = float(
                    queries[number] @ documents[place[negative]]
                )
    return scores


def train_and_score(
    task: Case,
    negatives: list[list[str]],
    val: list[FunctionPair],
    folder: Path,
    seed: int,
    arguments: argparse.Namespace,
) -> float:
    """nDCG@10 on functions of other modules or other packages, after training on one side's negatives."""
    import vembed

    rows = [
        {**row, "negatives": row_negatives}
        for row, row_negatives in zip(task.rows, negatives, strict=True)
    ]
    write(folder / "train.jsonl", rows)
    write(
        folder / "val.jsonl",
        [{"query": pair.query, "positive": pair.positive} for pair in val],
    )
    result = vembed.train(
        {
            "model_name": str(demo_model()),
            "data_path": str(folder / "train.jsonl"),
            "seed": seed,
            "val_data_path": str(folder / "val.jsonl"),
            "output_dir": str(folder / "run"),
            "batch_size": BATCH_SIZE,
            "max_steps": arguments.steps,
            "max_length": arguments.train_length,
            "eval_before": False,
            "eval_steps": None,
            "save_steps": None,
            "console": "quiet",
            "report_to": "none",
        }
    )
    return float(result.metrics["ndcg@10"])


def write(path: Path, records: list[Any]) -> None:
    """JSON Lines."""
    path.write_text(
        "".join(json.dumps(record) + "\n" for record in records), encoding="utf-8"
    )


def main() -> None:
    """Mine on all sides, print figures, and with --seeds train on each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--collection", choices=["functions", "packages"], default="functions"
    )
    parser.add_argument("--rows", type=int, default=2000, help="texts that are used")
    parser.add_argument(
        "--seeds",
        type=int,
        default=0,
        help="train on each side's negatives with so many seeds",
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--train-only", action="store_true", help="measure nothing but the training"
    )
    parser.add_argument(
        "--train-length",
        type=int,
        default=MAX_LENGTH,
        help="longest text in training, in tokens",
    )
    parser.add_argument(
        "--sides", nargs="+", choices=list(SIDES), default=list(SIDES), help="who mines"
    )
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--mined",
        type=Path,
        help="file for what is mined; where it is there, nothing is mined again",
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    texts, val = collection(arguments.collection, arguments.rows)
    task = case(texts, seed=0)
    print(
        f"{len(task.rows):,d} queries, {len(task.corpus):,d} documents, {len(task.hidden):,d} hidden positives"
    )
    mined = all_mined(task, arguments.sides, arguments.mined)
    figures: dict[str, dict[str, Any]] = {}
    if not arguments.train_only:
        scores = all_scores(task, list(mined.values()))
        figures = {
            name: measure(task, negatives_of_side, scores)
            for name, negatives_of_side in mined.items()
        }
    sides = {name: mined[name].negatives for name in TRAINED if name in mined} | {
        "no mining": [[] for _ in task.rows]
    }
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        for name, negatives in sides.items():
            with tempfile.TemporaryDirectory() as folder:
                score = train_and_score(
                    task, negatives, val, Path(folder), seed, arguments
                )
            figures.setdefault(name, {}).setdefault("ndcg@10", []).append(score)
            print(f"seed {seed}, {name}: ndcg@10 {score:.4f}", flush=True)
    for name, values in figures.items():
        print(name, json.dumps(values))
    if arguments.json:
        data = {
            "case": {key: len(value) for key, value in asdict(task).items()},
            "sides": figures,
        }
        arguments.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
