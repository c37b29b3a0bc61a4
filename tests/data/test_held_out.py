"""Held-out validation data, and validation data that are in the training data."""

import random

import numpy as np
import pytest

from tests.data.files import config, open_examples, write_jsonl
from tests.data.pictures import write
from tests.tiny import WORDS
from vembed.config.loading import load_config
from vembed.data.datasets import example_groups, hold_out, open_sets, overlap_warnings
from vembed.data.examples import Item
from vembed.data.near_duplicates import normal_text
from vembed.errors import UserError
from vembed.evaluation.dataset import from_examples


def store_of(folder, rows, name="a.jsonl"):
    return open_examples(
        config(no_duplicates=True), str(write_jsonl(folder / name, rows))
    )


def numbered(queries):
    """Records of these queries, each with a positive of its own."""
    return [
        {"query": query, "positive": f"p{number}"}
        for number, query in enumerate(queries)
    ]


def positives_of_both_sides(parts):
    """The texts of the positives that are trained on and of those that are held out."""
    trained = {
        parts.train[index].positives[0].text for index in range(len(parts.train))
    }
    held = {example.positives[0].text for _, example in parts.examples}
    return trained, held


@pytest.fixture
def rows():
    """200 records of 100 different queries: each once more in capitals, or with one more word."""
    draw = random.Random(0)
    actual = []
    for number in range(100):
        words = draw.choices(WORDS, k=40)
        again = " ".join(words).upper() if number % 2 else " ".join([*words, "now"])
        actual += [
            {"query": " ".join(words), "positive": f"first {number}"},
            {"query": again, "positive": "second"},
        ]
    return actual


def test_no_query_and_no_near_duplicate_is_on_both_sides(tmp_path, rows):
    store = store_of(tmp_path, rows)
    parts = hold_out(store, 0.2, seed=1)
    train = parts.train
    held = parts.examples
    assert len(train) + len(held) == 200 and 40 <= len(held) <= 44
    remaining = [train[index] for index in range(len(train))]
    assert not {normal_text(example.query.text or "") for example in remaining} & {
        normal_text(example.query.text or "") for _, example in held
    }
    assert len(set(example_groups(store).by_query.tolist())) == 100, (
        "each query and its near-duplicate are one group"
    )
    assert [example.where for _, example in hold_out(store, 0.2, seed=1).examples] == [
        entry.where for _, entry in held
    ]
    assert [example.where for _, example in hold_out(store, 0.2, seed=2).examples] != [
        entry.where for _, entry in held
    ]
    assert train.fingerprint != store.fingerprint
    items = (train[0].query, train[0].positives[0])
    assert train.all_keys().values[:2].tolist() == [item.key() for item in items]


def test_a_split_that_leaves_nothing_is_refused(tmp_path):
    store = store_of(
        tmp_path,
        [{"query": "the same", "positive": str(number)} for number in range(5)],
    )
    with pytest.raises(
        UserError,
        match="5 examples with 1 different queries leaves nothing to train on",
    ):
        hold_out(store, 0.1, seed=1)


def test_overlap_counts_queries(tmp_path):
    first = write(tmp_path / "one.png")
    second = tmp_path / "copy.png"
    second.write_bytes(first.read_bytes())
    train = store_of(
        tmp_path,
        [
            {"query": "How do I sort?", "positive": "Use sorted()."},
            {"query": "another", "positive": "shared  answer"},
            {"query": "a picture", "positive": {"image": "one.png"}},
        ],
    )
    validation = store_of(
        tmp_path,
        [
            {"query": "how do i sort", "positive": "use SORTED"},
            {"query": "new", "positive": "Shared answer!"},
            {"query": "quite new", "positive": "nothing alike"},
            {"query": "a picture", "positive": {"image": "copy.png"}},
        ],
        "b.jsonl",
    )
    queries = [validation[index].query for index in range(4)]
    (sentence,) = overlap_warnings(train, queries)
    assert sentence.startswith("2 of the 4 queries of the validation data (50.0%)")
    assert "'how do i sort'; 'a picture'" in sentence
    assert overlap_warnings(train, queries[1:3]) == [], "a corpus may serve both"
    many = [Item(text=f"new {number}") for number in range(993)]
    (sentence,) = overlap_warnings(train, [validation[0].query, *many])
    assert sentence.startswith("1 of the 994 queries of the validation data (0.1%)")


def test_vowel_signs_and_tone_marks_are_part_of_words():
    for first, second in (("दिन", "दान"), ("วันนี้", "วันนั้"), ("কি", "কা")):
        assert normal_text(first) != normal_text(second)
    assert normal_text("love ❤️") == normal_text("Love")


@pytest.mark.parametrize("seed", range(3))
def test_a_group_of_most_queries_is_not_held_out(tmp_path, seed):
    draw = random.Random(0)
    similar = [
        f"open the page of your account and choose the number {number} in its list"
        for number in range(140)
    ]
    others = [" ".join(draw.choices(WORDS, k=40)) for _ in range(60)]
    store = store_of(tmp_path, numbered([*similar, *others]))
    assert np.unique(example_groups(store).by_query[:140]).size < 10, "near-duplicates"
    parts = hold_out(store, 0.2, seed)
    train = parts.train
    held = parts.examples
    assert 40 <= len(held) <= 80 and len(train) + len(held) == 200


def of_a_template(text, count):
    return [f"{text} {number} of the list in the menu" for number in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_one_kind_of_query_is_not_all_that_is_held_out(tmp_path, seed):
    draw = random.Random(0)
    similar = of_a_template("please cancel the order with the number", 30)
    others = [" ".join(draw.choices(WORDS, k=40)) for _ in range(170)]
    parts = hold_out(store_of(tmp_path, numbered([*similar, *others])), 0.15, seed)
    held = {example.query.text for _, example in parts.examples}
    assert len(held) == 30
    assert len(held & set(similar)) <= 7


def shuffled_queries(draw, count):
    return [draw.choices(WORDS, k=draw.randint(8, 16)) for _ in range(count)]


@pytest.mark.parametrize("change", ["one word", "two in front", "two behind"])
def test_copies_of_queries_are_on_one_side(tmp_path, change):
    draw = random.Random(3)
    rows = []
    for number, words in enumerate(shuffled_queries(draw, 300)):
        copy = list(words)
        if change == "one word":
            copy[draw.randrange(len(copy))] = f"other{number}"
        elif change == "two in front":
            copy = ["please", "tell", *copy]
        else:
            copy = [*copy, "right", "now"]
        for query in (words, copy):
            rows.append({"query": " ".join(query), "positive": f"{number} {query[0]}"})
    parts = hold_out(store_of(tmp_path, rows), 0.1, seed=1)
    trained, held = positives_of_both_sides(parts)
    assert trained.isdisjoint(held) and len(held) >= 28


def test_answers_of_several_queries_are_on_one_side(tmp_path):
    draw = random.Random(4)
    queries = [" ".join(words) for words in shuffled_queries(draw, 400)]
    answers = [" ".join(draw.choices(WORDS, k=30)) for _ in range(250)]
    rows = []
    for number, query in enumerate(queries):
        rows.append({"query": query, "positive": answers[number % 250]})
    parts = hold_out(store_of(tmp_path, rows), 0.1, seed=1)
    trained, held = positives_of_both_sides(parts)
    assert trained.isdisjoint(held)
    (note,) = parts.notes
    assert note.startswith(f"0 of the {len(held):,d} documents")
    data = from_examples(
        [example for _, example in parts.examples],
        "held",
        documents=[item for _, item in parts.documents],
    )
    assert {item.text for item in data.documents} == set(answers), "all of the file"


def opened(path, share, **more):
    """The data of a run on a file."""
    config = {"model_name": "m", "data_path": str(path), "val_split": share, **more}
    options = load_config(config)
    return open_sets(
        options.data, options.objective, model_name="m", seed=0, compares=False
    )


def test_a_run_says_which_documents_were_trained_on(tmp_path, caplog):
    rows = []
    for number, words in enumerate(shuffled_queries(random.Random(6), 60)):
        rows.append({"query": " ".join(words), "positive": f"answer {number % 3}"})
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    caplog.set_level("INFO", logger="vembed")
    sets = opened(path, 0.2)
    num_train = len(sets.examples)
    assert f"{num_train:,d} of 60 examples" in sets.examples.summary()[0]
    assert len(sets.evaluation.notes) == 2
    assert "over 3 documents" in sets.evaluation.summary()
    assert "3 of the 3 documents" in sets.evaluation.summary()
    assert sets.evaluation.summary() in caplog.text


def test_a_share_below_a_percent_and_few_negatives_are_written_out(tmp_path):
    rows = []
    for number, words in enumerate(shuffled_queries(random.Random(6), 100)):
        rows.append({"query": " ".join(words), "positive": f"answer {number}"})
    rows[0]["negatives"] = ["other", "another"]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    sets = opened(path, 0.0001)
    assert f"from 0.01% of the queries of {path}" in sets.evaluation.summary()
    assert "0.02 negatives each" in sets.examples.summary()[0]


@pytest.mark.parametrize("max_negatives", [None, 1, 0])
def test_all_negatives_are_searched_whatever_a_step_trains_on(tmp_path, max_negatives):
    rows = []
    texts = set()
    for number, words in enumerate(shuffled_queries(random.Random(6), 40)):
        negatives = [f"wrong {number}", f"worse {number}"]
        positive = f"answer {number}"
        row = {"query": " ".join(words), "positive": positive, "negatives": negatives}
        rows.append(row)
        texts |= {positive, *negatives}
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    sets = opened(path, 0.2, max_negatives=max_negatives)
    # Those of the held-out records too.
    assert {item.text for item in sets.evaluation.documents} == texts
    num_trained = 2 if max_negatives is None else max_negatives
    assert len(sets.examples[0].negatives) == num_trained


def test_negatives_whose_images_no_step_reads_may_be_missing(tmp_path, caplog):
    rows = []
    for number, words in enumerate(shuffled_queries(random.Random(6), 40)):
        write(tmp_path / f"{number}.jpg", seed=number)
        names = [f"{number}.jpg", f"{number}-missing.jpg"]
        negatives = [{"image": name} for name in names]
        rows.append(
            {
                "query": " ".join(words),
                "positive": f"answer {number}",
                "negatives": negatives,
            }
        )
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    sets = opened(path, 0.2, max_negatives=1)
    assert len(sets.evaluation.documents) == 80
    assert "40 negatives beyond max_negatives" in caplog.text
