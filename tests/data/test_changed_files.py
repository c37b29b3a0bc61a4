"""Data that change during a run: the records are as they were or refused, and no signal ends the process."""

import os

import pytest

from tests.data.files import numbered, open_path, write_format
from vembed.errors import UserError


def append(path):
    with path.open("a") as file:
        file.write("more\n")


def replace(path):
    other = path.with_name("other")
    other.write_text("other content\n" * 50)
    other.replace(path)


def touch(path):
    os.utime(path, ns=(1, 1))


CHANGES = {
    "appended": append,
    "replaced": replace,
    "deleted": os.unlink,
    "written": touch,
    "truncated": lambda path: os.truncate(path, 40),
    "overwritten": lambda path: path.write_bytes(b"now something shorter"),
}


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
@pytest.mark.parametrize("name", CHANGES)
def test_records_are_as_they_were_or_refused(tmp_path, name, kind):
    path = write_format(tmp_path, kind, numbered(9))
    store = open_path(path)
    CHANGES[name](path)
    if name in ("truncated", "overwritten"):
        with pytest.raises(UserError, match=r"changed since the run .*: start again"):
            store[8]
    else:
        assert store[8].query.text == "q8"
