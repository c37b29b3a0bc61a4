"""SeveralFiles: the files of a folder or pattern as one source."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vembed.data.readers import Found, Reader


class SeveralFiles:
    """Readers one behind the other. Positions and lines count on from file to file."""

    def __init__(self, name: str, readers: Sequence[Reader]) -> None:
        self.name = name
        self.readers = tuple(readers)
        self.folder = readers[0].folder
        self.numbers_in_text = readers[0].numbers_in_text
        self.extents = [one.extent() for one in readers]
        self._starts = [0, *itertools.accumulate(positions for positions, _ in self.extents)]
        self._lines = [0, *itertools.accumulate(lines for _, lines in self.extents)]

    def scan(self) -> Iterator[Found]:
        """Yield all records in order."""
        for number in range(len(self.readers)):
            yield from self.scan_file(number)

    def scan_file(self, number: int) -> Iterator[Found]:
        """Yield the records of one file."""
        first, line = self._starts[number], self._lines[number]
        for start, size, own, record in self.readers[number].scan():
            yield first + start, size, line + own, record

    def read(self, start: int, size: int) -> Any:
        """Return one record again, from the position and size that `scan` yielded."""
        number = bisect.bisect_right(self._starts, start) - 1
        return self.readers[number].read(start - self._starts[number], size)

    def where(self, line: int) -> str:
        """Return the name of a record for messages."""
        number = min(bisect.bisect_left(self._lines, line) - 1, len(self.readers) - 1)
        return self.readers[number].where(line - self._lines[number])

    def files(self) -> Sequence[Path]:
        """Return the files that the records come from."""
        return [path for one in self.readers for path in one.files()]

    def extent(self) -> tuple[int, int]:
        """Return the numbers of positions and lines."""
        return self._starts[-1], self._lines[-1]
