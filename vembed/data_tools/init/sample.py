"""FileSample: the first records of a data file, and how many records it has in all. Imports no torch."""

from __future__ import annotations

import codecs
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vembed.data.examples import BadRecord
from vembed.data.formats.base import Format
from vembed.data.formats.opening import SeveralFiles, open_reader
from vembed.errors import UserError
from vembed.files import cache_folder, is_address, is_pattern
from vembed.saving.durability import replace_text

NUM_RECORDS = 1000
"""Number of records to look at."""
COUNTED_BYTES = 64 * 2**20
"""Records of larger files are not counted but estimated, from the size of the first ones."""

IMAGE_NAMES = ("image", "images", "bytes", "path")

Record = dict[str, Any]


@dataclass(frozen=True)
class FileSample:
    """The first records of a file."""

    records: list[Record] = field(default_factory=list)
    """Empty where there is nothing to look at: a name on the Hub, an address."""
    num_records: int = 0
    """Records in the whole file."""
    is_estimate: bool = False
    is_delimited: bool = False
    """CSV or TSV: the names are those of the first line, and all values are text."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of all columns, in order."""
        return tuple(dict.fromkeys(name for record in self.records for name in record))


def read_sample(path: Path) -> FileSample:
    """Read the first records of a file, or of a folder that is one source. Raise UserError if it cannot be read."""
    is_local_pattern = is_pattern(str(path)) and not is_address(str(path))
    if not path.exists() and not is_local_pattern:
        return FileSample()
    reader = open_reader(str(path), None, "train", cache_folder())
    rows = itertools.islice(reader.rows(), NUM_RECORDS)
    records = []
    for _, line, record in rows:
        if isinstance(record, dict):
            records.append(record)
        elif reader.columns is not None:
            # A row that is no record has no cells here; training says where it is and what is wrong.
            records.append(dict.fromkeys(reader.columns))
        else:
            reason = record if isinstance(record, BadRecord) else "not an object"
            raise UserError(f"{reader.where(line)}: {reason}")
    if not records:
        raise UserError(f"{path}: has no records")
    files = reader.readers if isinstance(reader, SeveralFiles) else (reader,)
    counts = [_num_records(file) for file in files]
    return FileSample(
        records,
        sum(count for count, _ in counts),
        any(is_estimate for _, is_estimate in counts),
        reader.numbers_are_text,
    )


def _num_records(reader: Format) -> tuple[int, bool]:
    """Return the number of records, and whether it is estimated, from the size of the first records."""
    count = reader.num_records()
    if count is not None:
        return count, False
    if reader.stop - reader.start <= COUNTED_BYTES:
        return sum(1 for _ in reader.rows()), False
    rows = list(itertools.islice(reader.rows(), NUM_RECORDS))
    seen_bytes = max(rows[-1][0] - reader.start, 1)
    return round((len(rows) - 1) * (reader.stop - reader.start) / seen_bytes), True


def texts_of(value: Any) -> list[str | None]:
    """Return the texts of a field, which may be a list and have objects; None for each entry that is not text alone."""
    entries: list[Any] = value if isinstance(value, list) else [value]
    texts: list[str | None] = []
    for entry in entries:
        text = entry
        if isinstance(entry, dict):
            has_image = any(entry.get(name) is not None for name in IMAGE_NAMES)
            text = None if has_image else entry.get("text")
            if isinstance(text, str) and isinstance(entry.get("title"), str):
                text = f"{entry['title']} {text}".strip()
        if entry is not None:
            texts.append(text if isinstance(text, str) else None)
    return texts


DELIMITED = (".csv", ".tsv")
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
NAMES = {"cp1252": "Windows-1252", "utf-16": "UTF-16"}


def utf8_copy(path: Path, *, force: bool = False) -> tuple[Path, str] | None:
    """Write a copy of a CSV or TSV that is not UTF-8; return its path and the encoding that was taken. None for a file
    that needs none. Raise UserError if the encoding cannot be told, or if another file has the copy's name."""
    if path.suffix.lower() not in DELIMITED or not path.is_file():
        return None
    if path.stat().st_size > COUNTED_BYTES:  # each record is checked as it is read
        return None
    raw = path.read_bytes()
    encoding = "utf-16" if raw.startswith(_UTF16) else "cp1252"
    if encoding == "cp1252":
        try:
            raw.decode()
            return None
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
        # In UTF-8 with a damaged place the other letters beyond ASCII are whole; text in Windows-1252 has hardly any
        # such. Some bytes are none of Windows-1252.
        letters = raw.decode("utf-8", "surrogateescape")
        num_broken = sum("\udc80" <= letter <= "\udcff" for letter in letters)
        num_whole = sum(not letter.isascii() for letter in letters) - num_broken
        if num_whole > num_broken or "\ufffd" in raw.decode("cp1252", "replace"):
            raise UserError(
                f"{path}, line {line}: not UTF-8 text; save the file as UTF-8"
            )
    text = raw.decode(encoding, "replace")
    copy = path.with_name(f"{path.stem}.utf8{path.suffix}")
    if copy.exists() and not force and copy.read_bytes() != text.encode():
        raise UserError(
            f"{path} is {NAMES[encoding]}, and its copy in UTF-8 would be {copy}, which is another file already: "
            "move it away, or give --force to overwrite it"
        )
    replace_text(copy, text)
    return copy, NAMES[encoding]
