"""Small training data and corpora, and a runner for the commands of the data engine."""

import json

import numpy as np
import pytest

from tests.data.files import open_examples
from tests.data.files import write_jsonl as write_lines
from tests.harness import run_ranks
from tests.tiny import shared, texts, tiny_bert_st
from vembed import Embedder
from vembed.config.schema import TrainConfig
from vembed.mining.mine import mine

NUM_ROWS = 40
NUM_DOCUMENTS = 300
MARGIN = 0.012
"""Similarities of the tiny model are close to each other."""


def model():
    return str(shared(tiny_bert_st))


def read_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def documents():
    return texts(NUM_DOCUMENTS, seed=1, shortest=5, longest=12)


def write_data(folder):
    """Rows whose positives are in a corpus of 300 documents, and the options that name both."""
    actual = documents()
    queries = [text.rpartition(" ")[0] for text in actual[:NUM_ROWS]]
    rows = [
        {"query": query, "positive": actual[number], "id": f"r{number}"}
        for number, query in enumerate(queries)
    ]
    corpus = [{"_id": f"d{number}", "text": text} for number, text in enumerate(actual)]
    return {
        "model_name": model(),
        "data_path": str(write_lines(folder / "train.jsonl", rows)),
        "corpus_path": str(write_lines(folder / "corpus.jsonl", corpus)),
        "output_path": str(folder / "mined.jsonl"),
        "num_negatives": 4,
        "top_k": 50,
        "relative_margin": MARGIN,
    }


def small(folder, rows, corpus=None, **changes):
    """Options for some rows, and documents if there are any, without a limit."""
    options = {
        "model_name": model(),
        "data_path": str(write_lines(folder / "rows.jsonl", rows)),
        "output_path": str(folder / "mined.jsonl"),
        "relative_margin": None,
    }
    if corpus is not None:
        options["corpus_path"] = str(write_lines(folder / "corpus.jsonl", corpus))
    return {**options, **changes}


def training_examples(path, **options):
    """What training reads in a file."""
    config = TrainConfig(model_name="m", data_path="x", **options)
    store = open_examples(config, str(path))
    return [store[number] for number in range(len(store))]


def run(options, **changes):
    """Mine in this process, and read what was written."""
    lines = []
    result = mine({**options, **changes}, log=lines.append)
    assert lines
    return read_lines(
        result.output_path
    ) if result.output_path.suffix == ".jsonl" else [], result


def on_ranks(command, options, num_ranks, folder, **changes):
    """Run a command on ranks, with a file of their own, and return each rank's result and the rows."""
    output = folder / f"{num_ranks}.jsonl"
    run_options = {**options, "output_path": str(output), **changes}
    return run_ranks(command, num_ranks, run_options), read_lines(output)


def score_matrix(queries, actual):
    """[Q, N] similarities, in float64."""
    embedder = Embedder(model(), device="cpu")
    sides = (
        embedder.encode(queries, kind="query"),
        embedder.encode(actual, kind="document"),
    )
    a, b = (side.astype(np.float64) for side in sides)
    return a @ b.T


def assert_same_rows(actual, expected):
    """Rows are equal; their scores nearly: products of other shapes may round in another way."""
    assert len(actual) == len(expected)
    for entry, other in zip(actual, expected, strict=True):
        assert entry.keys() == other.keys()
        for name, value in entry.items():
            assert value == (
                pytest.approx(other[name], abs=5e-6)
                if name.endswith("scores")
                else other[name]
            ), name
