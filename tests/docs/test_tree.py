"""The tree at the end of docs/design.md names every module, and no other; and modules stay small."""

from __future__ import annotations

import ast
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


def test_each_module_name_occurs_once() -> None:
    names = [path.name for path in modules() if path.name != "__init__.py"]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


def test_modules_and_functions_stay_small() -> None:
    """At most 500 lines for a module and under 80 for a function; half of the modules under 200."""
    lengths = []
    for path in modules():
        text = path.read_text(encoding="utf-8")
        lengths.append(len(text.splitlines()))
        assert lengths[-1] <= 500, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.lineno + 1 < 80, f"{path}: {node.name}"
    assert sorted(lengths)[len(lengths) // 2] < 200


def test_backward_is_two_calls_from_the_loop() -> None:
    """`Trainer.fit` calls `accumulate`, which calls `backward`."""

    def calls(module: str, function: str) -> set[str]:
        tree = ast.parse((ROOT / "vembed" / "training" / module).read_text(encoding="utf-8"))
        (found,) = (one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name == function)
        functions = (one.func for one in ast.walk(found) if isinstance(one, ast.Call))
        return {ast.unparse(one) for one in functions}

    assert "self.step.accumulate" in calls("trainer.py", "fit")
    assert "self.backward" in calls("step.py", "accumulate")
    assert "torch.autograd.backward" in calls("step.py", "backward")
