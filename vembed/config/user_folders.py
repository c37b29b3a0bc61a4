"""Folder of this user in which vembed keeps files of its own between runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder(env: Mapping[str, str] = os.environ) -> Path:
    """Return vembed's cache folder: $XDG_CACHE_HOME/vembed, by default ~/.cache/vembed."""
    # Empty counts as unset, as the XDG specification says.
    base = env.get("XDG_CACHE_HOME")
    return Path(base) / "vembed" if base else Path("~/.cache/vembed").expanduser()
