"""Training data from Python objects: lists of dicts and `datasets.Dataset`, stored where the readers find them."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vembed.config.user_folders import cache_folder
from vembed.errors import UserError

FOLDER = "python"
"""Folder inside the cache; a file's name is the hash of its content."""


def as_path(name: str, value: Any) -> Any:
    """Return the path of data given as objects; anything else, such as a path, a name or a list of them, as it is."""
    if isinstance(value, Path):
        return str(value)
    if _is_dataset(value):
        return _stored_dataset(value)
    if isinstance(value, list) and value and all(isinstance(one, Mapping) and "path" not in one for one in value):
        return _stored_rows(name, value)
    if isinstance(value, list):
        return [as_path(name, one) if isinstance(one, Path) or _is_dataset(one) else one for one in value]
    if isinstance(value, Mapping) and name == "val_data_path":
        raise UserError(f"{name} is one dict: give a list of dicts, one for each record")
    return value


def _is_dataset(value: Any) -> bool:
    """Return whether a value is a `datasets.Dataset`. The library is imported only if the caller has done so."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(value, library.Dataset)


def _stored_dataset(dataset: Any) -> str:
    folder = cache_folder() / FOLDER / f"dataset-{dataset._fingerprint}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        dataset.save_to_disk(str(partial))
        _rename(partial, folder)
    return str(folder)


def _stored_rows(name: str, rows: list[Mapping[str, Any]]) -> str:
    lines = []
    for number, row in enumerate(rows, 1):
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{name}, record {number}: {error}; records in a list hold texts, numbers and paths of images (a "
                "datasets.Dataset may hold images too)"
            ) from error
    data = b"".join(lines)
    path = cache_folder() / FOLDER / f"{hashlib.sha256(data).hexdigest()[:16]}.jsonl"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_bytes(data)
        partial.replace(path)
    return str(path)


def _rename(partial: Path, folder: Path) -> None:
    """Rename a folder; another process that was faster has written the same."""
    try:
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
