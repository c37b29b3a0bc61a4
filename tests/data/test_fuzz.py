"""Broken input of every kind at the loaders: a UserError or a counted skip, no traceback and no lost good record.

VEMBED_FUZZ says how many inputs are made altogether; 200 by default, 10,000 in the long version.
"""

import csv
import io
import json
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.data.files import (
    numbered,
    open_path,
    pair,
    pairs_of,
    queries_of,
    refused,
    write_parquet,
)
from vembed.data.formats import base, delimited
from vembed.errors import UserError

NUM_INPUTS = int(os.environ.get("VEMBED_FUZZ", "200"))
LONGEST_LINE = 3000
SUFFIXES = [".jsonl", ".json", ".csv", ".tsv", ".parquet"]


def rank_batch(percent):
    """So many of all inputs."""
    return settings(
        max_examples=max(1, NUM_INPUTS * percent // 100),
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.filter_too_much,
            HealthCheck.data_too_large,
        ],
    )


@contextmanager
def folder():
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch.object(base, "MAX_RECORD_BYTES", LONGEST_LINE),
        mock.patch.object(delimited, "MAX_RECORD_BYTES", LONGEST_LINE),
    ):
        yield Path(name)


def check(path, entries):
    """The good ones come in order, the bad ones are counted, and with `stop` they are named."""
    good = [value for is_good, value in entries if is_good]
    num_bad = len(entries) - len(good)
    if good:
        store = open_path(path, on_bad_record="skip")
        assert pairs_of(store) == good
        assert store.counts["bad"] == num_bad
    else:
        refused(path, on_bad_record="skip")
    if num_bad:
        said = refused(path, on_bad_record="stop")
        assert str(path) in said
        said.encode("utf-8")
        if good:
            assert f"{num_bad:,d} of {len(entries):,d} records" in said


letters = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
# Each begins with a letter: a broken quote before a text that begins with a comma or a newline may mean either.
good_texts = st.builds("a{}".format, st.text(letters, max_size=30))
pairs = st.tuples(good_texts, good_texts)


def pairs_among(broken, max_size):
    """Lists of (True, a pair) and (False, something broken)."""
    good = st.tuples(st.just(True), pairs)
    bad = st.tuples(st.just(False), broken)
    return st.lists(good | bad, min_size=1, max_size=max_size)


broken_texts = st.sampled_from(
    ["", " ", "\n\t ", "\0", "a\0b", "\ud800", "a\udfffb", None]
)
wrong_values = (
    broken_texts
    | st.integers()
    | st.floats()
    | st.booleans()
    | st.lists(st.none() | st.integers() | st.lists(st.text()), max_size=3)
    | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)
)
wrong_scores = st.sampled_from(
    ["1", True, [], [1, 2], {}, float("nan"), float("inf"), 10**400]
)
wrong_objects = st.one_of(
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=3),
    st.builds(pair, query=wrong_values),
    st.builds(pair, positive=wrong_values),
    wrong_values.map(lambda value: pair(positive=["p", value])),
    wrong_values.map(lambda value: pair(negatives=["n", value])),
    st.builds(pair, score=wrong_scores),
    wrong_values.filter(lambda value: value is not None).map(
        lambda value: pair(positive={"image": value})
    ),
    wrong_values.map(lambda value: pair(query={"text": value})),
)
wrong_json = (
    wrong_objects
    | st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.lists(st.integers())
)


def line_of(value):
    return json.dumps(value).encode()


broken_lines = st.one_of(
    wrong_json.map(line_of),
    st.builds(
        lambda texts, num_lost: line_of(pair(*texts))[:-num_lost],
        pairs,
        st.integers(1, 21),
    ),
    st.binary(max_size=50).map(lambda junk: b"\xff" + junk.replace(b"\n", b"")),
    st.integers(1, 100).map(lambda count: b"\0" * count),
    # A first line of one bracket begins an array.
    st.integers(2, LONGEST_LINE).map(lambda count: b"[" * count),
    st.integers(LONGEST_LINE, 12_000).map(lambda count: line_of(pair("x" * count))),
)


def records_of(entries):
    """The entries as values of JSON."""
    return [pair(*value) if is_good else value for is_good, value in entries]


@rank_batch(25)
@given(pairs_among(broken_lines, 12))
def test_json_lines(lines):
    data = b"\n".join(
        value if isinstance(value, bytes) else line_of(value)
        for value in records_of(lines)
    )
    # A file that begins so is taken for one array.
    assume(not data.lstrip().startswith(b"["))
    with folder() as place:
        path = place / "data.jsonl"
        path.write_bytes(data)
        check(path, lines)


broken_rows = st.sampled_from(
    [
        *(b"one", b"a,b,c", b",,,,", b",", b",b", b"a,", b" ,b", b"a\0,b", b"\xff,b"),
        *(b'd,"never closed', b'"never closed', b'"a,b', b'd,"closed" early'),
        b"a," + b"x" * (LONGEST_LINE + 10),
        b'a,"' + b"x" * (LONGEST_LINE - 10),
    ]
)


@rank_batch(20)
@given(
    pairs_among(broken_rows, 12),
    st.sampled_from(["\n", "\r\n"]),
)
def test_csv(rows, ending):
    with folder() as place:
        path = place / "data.csv"
        lines = [row_of(*row, ending) for row in rows]
        path.write_bytes(b"query,positive\n" + b"".join(lines))
        check(path, rows)


def row_of(is_good, cells, ending):
    if not is_good:
        return cells + ending.encode()
    buffer = io.StringIO(newline="")
    # csv.writer leaves a carriage return without quotes, which then is the end of a line.
    quoting = csv.QUOTE_ALL if "\r" in "".join(cells) else csv.QUOTE_MINIMAL
    csv.writer(buffer, lineterminator=ending, quoting=quoting).writerow(cells)
    return buffer.getvalue().encode()


@rank_batch(5)
@given(
    st.lists(
        st.tuples(st.floats(0, 0.999), st.integers(0, 255)), min_size=1, max_size=20
    ),
    st.floats(0, 1),
)
def test_damaged_parquet(damage, keep):
    buffer = io.BytesIO()
    write_parquet(buffer, numbered(50))
    data = bytearray(buffer.getvalue())
    for place, value in damage:
        data[int(place * len(data))] = value
    size = len(data) if keep > 0.5 else int(len(data) * keep)
    readable_or_named(".parquet", data[:size])


@rank_batch(10)
@given(
    st.sampled_from(SUFFIXES),
    st.binary(max_size=300)
    | st.text(max_size=300).map(lambda text: text.encode("utf-16")),
)
def test_any_bytes(suffix, content):
    readable_or_named(suffix, content)


def readable_or_named(suffix, content):
    with folder() as place:
        path = place / f"data{suffix}"
        path.write_bytes(content)
        for mode in ("skip", "stop"):
            try:
                store = open_path(path, on_bad_record=mode)
            except UserError as error:
                assert str(path) in str(error)
            else:
                assert all(queries_of(store))
