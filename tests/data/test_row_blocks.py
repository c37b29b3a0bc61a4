"""Columns of tables that are checked by their bytes are those that are checked value by value."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from vembed.data.formats.base import RecordBlock
from vembed.data.row_blocks import RowBlock

CJK = "\u4e2d\u6587"
COLUMNS = {
    "ascii": ["a", "b c", "~"],
    "not ascii": ["\u00e4", CJK, "\u00a0 a"],
    "begins with space": [" a", "\u2003b", "\x7f"],
    "empty": ["a", "", "b"],
    "blank": ["a", " \t", "b"],
    "wide blank": ["a", "\u2003\u00a0", "b"],
    "separators": ["a", "\x1c\x1f", "b"],
    "null": ["a", None, "b"],
    "nul": ["a", "b\0", "c"],
    "numbers": [1, 2, 3],
    "lists": [["a"], ["b"], ["c"]],
}


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), None])
def test_texts_by_their_bytes(name: str, kind: pa.DataType | None) -> None:
    values = COLUMNS[name]
    is_text = all(isinstance(one, str | None) for one in values)
    column = pa.array(
        ["before", *values, "\0after"] if is_text else [values[0], *values, values[0]]
    )
    rows = pa.record_batch(
        {"query": column.cast(kind) if kind is not None and is_text else column}
    ).slice(1, 3)
    found, records = RowBlock(rows, 5), [{"query": one} for one in values]
    numbers = np.arange(3)
    assert found.are_texts(("query",)) == RecordBlock(
        numbers, numbers, numbers, records
    ).are_texts(("query",))
    assert list(found.found()) == [
        (5 + row, 1, 6 + row, record) for row, record in enumerate(records)
    ]
    assert found.names() == ("query",)


def test_bytes_that_are_no_text() -> None:
    broken = pa.array([b"a", b"\xff", b"c"]).view(pa.string())
    found = RowBlock(pa.record_batch({"query": broken}), 0)
    assert not found.are_texts(("query",))
    assert "cannot be read" in str(found.records()[1])


@pytest.mark.parametrize(
    ("json", "value", "is_good"),
    [
        (rb'{"query": "a\n"}', "a\n", True),
        (rb'{"query": "\u00e4"}', "\u00e4", True),
        (rb'{"query": "\\u0000"}', "\\u0000", True),
        (rb'{"query": "\u0000"}', "\0", False),
        (rb'{"query": "\uD83D\uDE00"}', "\U0001f600", True),
        (rb'{"query": "\udc00"}', "\udc00", False),
    ],
)
def test_escapes_of_json(json: bytes, value: str, is_good: bool) -> None:
    number = np.arange(1)
    assert (
        RecordBlock(number, number, number, [{"query": value}], json).are_texts(
            ("query",)
        )
        == is_good
    )
    assert (
        RecordBlock(number, number, number, [{"query": value}]).are_texts(("query",))
        == is_good
    )
