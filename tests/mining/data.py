"""Small training data and corpora, and a runner for the commands of the data engine."""

from pathlib import Path

import numpy as np
import pytest

from tests.data.files import open_examples, pair, read_jsonl, write_jsonl
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


def documents():
    return texts(NUM_DOCUMENTS, seed=1, shortest=5, longest=12)


def pairs_of(actual):
    """Rows of a query, which is a document without its last word, and that document."""
    return [pair(text.rpartition(" ")[0], text) for text in actual]


def corpus_of(actual):
    """Documents d0, d1, ... with these texts."""
    return [{"_id": f"d{number}", "text": text} for number, text in enumerate(actual)]


def rows_in(options):
    """The rows of the file that is mined."""
    return read_jsonl(Path(options["data_path"]))


def write_data(folder):
    """Rows whose positives are in a corpus of 300 documents, and the options that name both."""
    rows = pairs_of(documents()[:NUM_ROWS])
    corpus = corpus_of(documents())
    return {
        "model_name": model(),
        "data_path": str(write_jsonl(folder / "train.jsonl", rows)),
        "corpus_path": str(write_jsonl(folder / "corpus.jsonl", corpus)),
        "output_path": str(folder / "mined.jsonl"),
        "num_negatives": 4,
        "top_k": 50,
        "relative_margin": MARGIN,
    }


def small(folder, rows, corpus=None, **changes):
    """Options for some rows, and documents if there are any, without a limit."""
    options = {
        "model_name": model(),
        "data_path": str(write_jsonl(folder / "rows.jsonl", rows)),
        "output_path": str(folder / "mined.jsonl"),
        "relative_margin": None,
    }
    if corpus is not None:
        options["corpus_path"] = str(write_jsonl(folder / "corpus.jsonl", corpus))
    return {**options, **changes}


def training_examples(path, **options):
    """What training reads in a file."""
    config = TrainConfig(model_name="m", data_path="x", **options)
    return list(open_examples(config, str(path)))


def run(options, **changes):
    """Mine in this process, and read the rows that were written."""
    lines = []
    result = mine({**options, **changes}, log=lines.append)
    assert lines
    is_jsonl = result.output_path.suffix == ".jsonl"
    return read_jsonl(result.output_path) if is_jsonl else [], result


def on_ranks(command, options, num_ranks, folder, **changes):
    """Run a command on ranks, with a file of their own, and return each rank's result and the rows."""
    output = folder / f"{num_ranks}.jsonl"
    run_options = {**options, "output_path": str(output), **changes}
    results = run_ranks(command, num_ranks, run_options, process_group=True)
    return results, read_jsonl(output)


def score_matrix(queries, actual):
    """[Q, N] similarities, in float64."""
    embedder = Embedder(model(), device="cpu")
    query_vectors = embedder.encode(queries, kind="query").astype(np.float64)
    return query_vectors @ embedder.encode(actual, kind="document").T


def assert_scores_are_the_models(rows):
    """Each negative of a corpus `documents()` has the similarity that the model gives it, and the positive too."""
    names = documents()
    scores = score_matrix([row["query"] for row in rows], names)
    for row, of_query in zip(rows, scores, strict=True):
        for name in ("positive", "negatives"):
            chosen = row[name] if name == "negatives" else [row[name]]
            places = [names.index(text) for text in chosen]
            actual = row[f"{name.removesuffix('s')}_scores"]
            assert actual == pytest.approx(of_query[places], abs=1e-5)


def assert_same_rows(actual, expected):
    """Rows are equal; their scores nearly: products of other shapes may round in another way."""
    assert len(actual) == len(expected)
    for entry, other in zip(actual, expected, strict=True):
        for name, value in other.items():
            if name.endswith("scores"):
                other[name] = pytest.approx(value, abs=5e-6)
        assert entry == other
