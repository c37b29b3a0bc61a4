"""No file of the package imports a file that imports it."""

import ast
from graphlib import TopologicalSorter

from tests.docs.pages import ROOT


def imports():
    """Module -> modules of the package that it imports, anywhere in the file.

    Imports for type checkers alone are no imports: they never run.
    `vembed` itself is left out: its public names are imported on first access.
    """
    paths = {}
    for path in (ROOT / "vembed").rglob("*.py"):
        paths[".".join(path.relative_to(ROOT).with_suffix("").parts)] = path
    graph = {}
    for module, path in paths.items():
        names = set()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
                names.add(node.module)
        graph[module] = names & paths.keys()
    del graph["vembed.__init__"]
    return graph


def test_files_do_not_import_each_other():
    TopologicalSorter(imports()).prepare()  # raises CycleError, which names the circle
