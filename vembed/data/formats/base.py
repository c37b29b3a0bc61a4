"""Blocks: consecutive records of a source, which the first pass checks together where it can."""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np

Found = tuple[int, int, int, Any]
"""Position, size and line of a record, and the record itself or a `BadRecord`."""

BLOCK = 256
"""Records of a block where the reader gives them one by one."""
_ODD_ESCAPES = (b"\\u0000", b"\\ud", b"\\uD")
"""Beginnings of the escapes by which JSON writes NUL and surrogates. Unescaped, neither is valid."""


class Block(ABC):
    """Consecutive records of a source, with their positions, sizes and lines (int64 [n])."""

    def __init__(
        self, starts: np.ndarray, sizes: np.ndarray, lines: np.ndarray
    ) -> None:
        self.starts, self.sizes, self.lines = starts, sizes, lines

    @abstractmethod
    def records(self) -> list[Any]:
        """Return the records, each a dict in general, or a `BadRecord`."""

    @abstractmethod
    def names(self) -> tuple[str, ...] | None:
        """Return the columns of the records; None if the records differ in them or one has none."""

    @abstractmethod
    def are_texts(self, names: Sequence[str]) -> bool:
        """Return True if all values of these columns are texts that can be embedded. False: look at each."""

    def found(self) -> Iterator[Found]:
        """Yield the records one by one."""
        return zip(
            self.starts.tolist(),
            self.sizes.tolist(),
            self.lines.tolist(),
            self.records(),
            strict=True,
        )

    def moved(self, positions: int = 0, lines: int = 0) -> Self:
        """Return the block with numbers added to its positions and lines."""
        moved = copy.copy(self)
        moved.starts, moved.lines = self.starts + positions, self.lines + lines
        return moved


class RecordBlock(Block):
    """Records that have been parsed."""

    def __init__(
        self,
        starts: np.ndarray,
        sizes: np.ndarray,
        lines: np.ndarray,
        records: list[Any],
        json: bytes | None = None,
    ) -> None:
        """`json`: what the records were parsed from."""
        super().__init__(starts, sizes, lines)
        self._records = records
        self._json = json

    def records(self) -> list[Any]:
        """See Block."""
        return self._records

    def names(self) -> tuple[str, ...] | None:
        """See Block."""
        if set(map(type, self._records)) != {dict}:
            return None
        names: set[tuple[str, ...]] = set(map(tuple, self._records))
        return names.pop() if len(names) == 1 else None

    def are_texts(self, names: Sequence[str]) -> bool:
        """See Block."""
        values = [record[name] for name in names for record in self._records]
        if (
            set(map(type, values)) != {str}
            or not all(values)
            or any(map(str.isspace, values))
        ):
            return False
        # Looking for a single byte is by far the fastest.
        if self._json is not None and (
            b"\\" not in self._json
            or not any(map(self._json.__contains__, _ODD_ESCAPES))
        ):
            return True
        joined = "".join(values)
        try:
            return "\0" not in joined and (joined.isascii() or bool(joined.encode()))
        except UnicodeEncodeError:
            return False


def grouped(found: Iterable[Found]) -> Iterator[Block]:
    """Yield records that come one by one in blocks."""
    found = iter(found)
    while block := list(itertools.islice(found, BLOCK)):
        starts, sizes, lines = (
            np.array([one[place] for one in block], np.int64) for place in range(3)
        )
        yield RecordBlock(starts, sizes, lines, [one[3] for one in block])
