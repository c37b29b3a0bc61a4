"""The table in README.md names every promise, and every test, page and command that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

TABLE = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
ROWS = {cells[1]: cells[2:] for line in TABLE.splitlines() if len(cells := [c.strip() for c in line.split("|")]) == 6}
NUM_ROWS = {"A": 26, "B": 33, "C": 34, "D": 46, "E": 41}
PROMISES = [f"{document}{number:02d}" for document, last in NUM_ROWS.items() for number in range(1, last + 1)]


def test_every_promise_has_one_row() -> None:
    assert [row for row in ROWS if re.fullmatch(r"[A-E]\d\d", row)] == PROMISES


@pytest.mark.parametrize("row", PROMISES)
def test_what_shows_it_exists(row: str) -> None:
    _, kind, shown, _ = ROWS[row]
    tests = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", shown)
    for file, name in tests:
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{row}: {file}::{name}"
    pages = re.findall(r"\]\(\.\./\.\./docs/", shown)
    commands = re.search(r"`vembed |as E19|the same lines", shown)
    if "CFG" in kind or "CPU2" in kind:
        assert tests or row == "E37", row
    elif "DOC" in kind:
        assert pages, row
    else:
        assert commands, row


def test_rows_in_the_names_of_tests_are_promises() -> None:
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE):
            for row in re.findall(r"_([A-E]\d\d)(?=_|$)", name):
                assert row in PROMISES, f"{path.name}: {name}"
