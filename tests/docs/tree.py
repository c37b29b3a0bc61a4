"""The annotated tree of the package at the end of docs/design.md. `python -m tests.docs.tree` writes it."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "design.md"
BEGIN, END = "<!-- tree: python -m tests.docs.tree writes it -->\n```text\n", "```\n<!-- end of the tree -->\n"
WIDTH = 140
COLUMN = 27
LAST = {
    "configs/": "accelerate_fsdp.yaml and the presets",
    "examples/": "a YAML and a script per recipe, sample data; launch/: Slurm, Kubernetes, SkyPilot, Modal, HF Jobs",
    "benchmarks/": "side-by-side runs against other libraries",
    "docs/": "these pages; options.md is written from the schema",
    "tests/": "as the package; parity/ against the formulas, acceptance/ the table of what was promised",
}


def modules() -> list[Path]:
    """Every module of the package that holds something, folders after files."""
    found = [path for path in (ROOT / "vembed").rglob("*.py") if path.name != "__init__.py"]
    found.append(ROOT / "vembed" / "__init__.py")
    return sorted(found, key=lambda path: (len(path.parts), path.name != "__init__.py", path.name))


def sentence(path: Path) -> str:
    """The first sentence of a module's docstring."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split())
    first = text.partition(". ")[0].removesuffix(".")
    return textwrap.shorten(first, WIDTH - COLUMN, placeholder=" ...")


def tree() -> str:
    """The tree as text."""
    lines = ["vembed/"]
    package = ROOT / "vembed"
    for path in modules():
        if path.parent == package:
            lines.append(f"  {path.name}".ljust(COLUMN) + sentence(path))
    for folder in sorted({path.parent for path in modules()} - {package}):
        lines.append(f"  {folder.name}/")
        for path in modules():
            if path.parent == folder:
                lines.append(f"    {path.name}".ljust(COLUMN) + sentence(path))
    lines += [name.ljust(COLUMN) + what for name, what in LAST.items()]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def main() -> None:
    """Write the tree into the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + tree() + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
