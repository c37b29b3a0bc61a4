"""Held-out validation data, and validation data that are in the training data."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from tests.data.files import config, write_jsonl
from tests.data.pictures import write
from tests.tiny import WORDS
from vembed.data.example_store import ExampleStore, open_examples
from vembed.data.held_out import hold_out, query_groups
from vembed.data.normal_form import normal_text
from vembed.data.overlap import Overlap, find_overlap, warnings_of
from vembed.errors import UserError


def store_of(
    folder: Path, rows: list[dict[str, object]], name: str = "a.jsonl"
) -> ExampleStore:
    return open_examples(
        config(no_duplicates=True), str(write_jsonl(folder / name, rows))
    )


@pytest.fixture
def rows() -> list[dict[str, object]]:
    """200 records of 100 different queries: each once more in capitals, or with one more word."""
    draw = random.Random(0)
    found: list[dict[str, object]] = []
    for number in range(100):
        words = draw.choices(WORDS, k=40)
        again = " ".join(words).upper() if number % 2 else " ".join([*words, "now"])
        found += [
            {"query": " ".join(words), "positive": f"first {number}"},
            {"query": again, "positive": "second"},
        ]
    return found


def test_no_query_and_no_near_duplicate_is_on_both_sides(
    tmp_path: Path, rows: list[dict[str, object]]
) -> None:
    store = store_of(tmp_path, rows)
    train, held = hold_out(store, 0.2, seed=1)
    assert len(train) + len(held) == 200 and 40 <= len(held) <= 44
    kept = [train[index] for index in range(len(train))]
    assert not {normal_text(one.query.text or "") for one in kept} & {
        normal_text(one.query.text or "") for _, one in held
    }
    assert len(set(query_groups(store).tolist())) == 100, (
        "each query and its near-duplicate are one group"
    )
    assert [one.where for _, one in hold_out(store, 0.2, seed=1)[1]] == [
        one.where for _, one in held
    ]
    assert [one.where for _, one in hold_out(store, 0.2, seed=2)[1]] != [
        one.where for _, one in held
    ]
    assert train.fingerprint != store.fingerprint
    assert len(train.all_keys().starts) == len(train) + 1
    assert train.keys(0) == [
        item.key() for item in (train[0].query, train[0].positives[0])
    ]


def test_records_that_are_added_leave_the_others_on_their_side(
    tmp_path: Path, rows: list[dict[str, object]]
) -> None:
    some, more = store_of(tmp_path, rows[:180]), store_of(tmp_path, rows, "b.jsonl")
    before = {one.query.text for _, one in hold_out(some, 0.2, seed=1)[1]}
    after = {one.query.text for _, one in hold_out(more, 0.2, seed=1)[1]}
    assert len(before - after) <= 4


def test_a_split_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    store = store_of(
        tmp_path,
        [{"query": "the same", "positive": str(number)} for number in range(5)],
    )
    with pytest.raises(
        UserError,
        match="5 examples with 1 different queries leaves nothing to train on",
    ):
        hold_out(store, 0.1, seed=1)


def test_overlap_counts_queries_positives_and_pairs(tmp_path: Path) -> None:
    first, second = write(tmp_path / "one.png"), tmp_path / "copy.png"
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
    pairs = [
        (one.query, one.positives[0])
        for one in (validation[index] for index in range(4))
    ]
    found = {one.what: one for one in find_overlap(train, pairs)}
    assert {what: len(one.found) for what, one in found.items()} == {
        "queries": 2,
        "positives": 3,
        "pairs": 2,
    }
    sentences = warnings_of(list(found.values()))
    assert sentences[0].startswith(
        "2 of the 4 queries of the validation data (50%) are in the training data too"
    )
    assert (
        "'how do i sort' -> 'use SORTED'" in sentences[2] and "copy.png" in sentences[2]
    )
    assert warnings_of(find_overlap(train, pairs[1:3])) == [], "a corpus may serve both"
    assert (
        "1 of the 994 queries of the validation data (0.1%) are"
        in Overlap("queries", 994, {1: "'a'"}).sentence()
    )


def test_vowel_signs_and_tone_marks_are_part_of_words(tmp_path: Path) -> None:
    train = store_of(
        tmp_path,
        [{"query": "दिन", "positive": "วันนี้"}, {"query": "love ❤️", "positive": "কি"}],
    )
    validation = store_of(
        tmp_path,
        [{"query": "दान", "positive": "วันนั้"}, {"query": "Love", "positive": "কা"}],
        "b.jsonl",
    )
    pairs = [
        (one.query, one.positives[0])
        for one in (validation[index] for index in range(2))
    ]
    assert [
        (one.what, list(one.found.values())) for one in find_overlap(train, pairs)
    ] == [("queries", ["'Love'"])]


@pytest.mark.parametrize("seed", range(8))
def test_a_group_of_most_queries_is_not_held_out(tmp_path: Path, seed: int) -> None:
    draw = random.Random(0)
    similar = [
        f"open the page of your account and choose the number {n} in its list"
        for n in range(140)
    ]
    others = [" ".join(draw.choices(WORDS, k=40)) for _ in range(60)]
    store = store_of(
        tmp_path,
        [
            {"query": one, "positive": f"p{n}"}
            for n, one in enumerate([*similar, *others])
        ],
    )
    assert np.unique(query_groups(store)[:140]).size < 10, "near-duplicates"
    train, held = hold_out(store, 0.2, seed)
    assert 40 <= len(held) <= 80 and len(train) + len(held) == 200
