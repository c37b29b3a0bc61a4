"""Broken input of every kind at the loaders: a UserError or a counted skip, no traceback and no lost good record.

VEMBED_FUZZ says how many inputs are made altogether; 500 by default, 10,000 in the long version.
"""

import csv
import io
import json
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.data.files import open_examples, pair, pairs_of
from vembed.config.schema import TrainConfig
from vembed.data.formats import base, delimited
from vembed.errors import UserError

NUM_INPUTS = int(os.environ.get("VEMBED_FUZZ", "500"))
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


def open_path(path, on_bad_record, **options):
    return open_examples(
        TrainConfig(
            model_name="m", data_path="unused", on_bad_record=on_bad_record, **options
        ),
        str(path),
    )


def check(path, good, num_bad, **options):
    """The good ones come in order, the bad ones are counted, and with `stop` they are named."""
    if not good:
        with pytest.raises(UserError):
            open_path(path, "skip", **options)
    else:
        store = open_path(path, "skip", **options)
        assert pairs_of(store) == good
        assert store.num_skipped == num_bad
    if num_bad:
        with pytest.raises(UserError) as caught:
            open_path(path, "stop", **options)
        assert str(path) in str(caught.value)
        if good:
            assert f"{num_bad:,d} of {num_bad + len(good):,d} records" in str(
                caught.value
            )
        str(caught.value).encode("utf-8")


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
wrong_objects = st.one_of(
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3).filter(
        lambda d: "query" not in d
    ),
    wrong_values.map(lambda value: pair(query=value)),
    wrong_values.map(lambda value: pair(positive=value)),
    wrong_values.map(lambda value: pair(positive=["p", value])),
    wrong_values.map(lambda value: pair(negatives=["n", value])),
    st.builds(
        lambda value: pair(score=value),
        st.sampled_from(
            ["1", True, [], [1, 2], {}, float("nan"), float("inf"), 10**400]
        ),
    ),
    st.builds(
        lambda value: pair(positive={"image": value}),
        wrong_values.filter(lambda v: v is not None),
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
cut_json = st.builds(
    lambda pair, keep: json.dumps({"query": pair[0], "positive": pair[1]})[
        : -1 - keep
    ].encode(),
    pairs,
    st.integers(0, 20),
)
broken_lines = st.one_of(
    wrong_json.map(lambda value: json.dumps(value).encode()),
    cut_json,
    st.builds(lambda junk: b"\xff" + junk.replace(b"\n", b""), st.binary(max_size=50)),
    st.builds(lambda count: b"\0" * count, st.integers(1, 100)),
    # A first line of one bracket begins an array.
    st.builds(lambda count: b"[" * count, st.integers(2, LONGEST_LINE)),
    st.builds(
        lambda count: (
            b'{"query": "%s", "positive": "b"}' % (b"x" * (LONGEST_LINE + count))
        ),
        st.integers(0, 9000),
    ),
)


@rank_batch(25)
@given(pairs_among(broken_lines, 12))
def test_json_lines(lines):
    good = [pair for is_good, pair in lines if is_good]
    data = b"\n".join(
        json.dumps({"query": line[0], "positive": line[1]}).encode()
        if is_good
        else line
        for is_good, line in lines
    )
    # A file that begins so is taken for one array.
    assume(not data.lstrip().startswith(b"["))
    with folder() as place:
        path = place / "data.jsonl"
        path.write_bytes(data)
        check(path, good, len(lines) - len(good))


@rank_batch(10)
@given(
    pairs_among(wrong_json, 8),
    st.integers(0, 3),
    st.integers(0, 30),
)
def test_json_arrays(elements, indent, cut):
    good = [pair for is_good, pair in elements if is_good]
    values = [
        {"query": element[0], "positive": element[1]} if is_good else element
        for is_good, element in elements
    ]
    text = json.dumps(values, indent=indent or None)
    constants = []  # NaN is a mistake in the syntax of JSON, after which an array cannot be read
    json.loads(text, parse_constant=constants.append)
    with folder() as place:
        path = place / "data.json"
        if constants or cut:
            path.write_text(text[: len(text) - cut] if cut else text, encoding="utf-8")
            with pytest.raises(UserError, match=r"data\.json"):
                open_path(path, "skip")
            return
        path.write_text(text, encoding="utf-8")
        check(path, good, len(elements) - len(good))


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
    good = [pair for is_good, pair in rows if is_good]
    with folder() as place:
        path = place / "data.csv"
        path.write_bytes(
            b"query,positive\n" + b"".join(_row(row, ",", ending) for row in rows)
        )
        check(path, good, len(rows) - len(good))


def _row(row, delimiter, ending):
    is_good, cells = row
    if not is_good:
        return bytes(cells) + ending.encode()
    buffer = io.StringIO(newline="")
    # csv.writer leaves a carriage return without quotes, which then is the end of a line.
    quoting = (
        csv.QUOTE_ALL if any("\r" in cell for cell in cells) else csv.QUOTE_MINIMAL
    )
    csv.writer(
        buffer, delimiter=delimiter, lineterminator=ending, quoting=quoting
    ).writerow(cells)
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
    pq.write_table(
        pa.table(
            {"query": [f"q{number}" for number in range(50)], "positive": ["p"] * 50}
        ),
        buffer,
    )
    data = bytearray(buffer.getvalue())
    for place, value in damage:
        data[int(place * len(data))] = value
    readable_or_named(
        ".parquet", bytes(data) if keep > 0.5 else bytes(data[: int(len(data) * keep)])
    )


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
                store = open_path(path, mode)
            except UserError as error:
                assert str(path) in str(error)
            else:
                assert all(store[number].query.text for number in range(len(store)))
