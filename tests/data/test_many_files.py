"""Folders, patterns, packed files and addresses are read like one file of the same records."""

import gzip
import json
from functools import partial

import fsspec
import pyarrow as pa
import pytest

from tests.data.files import numbered, open_path, queries_of, refused, write_parquet

RECORDS = numbered(7)
QUERIES = [record["query"] for record in RECORDS]
PARTS = (RECORDS[:3], RECORDS[3:4], RECORDS[4:])


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


PACKERS = {
    "jsonl": bytes,
    "jsonl.gz": gzip.compress,
    "jsonl.zst": partial(pa.Codec("zstd").compress, asbytes=True),
}


def write(folder, ending):
    folder.mkdir()
    for number, part in enumerate(PARTS):
        path = folder / f"part-{number}.{ending}"
        if ending == "parquet":
            write_parquet(path, part)
        else:
            path.write_bytes(PACKERS[ending](lines(part)))


def test_files_of_several_splits_are_not_one_source(tmp_path):
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        write_parquet(tmp_path / f"{name}.parquet", PARTS[0])
    reason = refused(tmp_path)
    assert "several splits (test, train)" in reason and f"{tmp_path}/train*" in reason
    assert queries_of(open_path(f"{tmp_path}/train*")) == 2 * QUERIES[:3]


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
@pytest.mark.parametrize("pattern", ["data", "d*/part-*"])
def test_files_of_a_folder_or_pattern_are_one_source(tmp_path, ending, pattern):
    write(tmp_path / "data", ending)
    store = open_path(tmp_path / pattern)
    assert queries_of(store) == QUERIES
    assert store.sizes == (7,)
    assert store[4].where == f"{tmp_path}/data/part-2.{ending}:1"


def test_bad_records_are_named_by_their_own_file(tmp_path):
    folder = tmp_path / "data"
    write(folder, "jsonl.gz")
    bad = lines(RECORDS[:1]) + b"{\n"
    (folder / "part-3.jsonl.gz").write_bytes(gzip.compress(bad))
    assert "part-3.jsonl.gz:2: not JSON" in refused(folder)


def test_a_packed_file_is_unpacked_once_for_each_version(tmp_path, cache_home):
    path = tmp_path / "data.jsonl.gz"
    for part in PARTS[:2]:
        path.write_bytes(gzip.compress(lines(part)))
        times = set()
        for _ in range(2):
            store = open_path(path)
            assert queries_of(store) == [record["query"] for record in part]
            (unpacked,) = cache_home.rglob("unpacked/*/*.jsonl")
            times.add(unpacked.stat().st_mtime_ns)
        assert len(times) == 1


def test_addresses_are_fetched_into_the_cache(tmp_path):
    files = fsspec.filesystem("memory")
    for number, part in enumerate(PARTS):
        files.pipe(f"/bucket/part-{number}.jsonl", lines(part))
    store = open_path("memory://bucket/*.jsonl")
    assert queries_of(store) == QUERIES
    assert store[4].where == "memory:///bucket/part-2.jsonl:1"
    write(tmp_path / "data", "parquet")
    store = open_path(f"file://{tmp_path}/data/part-0.parquet")
    assert queries_of(store) == QUERIES[:3]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere/*.jsonl", "names no file"),
        ("memory://bucket/none.jsonl", "cannot be read"),
        ("unknown://bucket/a.jsonl", "unknown"),
    ],
)
def test_what_is_not_there_is_one_sentence(path, said):
    message = refused(path)
    assert said in message
    assert len(message.splitlines()) == 1
