"""The table names every promise and what shows it: tests by their marks, pages, commands."""

import re

import pytest

from tests.acceptance.table import README, marked_tests, promises, table

NUM_ROWS = {"A": 26, "B": 33, "C": 34, "D": 46, "E": 41}
ROWS = [
    f"{document}{number:02d}"
    for document, last in NUM_ROWS.items()
    for number in range(1, last + 1)
]


def test_every_promise_has_one_row():
    assert list(promises()) == ROWS


def test_the_table_is_made_from_the_marks():
    assert README.read_text(encoding="utf-8") == table(), (
        "run: python -m tests.acceptance.table"
    )


def test_marks_name_promises():
    assert [(row, test) for row, test in marked_tests() if row not in ROWS] == []


@pytest.mark.parametrize("row", ROWS)
def test_every_row_is_shown(row):
    kind = promises()[row]["kind"]
    also = promises()[row].get("also", "")
    if "CFG" in kind or "CPU2" in kind:
        assert row in {marked for marked, _ in marked_tests()} or row == "E37"
    elif "DOC" in kind:
        assert "](../../docs/" in also
    else:
        assert re.search(r"`vembed |as E19|the same lines", also)
