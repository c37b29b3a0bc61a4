"""in_batch_negatives: documents of other queries of the global batch, the same on any number of processes."""

from dataclasses import replace
from math import nan

import numpy as np
import pytest

from tests.built import described
from tests.commands import command
from tests.data.files import text_records, write_jsonl
from tests.tiny import shared, tiny_reranker
from tests.training.test_run import metrics
from vembed.config.schema import TrainConfig
from vembed.data.batching.rank_batch import make_rank_batch, with_in_batch_negatives
from vembed.data.examples import Example, Item
from vembed.data.features import build_featuriser


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


def test_negatives_of_a_record_keep_their_scores_beside_further_ones():
    first = replace(
        example("q", "a", negatives=("c",)), scores=(1.0,), negative_scores=(0.25,)
    )
    second = replace(example("r", "b"), scores=(0.5,))
    extended = [
        with_in_batch_negatives(first, [second], 1),
        with_in_batch_negatives(second, [first], 1),
    ]
    config = TrainConfig(
        model_name=str(shared(tiny_reranker)), data_path="d", task="rerank"
    )
    batch = make_rank_batch(extended, 0, build_featuriser(described(config)))
    np.testing.assert_array_equal(batch.label_scores, [1.0, 0.5])
    np.testing.assert_array_equal(batch.negative_label_scores, [0.25, nan, nan])


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "pairs.jsonl"
    write_jsonl(path, text_records(32))
    return path


def run(data, name, code=0, **changes):
    """The real command on these pairs."""
    options = {
        "model_name": str(shared(tiny_reranker)),
        "task": "rerank",
        "data_path": data.name,
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
    return command("train", *settings, folder=data.parent, code=code)


def losses_of(data, name, **changes):
    run(data, name, **changes)
    return metrics(data.parent / name)


def test_pairs_train_a_reranker_alike_on_one_and_two_processes(data):
    losses = losses_of(data, "one", in_batch_negatives=3)
    assert len(losses) == 4
    by_two = losses_of(data, "two", in_batch_negatives=3, num_processes=2)
    assert by_two == pytest.approx(losses, rel=1e-5)
    assert losses_of(data, "more", in_batch_negatives=5)[0] != losses[0]


@pytest.mark.parametrize(
    "options", [{}, {"in_batch_negatives": 3, "loss": "mse", "teacher": "scores"}]
)
def test_pairs_without_negatives_are_refused(data, options):
    result = run(data, "out", code=2, **options)
    assert "in_batch_negatives" in result.stderr
