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


class KeyIndex:
    """Positions of many numbers; of equal ones the first counts."""

    def __init__(self, values: np.ndarray) -> None:
        self._values, self._positions = np.unique(values, return_index=True)

    def find(self, wanted: np.ndarray) -> np.ndarray:
        """Return the position of each wanted number, -1 where there is none."""
        if not len(self._values):
            return np.full(len(wanted), -1)
        # searchsorted gives their number for what is larger than all.
        last = len(self._values) - 1
        place = np.minimum(np.searchsorted(self._values, wanted), last)
        return np.where(self._values[place] == wanted, self._positions[place], -1)
