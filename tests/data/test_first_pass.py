"""What is kept of the data: unpacked Parquet files, the cache of the first pass, and little memory."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vembed
from tests.data.files import (
    RECORDS,
    config,
    open_examples,
    open_path,
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
    """The sources that were gone through."""
    names = []
    build = example_store.build_index

    def counted(reader, *arguments, **options):
        names.append(reader.name)
        return build(reader, *arguments, **options)

    monkeypatch.setattr(example_store, "build_index", counted)
    return names


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "folder"])
def test_the_first_pass_is_made_once(tmp_path, kind, passes):
    path = write_format(tmp_path, kind, [*RECORDS, {**RECORDS[0], "query": ""}])
    first = open_path(path, on_bad_record="skip", no_duplicates=True)
    again = open_path(path, on_bad_record="skip", no_duplicates=True)
    assert len(passes) == 1
    assert again.summary() == first.summary()
    assert again.fingerprint == first.fingerprint
    assert again.num_skipped == 1
    assert all(again[number] == first[number] for number in range(len(first)))
    assert again.all_keys().values.tolist() == first.all_keys().values.tolist()
    assert "1 of 41 records cannot be used" in refused(path, no_duplicates=True)


def test_a_mapping_that_no_record_matches_is_refused_after_a_run_with_several_sources(
    tmp_path,
):
    first = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    named = [
        {"querry" if name == "query" else name: value for name, value in record.items()}
        for record in RECORDS
    ]
    two = write_jsonl(tmp_path / "b.jsonl", named)
    mapping = {"querry": "query"}
    said = "column_mapping names querry, which no record has"
    assert said in refused(first, column_mapping=mapping)
    assert len(
        open_examples(config(column_mapping=mapping), [str(first), str(two)])
    ) == 2 * len(RECORDS)
    assert said in refused(first, column_mapping=mapping)


def test_other_options_and_other_content_are_another_pass(tmp_path, passes):
    path = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    open_path(path)
    open_path(path, max_negatives=0)
    open_path(path, no_duplicates=True)
    assert len(passes) == 3
    write_jsonl(path, RECORDS[:7])
    assert len(open_path(path)) == 7
    assert len(passes) == 4


def test_images_that_change_are_seen(tmp_path, passes):
    for name in ("a.jpg", "b.jpg"):
        write(tmp_path / name)
    path = write_jsonl(
        tmp_path / "a.jsonl",
        [{"query": "q", "image": name} for name in ("a.jpg", "b.jpg", "c.jpg")],
    )
    assert len(open_path(path, on_bad_record="skip")) == 2
    assert len(open_path(path, on_bad_record="skip")) == 2
    assert len(passes) == 1
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
    names = ("data/images/files.py", "data/batching/schedule.py", "losses/vectors.py")
    for name in (None, None, *names):
        if name is not None:
            with (package / name).open("a") as file:
                file.write("# another version\n")
        subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
        counts.append(len(list(cache_home.rglob("*.safetensors"))))
    assert counts == [1, 1, 2, 3, 4]


def test_a_damaged_cache_is_made_again(tmp_path, cache_home, passes):
    path = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    open_path(path)
    for keep in (-9, 20, 0):
        (damaged,) = cache_home.rglob("*.safetensors")
        damaged.write_bytes(damaged.read_bytes()[:keep])
        assert len(open_path(path)) == 40
    assert len(passes) == 4


def test_a_cache_that_cannot_be_written_costs_time_alone(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    assert len(open_path(path)) == 40


def test_small_data_leave_nothing_behind(tmp_path, cache_home, monkeypatch):
    monkeypatch.setattr(example_store, "CACHE_AFTER_SECONDS", CACHE_AFTER_SECONDS)
    open_path(write_jsonl(tmp_path / "a.jsonl", RECORDS))
    assert not list(cache_home.iterdir())
