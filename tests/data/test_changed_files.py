"""Data that change during a run: the records are as they were or refused, and no signal ends the process."""

import json
import os

import pytest

from tests.data.files import open_path
from vembed.errors import UserError


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
    "appended": append,
    "replaced": replace,
    "deleted": lambda path: path.unlink(),
    "truncated": truncate,
    "written": touch,
}


@pytest.mark.parametrize("name", CHANGES)
def test_records_are_as_they_were_or_refused(tmp_path, name):
    path = tmp_path / "a.jsonl"
    path.write_text(rows(9))
    store = open_path(path)
    CHANGES[name](path)
    if name == "truncated":
        with pytest.raises(UserError, match="has changed since the run began"):
            store[8]
    else:
        assert store[8].query.text == "q8"
