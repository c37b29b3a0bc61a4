"""The contract of file formats, for all that `FORMATS` declares: order, names of rows, parts, pickling, fingerprints.

A new format in the file NAME.py needs a function `write` in tests/data/test_NAME.py, and the constant
`LINES = (line of the first record, lines of each)` unless that is (1, 1).
"""

import copy
import json
import os
import pickle
import pydoc
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vembed.data.formats
from tests.data.files import (
    numbered,
    open_path,
    open_rows,
    pair,
    pairs_of,
    places_of,
    refused,
    write_delimited,
    write_json_array,
    write_jsonl,
    write_parquet,
)
from tests.parts import ROOT, from_its_test, unlisted_classes
from vembed.data import example_store
from vembed.data.example_store import build_index, index_part
from vembed.data.examples import BadRecord, ImageRoot
from vembed.data.formats import base, parquet
from vembed.data.formats.base import Format, python_rows
from vembed.data.formats.delimited import DelimitedFile, TsvFile
from vembed.data.formats.json_lines import JsonArray, JsonLines
from vembed.data.formats.parquet import ParquetFile
from vembed.data.formats.table import FORMATS, SeveralFiles, check_formats, open_reader
from vembed.data.records import Columns, RecordFormat

NUM_RECORDS = 300
RECORDS = [
    {
        "query": f"question {row}, \u00e4\u6f22 " * (1 + row % 7),
        "positive": f'answer "{row}"',
        "other": str(row),
    }
    for row in range(NUM_RECORDS)
]


WRITERS = {
    JsonLines: write_jsonl,
    JsonArray: write_json_array,
    DelimitedFile: write_delimited,
    TsvFile: write_delimited,
    ParquetFile: partial(write_parquet, rows_of_a_group=70),
}


def writer_of(form):
    """The function that writes a file of a format."""
    module = form.__module__.rpartition(".")[2]
    return WRITERS.get(form) or from_its_test("data", module, "write")


LINES_OF_WRITERS = {DelimitedFile: (2, 1), TsvFile: (2, 1)}
"""Line of the first record and lines of each, in what the writers of this file write, where that is not (1, 1)."""


def line_of(form, number):
    """The line of a record, counted from 0. The test file of a format may have the constant LINES."""
    module = sys.modules[writer_of(form).__module__]
    lines = LINES_OF_WRITERS.get(form) or getattr(module, "LINES", (1, 1))
    return int(lines[0] + number * lines[1])


all_formats = pytest.mark.parametrize(
    "form", [*FORMATS, JsonArray], ids=lambda form: form.__name__
)


def path_of(form, folder, name="data"):
    return folder / f"{name}{(form.endings or ('.json',))[0]}"


def written(form, folder, records=RECORDS):
    path = path_of(form, folder)
    writer_of(form)(path, records)
    return path


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Files of these tests have several parts, pieces and batches, and are copied into the cache folder."""
    monkeypatch.setattr(base, "PART_BYTES", 5_000)
    monkeypatch.setattr(base, "READ_ROWS", 7)
    monkeypatch.setattr(parquet, "READ_ROWS", 32)
    monkeypatch.setattr(parquet, "PART_ROW_BYTES", 4_000)


@all_formats
def test_each_format_has_a_writer(form):
    assert callable(writer_of(form))


def record_format(**options):
    return RecordFormat(Columns(), ImageRoot("/", allow_urls=False), **options)


def numbers_of(reader):
    return [number for number, _, _ in reader.rows()]


def as_plain(index):
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in vars(index).items()
    }


@all_formats
def test_each_ending_is_on_the_page(form):
    page = (ROOT / "docs" / "data.md").read_text()
    missing = [ending for ending in form.endings if f"`{ending}`" not in page]
    assert not missing, (
        f"write these endings of {form.title} in docs/data.md: {missing}"
    )


def test_each_format_is_in_the_table():
    named = unlisted_classes(vembed.data.formats, Format, FORMATS)
    missing = [name for name in named if pydoc.locate(name).endings]
    assert not missing, f"list these in vembed/data/formats/table.py: {missing}"


class NoRows(Format):
    endings = (".a",)
    title = "A"


class SameEnding(JsonLines):
    endings = (".csv",)
    title = "JSON Lines of another ending"


class OneText(JsonLines):
    endings = ".one"  # type: ignore[assignment]
    title = "a text for a tuple"


class TwoDots(JsonLines):
    endings = (".csv.xz",)
    title = "an ending that no file has"


@pytest.mark.parametrize(
    ("form", "missing"),
    [
        (NoRows, "rows"),
        (SameEnding, "csv"),
        (OneText, "'.one',"),
        (TwoDots, "csv.xz"),
    ],
)
def test_what_a_format_does_not_declare_is_named(form, missing):
    with pytest.raises(TypeError, match=f"{form.__name__} .*{missing}"):
        check_formats((DelimitedFile, form))


@all_formats
def test_records_come_in_order_and_again(form, tmp_path):
    reader = open_reader(str(written(form, tmp_path)))
    assert type(reader) is form
    rows = list(reader.rows())
    assert [record for _, _, record in rows] == RECORDS
    numbers = numbers_of(reader)
    assert numbers == sorted(set(numbers))
    assert [reader.read(number) for number in reversed(numbers)] == RECORDS[::-1]
    assert reader.num_records() in (None, NUM_RECORDS)
    assert reader.columns in (None, tuple(RECORDS[0]))


@all_formats
def test_records_are_named_by_file_and_line(form, tmp_path):
    records = copy.deepcopy(RECORDS)
    for number in (3, 200):
        records[number]["positive"] = None if form is ParquetFile else ""
    path = written(form, tmp_path, records)
    said = refused(path)
    assert f"{path}:{line_of(form, 3)}: positive" in said
    assert f"2 of {NUM_RECORDS} records" in said
    places = places_of(open_path(path, on_bad_record="skip"))
    good = [number for number in range(NUM_RECORDS) if number not in (3, 200)]
    assert places == [f"{path}:{line_of(form, number)}" for number in good]


@all_formats
def test_parts_are_the_whole(form, tmp_path):
    reader = open_reader(str(written(form, tmp_path)))
    parts = reader.parts()
    rows = []
    first_line = 0
    for part in parts:
        for number, line, record in reader.rows(part):
            rows.append((number, line + first_line, record))
        first_line += reader.num_lines(part)
    assert rows == list(reader.rows())
    if form in (JsonLines, ParquetFile):
        assert len(parts) > 3


@all_formats
def test_another_process_reads_the_same(form, tmp_path):
    reader = open_reader(str(written(form, tmp_path)))
    reader.name = "another name"
    if reader.columns is not None:
        reader.select(reader.columns[:2])
    again = pickle.loads(pickle.dumps(reader))
    assert list(again.rows()) == list(reader.rows())
    assert again.where(7) == reader.where(7) == "another name:7"
    assert again.parts() == reader.parts()


@all_formats
def test_another_part_is_another_fingerprint(form, tmp_path):
    path = written(form, tmp_path)
    fingerprints = [open_path(path).fingerprint for _ in range(2)]
    fingerprints.append(open_path(path, max_train_examples=200).fingerprint)
    written(form, tmp_path, [*RECORDS[:-1], pair()])
    fingerprints.append(open_path(path).fingerprint)
    first, again, *others = fingerprints
    assert again == first
    assert first not in others


@all_formats
def test_threads_read_the_same(form, tmp_path):
    reader = open_reader(str(written(form, tmp_path)))
    numbers = numbers_of(reader)

    def read_all(thread):
        order = np.random.default_rng(thread).permutation(NUM_RECORDS).tolist()
        return [reader.read(numbers[row]) == RECORDS[row] for row in order]

    with ThreadPoolExecutor(4) as threads:
        for results in threads.map(read_all, range(4)):
            assert all(results)


@pytest.mark.parametrize(
    ("form", "with_keys"), [(JsonLines, True), (ParquetFile, False)]
)
def test_several_processes_find_what_one_finds(form, with_keys, tmp_path, monkeypatch):
    records = copy.deepcopy(RECORDS)
    records[150]["positive"] = " "
    for name in ("1", "2"):
        writer_of(form)(path_of(form, tmp_path, name), records)
    pattern = str(path_of(form, tmp_path, "*"))
    results = []
    for num_cores in (1, 2):
        monkeypatch.setattr(example_store, "num_cores", lambda count=num_cores: count)
        reader = open_reader(pattern)
        assert isinstance(reader, SeveralFiles)
        index = build_index(reader, [record_format(keeps_keys=with_keys)] * 2)
        results.append(as_plain(index))
    assert results[0] == results[1]
    assert results[0]["counts"]["bad"] == 2
    assert len(results[0]["numbers"]) == 2 * (NUM_RECORDS - 1)


def test_a_mapped_column_is_found_behind_records_of_many_forms(tmp_path, monkeypatch):
    """More forms than are remembered, read by two processes."""
    monkeypatch.setattr(base, "PART_BYTES", 2**20)
    monkeypatch.setattr(example_store, "num_cores", lambda: 2)
    records = [pair(**{f"more {number}": 1}) for number in range(1_200)]
    for name in ("1", "2"):
        last = {"query": "q", "solution": f"the last one of {name}"}
        write_jsonl(tmp_path / f"{name}.jsonl", [*records, last])
    mapping = {"solution": "positive"}
    store = open_path(tmp_path / "*.jsonl", column_mapping=mapping)
    assert pairs_of(store)[1_200] == ("q", "the last one of 1")


# ---- JSON Lines ------------------------------------------------------------------

PLAIN = numbered(40, neg_1="n", neg_2="m", more=1)
ODD = [
    "",
    "  ",
    '{"query": "a", "positive": "b"} ',
    '{"query": "a", "positive": "b"}\r',
    '{"query": "a", "positive": ["b", "c"]}',
    '{"query": "a", "positive": "b"}, {"query": "a", "positive": "b"}',
    '{"query": "a",',
    '"positive": "b"}',
    '{"query": " ", "positive": "b"}',
    '{"query": 5, "positive": "b"}',
    '{"query": ["a"], "positive": "b"}',
    '{"query": "", "positive": "b"}',
    '{"query": "a", "positive": null}',
    '{"query": "a\\u0000", "positive": "b"}',
    '{"query": "\\ud800", "positive": "b"}',
    '{"query": "\u00e4 \u2028", "positive": "\u4e2d"}',
    '{"query": NaN, "positive": "b"}',
    '{"positive": "b", "query": "a"}',
    '{"messages": [{"role": "user", "content": "a"}], "positive_messages": [[{"role": "user", "content": "b"}]]}',
    '{"query": "a", "positive": "b", "score": 1}',
    '{"text": "a", "label": 3}',
    '["a"]',
    '{"query": "' + "long " * 40 + '", "positive": "b"}',
]


@pytest.mark.parametrize("longest", [150, 2**20])
@pytest.mark.parametrize("losses", [("infonce",), ("triplet",), ("cosent",)])
def test_records_checked_together_are_those_checked_alone(
    tmp_path,
    monkeypatch,
    longest,
    losses,
):
    def results(path):
        form = record_format(losses=losses, max_negatives=1)
        reader = JsonLines(path)
        part = range(reader.start, reader.stop)
        facts = vars(index_part(reader, [form], part))
        facts["counts"] = +facts["counts"]
        facts["columns"] = vars(facts["columns"])
        return facts

    if losses == ("infonce",):
        assert record_format(losses=losses).example_of_plain_block(PLAIN) is not None
    lines = [json.dumps(record) for record in PLAIN]
    for at, line in enumerate(ODD):
        lines.insert(3 + 2 * at, line)
    files = {
        "plain": "\n".join(json.dumps(record) for record in PLAIN).encode(),
        "odd": ("\ufeff" + "\n".join(lines) + "\n").encode()
        + b'{"query": "\xff", "positive": "b"}\n',
        "pairs": b'{"query": "a", "positive": "b"}\r\n' * 9,
    }
    monkeypatch.setattr(base, "MAX_RECORD_BYTES", longest)
    monkeypatch.setattr(example_store, "BLOCK_RECORDS", 5)
    for name, data in files.items():
        path = tmp_path / name
        path.write_bytes(data)
        together = results(path)
        assert len(together["numbers"]) + together["counts"]["bad"] >= 9
        with pytest.MonkeyPatch.context() as alone:
            alone.setattr(RecordFormat, "example_of_plain_block", lambda *_: None)
            assert results(path) == together


def test_a_line_over_several_parts(tmp_path):
    long = "long " * 3_000
    store = open_rows(tmp_path, [*RECORDS[:50], pair(long), *RECORDS[50:]])
    assert store[50].query.text == long
    assert store[51].where.endswith(":52")


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
@pytest.mark.parametrize("text", ["[%s]", "\ufeff [\n%s\n]\n"])
def test_an_array_is_known_by_its_bracket(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text % json.dumps(pair()), encoding="utf-8")
    assert len(open_path(path)) == 1


# ---- tables ----------------------------------------------------------------------


def test_values_that_python_cannot_hold_are_bad_records():
    broken = pa.array([b"a", b"\xff", b"c"]).view(pa.string())
    rows = python_rows(pa.record_batch({"query": broken}))
    assert rows[::2] == [{"query": "a"}, {"query": "c"}]
    assert isinstance(rows[1], BadRecord)


def copies(cache_home):
    return sorted((cache_home / "vembed" / "parquet").rglob("*.arrow"))


@pytest.mark.parametrize("kind", ["plain", "one group", "dictionaries"])
def test_copied_rows_are_the_rows(kind, tmp_path, cache_home):
    path = tmp_path / "a.parquet"
    table = pa.Table.from_pylist(RECORDS)
    ends = [NUM_RECORDS] if kind == "one group" else [1, 38, 290, NUM_RECORDS]
    groups = []
    for start, stop in pairwise([0, *ends]):
        group = table.slice(start, stop - start)
        if kind == "dictionaries":
            queries = group.column("query").combine_chunks().dictionary_encode()
            group = group.set_column(0, "query", queries)
        groups.append(group)
    with pq.ParquetWriter(path, groups[0].schema) as writer:
        for group in groups:
            writer.write_table(group)
    expected = [(row["query"], row["positive"]) for row in RECORDS]
    assert pairs_of(open_path(path)) == expected
    assert len(copies(cache_home)) == 1


def test_a_copy_serves_until_it_is_damaged_or_the_file_changes(tmp_path, cache_home):
    path = written(ParquetFile, tmp_path)
    open_path(path)
    (copied,) = copies(cache_home)
    written_at = copied.stat().st_mtime_ns
    open_path(path)
    assert copies(cache_home) == [copied]
    assert copied.stat().st_mtime_ns == written_at
    os.truncate(copied, 1000)
    assert len(open_path(path)) == NUM_RECORDS
    for copied in copies(cache_home):
        copied.unlink()
    assert len(open_path(path)) == NUM_RECORDS
    write_parquet(path, RECORDS[:100])
    assert len(open_path(path)) == 100
    (again,) = copies(cache_home)
    assert again != copied


def test_a_full_disk_leaves_nothing(tmp_path, cache_home, monkeypatch):
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(parquet.pa.ipc, "new_stream", Mock(side_effect=full))
    assert "No space left" in refused(written(ParquetFile, tmp_path))
    assert not list((cache_home / "vembed" / "parquet").rglob("*.*"))
