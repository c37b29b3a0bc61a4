"""Docstrings say what a thing is or does: a noun phrase, or the imperative."""

from __future__ import annotations

import ast
import re

from tests.docs.pages import ROOT

QUESTION = r"(What|How|Where|Whether|Why|When|Who)\b"


def test_docstrings_do_not_begin_with_a_question() -> None:
    """Docstrings of modules, classes, functions and attributes."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value.value.splitlines()[0]}"
        for path in (ROOT / "vembed").rglob("*.py")
        if re.search(f"[\"']{QUESTION}", path.read_text(encoding="utf-8"))  # parsing takes longer
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and re.match(QUESTION, node.value.value)
    ]
    assert found == []
