"""Classes and functions of the user's own files, named as `path/to/file.py:Name` or `package.module:Name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from vembed.errors import UserError
from vembed.models.custom.modeling import OwnModel, accepted_inputs

_trusted: dict[str, type[OwnModel]] = {}
"""Folder -> model class of the user's file that a config of this process names for it. A folder that is not here brings
its own code, which runs with trust_remote_code alone."""


@dataclass(frozen=True, slots=True)
class OwnCode:
    """A class or function of the user's, and the file that it stands in."""

    value: Any
    file: Path

    @property
    def name(self) -> str:
        """Name of the class inside its file."""
        return str(self.value.__qualname__)


def find(named: str, option: str) -> OwnCode:
    """Return what `file.py:Name` or `package.module:Name` names. Raise UserError if there is no such thing."""
    place, separator, name = named.rpartition(":")
    if not separator or not place or not name:
        raise UserError(
            f"{option}: {named} must be path/to/file.py:Name or package.module:Name"
        )
    module = (
        _import_file(Path(place).expanduser(), option)
        if place.endswith(".py")
        else _import_name(place, option)
    )
    if name not in vars(module):
        known = [
            name_in_module
            for name_in_module, value in vars(module).items()
            if inspect.isclass(value) or inspect.isfunction(value)
        ]
        raise UserError(
            f"{option}: {place} has no {name}; it has {', '.join(known) or 'no class'}"
        )
    return OwnCode(vars(module)[name], Path(str(module.__file__)).resolve())


def find_class(named: str) -> OwnCode:
    """Return the backbone class that `model_class` names. Raise UserError if it cannot be one."""
    code = find(named, "model_class")
    check_class(code.value, named)
    return code


def check_class(value: Any, named: str) -> None:
    """Raise UserError unless a class is a module whose forward takes texts or images."""
    if not (inspect.isclass(value) and issubclass(value, nn.Module)):
        raise UserError(f"model_class: {named} is not a class of torch.nn.Module")
    accepted = accepted_inputs(value)
    if not {"input_ids", "pixel_values"} & set(accepted):
        have = (
            ", ".join(list(inspect.signature(value.forward).parameters)[1:])
            or "nothing"
        )
        raise UserError(
            f"model_class: the forward of {named} takes {have}, and it must take input_ids (with attention_mask), "
            "pixel_values, or both"
        )


def name_of(value: type[nn.Module]) -> str:
    """Return `file.py:Class` of a class. Raise UserError for a class without a file, which no saved model could
    carry."""
    file = inspect.getsourcefile(value) if value.__module__ != "builtins" else None
    if file is None or not Path(file).is_file() or "." in value.__qualname__:
        raise UserError(
            f"model_class: {value.__qualname__} is not a class at the top of a Python file, and the saved model must "
            "carry that file: put it into one"
        )
    return f"{Path(file).resolve()}:{value.__qualname__}"


# ---- classes by folder ---------------------------------------------------------------------------------------------


def trust(folder: Path, code: OwnCode) -> None:
    """Let this process build the model of a folder with the class that its config names."""
    known = _trusted.get(str(folder))
    if known is None or known.backbone_class is not code.value:
        _trusted[str(folder)] = OwnModel.of(code.value)


def trusted_class(folder: str) -> type[OwnModel] | None:
    """Return the model class for a folder whose class a config has named; None if none has."""
    return _trusted.get(folder)


# ---- imports -------------------------------------------------------------------------------------------------------


def _import_name(name: str, option: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"{option}: the module {name} cannot be imported ({error}); install it, or give path/to/file.py:Name"
        ) from error


def _import_file(path: Path, option: str) -> ModuleType:
    """Import a file once per process: as a module of its package if it has one, otherwise by its name alone."""
    if not path.is_file():
        raise UserError(
            f"{option}: {path} is not a file here; give path/to/file.py:Name"
        )
    path = path.resolve()
    for module in list(sys.modules.values()):
        if vars(module).get("__file__") and Path(str(vars(module)["__file__"])) == path:
            return module
    if (path.parent / "__init__.py").is_file():
        top = path.parent
        while (top.parent / "__init__.py").is_file():
            top = top.parent
        if str(top.parent) not in sys.path:
            sys.path.insert(0, str(top.parent))
        return _import_name(
            ".".join(path.relative_to(top.parent).with_suffix("").parts), option
        )
    # A package of its own, so that `from .layers import Block` finds the file beside it.
    package = (
        "vembed_own_"
        + hashlib.blake2b(str(path.parent).encode(), digest_size=6).hexdigest()
    )
    if package not in sys.modules:
        parent = ModuleType(package)
        parent.__path__ = [str(path.parent)]
        sys.modules[package] = parent
    spec = importlib.util.spec_from_file_location(f"{package}.{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module
