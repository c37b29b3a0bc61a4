"""The first pass in several processes finds what it finds in one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.files import config
from vembed.data import first_pass as index
from vembed.data import index_parts, index_worker
from vembed.data.columns import Columns
from vembed.data.example_store import open_examples
from vembed.data.first_pass import Index
from vembed.data.formats import base as blocks
from vembed.data.formats import json_files as readers
from vembed.data.formats import parquet as parquet_table
from vembed.data.formats.json_files import JsonLines
from vembed.data.images.files import ImageRoot
from vembed.data.index_parts import index_part
from vembed.data.records import RecordFormat

ROWS = [
    {
        "query": f"q {n} \u00e4" * (1 + n % 5),
        "positive": f"p {n}",
        "extra": 1,
        "negatives": ["a", "b"][: n % 3],
    }
    for n in range(400)
]


def as_dict(found: Index) -> dict[str, Any]:
    values = {one.name: getattr(found, one.name) for one in dataclasses.fields(found)}
    keys = values.pop("keys")
    values |= {"key_values": keys.values, "key_starts": keys.starts}
    return {
        name: one.tolist() if isinstance(one, np.ndarray) else one
        for name, one in values.items()
    }


def indices(
    path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> tuple[dict[str, Any], dict[str, Any], int]:
    """The index that one process finds, that which two find, and the number of parts."""
    found: list[Index] = []
    parts: list[int] = []
    build, split = index.build_index, index.in_processes

    def kept(*arguments: Any, **options: Any) -> Index:
        found.append(build(*arguments, **options))
        return found[-1]

    def counted(reader: Any, form: Any, some: Any, **options: Any) -> Any:
        parts.append(len(some))
        return split(reader, form, some, **options)

    monkeypatch.setattr("vembed.data.example_store.build_index", kept)
    monkeypatch.setattr(index, "in_processes", counted)
    for cores in (1, 2):
        monkeypatch.setattr(index_worker, "num_cores", lambda cores=cores: cores)
        store = open_examples(
            config(no_duplicates=True, on_bad_record="skip"),
            path,
            cache_dir=tmp_path / f"cache-{cores}",
        )
        assert store[3].query.text == "q 3 \u00e4" * 4
        assert store[len(store) - 1].query.text == ROWS[-1]["query"]
    return as_dict(found[0]), as_dict(found[1]), parts[0]


def test_json_lines_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PART_BYTES", 9_000)
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    lines[150] = "{broken"
    lines.insert(200, "")
    lines.insert(
        250, json.dumps({"query": "long " * 3_000, "positive": "over a whole part"})
    )
    for number, part in enumerate((lines[:300], lines[300:])):
        (tmp_path / f"{number}.jsonl").write_text(
            "\n".join(part) + "\n", encoding="utf-8"
        )
    one, two, parts = indices(f"{tmp_path}/*.jsonl", monkeypatch, tmp_path)
    assert one == two
    assert parts > 4
    assert one["num_bad"] == 1 and "0.jsonl:151: not JSON" in one["problems"][0]
    assert one["unused"] == ["'extra'"] or one["unused"] == ["extra"]


@pytest.mark.parametrize("size", [7, 60, 1_000])
@pytest.mark.parametrize("end", ["\n", ""])
def test_a_part_that_was_read_knows_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, end: str
) -> None:
    monkeypatch.setattr(readers, "PART_BYTES", size)
    monkeypatch.setattr(readers, "PIECE_BYTES", 50)
    lines = [json.dumps(row) for row in ROWS[:30]] + [
        "",
        "{broken",
        " ",
        *(json.dumps(row) for row in ROWS[:9]),
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + end, encoding="utf-8")
    reader, other = JsonLines(tmp_path / "a.jsonl"), JsonLines(tmp_path / "a.jsonl")
    for part in reader.parts():
        list(reader.blocks(part))
        assert reader.num_lines(part) == other.num_lines(part), part


def test_parquet_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_table, "IN_MEMORY", 100)
    monkeypatch.setattr(parquet_table, "CHUNK_ROWS", 50)
    monkeypatch.setattr(parquet_table, "PART_BYTES", 1)
    pq.write_table(
        pa.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=100
    )
    one, two, parts = indices(str(tmp_path / "a.parquet"), monkeypatch, tmp_path)
    assert one == two
    assert parts == 4
    assert one["lines"][0] == 1 and one["lines"][-1] == 400


PLAIN = [
    {"query": f"q {n}", "positive": f"p {n}", "neg_1": "n", "neg_2": "m", "more": 1}
    for n in range(40)
]
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


@pytest.mark.parametrize(
    ("piece", "longest"), [(50, 150), (400, 2**20), (2**20, 2**20)]
)
@pytest.mark.parametrize("losses", [("infonce",), ("triplet",), ("cosent",)])
def test_records_that_are_checked_together_are_those_that_are_checked_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    piece: int,
    longest: int,
    losses: tuple[str, ...],
) -> None:
    def found(path: Path) -> dict[str, Any]:
        form = RecordFormat(
            Columns(),
            ImageRoot(str(tmp_path), allow_urls=False),
            losses=losses,
            max_negatives=1,
        )
        reader = JsonLines(path)
        (part,) = reader.parts()
        one = index_part(reader, form, part, with_keys=False)
        return {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in vars(one).items()
        }

    lines = [json.dumps(one) for one in PLAIN]
    for at, line in enumerate(ODD):
        lines.insert(3 + 2 * at, line)
    files = {
        "plain": "\n".join(json.dumps(one) for one in PLAIN),
        "odd": "\ufeff" + "\n".join(lines) + "\n",
        "pairs": '{"query": "a", "positive": "b"}\r\n' * 9,
    }
    monkeypatch.setattr(readers, "MAX_RECORD", longest)
    monkeypatch.setattr(readers, "PIECE_BYTES", piece)
    monkeypatch.setattr(index_parts, "BLOCK", 5)
    monkeypatch.setattr(blocks, "BLOCK", 5)
    for name, text in files.items():
        path = tmp_path / name
        path.write_bytes(
            text.encode()
            + (b'{"query": "\xff", "positive": "b"}\n' if name == "odd" else b"")
        )
        together = found(path)
        assert len(together["starts"]) + together["num_bad"] >= 9
        with pytest.MonkeyPatch.context() as alone:
            alone.setattr(JsonLines, "_plain_records", lambda *_: None)
            alone.setattr(RecordFormat, "num_plain_negatives", lambda *_: None)
            assert found(path) == together
    if losses == ("infonce",):
        monkeypatch.setattr(
            RecordFormat,
            "example",
            lambda *_: pytest.fail("a record was checked alone"),
        )
        assert len(found(tmp_path / "plain")["starts"]) == 40
