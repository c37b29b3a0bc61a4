"""in_batch_negatives: documents of other queries of the global batch, the same on any number of processes."""

import json

import pytest

from tests.commands import command
from tests.tiny import shared, texts, tiny_reranker
from vembed.data.batching.rank_batch import with_in_batch_negatives
from vembed.data.examples import Example, Item
from vembed.errors import UserError


def example(query, *documents, negatives=()):
    return Example(
        Item(text=query),
        tuple(Item(text=text) for text in documents),
        tuple(Item(text=text) for text in negatives),
    )


def test_documents_of_other_queries_that_the_example_does_not_have():
    first = example("q", "a", "b", negatives=("c",))
    others = [
        example("q", "same query"),
        example("r", "a"),
        example("s", "c"),
        example("t", "q"),
        example("u", "d", "second positive"),
        example("v", "d"),
        example("w", "e"),
        example("x", "f"),
    ]
    extended = with_in_batch_negatives(first, iter(others), 2)
    assert [item.text for item in extended.negatives] == ["c", "d", "e"]
    assert extended.positives == first.positives
    few = with_in_batch_negatives(first, iter(others[:4]), 2)
    assert few.negatives == first.negatives


def run(folder, name, **changes):
    """Return the losses of a run through the real command."""
    pairs = texts(64, seed=5, longest=12)
    lines = []
    for row in range(0, 64, 2):
        record = {"query": pairs[row], "positive": pairs[row + 1]}
        lines.append(json.dumps(record) + "\n")
    (folder / "pairs.jsonl").write_text("".join(lines))
    options = {
        "model_name": str(shared(tiny_reranker)),
        "task": "rerank",
        "data_path": "pairs.jsonl",
        "loss": "bce",
        "global_batch_size": 8,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "mixed_precision": "no",
        "logging_steps": 1,
        "report_to": "none",
        "output_dir": name,
        **changes,
    }
    settings = [f"{option}={value}" for option, value in options.items()]
    result = command("train", *settings, folder=folder)
    if result.returncode:
        raise UserError(result.stderr)
    rows = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, rows) if "loss" in row]


def test_pairs_train_a_reranker_alike_on_one_and_two_processes(tmp_path):
    losses = run(tmp_path, "one", in_batch_negatives=3)
    shared_out = run(tmp_path, "two", in_batch_negatives=3, num_processes=2)
    assert len(losses) == 4
    assert shared_out == pytest.approx(losses, rel=1e-5)
    assert run(tmp_path, "more", in_batch_negatives=5)[0] != losses[0]
    with pytest.raises(UserError, match="in_batch_negatives"):
        run(tmp_path, "none")
    with pytest.raises(UserError, match="in_batch_negatives"):
        run(tmp_path, "scores", in_batch_negatives=3, loss="mse", teacher="scores")
