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
from vembed.data import index, index_worker, readers, tables
from vembed.data.index import Index
from vembed.data.sources import open_examples

ROWS = [{"query": f"q {n} \u00e4" * (1 + n % 5), "positive": f"p {n}", "extra": 1, "negatives": ["a", "b"][: n % 3]}
        for n in range(400)]  # fmt: skip


def as_dict(found: Index) -> dict[str, Any]:
    values = {one.name: getattr(found, one.name) for one in dataclasses.fields(found)}
    keys = values.pop("keys")
    values |= {"key_values": keys.values, "key_starts": keys.starts}
    return {name: one.tolist() if isinstance(one, np.ndarray) else one for name, one in values.items()}


def indices(path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any], int]:
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

    monkeypatch.setattr("vembed.data.sources.build_index", kept)
    monkeypatch.setattr(index, "in_processes", counted)
    for cores in (1, 2):
        monkeypatch.setattr(index_worker, "num_cores", lambda cores=cores: cores)
        store = open_examples(
            config(no_duplicates=True, on_bad_record="skip"), path, cache_dir=tmp_path / f"cache-{cores}"
        )
        assert store[3].query.text == "q 3 \u00e4" * 4
        assert store[len(store) - 1].query.text == ROWS[-1]["query"]
    return as_dict(found[0]), as_dict(found[1]), parts[0]


def test_json_lines_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PART_BYTES", 9_000)
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    lines[150] = "{broken"
    lines.insert(200, "")
    lines.insert(250, json.dumps({"query": "long " * 3_000, "positive": "over a whole part"}))
    for number, part in enumerate((lines[:300], lines[300:])):
        (tmp_path / f"{number}.jsonl").write_text("\n".join(part) + "\n", encoding="utf-8")
    one, two, parts = indices(f"{tmp_path}/*.jsonl", monkeypatch, tmp_path)
    assert one == two
    assert parts > 4
    assert one["num_bad"] == 1 and "0.jsonl:151: not JSON" in one["problems"][0]
    assert one["unused"] == ["'extra'"] or one["unused"] == ["extra"]


def test_parquet_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "IN_MEMORY", 100)
    monkeypatch.setattr(tables, "CHUNK_ROWS", 50)
    monkeypatch.setattr(tables, "PART_ROWS", 90)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=100)
    one, two, parts = indices(str(tmp_path / "a.parquet"), monkeypatch, tmp_path)
    assert one == two
    assert parts == 5
    assert one["lines"][0] == 1 and one["lines"][-1] == 400
