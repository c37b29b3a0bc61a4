"""utf8_copy(): a CSV or TSV as Excel saves it, in Windows-1252 or UTF-16, as a copy in UTF-8."""

from __future__ import annotations

import codecs
from pathlib import Path

from vembed.data_tools.init.sample import COUNTED_BYTES
from vembed.errors import UserError
from vembed.saving.durability import replace_text

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
    text, encoding = _decoded(path, raw)
    if encoding is None:
        return None
    copy = path.with_name(f"{path.stem}.utf8{path.suffix}")
    if copy.exists() and not force and copy.read_bytes() != text.encode():
        raise UserError(
            f"{path} is {NAMES[encoding]}, and its copy in UTF-8 would be {copy}, which is another file already: "
            "move it away, or give --force to overwrite it"
        )
    replace_text(copy, text)
    return copy, NAMES[encoding]


def _decoded(path: Path, raw: bytes) -> tuple[str, str | None]:
    """Return the text and its encoding; None as encoding for UTF-8."""
    if raw.startswith(_UTF16):
        return raw.decode("utf-16", "replace"), "utf-16"
    try:
        return raw.decode(), None
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
    # In UTF-8 with a damaged place the other letters beyond ASCII are whole; text in Windows-1252 has hardly any such.
    read = raw.decode("utf-8", "surrogateescape")
    broken = sum("\udc80" <= one <= "\udcff" for one in read)
    whole = sum(not one.isascii() for one in read) - broken
    if whole <= broken:
        try:
            return raw.decode("cp1252"), "cp1252"
        except UnicodeDecodeError:
            pass  # a byte that Windows-1252 does not have
    raise UserError(f"{path}, line {line}: not UTF-8 text; save the file as UTF-8")
