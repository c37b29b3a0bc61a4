"""The file formats that vembed reads.

A new format needs its class in a file of this folder and its entry in the list below.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vembed.data.formats.base import Format
from vembed.data.formats.delimited import DelimitedFile, TsvFile
from vembed.data.formats.json_lines import JsonLines
from vembed.data.formats.parquet import ParquetFile
from vembed.declarations import check_parts

PACKED_ENDINGS = (".gz", ".zst", ".bz2")
"""Endings of packed files, which may follow each of the others."""
FORMATS: tuple[type[Format], ...] = (
    JsonLines,
    DelimitedFile,
    TsvFile,
    ParquetFile,
)


def check_formats(formats: Sequence[type[Format]]) -> dict[str, type[Format]]:
    """Return the formats by ending. Raise TypeError for a class that lacks something."""
    by_ending = check_parts(
        "format",
        Format,
        formats,
        lambda form: form.endings,
        needed=("endings", "title"),
        taken=PACKED_ENDINGS,
    )
    for ending, form in by_ending.items():
        if not Path(f"data{ending}").suffix == ending == ending.lower():
            raise TypeError(
                f"format {form.__name__} of {form.__module__}: write the ending {ending!r} as '.name', in small letters, "
                "with one dot"
            )
    return by_ending


ENDINGS = check_formats(FORMATS)
"""Format by the ending of the file."""


def ending_of(path: Path) -> str:
    """Return the ending of a file, of a packed one that of its content."""
    ending = path.suffix.lower()
    return path.with_suffix("").suffix.lower() if ending in PACKED_ENDINGS else ending


def described_formats() -> str:
    """Return the formats and their endings, for messages."""
    names = [f"{form.title} ({', '.join(form.endings)})" for form in FORMATS]
    return f"{', '.join(names)}, also packed ({', '.join(PACKED_ENDINGS)})"
