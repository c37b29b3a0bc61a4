"""The acceptance table: promises.yaml, and the tests that carry a row as `@pytest.mark.promise("A08", "D43")`.

python -m tests.acceptance.table    writes README.md
"""

import ast
from functools import cache
from pathlib import Path

import yaml

from tests.docs.pages import ROOT

PROMISES = Path(__file__).with_name("promises.yaml")
README = Path(__file__).with_name("README.md")
HEAD = """\
# What was promised, and what shows it

One row per promise that five guides to sharded training make (A: Heretic's set-up guide, B: its implementation notes,
C: a guide of ModularModel, D: one of vembed-factory, E: one of a free transformer). A promise that makes sense for
embedding models is met here. A wrong statement is [corrected](../../docs/other-guides.md).

Kinds: CFG is parsing and checks, CPU2 two gloo processes on CPUs, GPU and nGPU one or several GPUs, and DOC a page.
GPUs were not available, so the table names the command to run. `pytest --promise D27` runs the tests of a row. The
table is made from `promises.yaml` and the tests' marks by `python -m tests.acceptance.table`.

| row | promise | kind | shown by |
| --- | --- | --- | --- |
"""


@cache
def promises():
    """Return row -> promise, kind, and `also`: what shows it besides tests."""
    return yaml.safe_load(PROMISES.read_text(encoding="utf-8"))


@cache
def marked_tests():
    """Return (row, `file::test`) of every mark, without importing the tests."""
    return tuple(_marks())


def _marks():
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for mark in (
                node.decorator_list if isinstance(node, ast.FunctionDef) else ()
            ):
                if (
                    isinstance(mark, ast.Call)
                    and ast.unparse(mark.func) == "pytest.mark.promise"
                ):
                    for row in mark.args:
                        yield (
                            ast.literal_eval(row),
                            f"{path.relative_to(ROOT)}::{node.name}",
                        )


def table():
    """Return the text of README.md."""
    tests = {}
    for row, test in marked_tests():
        tests.setdefault(row, []).append(f"`{test}`")
    lines = []
    for row, promise in promises().items():
        printed = "; ".join(
            [*tests.get(row, ()), *([promise["also"]] if "also" in promise else ())]
        )
        lines.append(
            f"| {row} | {promise['promise']} | {promise['kind']} | {printed} |\n"
        )
    return HEAD + "".join(lines)


if __name__ == "__main__":
    README.write_text(table(), encoding="utf-8")
