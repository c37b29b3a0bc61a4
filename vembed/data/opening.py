"""Selection of the reader for a path or a Hub dataset name."""

from __future__ import annotations

import difflib
import stat
from pathlib import Path

from vembed.config.places import is_hub_dataset
from vembed.data.cache import short_hash, stamp
from vembed.data.columns import Columns
from vembed.data.delimited import DelimitedFile
from vembed.data.readers import JsonArray, JsonLines, Reader
from vembed.data.tables import ParquetTable, Role, open_folder, open_hub
from vembed.errors import UserError

FORMATS = "JSON Lines (.jsonl, .ndjson), JSON (.json), CSV (.csv), TSV (.tsv) and Parquet (.parquet)"

_PACKED = {".gz": "gunzip -k", ".zst": "unzstd", ".bz2": "bunzip2 -k", ".xz": "unxz -k", ".zip": "unzip"}


def open_reader(path: str, columns: Columns, role: Role, cache: Path) -> Reader:
    """Return the reader of a file, a folder saved by `datasets`, or a Hub dataset."""
    try:
        place = Path(path).expanduser()
        status = place.stat()
    except FileNotFoundError:
        return _open_name(path, columns, role)
    except (OSError, ValueError, RuntimeError) as error:  # a symlink loop, a NUL character, an unknown home folder
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"{path} cannot be read: {reason}") from error
    if stat.S_ISDIR(status.st_mode):
        return open_folder(place, columns, role)
    if not stat.S_ISREG(status.st_mode):  # a pipe, for example, blocks and can be read only once
        raise UserError(f"{path} is not a regular file")
    if status.st_size == 0:
        raise UserError(f"{path} is empty")
    try:
        return _open_file(place, columns, cache)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _open_file(path: Path, columns: Columns, cache: Path) -> Reader:
    kind = path.suffix.lower()
    if kind in (".jsonl", ".ndjson"):
        return JsonLines(path)
    if kind == ".json":
        with path.open("rb") as file:
            is_array = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        return JsonArray(path) if is_array else JsonLines(path)
    if kind in (".csv", ".tsv"):
        return DelimitedFile(path, "\t" if kind == ".tsv" else ",", columns)
    if kind in (".parquet", ".pq"):
        unpacked = cache / "parquet" / f"{short_hash(str(path.absolute()))}-{short_hash(stamp(path))}"
        return ParquetTable(path, columns, unpacked)
    if kind in _PACKED:
        raise UserError(f"{path} is packed, and records are read from any place of a file: unpack it ({_PACKED[kind]})")
    raise UserError(f"{path} has the ending {kind or '(none)'}, and vembed reads {FORMATS}")


def _open_name(path: str, columns: Columns, role: Role) -> Reader:
    folder, name = Path(path).parent, Path(path).name
    if not is_hub_dataset(path):
        near = difflib.get_close_matches(name, _names_in(folder), n=1)
        hint = f"; did you mean {folder / near[0]}?" if near else ""
        raise UserError(f"{path} does not exist (looked from {Path.cwd()}){hint}")
    return open_hub(path, columns, role)


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []
