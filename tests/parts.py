"""What the contract tests of losses, poolings, families and formats need of a new part."""

import importlib
import pkgutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def from_its_test(folder, part, function):
    """Return a function of tests/FOLDER/test_PART.py. Raise AssertionError that names what is missing."""
    path = f"tests/{folder}/test_{part}.py"
    module = None
    if (ROOT / path).exists():
        module = importlib.import_module(f"tests.{folder}.test_{part}")
    expected = getattr(module, function, None)
    assert expected is not None, (
        f"{part} has no `{function}`: write this function in {path}"
    )
    return expected


def values_in(package):
    """Yield (file, value) of each name of the modules of a package."""
    for entry in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{entry.name}")
        for value in vars(module).values():
            yield module.__name__, value


def unlisted_classes(package, base, listed):
    """Return the subclasses of `base` with a name of their own that are in no table."""
    missing = []
    for module, value in values_in(package):
        if not isinstance(value, type) or not issubclass(value, base):
            continue
        if value.__module__ == module and value not in listed:
            missing.append(f"{module}.{value.__name__}")
    return missing
