"""Cores that this process may use."""

from __future__ import annotations

import os
import sys


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return (
        len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    )
