"""Data that are easily misread: what is not read or taken for something else is warned of or refused."""

import re

import pytest

from tests.data.files import (
    numbered,
    open_path,
    open_rows,
    pair,
    queries_of,
    refused_rows,
    write_format,
    write_parquet,
)


def test_texts_that_look_like_lists_are_warned_of(tmp_path):
    records = [
        pair(f"q{number}", negatives=str([f"it's {number}", "b"]))
        for number in range(3)
    ]
    path = write_format(tmp_path, "csv", records)
    (warning,) = open_path(path).warnings()
    assert "its negatives look like lists or objects" in warning
    assert "write JSON Lines or Parquet" in warning
    rows = numbered(3, positive='{"text": "p"}', negatives="['a' 'b']")
    positives, negatives = open_rows(tmp_path, rows).warnings()
    assert "positives look like lists or objects" in positives
    assert "negatives look like lists" in negatives
    records[1:] = [pair(negatives="a text")]
    write_format(tmp_path, "csv", records)
    assert open_path(path).warnings() == [], "one such text is a text"


@pytest.mark.parametrize(
    ("record", "options", "expected"),
    [
        (
            {"score": 1},
            {},
            "scores are not read by loss: infonce, .*: set loss: cosent",
        ),
        (
            {"pos_scores": [1], "negatives": ["n"]},
            {"loss": "triplet"},
            "scores are not read by loss: triplet, .*teacher: scores",
        ),
        (
            {"positive_scores": [0.9]},
            {"losses": [{"loss": "infonce"}, {"loss": "mse", "teacher": "m"}]},
            "scores are not read by loss: infonce and mse, .*teacher: scores",
        ),
        (
            {"scores": [1, 0], "negatives": ["n"]},
            {"loss": "triplet"},
            "scores are not read by loss: triplet, .*loss: kl",
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
    records = numbered(3, **record)
    warnings = open_rows(tmp_path, records, **options).warnings()
    assert len(warnings) == (expected is not None), warnings
    assert expected is None or re.search(expected, warnings[0])
    # Graded relevance is read in an evaluation, and negatives are no part of it.
    validation = open_rows(tmp_path, records, role="validation", **options)
    assert validation.warnings() == []


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
    pairs = numbered(3)
    warnings = open_rows(tmp_path, pairs, **options).warnings()
    for warning, sentence in zip(warnings, expected, strict=True):
        assert sentence in warning
    pairs[0]["negatives"] = ["n"]
    assert open_rows(tmp_path, pairs, **options).warnings() == []


def test_a_label_beside_messages_is_a_score(tmp_path):
    records = []
    for number in range(3):
        record = {"label": number / 2}
        for name in ("messages", "positive_messages"):
            record[name] = [{"role": "user", "content": f"{name} {number}"}]
        records.append(record)
    (warning,) = open_rows(tmp_path, records).warnings()
    assert "its scores are not read by loss: infonce" in warning
    write_parquet(tmp_path / "a.parquet", records)
    store = open_path(tmp_path / "a.parquet", loss="cosent")
    assert queries_of(store) == ["messages 0", "messages 1", "messages 2"]
    assert [example.scores for example in store] == [(0,), (0.5,), (1,)]
    assert store.warnings() == []
    assert "not used" not in "".join(store.summary())


def labelled(*labels):
    return [{"sentence1": "a", "sentence2": "b", "label": label} for label in labels]


def test_classes_that_are_taken_for_scores_are_warned_of(tmp_path):
    (warning,) = open_rows(tmp_path, labelled(0, 1, 2), loss="cosent").warnings()
    assert "label (0, 1, 2) is taken for a score" in warning
    assert open_rows(tmp_path, labelled(0, 1, 1), loss="cosent").warnings() == []


def test_scores_beyond_a_cosine_are_found_before_training(tmp_path):
    rows = labelled(0, 1, 4)
    said = refused_rows(tmp_path, rows, loss="cosine")
    assert "rows.jsonl:3: label is 4, and loss: cosine" in said
    for options in ({"loss": "cosent"}, {"loss": "cosine", "similarity": "dot"}):
        assert len(open_rows(tmp_path, rows, **options)) == 3
