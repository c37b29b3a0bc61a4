"""Removal of repeated inputs: each distinct one is encoded once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np

Value = TypeVar("Value")


def distinct(
    values: Sequence[Value], key: Callable[[Value], Hashable]
) -> tuple[list[Value], np.ndarray]:
    """Return the first value of each key, and for every value the position of its equal among them, int64 [n]."""
    position: dict[Hashable, int] = {}
    firsts: list[Value] = []
    where = np.empty(len(values), dtype=np.int64)
    for number, value in enumerate(values):
        place = position.setdefault(key(value), len(firsts))
        if place == len(firsts):
            firsts.append(value)
        where[number] = place
    return firsts, where
