"""Data that change during a run: said once, and never the end of the process by a signal."""

import json
import os

import pytest

import vembed
from tests.data.files import open_path
from tests.training.test_run import settings
from vembed.errors import UserError
from vembed.training.hooks.base import Hook


def rows(count, start=0):
    return "".join(
        json.dumps({"query": f"q{number}", "positive": f"p{number}"}) + "\n"
        for number in range(start, start + count)
    )


def append(path):
    with path.open("a") as file:
        file.write(rows(2, start=90))


def replace(path):
    other = path.with_name("other")
    other.write_text(rows(9, start=50))
    other.replace(path)


def truncate(path):
    os.truncate(path, 40)


def touch(path):
    os.utime(path, ns=(1, 1))


CHANGES = {
    "appended": (append, "has been written to"),
    "replaced": (replace, "has been replaced"),
    "deleted": (lambda path: path.unlink(), "has been deleted or moved"),
    "truncated": (truncate, "has been written to"),
    "written": (touch, "has been written to"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_happened_to_a_file_is_said(tmp_path, name):
    path = tmp_path / "a.jsonl"
    path.write_text(rows(9))
    store = open_path(path)
    assert store.changed_files() == []
    change, says = CHANGES[name]
    change(path)
    (line,) = store.changed_files()
    assert line.startswith(f"{path} {says}")
    if name == "truncated":
        with pytest.raises(UserError, match="has changed since the run began"):
            store[8]
    else:
        assert store[8].query.text == "q8"


@pytest.mark.parametrize("name", ["appended", "replaced", "deleted"])
def test_a_run_says_it_once_and_goes_on(tmp_path, name):
    options = settings(tmp_path, max_steps=None, epochs=3, val_data_path=None)

    class Changes(Hook):
        def on_step(self, report):
            if report.step == 1:
                CHANGES[name][0](tmp_path / "train.jsonl")

    vembed.train(options, hooks=[Changes()])
    log = (tmp_path / "run" / "training_log.txt").read_text()
    assert (
        log.count(f"{tmp_path / 'train.jsonl'} has") == log.count(CHANGES[name][1]) == 1
    )


def test_a_truncated_arrow_file_is_a_sentence_and_no_signal(tmp_path):
    datasets = pytest.importorskip("datasets")
    built = datasets.Dataset.from_dict(
        {
            "query": [f"q{number}" for number in range(20_000)],
            "positive": ["p" * 50] * 20_000,
        }
    )
    built.save_to_disk(tmp_path / "saved")
    store = open_path(tmp_path / "saved")
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    assert store[19_999].query.text == "q19999"
    os.truncate(arrow, 4096)
    with pytest.raises(
        UserError,
        match=r"has been truncated from .* to 4,096 bytes since it was opened",
    ):
        store[19_999]
    with pytest.raises(UserError, match="was saved by `datasets`, and is damaged"):
        open_path(tmp_path / "saved")
