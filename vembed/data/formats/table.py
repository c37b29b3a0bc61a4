"""The file formats that vembed reads.

A new format needs its class in a file of this folder and its entry in the list below.
"""

from __future__ import annotations

from pathlib import Path

from vembed.data.formats.base import Format
from vembed.data.formats.delimited import DelimitedFile, TsvFile
from vembed.data.formats.json_lines import JsonLines
from vembed.data.formats.parquet import ParquetFile

FORMATS: tuple[type[Format], ...] = (
    JsonLines,
    DelimitedFile,
    TsvFile,
    ParquetFile,
)


def check_formats(formats: tuple[type[Format], ...]) -> dict[str, type[Format]]:
    """Return the formats by ending. Raise TypeError for a class that lacks something."""
    by_ending: dict[str, type[Format]] = {}
    for form in formats:
        where = f"format {form.__name__} of {form.__module__}"
        missing = [name for name in ("endings", "title") if not getattr(form, name)]
        missing += sorted(form.__abstractmethods__)
        if missing:
            raise TypeError(f"{where} declares no `{'`, `'.join(missing)}`")
        for ending in form.endings:
            if not ending.startswith(".") or ending != ending.lower():
                raise TypeError(f"{where}: write the ending {ending!r} as '.name'")
            other = by_ending.setdefault(ending, form)
            if other is not form:
                raise TypeError(f"{where} has the ending {ending} of {other.__name__}")
    return by_ending


ENDINGS = check_formats(FORMATS)
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
