"""Folders, patterns, packed files and addresses are read like one file of the same records."""

import gzip
import json

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.files import config, open_examples, queries_of
from vembed.errors import UserError

RECORDS = [
    {"query": f"query {number}", "positive": f"answer {number}"} for number in range(7)
]
PARTS = (RECORDS[:3], RECORDS[3:4], RECORDS[4:])


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def opened(path):
    return open_examples(config(), path)


def write(folder, ending):
    folder.mkdir()
    for number, part in enumerate(PARTS):
        path = folder / f"part-{number}.{ending}"
        match ending:
            case "jsonl":
                path.write_bytes(lines(part))
            case "jsonl.gz":
                path.write_bytes(gzip.compress(lines(part)))
            case "jsonl.zst":
                path.write_bytes(pa.Codec("zstd").compress(lines(part), asbytes=True))
            case "parquet":
                pq.write_table(pa.Table.from_pylist(part), path)


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
@pytest.mark.parametrize("form", ["folder", "pattern"])
def test_files_of_a_folder_or_pattern_are_one_source(tmp_path, ending, form):
    write(tmp_path / "data", ending)
    path = (
        str(tmp_path / "data") if form == "folder" else f"{tmp_path}/d*/part-*.{ending}"
    )
    store = opened(path)
    assert queries_of(store) == [record["query"] for record in RECORDS]
    assert store.sizes == (7,)
    assert store[4].where.startswith(str(tmp_path / "data" / f"part-2.{ending}"))


def test_bad_records_are_named_by_their_own_file(tmp_path):
    write(tmp_path / "data", "jsonl.gz")
    (tmp_path / "data" / "part-3.jsonl.gz").write_bytes(
        gzip.compress(lines(RECORDS[:1]) + b"{\n")
    )
    with pytest.raises(UserError, match=r"part-3\.jsonl\.gz:2: not JSON"):
        opened(str(tmp_path / "data"))


def test_a_packed_file_is_unpacked_once_for_each_version(tmp_path, cache_home):
    path = tmp_path / "data.jsonl.gz"
    for part in PARTS[:2]:
        path.write_bytes(gzip.compress(lines(part)))
        assert queries_of(opened(str(path))) == [example["query"] for example in part]
        copies = list(cache_home.rglob("unpacked/*/*.jsonl"))
        assert len(copies) == 1
        before = copies[0].stat().st_mtime_ns
        opened(str(path))
        assert copies[0].stat().st_mtime_ns == before


def test_addresses_are_fetched_into_the_cache(tmp_path):
    files = fsspec.filesystem("memory")
    for number, part in enumerate(PARTS):
        files.pipe(f"/bucket/part-{number}.jsonl", lines(part))
    store = opened("memory://bucket/*.jsonl")
    assert queries_of(store) == [record["query"] for record in RECORDS]
    assert store[4].where == "memory:///bucket/part-2.jsonl:1"
    write(tmp_path / "data", "parquet")
    assert queries_of(opened(f"file://{tmp_path}/data/part-0.parquet")) == [
        "query 0",
        "query 1",
        "query 2",
    ]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere/*.jsonl", "names no file"),
        ("memory://bucket/none.jsonl", "cannot be read"),
        ("unknown://bucket/a.jsonl", "unknown"),
    ],
)
def test_what_is_not_there_is_one_sentence(path, said):
    with pytest.raises(UserError, match=said) as raised:
        opened(path)
    assert "\n" not in str(raised.value)
