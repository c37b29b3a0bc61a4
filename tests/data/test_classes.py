"""Labelled data: texts or images with a class, of which pairs are made, one of each class in a batch."""

import numpy as np
import pytest

from tests.data.files import open_rows, pair, pairs_of, queries_of, write_jsonl
from vembed.config.schema import DataSection
from vembed.data.batching.schedule import BatchSchedule
from vembed.data.datasets import hold_out
from vembed.errors import UserError
from vembed.evaluation.dataset import from_examples, open_eval_data


@pytest.mark.parametrize(
    "sizes", [[2, 3, 5], [40, 2, 2, 2], [30] * 8, [1, 1, 7, 9, 100]]
)
@pytest.mark.parametrize("batch", [2, 3, 8])
def test_no_class_is_twice_in_a_batch(sizes, batch):
    labels = np.repeat(np.arange(len(sizes)) + 7, sizes)
    labels = np.random.default_rng(0).permutation(labels)
    schedule = BatchSchedule([len(labels)], batch, 3, labels=[labels])
    again = BatchSchedule([len(labels)], batch, 3, labels=[labels])
    eligible = [size for size in sizes if size > 1]
    size = min(batch, len(eligible))
    assert schedule.smallest_batch == size
    assert schedule.batches_per_epoch == max(1, sum(eligible) // size)
    drawn = set()
    for epoch in range(6):
        for step in range(schedule.batches_per_epoch):
            first = schedule.batch(epoch, step)
            positives = schedule.positives(epoch, step)
            classes = labels[first]
            assert len(set(classes.tolist())) == len(first) == size
            assert np.array_equal(labels[positives], classes)
            assert not (positives == first).any()
            drawn.update(classes.tolist())
    assert np.array_equal(again.batch(epoch, step), first)
    assert np.array_equal(again.positives(epoch, step), positives)
    assert drawn == {number + 7 for number, size in enumerate(sizes) if size > 1}


def test_classes_are_drawn_by_size_and_examples_in_passes():
    labels = np.repeat(np.arange(20), 10)
    schedule = BatchSchedule([200], 5, 1, labels=[labels])
    drawn = np.concatenate([schedule.batch(0, step) for step in range(40)])
    assert np.array_equal(np.sort(drawn), np.arange(200))


def test_records_with_a_label_are_pairs_of_their_class(tmp_path):
    rows = [{"text": f"t{number}", "label": "ab"[number % 2]} for number in range(6)]
    store = open_rows(tmp_path, rows)
    pairs = pairs_of(store)
    assert pairs[0] == ("t0", "t2")
    assert pairs[5] == ("t5", "t1")
    assert store.pair(1, 5).positives[0].text == "t5"
    assert "labelled with 2 classes" in store.summary()[0]
    mapped = [{"headline": row["text"], "topic": row["label"]} for row in rows]
    mapping = {"headline": "text", "topic": "label"}
    store = open_rows(tmp_path, mapped, column_mapping=mapping)
    assert pairs_of(store) == pairs


def test_equal_texts_of_a_class_are_no_pair(tmp_path):
    # b has red twice, a and b have blue twice.
    texts = ["red", "red", "green", "red", "blue", "green", "blue", "blue", "blue"]
    rows = []
    for number, text in enumerate(texts):
        rows.append({"text": text, "label": "ab"[number % 2]})
    store = open_rows(tmp_path, rows)
    assert np.flatnonzero(store.labels[0] < 0).tolist() == [3, 6, 8]
    schedule = BatchSchedule(store.sizes, 2, 0, labels=store.labels, names=["x"])
    summary = schedule.summary()
    assert "x: 2 of 2 classes in a batch (3 examples that are alone" in summary
    for epoch in range(8):
        for step in range(schedule.batches_per_epoch):
            queries = schedule.batch(epoch, step).tolist()
            positives = schedule.positives(epoch, step).tolist()
            for pair_of_rows in zip(queries, positives, strict=True):
                example = store.pair(*pair_of_rows)
                assert example.query.text != example.positives[0].text


def test_a_label_beside_a_pair_is_not_read(tmp_path):
    store = open_rows(tmp_path, [pair(label="x")])
    assert store.labels == [None]
    assert store[0].positives[0].text == "p"


LABELLED = {"text": "a", "label": "x"}


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"text": "a", "label": None}], {}, "label is null"),
        ([LABELLED, pair()], {}, "1 of its records are a text .*, 1 are pairs"),
        ([LABELLED], {"loss": "cosent"}, "which loss: cosent needs"),
    ],
)
def test_labelled_data_that_cannot_be_used(tmp_path, rows, options, message):
    with pytest.raises(UserError, match=message):
        open_rows(tmp_path, rows, **options)


@pytest.mark.parametrize(
    ("sizes", "labels", "message"),
    [
        ([3], [[1, 1, 2]], "labelled data need at least two such classes"),
        ([4], [[5, 5, 6, -4]], "1 of its classes have two different examples"),
        ([2, 2], [[1, 1], None], "set homogeneous_batches: true"),
    ],
)
def test_labels_that_make_no_batches(sizes, labels, message):
    arrays = [None if label is None else np.array(label) for label in labels]
    with pytest.raises(UserError, match=message):
        BatchSchedule(sizes, 2, 0, labels=arrays)


@pytest.mark.parametrize("name", ["label", "is_duplicate", "Gold-Label", "similarity"])
def test_pairs_with_a_column_that_says_which_match_are_warned_of(tmp_path, name):
    rows = [pair(**{name: number % 2}) for number in range(4)]
    (warning,) = open_rows(tmp_path, rows).warnings()
    assert f"{name} is not read" in warning
    assert f"column_mapping: {{{name}: score}} and loss: cosent" in warning
    options = {"column_mapping": {name: "score"}, "loss": "cosent"}
    store = open_rows(tmp_path, rows, **options)
    assert store.warnings() == []
    assert store[1].scores == (1.0,)
    assert open_rows(tmp_path, [pair(page=3)]).warnings() == []


def test_held_out_texts_with_a_label_find_those_of_their_class(tmp_path):
    rows = []
    for number in range(90):
        name = ("cat", "dog", "cow")[number % 3]
        text = f"{name} number {number}"
        rows.append({"text": text, "label": number % 3, "query_prompt": "ask: "})
    parts = hold_out(open_rows(tmp_path, rows), 0.3, seed=1)
    held = [example for _, example in parts.examples]
    data = from_examples(held, "held")
    assert len(data.queries) == len(data.documents) == len(held) == 27
    assert {query.prompt for query in data.queries} == {"ask: "}
    assert {document.prompt for document in data.documents} == {None}
    texts = [str(item.text) for item in data.documents]
    classes = [text.split()[0] for text in texts]
    for query, relevant in zip(data.queries, data.relevance, strict=True):
        same = {
            number for number, name in enumerate(classes) if name in str(query.text)
        }
        assert relevant == dict.fromkeys(same - {texts.index(str(query.text))}, 1)
    remaining = queries_of(parts.train)
    assert len(remaining) == 63
    assert not {example.query.text for example in held} & set(remaining)


def test_labelled_validation_data(tmp_path):
    rows = [{"text": f"t{number}", "label": "a"} for number in range(130)]
    alone = {"text": "alone", "label": "b"}
    path = write_jsonl(tmp_path / "val.jsonl", [*rows, alone])
    data = open_eval_data(DataSection(data_path="d"), str(path))
    assert len(data.queries) == 100
    assert len(data.documents) == 101, "what is alone in its class is a document"
    assert data.notes == ("at most 100 of a class, 30 left out",)
    write_jsonl(path, [LABELLED, alone])
    with pytest.raises(UserError, match="has no query with a relevant document"):
        open_eval_data(DataSection(data_path="d"), str(path))
