"""Data that are easily misread: what is not read or taken for something else is warned of or refused."""

import csv
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.files import RECORDS, config, open_examples, open_path, write_jsonl
from vembed.errors import UserError


def test_texts_that_look_like_lists_are_warned_of(tmp_path):
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        rows = [
            [f"q{number}", f"p{number}", str([f"it's {number}", "b"])]
            for number in range(3)
        ]
        csv.writer(file).writerows([["query", "positive", "negatives"], *rows])
    (warning,) = open_path(path).warnings()
    assert (
        "its negatives look like lists or objects" in warning
        and "write JSON Lines or Parquet" in warning
    )
    records = [
        {"query": f"q{number}", "positive": '{"text": "p"}', "negatives": "['a' 'b']"}
        for number in range(3)
    ]
    kinds = open_path(write_jsonl(tmp_path / "a.jsonl", records)).warnings()
    assert [
        "positives look like lists or objects" in kinds[0],
        "negatives look like lists" in kinds[1],
    ] == [True, True]
    path.write_text("query,positive,negatives\nq,p,\"['a', 'b']\"\nr,p,a text\n")
    assert open_path(path).warnings() == [], "one such text is a text"


@pytest.mark.parametrize(
    ("record", "options", "expected"),
    [
        (
            {"score": 1},
            {},
            "its scores are not read by loss: infonce, and every pair is taken for a match: set loss: cosent",
        ),
        (
            {"pos_scores": [1], "negatives": ["n"]},
            {"loss": "triplet"},
            "its scores are not read by loss: triplet, .*teacher: scores",
        ),
        (
            {"positive_scores": [0.9]},
            {"losses": [{"loss": "infonce"}, {"loss": "mse", "teacher": "m"}]},
            "its scores are not read by loss: infonce and mse, .*teacher: scores",
        ),
        (
            {"scores": [1, 0], "negatives": ["n"]},
            {"loss": "triplet"},
            "its scores are not read by loss: triplet, and every pair is taken for a match: .*loss: kl",
        ),
        (
            {"pos_scores": [1], "neg_scores": [0], "negatives": ["n"]},
            {"loss": "kl", "teacher": "scores"},
            None,
        ),
        (
            {"negative1": "n", "bm25 negatives": ["m"]},
            {},
            "{bm25 negatives: negative, negative1: negative}",
        ),
        ({"negative_ids": [3], "is_negative": False, "negative_1": "n"}, {}, None),
    ],
)
def test_parts_of_records_that_are_not_read_are_warned_of(
    tmp_path,
    record,
    options,
    expected,
):
    records = [
        {"query": f"q{number}", "positive": f"p{number}", **record}
        for number in range(3)
    ]
    warnings = open_path(
        write_jsonl(tmp_path / "a.jsonl", records), **options
    ).warnings()
    assert len(warnings) == (expected is not None), warnings
    assert expected is None or re.search(expected, warnings[0])
    assert open_examples(
        config(**options), str(tmp_path / "a.jsonl"), role="validation"
    ).warnings() == [
        warning
        for warning in warnings
        if not re.search("not read by|negative1|Instruction", warning)
    ], "graded relevance is read in an evaluation, and negatives are no part of it"


TEACHERS = [{"name": "t", "model": "m"}]


@pytest.mark.parametrize(
    ("losses", "options", "expected"),
    [
        (["infonce", "margin_mse", "kl"], {}, ["loss: margin_mse and kl stays 0"]),
        (["infonce", "mse"], {}, []),
        (["infonce", "kl"], {"in_batch_negatives": 2}, []),
    ],
)
def test_a_loss_that_stays_0_beside_another_is_warned_of(
    tmp_path,
    losses,
    options,
    expected,
):
    entries = []
    for loss in losses:
        teacher = {} if loss == "infonce" else {"teacher": "t"}
        entries.append({"loss": loss, **teacher})
    options = {"losses": entries, "teachers": TEACHERS, **options}
    pairs = [{"query": f"q{number}", "positive": f"p{number}"} for number in range(3)]
    path = write_jsonl(tmp_path / "a.jsonl", pairs)
    warnings = open_path(path, **options).warnings()
    assert len(warnings) == len(expected), warnings
    for warning, sentence in zip(warnings, expected, strict=True):
        assert sentence in warning
    pairs[0]["negatives"] = ["n"]
    assert open_path(write_jsonl(path, pairs), **options).warnings() == []


def test_a_label_beside_messages_is_a_score(tmp_path):
    records = [
        {
            name: [{"role": "user", "content": f"{name} {number}"}]
            for name in ("messages", "positive_messages")
        }
        | {"label": number / 2}
        for number in range(3)
    ]
    (warning,) = open_path(write_jsonl(tmp_path / "a.jsonl", records)).warnings()
    assert "its scores are not read by loss: infonce" in warning
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    store = open_path(tmp_path / "a.parquet", loss="cosent")
    assert [(store[n].query.text, store[n].scores) for n in (0, 2)] == [
        ("messages 0", (0.0,)),
        ("messages 2", (1.0,)),
    ]
    assert store.warnings() == [] and not [
        line for line in store.summary() if "not used" in line
    ]


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ((0, 1, 2), "label (0, 1, 2) is taken for a score"),
        ((0, 1, 1), None),
    ],
)
def test_classes_that_are_taken_for_scores_are_warned_of(tmp_path, labels, said):
    rows = [
        {"sentence1": f"a{number}", "sentence2": "b", "label": label}
        for number, label in enumerate(labels)
    ]
    warnings = open_path(
        write_jsonl(tmp_path / "a.jsonl", rows), loss="cosent"
    ).warnings()
    assert [warning.partition(": ")[2][: len(said or "")] for warning in warnings] == (
        [said] if said else []
    )


def test_a_name_of_the_mapping_that_no_source_has(tmp_path):
    first = write_jsonl(
        tmp_path / "a.jsonl", [{"frage": "q", "positive": "p", "falsch": ["n"]}]
    )
    second = write_jsonl(tmp_path / "b.jsonl", RECORDS)
    paths = [str(first), str(second)]
    assert open_examples(
        config(column_mapping={"frage": "query", "falsch": "negative"}), paths
    )[0].negatives
    with pytest.raises(
        UserError,
        match="column_mapping names flasch, which no record of any source has",
    ):
        open_examples(
            config(column_mapping={"frage": "query", "flasch": "negative"}), paths
        )


def test_scores_beyond_a_cosine_are_found_before_training(tmp_path):
    path = write_jsonl(
        tmp_path / "a.jsonl",
        [{"sentence1": "a", "sentence2": "b", "label": n} for n in (0, 1, 4)],
    )
    with pytest.raises(
        UserError,
        match=r"a.jsonl:3: label is 4, and loss: cosine .* \[-1, 1\]: scale the scores",
    ):
        open_path(path, loss="cosine")
    for options in ({"loss": "cosent"}, {"loss": "cosine", "similarity": "dot"}):
        assert len(open_path(path, **options)) == 3
