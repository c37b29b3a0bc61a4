"""Data of the demo: docstrings and functions of Python's standard library, split by module."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vembed.data.normal_form import normal_text
from vembed.errors import UserError

MIN_QUERY_WORDS = 3
MAX_QUERY_CHARACTERS = 1000
MIN_BODY_STATEMENTS = 1
SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "turtledemo",
    }
)


@dataclass(frozen=True, slots=True)
class Pair:
    """A function of the standard library: its docstring and its source."""

    module: str
    query: str
    positive: str


def standard_library_pairs(folder: Path | None = None) -> list[Pair]:
    """Return all usable pairs, sorted by module and line; the same list on every run of one Python. Duplicate
    queries and functions are dropped, so that no relevant document counts as wrong."""
    root = folder or Path(sysconfig.get_path("stdlib"))
    pairs = []
    seen: set[str] = set()
    for relative in sorted(_modules(root), key=lambda path: path.parts):
        for pair in _pairs_of_file(
            root / relative, ".".join(relative.with_suffix("").parts)
        ):
            if pair.query not in seen and pair.positive not in seen:
                seen.update((pair.query, pair.positive))
                pairs.append(pair)
    return pairs


def split_by_module(
    pairs: list[Pair], num_train: int, num_val: int
) -> tuple[list[Pair], list[Pair]]:
    """Return `num_train` and `num_val` pairs without a common top-level package. Validation packages are taken in
    the order of a hash of their names until there are enough pairs. Surplus pairs are dropped evenly over the
    modules. Texts that occur twice, apart from case and punctuation, are left out of the validation pairs."""
    counts = Counter(
        normal_text(text) for pair in pairs for text in (pair.query, pair.positive)
    )
    packages: dict[str, list[Pair]] = {}
    for pair in pairs:
        packages.setdefault(pair.module.split(".")[0], []).append(pair)
    # A few packages (tkinter, asyncio) hold a tenth of all pairs. Cap them, so that validation covers many modules.
    order = sorted(packages, key=_hash)
    validation: list[Pair] = []
    rest: list[Pair] = []
    for package in order:
        # Whole packages, so that no training function comes from a module that is measured with.
        if len(validation) < num_val and len(packages[package]) <= num_val // 5:
            for pair in packages[package]:
                texts = (pair.query, pair.positive)
                if all(counts[normal_text(text)] == 1 for text in texts):
                    validation.append(pair)
        else:
            rest.extend(packages[package])
    if len(rest) < num_train or len(validation) < num_val:
        raise UserError(
            f"This Python's standard library gives {len(rest):,d} training and {len(validation):,d} validation pairs, "
            f"and the demo needs {num_train:,d} and {num_val:,d}: is it installed without its sources or docstrings?"
        )
    return _thin(rest, num_train), _thin(validation, num_val)


def write_pairs(pairs: list[Pair], path: Path) -> None:
    """Write one JSON object per line, vembed's training format."""
    lines = (
        json.dumps({"query": pair.query, "positive": pair.positive}) for pair in pairs
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _thin(pairs: list[Pair], number: int) -> list[Pair]:
    """Return the pairs with the smallest hashes, in their original order."""
    chosen = set(
        sorted(range(len(pairs)), key=lambda index: _hash(pairs[index].positive))[
            :number
        ]
    )
    return [pair for index, pair in enumerate(pairs) if index in chosen]


def _modules(root: Path) -> Iterator[Path]:
    """Yield the path of each module below a folder, from there; installed packages are not looked into."""
    for folder, names, files in os.walk(root):
        # In place: os.walk goes into what is left.
        names[:] = [name for name in names if name not in SKIPPED_FOLDERS]
        for file_name in files:
            relative = Path(folder, file_name).relative_to(root)
            if file_name.endswith(".py") and not _is_test(relative):
                yield relative


def _is_test(relative: Path) -> bool:
    return any(
        part.startswith("test_") or part.endswith("_test")
        for part in relative.with_suffix("").parts
    )


def _pairs_of_file(path: Path, module: str) -> Iterator[Pair]:
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (
        SyntaxError,
        UnicodeDecodeError,
    ):  # a few files are invalid on purpose (samples of lib2to3 and encodings)
        return
    lines = list(io.StringIO(source))  # as Python counts them: a form feed ends no line
    for node in sorted(_functions(tree), key=lambda node: node.lineno):
        docstring = ast.get_docstring(node)
        if docstring is None or len(node.body) - 1 < MIN_BODY_STATEMENTS:
            continue
        query = " ".join(docstring.split("\n\n")[0].split())
        if len(query.split()) >= MIN_QUERY_WORDS and len(query) <= MAX_QUERY_CHARACTERS:
            yield Pair(module, query, _without_docstring(node, lines))


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions of a module. Looks at statements alone: most nodes are parts of expressions."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = node.__dict__.get(name)
            if isinstance(
                inner, list
            ):  # of a statement; a conditional expression has one node
                pending += inner


def _without_docstring(
    node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]
) -> str:
    """Return the function's source, comments included, without its docstring and indentation."""
    first = node.body[0]
    end = node.end_lineno or node.lineno
    remaining = (
        lines[node.lineno - 1 : first.lineno - 1]
        + lines[first.end_lineno or first.lineno : end]
    )
    indent = " " * node.col_offset
    return "".join(line.removeprefix(indent) for line in remaining).rstrip()
