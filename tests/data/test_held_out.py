"""Held-out validation data, and validation data that are in the training data."""

import random

import numpy as np
import pytest

from tests.data.files import (
    numbered,
    open_path,
    open_rows,
    pair,
    pairs_of,
    queries_of,
    write_jsonl,
)
from tests.data.pictures import write
from tests.tiny import WORDS
from vembed.config.schema import TrainConfig
from vembed.data import datasets
from vembed.data.datasets import example_groups, hold_out, open_sets, overlap_warnings
from vembed.data.examples import Item
from vembed.data.near_duplicates import normal_text
from vembed.errors import UserError
from vembed.evaluation.dataset import from_examples


def store_of(folder, rows):
    return open_rows(folder, rows, no_duplicates=True)


def with_answers(queries):
    """Records of these queries, each with a positive of its own."""
    return [pair(query, f"p{number}") for number, query in enumerate(queries)]


def random_queries(draw, count, longest=16):
    """Return texts of 8 to 16 words, or of as many as `longest` says, if that is more."""
    queries = []
    for _ in range(count):
        shortest = 8 if longest == 16 else longest
        words = draw.choices(WORDS, k=draw.randint(shortest, longest))
        queries.append(" ".join(words))
    return queries


def positives_of_both_sides(parts):
    """The texts of the positives that are trained on and of those that are held out."""
    trained = {positive for _, positive in pairs_of(parts.train)}
    held = {example.positives[0].text for _, example in parts.examples}
    return trained, held


@pytest.fixture
def rows():
    """200 records of 100 different queries: each once more in capitals, with other words around it, or with another
    word in it."""
    rows = []
    for number, query in enumerate(random_queries(random.Random(0), 100, longest=40)):
        first, _, rest = query.partition(" ")
        copies = (
            query.upper(),
            f"please tell {query}",
            f"{query} right now",
            f"{first} other{number} {rest.partition(' ')[2]}",
        )
        again = copies[number % 4]
        rows += [pair(query, f"first {number}"), pair(again, "second")]
    return rows


def test_no_query_and_no_near_duplicate_is_on_both_sides(tmp_path, rows):
    store = store_of(tmp_path, rows)
    parts = hold_out(store, 0.2, seed=1)
    train = parts.train
    held = [example for _, example in parts.examples]
    assert len(train) + len(held) == 200 and 40 <= len(held) <= 44
    remaining = {normal_text(query) for query in queries_of(train)}
    assert remaining.isdisjoint(normal_text(example.query.text) for example in held)
    groups = example_groups(store).by_query
    assert len(set(groups.tolist())) == 100, "with its near-duplicate one group"
    assert hold_out(store, 0.2, seed=1).examples == parts.examples
    assert hold_out(store, 0.2, seed=2).examples != parts.examples
    assert train.fingerprint != store.fingerprint
    items = (train[0].query, train[0].positives[0])
    assert train.all_keys().values[:2].tolist() == [item.key() for item in items]


def test_a_split_that_leaves_nothing_is_refused(tmp_path):
    store = store_of(tmp_path, numbered(5, query="the same"))
    with pytest.raises(UserError, match="5 examples with 1 different queries"):
        hold_out(store, 0.1, seed=1)


def test_overlap_counts_queries(tmp_path):
    first = write(tmp_path / "one.png")
    (tmp_path / "copy.png").write_bytes(first.read_bytes())
    train = open_rows(
        tmp_path,
        [
            pair("How do I sort?", "Use sorted()."),
            pair("another", "shared  answer"),
            pair("a picture", {"image": "one.png"}),
        ],
    )
    validation = write_jsonl(
        tmp_path / "validation.jsonl",
        [
            pair("how do i sort", "use SORTED"),
            pair("new", "Shared answer!"),
            pair("quite new", "nothing alike"),
            pair("a picture", {"image": "copy.png"}),
        ],
    )
    queries = [example.query for example in open_path(validation)]
    (sentence,) = overlap_warnings(train, queries)
    assert "in the training data too: 2 of 4 (50.0%)" in sentence
    assert "'how do i sort'; 'a picture'" in sentence
    assert overlap_warnings(train, queries[1:3]) == [], "a corpus may serve both"
    many = [Item(text=f"new {number}") for number in range(993)]
    (sentence,) = overlap_warnings(train, [queries[0], *many])
    assert "in the training data too: 1 of 994 (0.1%)" in sentence


def test_vowel_signs_and_tone_marks_are_part_of_words():
    for first, second in (("दिन", "दान"), ("วันนี้", "วันนั้"), ("কি", "কা")):
        assert normal_text(first) != normal_text(second)
    assert normal_text("love ❤️") == normal_text("Love")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("num_similar", "share", "sizes", "most_similar"),
    [
        (140, 0.2, range(40, 81), 80),
        (30, 0.15, [30], 7),
        # Nothing but one template: each query is held out by itself.
        (200, 0.1, [20], 20),
    ],
)
def test_near_duplicates_are_not_most_of_what_is_held_out_where_there_are_others(
    tmp_path, num_similar, share, sizes, most_similar, seed
):
    similar = [
        f"please cancel the order {number} of the list in the menu"
        for number in range(num_similar)
    ]
    others = random_queries(random.Random(0), 200 - num_similar, longest=40)
    store = store_of(tmp_path, with_answers([*similar, *others]))
    groups = example_groups(store).by_query[:num_similar]
    assert np.unique(groups).size < 10, "near-duplicates"
    parts = hold_out(store, share, seed)
    assert len(parts.examples) in sizes
    assert len(parts.train) + len(parts.examples) == 200
    held = [example.query.text for _, example in parts.examples]
    assert len(set(held) & set(similar)) <= most_similar


def test_answers_of_several_queries_are_on_one_side(tmp_path):
    draw = random.Random(4)
    answers = random_queries(draw, 250, longest=30)
    rows = []
    for number, query in enumerate(random_queries(draw, 400)):
        rows.append(pair(query, answers[number % 250]))
    parts = hold_out(store_of(tmp_path, rows), 0.1, seed=1)
    trained, held = positives_of_both_sides(parts)
    assert trained.isdisjoint(held)
    (note,) = parts.notes
    assert note.startswith(f"0 of the {len(held):,d} documents")
    examples = [example for _, example in parts.examples]
    documents = [item for _, item in parts.documents]
    data = from_examples(examples, "held", documents=documents)
    assert {item.text for item in data.documents} == set(answers), "all of the file"


def opened(folder, rows, share=0.2, **more):
    """The data of a run on these records, of which a share is held out."""
    path = str(write_jsonl(folder / "a.jsonl", rows))
    options = TrainConfig(model_name="m", data_path=path, val_split=share, **more)
    return open_sets(
        options.data, options.objective, model_name="m", seed=0, compares=False
    )


def test_a_small_source_is_searched_as_a_large_one(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "MAX_SEARCHED_DOCUMENTS", 20)
    paths = []
    for name, count in (("large", 200), ("small", 20), ("tiny", 2)):
        queries = random_queries(random.Random(name), count)
        rows = [pair(query, f"{name} {query}") for query in queries]
        paths.append(str(write_jsonl(tmp_path / f"{name}.jsonl", rows)))
    parts = hold_out(open_path(paths), 0.1, seed=1)
    sources = [source for source, _ in parts.documents]
    assert [sources.count(source) for source in range(3)] == [11, 7, 2], (
        "every third of the small source"
    )


def test_a_run_says_which_documents_were_trained_on(tmp_path, caplog):
    rows = []
    for number, query in enumerate(random_queries(random.Random(6), 60)):
        rows.append(pair(query, f"answer {number % 3}"))
    caplog.set_level("INFO", logger="vembed")
    sets = opened(tmp_path, rows)
    num_train = len(sets.examples)
    assert f"{num_train:,d} of 60 examples" in sets.examples.summary()[0]
    assert len(sets.evaluation.notes) == 2
    summary = sets.evaluation.summary()
    assert "over 3 documents" in summary
    assert "3 of the 3 documents" in summary
    assert summary in caplog.text


def test_a_share_below_a_percent_and_few_negatives_are_written_out(tmp_path):
    rows = with_answers(random_queries(random.Random(6), 100))
    rows[0]["negatives"] = ["other", "another"]
    sets = opened(tmp_path, rows, 0.0001)
    expected = f"from 0.01% of the queries of {tmp_path}/a.jsonl"
    assert expected in sets.evaluation.summary()
    assert "0.02 negatives each" in sets.examples.summary()[0]


@pytest.mark.parametrize("max_negatives", [None, 1, 0])
def test_all_negatives_are_searched_whatever_a_step_trains_on(tmp_path, max_negatives):
    rows = []
    texts = set()
    for number, query in enumerate(random_queries(random.Random(6), 40)):
        negatives = [f"wrong {number}", f"worse {number}"]
        rows.append(pair(query, f"answer {number}", negatives=negatives))
        texts |= {f"answer {number}", *negatives}
    sets = opened(tmp_path, rows, max_negatives=max_negatives)
    # Those of the held-out records too.
    assert {item.text for item in sets.evaluation.documents} == texts
    num_trained = 2 if max_negatives is None else max_negatives
    assert len(sets.examples[0].negatives) == num_trained


def test_negatives_whose_images_no_step_reads_may_be_missing(tmp_path, caplog):
    rows = []
    for number, query in enumerate(random_queries(random.Random(6), 40)):
        write(tmp_path / f"{number}.jpg", seed=number)
        names = (f"{number}.jpg", f"{number}-missing.jpg")
        negatives = [{"image": name} for name in names]
        rows.append(pair(query, f"answer {number}", negatives=negatives))
    sets = opened(tmp_path, rows, max_negatives=1)
    assert len(sets.evaluation.documents) == 80
    assert "40 negatives beyond max_negatives" in caplog.text
