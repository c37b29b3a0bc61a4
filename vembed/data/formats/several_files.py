"""SeveralFiles: the files of a folder or pattern as one source."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vembed.data.formats.base import Block, Found
from vembed.data.formats.json_files import Part, Reader


class SeveralFiles:
    """Readers one behind the other. Positions and lines count on from file to file."""

    def __init__(self, name: str, readers: Sequence[Reader]) -> None:
        self.name = name
        self.readers = tuple(readers)
        self.folder = readers[0].folder
        self.numbers_in_text = readers[0].numbers_in_text
        self.extents = [one.extent() for one in readers]
        self._starts = [
            0,
            *itertools.accumulate(positions for positions, _ in self.extents),
        ]
        self._lines = [0, *itertools.accumulate(lines for _, lines in self.extents)]

    def scan(self) -> Iterator[Found]:
        """Yield all records in order."""
        for first, line, reader in zip(
            self._starts, self._lines, self.readers, strict=False
        ):
            for start, size, own, record in reader.scan():
                yield first + start, size, line + own, record

    def parts(self) -> list[Part]:
        """Return the parts of all files."""
        return [
            replace(part, file=number, first_line=self._lines[number])
            for number, reader in enumerate(self.readers)
            for part in reader.parts()
        ]

    def blocks(self, part: Part) -> Iterator[Block]:
        """Yield the records of a part. Lines count from the part's first one."""
        first = self._starts[part.file]
        return (
            block.moved(positions=first)
            for block in self.readers[part.file].blocks(part)
        )

    def num_lines(self, part: Part) -> int:
        """Return the number of lines of a part."""
        return self.readers[part.file].num_lines(part)

    def unpacks(self) -> int:
        """Return the bytes that a pass over the records stores in the cache folder."""
        return sum(one.unpacks() for one in self.readers)

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
