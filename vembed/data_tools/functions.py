"""Python functions with docstrings: pairs of what a function does and its code, for the demo and `vembed generate`."""

from __future__ import annotations

import ast
import re


def documented_functions(source: str) -> list[tuple[str, str]]:
    """Return the first paragraph of the docstring of each function that has one, and the function without it and without
    its indentation, in the order of the source. Raise SyntaxError if it is no Python."""
    functions = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append(node)
    # As Python counts them: a form feed ends no line.
    lines = re.split(r"\r\n?|\n", source)
    pairs = []
    for function in sorted(functions, key=lambda function: function.lineno):
        docstring = ast.get_docstring(function)
        if not docstring or len(function.body) < 2:
            continue
        first = function.body[0]
        # From `def` on, without decorators, to the line before the docstring; then all behind it, comments included.
        head = lines[function.lineno - 1 : first.lineno - 1]
        body = lines[first.end_lineno or first.lineno : function.end_lineno]
        indent = " " * function.col_offset
        code = "\n".join(line.removeprefix(indent) for line in head + body)
        summary = " ".join(docstring.partition("\n\n")[0].split())
        pairs.append((summary, code.rstrip()))
    return pairs
