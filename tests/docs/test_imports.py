"""Imports go one way: no circle between files or rooms, and the order that docs/design.md states."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Set
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.docs.pages import ROOT

BEGIN, END = (
    "<!-- order of imports: tests/docs/test_imports.py reads it -->\n```text\n",
    "```\n<!-- end of the order -->",
)


@cache
def imports() -> dict[str, set[str]]:
    """Module -> modules of the package that it imports, anywhere in the file. `vembed` itself, whose public names are
    imported on first access, is left out."""
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "vembed").rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        graph[module] = found & paths.keys()
    del graph["vembed.__init__"]
    return graph


def room_of(module: str) -> str:
    """The folder of a module, or the module's own name in the package's folder; the command line is one room."""
    name = module.split(".")[1]
    return "cli" if name.startswith("cli") else name


def rooms(graph: Mapping[str, Set[str]]) -> dict[str, set[str]]:
    """Room -> rooms that it imports."""
    found: dict[str, set[str]] = {}
    for module, others in graph.items():
        found.setdefault(room_of(module), set()).update(room_of(other) for other in others)
    return {room: others - {room} for room, others in found.items()}


def order() -> list[list[str]]:
    """The lines of the order in docs/design.md."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    lines = page.partition(BEGIN)[2].partition(END)[0].splitlines()
    return [line.partition("   ")[0].strip().split(", ") for line in lines]


def circle(graph: Mapping[str, Set[str]]) -> list[str]:
    """One circle of a graph; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_files_do_not_import_each_other() -> None:
    assert circle(imports()) == []


def test_rooms_do_not_import_each_other() -> None:
    assert circle(rooms(imports())) == []


def test_rooms_import_only_rooms_above_them_in_the_order() -> None:
    floors = {room: floor for floor, line in enumerate(order()) for room in line}
    found = rooms(imports())
    assert floors.keys() <= found.keys() | {"errors"}, "docs/design.md names a room that does not exist"
    wrong = [
        f"{room} imports {other}"
        for room, others in found.items()
        for other in others
        if room in floors and other in floors and floors[other] >= floors[room]
    ]
    assert wrong == []


@pytest.mark.parametrize("line", [["config"], ["models"], ["training"], ["cli"]])
def test_the_order_is_read(line: list[str]) -> None:
    assert line in order()
