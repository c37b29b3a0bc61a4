"""The tree at the end of docs/design.md names every module, and no other."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT
from tests.docs.tree import BEGIN, END, PAGE, modules, sentence


def test_the_tree_names_every_module() -> None:
    shown = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    named, folder = set(), "vembed"
    for line in shown.splitlines():
        if match := re.match(r"  (\w+)/$", line):
            folder = f"vembed/{match[1]}"
        elif match := re.match(r"    (\w+\.py)\b", line):
            named.add(f"{folder}/{match[1]}")
        elif match := re.match(r"  (\w+\.py)\b", line):
            named.add(f"vembed/{match[1]}")
    there = {path.relative_to(ROOT).as_posix() for path in modules()}
    assert named == there, "write it anew: python -m tests.docs.tree"


def test_every_module_says_what_belongs_in_it() -> None:
    for path in modules():
        assert sentence(path), path
