"""The file formats that vembed reads. A format is added by its file and a line here."""

from __future__ import annotations

from pathlib import Path

from vembed.data.formats.base import Format
from vembed.data.formats.delimited import DelimitedFile, TsvFile
from vembed.data.formats.json_lines import JsonLines
from vembed.data.formats.parquet import ParquetFile

FORMATS: tuple[type[Format], ...] = (JsonLines, DelimitedFile, TsvFile, ParquetFile)

ENDINGS = {ending: form for form in FORMATS for ending in form.endings}
"""Format by the ending of the file."""
PACKED_ENDINGS = (".gz", ".zst", ".bz2")
"""Endings of packed files, which may follow each of the others."""


def ending_of(path: Path) -> str:
    """Return the ending of a file, of a packed one that of its content."""
    ending = path.suffix.lower()
    return path.with_suffix("").suffix.lower() if ending in PACKED_ENDINGS else ending


def described_formats() -> str:
    """Return the formats and their endings, for messages."""
    names = [f"{form.title} ({', '.join(form.endings)})" for form in FORMATS]
    return f"{', '.join(names)}, also packed ({', '.join(PACKED_ENDINGS)})"
