"""Labelled data: texts or images with a class, of which pairs are made, one of each class in a batch."""

import numpy as np
import pytest

from tests.data.files import open_examples, pair, write_jsonl
from vembed.config.schema import DataSection, TrainConfig
from vembed.data.batching.schedule import BatchSchedule
from vembed.data.datasets import hold_out
from vembed.errors import UserError
from vembed.evaluation.dataset import from_examples, open_eval_data


def opened(folder, rows, **options):
    path = write_jsonl(folder / "labelled.jsonl", rows)
    config = TrainConfig(
        model_name="m", data_path=str(path), output_dir=str(folder / "out"), **options
    )
    return open_examples(config, str(path))


@pytest.mark.parametrize(
    "sizes", [[2, 3, 5], [40, 2, 2, 2], [30] * 8, [1, 1, 7, 9, 100]]
)
@pytest.mark.parametrize("batch", [2, 3, 8])
def test_no_class_is_twice_in_a_batch(sizes, batch):
    labels = np.random.default_rng(0).permutation(
        np.repeat(np.arange(len(sizes)) + 7, sizes)
    )
    schedule, again = (
        BatchSchedule([len(labels)], batch, 3, labels=[labels]) for _ in range(2)
    )
    eligible = [size for size in sizes if size > 1]
    size = min(batch, len(eligible))
    assert schedule.smallest_batch == size
    assert schedule.batches_per_epoch == max(1, sum(eligible) // size)
    drawn = []
    for epoch in range(6):
        for step in range(schedule.batches_per_epoch):
            first = schedule.batch(epoch, step)
            positives = schedule.positives(epoch, step)
            assert len(set(labels[first].tolist())) == len(first) == size
            assert np.array_equal(labels[positives], labels[first])
            assert not (positives == first).any()
            drawn += first.tolist()
    last = 5, schedule.batches_per_epoch - 1
    assert np.array_equal(again.batch(*last), schedule.batch(*last))
    assert np.array_equal(again.positives(*last), schedule.positives(*last))
    recorded = {int(labels[index]) for index in drawn}
    assert recorded == {int(label) for label in labels if (labels == label).sum() > 1}


def test_classes_are_drawn_by_size_and_examples_in_passes():
    labels = np.repeat(np.arange(20), 10)
    schedule = BatchSchedule([200], 5, 1, labels=[labels])
    drawn = np.concatenate([schedule.batch(0, step) for step in range(40)])
    assert np.array_equal(np.sort(drawn), np.arange(200))


def test_records_with_a_label_are_pairs_of_their_class(tmp_path):
    rows = [
        {"text": f"text {number}", "label": "ab"[number % 2]} for number in range(6)
    ]
    store = opened(tmp_path, rows)
    assert [example.query.text for example in (store[0], store[5])] == [
        "text 0",
        "text 5",
    ]
    assert [example.positives[0].text for example in (store[0], store[5])] == [
        "text 2",
        "text 1",
    ]
    assert store.pair(1, 5).positives[0].text == "text 5"
    assert "labelled with 2 classes" in store.summary()[0]
    mapped = [
        {"headline": row["text"], "topic": number % 3}
        for number, row in enumerate(rows)
    ]
    store = opened(
        tmp_path, mapped, column_mapping={"headline": "text", "topic": "label"}
    )
    assert store[1].positives[0].text == "text 4"


def test_equal_texts_of_a_class_are_no_pair(tmp_path):
    # b has red twice, a and b have blue twice.
    texts = ["red", "red", "green", "red", "blue", "green", "blue", "blue"]
    rows = [
        {"text": text, "label": "ab"[number % 2]} for number, text in enumerate(texts)
    ]
    store = opened(tmp_path, [*rows, {"text": "blue", "label": "a"}])
    assert store.labels[0] is not None
    assert np.flatnonzero(store.labels[0] < 0).tolist() == [3, 6, 8]
    schedule = BatchSchedule(store.sizes, 2, 0, labels=store.labels, names=["x"])
    assert (
        "x: 2 of 2 classes in a batch (3 examples that are alone in their class or repeat another"
        in schedule.summary()
    )
    for epoch in range(8):
        for step in range(schedule.batches_per_epoch):
            mates = schedule.positives(epoch, step)
            for index, mate in zip(
                schedule.batch(epoch, step).tolist(), mates.tolist(), strict=True
            ):
                pair = store.pair(index, mate)
                assert pair.query.text != pair.positives[0].text
    with pytest.raises(
        UserError, match="1 of its classes have two different examples or more"
    ):
        BatchSchedule([4], 2, 0, labels=[np.array([5, 5, 6, -4])])


def test_a_label_beside_a_pair_is_not_read(tmp_path):
    store = opened(tmp_path, [pair(label="x")])
    assert store.labels == [None]
    assert store[0].positives[0].text == "p"


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            [{"text": "a", "label": None}],
            {},
            "label is null, not the name or number of a class",
        ),
        (
            [{"text": "a", "label": "x"}, pair()],
            {},
            "1 of its records are a text or image with a label, 1 are pairs",
        ),
        (
            [{"text": "a", "label": "x"}],
            {"loss": "cosent"},
            "which loss: cosent needs",
        ),
    ],
)
def test_labelled_data_that_cannot_be_used(tmp_path, rows, options, message):
    with pytest.raises(UserError, match=message):
        opened(tmp_path, rows, **options)


def test_labels_that_make_no_batches():
    with pytest.raises(UserError, match="labelled data need at least two such classes"):
        BatchSchedule([3], 2, 0, labels=[np.array([1, 1, 2])])
    with pytest.raises(UserError, match="set homogeneous_batches: true"):
        BatchSchedule([2, 2], 2, 0, labels=[np.array([1, 1]), None])


@pytest.mark.parametrize("name", ["label", "is_duplicate", "Gold-Label", "similarity"])
def test_pairs_with_a_column_that_says_which_match_are_warned_of(tmp_path, name):
    rows = [
        {"query": f"q{number}", "positive": "p", name: number % 2}
        for number in range(4)
    ]
    (warning,) = opened(tmp_path, rows).warnings()
    assert f"{name} is not read, and every pair is taken for a match" in warning
    assert f"column_mapping: {{{name}: score}} and loss: cosent" in warning
    store = opened(tmp_path, rows, column_mapping={name: "score"}, loss="cosent")
    assert store.warnings() == [] and store[1].scores == (1.0,)
    assert opened(tmp_path, [pair(page=3)]).warnings() == []


def test_held_out_texts_with_a_label_find_those_of_their_class(tmp_path):
    rows = [
        {
            "text": f"{['cat', 'dog', 'cow'][number % 3]} number {number}",
            "label": number % 3,
        }
        for number in range(90)
    ]
    parts = hold_out(opened(tmp_path, rows), 0.3, seed=1)
    train = parts.train
    held = [example for _, example in parts.examples]
    assert len(held) == 27 and len(train) == 63
    data = from_examples(held, "held")
    classes = [str(item.text).split()[0] for item in data.documents]
    assert len(data.queries) == len(data.documents) == 27
    for query, relevant in zip(data.queries, data.relevance, strict=True):
        same = {
            number for number, name in enumerate(classes) if name in str(query.text)
        }
        assert relevant == dict.fromkeys(same - {data.documents.index(query)}, 1)
    remaining = {train[index].query.text for index in range(len(train))}
    assert remaining.isdisjoint(example.query.text for example in held)


def test_labelled_validation_data(tmp_path):
    rows = [{"text": f"t{number}", "label": "a"} for number in range(130)]
    alone = {"text": "alone", "label": "b"}
    path = write_jsonl(tmp_path / "val.jsonl", [*rows, alone])
    data = open_eval_data(DataSection(data_path="d"), str(path))
    assert len(data.queries) == 100 and len(data.documents) == 101, (
        "what is alone in its class is a document"
    )
    assert data.notes == ("at most 100 of a class, 30 left out",)
    path.write_text('{"text": "a", "label": 1}\n{"text": "b", "label": 2}\n')
    with pytest.raises(UserError, match="has no query with a relevant document"):
        open_eval_data(DataSection(data_path="d"), str(path))
