"""Templates in `output_dir`: runs/{model}-{time}. Expanded once, to the same folder on every rank."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import PurePath
from typing import Any

from vembed.config.entries import DataSource

FIELDS = ("model", "data", "seed", "time")
_FIELD = re.compile(r"\{([^{}]*)\}")
_GENERAL = frozenset({"model", "final", "merged", ""})
"""Folder names that do not tell one model from another."""


def expand_output_dir(
    template: str, values: Mapping[str, Any], env: Mapping[str, str] = os.environ
) -> str:
    """Return the folder that a template names. `values`: the options by name. Raise ValueError for a bad template."""
    # Not str.format: other braces, format specs and attributes in a folder's name stay as they are.
    names = _FIELD.findall(template)
    if not names:
        return template
    unknown = [name for name in names if name not in FIELDS]
    if unknown:
        raise ValueError(
            f"{{{unknown[0]}}} is not known; a folder's name may contain {{{'}, {'.join(FIELDS)}}}"
        )
    start = ""
    if "time" in names:
        resume = values.get("resume", False)
        if resume in (True, "auto", "force"):
            raise ValueError(
                f"{{time}} names a new folder at each start, so resume: {str(resume).lower()} finds no checkpoint "
                "there; give resume the folder of the earlier run, or leave out {time}"
            )
        if values.get("num_machines", 1) != 1:
            raise ValueError(
                "{time} differs between machines; give all of them one fixed folder"
            )
        seconds = time.time()
        if env.get("LOCAL_RANK") is not None:
            # Ranks take the start of the process that started them, which they share.
            import psutil

            seconds = float(psutil.Process(os.getppid()).create_time())
        start = datetime.fromtimestamp(seconds).strftime("%Y%m%d-%H%M%S")
    data = values.get("data_path")
    first = data[0] if isinstance(data, list) and data else data
    path = first.path if isinstance(first, DataSource) else str(first)
    known = {
        "model": _short(str(values.get("model_name", ""))),
        "data": _short(path).partition(".")[0],
        "seed": str(values.get("seed", 42)),
        "time": start,
    }
    return _FIELD.sub(lambda match: known[match[1]], template)


def _short(name: str) -> str:
    """Return the last part of a path or Hub name that says which model or file it is."""
    parts = [
        part for part in PurePath(name.replace("\\", "/")).parts if part not in _GENERAL
    ]
    last = parts[-1] if parts else name
    return re.sub(r"[^\w.-]+", "-", last).strip("-.") or "run"
