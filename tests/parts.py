"""What the contract tests of losses, poolings, families and formats need of a new part."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def from_its_test(folder: str, part: str, function: str) -> Any:
    """Return a function of tests/FOLDER/test_PART.py. Raise AssertionError that names what is missing."""
    path = f"tests/{folder}/test_{part}.py"
    module: object = None
    if (ROOT / path).exists():
        module = importlib.import_module(f"tests.{folder}.test_{part}")
    wanted = getattr(module, function, None)
    assert wanted is not None, (
        f"{part} has no `{function}`: write this function in {path}"
    )
    return wanted


def values_in(package: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield (file, value) of each name of the modules of a package."""
    for entry in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{entry.name}")
        for value in vars(module).values():
            yield module.__name__, value


def unlisted_classes(package: ModuleType, base: type, listed: object) -> list[str]:
    """Return the subclasses of `base` with a name of their own that are in no table."""
    missing = []
    for module, value in values_in(package):
        if not isinstance(value, type) or not issubclass(value, base):
            continue
        if value.__module__ == module and value not in listed:  # type: ignore[operator]
            missing.append(f"{module}.{value.__name__}")
    return missing
