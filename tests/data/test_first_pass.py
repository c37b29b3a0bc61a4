"""What is kept of the data: unpacked Parquet files, the cache of the first pass, and little memory."""

import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import vembed
from tests.data.files import (
    RECORDS,
    numbered,
    open_path,
    open_rows,
    refused,
    write_format,
    write_jsonl,
)
from tests.data.pictures import write
from vembed.data import example_store
from vembed.data.example_store import CACHE_AFTER_SECONDS

# ---- the cache of the first pass -----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def eager_cache(monkeypatch):
    monkeypatch.setattr(example_store, "CACHE_AFTER_SECONDS", 0.0)


@pytest.fixture
def passes(monkeypatch):
    """Counts the sources that were gone through."""
    build = Mock(wraps=example_store.build_index)
    monkeypatch.setattr(example_store, "build_index", build)
    return build


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "folder"])
def test_the_first_pass_is_made_once(tmp_path, kind, passes):
    path = write_format(tmp_path, kind, [*RECORDS, {**RECORDS[0], "query": ""}])
    options = {"on_bad_record": "skip", "no_duplicates": True}
    first = open_path(path, **options)
    again = open_path(path, **options)
    assert passes.call_count == 1
    assert again.summary() == first.summary()
    assert again.fingerprint == first.fingerprint
    assert again.counts["bad"] == 1
    assert list(again) == list(first)
    assert again.all_keys().values.tolist() == first.all_keys().values.tolist()
    assert "1 of 41 records" in refused(path, no_duplicates=True)


def test_a_mapping_that_no_record_matches_is_refused_after_a_run_with_several_sources(
    tmp_path,
):
    first = write_jsonl(tmp_path / "a.jsonl", numbered(9))
    second = write_jsonl(tmp_path / "b.jsonl", [{"querry": "q", "positive": "p"}])
    mapping = {"querry": "query"}
    said = "column_mapping names querry, which no record has"
    assert said in refused(first, column_mapping=mapping)
    assert len(open_path([first, second], column_mapping=mapping)) == 10
    assert said in refused(first, column_mapping=mapping)
    nothing_is_read = refused(second, column_mapping={"quary": "query"})
    assert "names quary, which no record has" in nothing_is_read
    assert "querry" in nothing_is_read
    mapping["flasch"] = "negative"
    said = "column_mapping names flasch, which no record of any source has"
    assert said in refused([first, second], column_mapping=mapping)


def test_other_options_and_other_content_are_another_pass(tmp_path, passes):
    path = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    open_path(path)
    open_path(path, max_negatives=0)
    open_path(path, no_duplicates=True)
    assert passes.call_count == 3
    write_jsonl(path, RECORDS[:7])
    assert len(open_path(path)) == 7
    assert passes.call_count == 4


def test_images_that_change_are_seen(tmp_path, passes):
    names = ("a.jpg", "b.jpg", "c.jpg")
    rows = [{"query": "q", "image": name} for name in names]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    for name in names[:2]:
        write(tmp_path / name)
    for _ in range(2):
        assert len(open_path(path, on_bad_record="skip")) == 2
    assert passes.call_count == 1
    write(tmp_path / "c.jpg")
    assert len(open_path(path)) == 3, "one that was missing has come"
    (tmp_path / "b.jpg").unlink()
    assert f"{path}:2: image" in refused(path)


def test_other_code_is_another_pass(tmp_path, cache_home):
    package = tmp_path / "vembed"
    shutil.copytree(Path(vembed.__file__).parent, package)
    path = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    code = (
        "from vembed.config.schema import TrainConfig\n"
        "from vembed.data import example_store\n"
        "example_store.CACHE_AFTER_SECONDS = 0.0\n"
        f"config = TrainConfig(model_name='m', data_path={str(path)!r})\n"
        "example_store.open_examples(config.data, config.data.data_path)\n"
    )
    counts = []
    for name in (None, "data/images/files.py", "losses/vectors.py"):
        if name is not None:
            with (package / name).open("a") as file:
                file.write("# another version\n")
        subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
        counts.append(len(list(cache_home.rglob("*.safetensors"))))
    assert counts == [1, 2, 3]


def test_a_damaged_cache_is_made_again(tmp_path, cache_home, passes):
    path = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    open_path(path)
    for keep in (-9, 20, 0):
        (damaged,) = cache_home.rglob("*.safetensors")
        damaged.write_bytes(damaged.read_bytes()[:keep])
        assert len(open_path(path)) == 40
    assert passes.call_count == 4


def test_a_cache_that_cannot_be_written_costs_time_alone(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    assert len(open_path(path)) == 40


def test_small_data_leave_nothing_behind(tmp_path, cache_home, monkeypatch):
    monkeypatch.setattr(example_store, "CACHE_AFTER_SECONDS", CACHE_AFTER_SECONDS)
    open_rows(tmp_path, RECORDS)
    assert not list(cache_home.iterdir())
