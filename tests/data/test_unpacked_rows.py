"""Rows of Parquet files that are unpacked into the cache folder are those of files that are held in memory."""

from __future__ import annotations

import errno
import logging
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.files import open_path, refused
from tests.data.test_parallel_pass import as_dict
from vembed.data import direct_file, index_worker, unpacked_rows
from vembed.data import first_pass as index
from vembed.data.columns import Columns
from vembed.data.direct_file import DirectFile
from vembed.data.example_store import ExampleStore
from vembed.data.formats import parquet as parquet_table

NUM_ROWS = 500
ROWS: list[dict[str, Any]] = [
    {
        "query": f"q {n} \u00e4" * (1 + n % 7),
        "positive": f"p {n}" * (1 + 40 * (n % 97 == 0)),
        "negatives": [None, [], ["a"], ["b", f"c {n}"]][n % 4]
        if n % 5
        else [f"n {n}"] * 3,
        "other": n,
    }
    for n in range(NUM_ROWS)
]
BAD = {50: {"query": None}, 130: {"positive": " "}, 411: {"query": ""}}
GROUPS = (1, 37, 300, 5, 157)


def groups_of(table: pa.Table) -> Iterator[pa.Table]:
    start = 0
    for size in GROUPS:
        yield table.slice(start, size)
        start += size


def write(path: Path, rows: list[dict[str, Any]] = ROWS, kind: str = "zstd") -> Path:
    """Write row groups of very different sizes."""
    table = pa.Table.from_pylist(rows)
    if kind == "one group":
        pq.write_table(table, path)
        return path
    if kind == "large strings":
        kinds = {
            "query": pa.large_string(),
            "negatives": pa.large_list(pa.large_string()),
        }
        table = table.cast(
            pa.schema(
                [
                    pa.field(one.name, kinds.get(one.name, one.type))
                    for one in table.schema
                ]
            )
        )
    if kind == "dictionaries":  # each row group has its own
        pairs = [
            (one.column("query").combine_chunks(), one) for one in groups_of(table)
        ]
        tables = [
            one.set_column(0, "query", column.dictionary_encode())
            for column, one in pairs
        ]
    else:
        tables = list(groups_of(table))
    codec = kind if kind in ("zstd", "snappy", "none") else "snappy"
    with pq.ParquetWriter(path, tables[0].schema, compression=codec) as writer:
        for one in tables:
            writer.write_table(one)
    return path


def found(
    path: Path | str, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[ExampleStore, dict[str, Any]]:
    """The examples, and the index that a first pass has made of them."""
    made, build = list[Any](), index.build_index

    def kept(*arguments: Any, **given: Any) -> Any:
        made.append(build(*arguments, **given))
        return made[-1]

    with monkeypatch.context() as patched:
        patched.setattr("vembed.data.example_store.build_index", kept)
        store = open_path(path, on_bad_record="skip", **options)
    return store, as_dict(made[0]) if made else {}


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing is held in memory; a part is a few row groups; batches end in the middle of row groups."""
    for name, value in (
        ("IN_MEMORY", 1000),
        ("PART_BYTES", 600),
        ("CHUNK_ROWS", 64),
        ("TOGETHER_ROWS", 7),
    ):
        monkeypatch.setattr(parquet_table, name, value)
    return monkeypatch


def parts(cache_home: Path) -> list[Path]:
    return sorted((cache_home / "vembed" / "parquet").rglob("*.arrow"))


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize(
    "kind", ["zstd", "snappy", "none", "one group", "large strings", "dictionaries"]
)
def test_unpacked_rows_are_the_rows(
    tmp_path: Path,
    cache_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    cores: int,
) -> None:
    rows = [{**row, **BAD.get(number, {})} for number, row in enumerate(ROWS)]
    path = write(tmp_path / "a.parquet", rows, kind)
    held, expected = found(path, monkeypatch, no_duplicates=True)
    assert not parts(cache_home)
    monkeypatch.setattr(index_worker, "num_cores", lambda: cores)
    monkeypatch.setattr(parquet_table, "PART_BYTES", 600)
    monkeypatch.setattr(parquet_table, "TOGETHER_ROWS", 7)
    monkeypatch.setattr(parquet_table, "CHUNK_ROWS", 64)
    monkeypatch.setattr(parquet_table, "IN_MEMORY", 1000)
    store, one = found(path, monkeypatch, no_duplicates=True)
    assert len(parts(cache_home)) == (1 if kind == "one group" else 3)
    assert one == expected and one["num_bad"] == len(BAD)
    assert store.fingerprint == held.fingerprint and store.summary() == held.summary()
    assert [store[n] for n in range(len(store))] == [held[n] for n in range(len(held))]
    assert [store.record(n) for n in range(len(store))] == [
        held.record(n) for n in range(len(held))
    ]


def nested(values: pa.Array, kind: str) -> pa.Array:
    """Texts from dictionaries inside of lists or structs, as libraries write categories."""
    own = values.dictionary_encode()
    if kind == "structs":
        return pa.StructArray.from_arrays([own], ["text"])
    if kind == "fixed lists":
        return pa.FixedSizeListArray.from_arrays(own, 1)
    inner = nested(values, "structs") if kind == "lists of structs" else own
    return pa.ListArray.from_arrays(list(range(len(values) + 1)), inner)


@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize(
    "kind", ["structs", "lists", "fixed lists", "lists of structs"]
)
def test_dictionaries_inside_of_lists_and_structs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_held: bool
) -> None:
    texts, queries = (
        [f"category {n // 40}" for n in range(NUM_ROWS)],
        [f"q {n} " + "x" * 200 for n in range(NUM_ROWS)],
    )
    table = pa.table({"query": queries, "positive": nested(pa.array(texts), kind)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=90, compression="none")
    if not is_held:
        for name, value in (
            ("IN_MEMORY", 20_000),
            ("PART_BYTES", 50_000),
            ("TOGETHER_ROWS", 7),
        ):
            monkeypatch.setattr(parquet_table, name, value)
    store = open_path(tmp_path / "a.parquet")
    assert [
        (one.query.text, one.positives[0].text)
        for one in map(store.__getitem__, range(NUM_ROWS))
    ] == list(zip(queries, texts, strict=True))


def test_threads_read_the_same_rows(
    tmp_path: Path, unpacked: pytest.MonkeyPatch
) -> None:
    unpacked.setattr(
        unpacked_rows, "_opened", lru_cache(2)(unpacked_rows._opened.__wrapped__)
    )
    store = open_path(write(tmp_path / "a.parquet"))
    numbers = random.Random(0).choices(range(NUM_ROWS), k=3000)
    with ThreadPoolExecutor(8) as pool:
        assert [one.query.text for one in pool.map(store.__getitem__, numbers)] == [
            ROWS[n]["query"] for n in numbers
        ]


def test_files_of_a_pattern_share_the_memory(
    tmp_path: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (3, 200, 2, 295)
    bounds = [sum(sizes[:n]) for n in range(5)]
    for number in range(4):
        write(
            tmp_path / f"{number}.parquet",
            ROWS[bounds[number] : bounds[number + 1]],
            "one group",
        )
    held, expected = found(f"{tmp_path}/*.parquet", monkeypatch, no_duplicates=True)
    assert not parts(cache_home)
    size = (
        parquet_table.ParquetTable(
            tmp_path / "2.parquet", Columns(), tmp_path / "none" / "x"
        )
        ._runs[0]
        .size
    )
    monkeypatch.setattr(parquet_table, "IN_MEMORY", 4 * 2 * size)
    monkeypatch.setattr(index_worker, "num_cores", lambda: 2)
    store, one = found(f"{tmp_path}/*.parquet", monkeypatch, no_duplicates=True)
    assert one == expected and [store[n] for n in range(NUM_ROWS)] == [
        held[n] for n in range(NUM_ROWS)
    ]
    assert len(parts(cache_home)) == 2, "small ones are held in memory"


def test_rows_that_are_gone_or_damaged_are_unpacked_again(
    tmp_path: Path, cache_home: Path, unpacked: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.parquet")
    open_path(path)
    first, second, third = parts(cache_home)
    before, whole = third.stat().st_mtime_ns, second.read_bytes()
    first.unlink()
    replaced = second.with_suffix(
        ".new"
    )  # as another process would find it, which has nothing open
    replaced.write_bytes(whole[:-100])
    replaced.replace(second)
    unpacked_rows._opened.cache_clear()
    store = open_path(path)
    assert [store[n].query.text for n in range(NUM_ROWS)] == [
        row["query"] for row in ROWS
    ]
    assert second.read_bytes() == whole and third.stat().st_mtime_ns == before
    assert len(parts(cache_home)) == 3


def test_rows_that_can_no_longer_be_read(
    tmp_path: Path, cache_home: Path, unpacked: pytest.MonkeyPatch
) -> None:
    store = open_path(write(tmp_path / "a.parquet"))
    for part in parts(cache_home):
        os.truncate(part, 900)
    with pytest.raises(
        parquet_table.UserError,
        match=r"the unpacked copy of .*a.parquet, can no longer be read",
    ):
        [store[n] for n in range(NUM_ROWS)]


def test_a_large_row_group_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(0)
    texts = [draw.randbytes(10_000).hex() for _ in range(1500)]
    pq.write_table(
        pa.table({"query": texts, "positive": texts}),
        tmp_path / "a.parquet",
        use_dictionary=False,
        write_batch_size=16,  # pages of a megabyte
    )
    monkeypatch.setattr(parquet_table, "IN_MEMORY", 2**20)
    monkeypatch.setattr(parquet_table, "CHUNK_BYTES", 2**20)
    table = parquet_table.ParquetTable(
        tmp_path / "a.parquet", Columns(), tmp_path / "unpacked" / "a"
    )
    del texts
    before = pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() - before for _ in table.blocks(table.parts()[0])]
    assert table.extent()[0] == 1501 and len(held) > 30
    assert max(held) < 20 * 2**20 < (tmp_path / "a.parquet").stat().st_size


KILLED = """
import os, signal, sys
from vembed.data import index_worker
from vembed.data.formats import parquet as parquet_table
from vembed.data import unpacked_rows
from tests.data.files import open_path
for name, value in dict(IN_MEMORY=1000, PART_BYTES=600, CHUNK_ROWS=64, TOGETHER_ROWS=7).items():
    setattr(parquet_table, name, value)
index_worker.num_cores = lambda: 1
class Dies(unpacked_rows._RangeFile):
    def __init__(self, path, *others):
        super().__init__(path, *others)
        self.path = path
    def write(self, rows):
        super().write(rows)
        if "00001" in str(self.path):
            os.kill(os.getpid(), signal.SIGKILL)
unpacked_rows._RangeFile = Dies
open_path(sys.argv[1])
"""


def test_a_kill_leaves_whole_parts(
    tmp_path: Path, cache_home: Path, unpacked: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.parquet")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    (first,) = parts(cache_home)
    (left,) = first.parent.glob("*.partial")
    before = first.stat().st_mtime_ns
    store = open_path(path)
    assert [store.record(n)["query"] for n in range(NUM_ROWS)] == [
        row["query"] for row in ROWS
    ]
    assert first.stat().st_mtime_ns == before and left.exists(), (
        "another process may still write it"
    )
    os.utime(left, (0, time.time() - unpacked_rows.SECONDS_UNTIL_ABANDONED - 1))
    parts(cache_home)[2].unlink()
    open_path(path)
    assert not left.exists() and len(parts(cache_home)) == 3


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, cache_home: Path, unpacked: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.parquet")

    def full(self: DirectFile, data: memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    unpacked.setattr(DirectFile, "_write_all", full)
    unpacked.setattr(index_worker, "num_cores", lambda: 1)
    message = refused(path)
    assert (
        "a.parquet could not be unpacked into" in message
        and "No space left" in message
        and "free some" in message
    )
    assert not [one for one in cache_home.rglob("*") if one.is_file()]


def test_room_for_all_files_is_asked_for_first(
    tmp_path: Path,
    cache_home: Path,
    unpacked: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for number in range(2):
        write(tmp_path / f"{number}.parquet")
    with caplog.at_level(logging.INFO, "vembed"):
        open_path(tmp_path / "0.parquet")
        open_path(f"{tmp_path}/*.parquet")
    sizes = [
        int(one.args[1].replace(",", ""))
        for one in caplog.records
        if "are unpacked into" in one.message
    ]
    assert len(sizes) == 2 and sizes[0] == sizes[1], "the first file is there already"
    assert len(parts(cache_home)) == 6


@pytest.mark.parametrize("refuses", [None, "fcntl", "write"])
def test_a_direct_file_holds_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str | None
) -> None:
    write_bytes, control = os.write, direct_file.fcntl.fcntl
    is_direct = False

    def written(file: int, data: Any) -> int:
        if refuses == "write" and is_direct:
            raise OSError(errno.EINVAL, "no direct writes")
        return write_bytes(
            file, data[: max(1, len(data) // 2)] if not is_direct else data
        )

    def controlled(file: int, what: int, flags: int = 0) -> int:
        nonlocal is_direct
        if refuses == "fcntl" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct writes")
        if what == direct_file.fcntl.F_SETFL:
            is_direct = bool(flags & os.O_DIRECT)
        return int(control(file, what, flags))

    monkeypatch.setattr(direct_file.os, "write", written)
    monkeypatch.setattr(direct_file.fcntl, "fcntl", controlled)
    monkeypatch.setattr(direct_file, "BUFFER_BYTES", 2 * 4096)
    draw, expected = random.Random(0), b""
    file = DirectFile(tmp_path / "a")
    for size in (1, 4096, 8191, 0, 20_000, 3):
        data = draw.randbytes(size)
        assert file.write(data) == size
        expected += data
        assert file.tell() == len(expected)
    file.close()
    assert (tmp_path / "a").read_bytes() == expected


@pytest.mark.parametrize("cores", [1, 2])
def test_progress_names_share_rate_and_rest(
    tmp_path: Path,
    unpacked: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cores: int,
) -> None:
    unpacked.setattr(index, "SECONDS_BETWEEN_LINES", 0.0)
    unpacked.setattr(index_worker, "num_cores", lambda: cores)
    with caplog.at_level(logging.INFO, "vembed"):
        open_path(write(tmp_path / "a.parquet"))
    lines = [one.message for one in caplog.records if "records checked" in one.message]
    assert any(
        re.search(r": 338 records checked \(68%\), [\d,]+/s, \d+ s left$", line)
        for line in lines
    ), lines
