"""Selection of the reader for a path or a Hub dataset name."""

from __future__ import annotations

import logging
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from vembed.config.places import is_hub_dataset, similar_path
from vembed.data.cache import short_hash, stamp
from vembed.data.columns import Columns
from vembed.data.formats.class_folders import class_records, is_class_folder
from vembed.data.formats.copies import (
    CODECS,
    fetched_copies,
    is_address,
    is_pattern,
    unpacked_copy,
)
from vembed.data.formats.delimited import DelimitedFile
from vembed.data.formats.json_files import JsonArray, JsonLines, Reader
from vembed.data.formats.parquet import ParquetTable
from vembed.data.formats.saved_datasets import (
    Role,
    is_saved_dataset,
    open_folder,
    open_hub,
)
from vembed.data.formats.several_files import SeveralFiles
from vembed.data.images.files import IMAGE_SUFFIXES
from vembed.data.messages import ROOM, listed
from vembed.errors import UserError

log = logging.getLogger("vembed")

FORMATS = (
    "JSON Lines (.jsonl, .ndjson), JSON (.json), CSV (.csv), TSV (.tsv) and Parquet (.parquet), also packed (.gz, "
    ".zst, .bz2)"
)

WAYS_OUT = {
    **dict.fromkeys(
        (".feather", ".arrow", ".pkl", ".pickle"),
        "write it as Parquet (in pandas df.to_parquet)",
    ),
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "save the sheet as CSV"),
    **dict.fromkeys((".txt", ".text"), "give the file the ending of what is in it"),
}
"""Ways to make use of files whose ending no reader has."""
PACKED = {".xz": "unxz -k", ".zip": "unzip"}
"""Endings of packed files that nothing here unpacks, and the commands that do."""
READ = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".pq")
"""Endings of the files that a folder or a pattern stands for, also packed."""


def open_reader(path: str, columns: Columns, role: Role, cache: Path) -> Reader:
    """Return the reader of a file, a pattern such as `data/*.parquet`, a folder, an address that fsspec opens, or a Hub
    dataset. Raise UserError if the cache folder has no room for what is unpacked from it."""
    reader = _reader(path, columns, role, cache)
    size = reader.unpacks()
    if size:
        folder = next(one for one in (cache, *cache.absolute().parents) if one.exists())
        free = shutil.disk_usage(folder).free
        if free < size:
            raise UserError(
                f"{reader.name} unpacks to {size:,d} bytes, and {cache} has {free:,d} left: {ROOM}"
            )
        log.info(
            "%s: %s bytes are unpacked into %s, once for each version of the data",
            reader.name,
            f"{size:,d}",
            cache,
        )
    return reader


def _reader(path: str, columns: Columns, role: Role, cache: Path) -> Reader:
    if is_address(path):
        copies = fetched_copies(path, cache)
        return _joined(
            path,
            [_named(copy, name, columns, cache, len(copies)) for name, copy in copies],
        )
    try:
        place = Path(path).expanduser()
        status = place.stat()
    except FileNotFoundError:
        if is_pattern(path):
            return _open_pattern(path, columns, cache)
        return _open_name(path, columns, role)
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # a symlink loop, a NUL character, an unknown home folder
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"{path} cannot be read: {reason}") from error
    if stat.S_ISDIR(status.st_mode):
        files = data_files(place)
        if files and not is_saved_dataset(place):
            return _joined(
                path, [_open_file(one, columns, cache, len(files)) for one in files]
            )
        if not is_saved_dataset(place) and is_class_folder(place):
            reader = _named(class_records(place, cache), path, columns, cache)
            reader.folder = place
            return reader
        if not is_saved_dataset(place):
            raise _no_data(place)
        return open_folder(place, columns, role)
    if not stat.S_ISREG(
        status.st_mode
    ):  # a pipe, for example, blocks and can be read only once
        raise UserError(f"{path} is not a regular file")
    if status.st_size == 0:
        raise UserError(f"{path} is empty")
    try:
        return _open_file(place, columns, cache)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _open_pattern(path: str, columns: Columns, cache: Path) -> Reader:
    files = files_of_pattern(path)
    return _joined(path, [_open_file(one, columns, cache, len(files)) for one in files])


def files_of_pattern(path: str) -> list[Path]:
    """Return the files that a pattern such as `data/*.parquet` names, sorted by name. Raise UserError if it names
    none."""
    parts = Path(path).expanduser().parts
    first = next(number for number, part in enumerate(parts) if is_pattern(part))
    found = sorted(Path(*parts[:first]).glob("/".join(parts[first:])))
    files = [one for one in found if one.is_file() and one.stat().st_size]
    if not files:
        raise UserError(f"{path} names no file (looked from {Path.cwd()})")
    return files


def data_files(folder: Path) -> list[Path]:
    """Return the data files of a folder, sorted by name. A folder of one kind of file is one source."""
    found = [
        one
        for one in sorted(folder.iterdir())
        if one.is_file() and one.stat().st_size and kind_of(one) in READ
    ]
    return found if len({kind_of(one) for one in found}) == 1 else []


def kind_of(path: Path) -> str:
    """Return the ending of a file, of a packed one that of its content."""
    kind = path.suffix.lower()
    return path.with_suffix("").suffix.lower() if kind in CODECS else kind


def _joined(name: str, readers: Sequence[Reader]) -> Reader:
    return readers[0] if len(readers) == 1 else SeveralFiles(name, readers)


def _named(
    copy: Path, name: str, columns: Columns, cache: Path, num_files: int = 1
) -> Reader:
    """Return the reader of a copy, which messages call by the name of what it was copied from."""
    reader = _open_file(copy, columns, cache, num_files)
    reader.name = name
    return reader


def _open_file(path: Path, columns: Columns, cache: Path, num_files: int = 1) -> Reader:
    """Return the reader of one of the files of a source."""
    kind = path.suffix.lower()
    if kind in (
        ".jsonl",
        ".ndjson",
        ".json",
    ):  # a list is an array in any of them: no record is one
        with path.open("rb") as file:
            is_array = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        return JsonArray(path) if is_array else JsonLines(path)
    if kind in (".csv", ".tsv"):
        return DelimitedFile(path, "\t" if kind == ".tsv" else ",", columns)
    if kind in (".parquet", ".pq"):
        unpacked = (
            cache
            / "parquet"
            / short_hash(str(path.absolute()))
            / short_hash(stamp(path))
        )
        return ParquetTable(path, columns, unpacked, num_files)
    if kind in CODECS:
        reader = _named(
            unpacked_copy(path, cache), str(path), columns, cache, num_files
        )
        reader.folder = path.parent
        return reader
    raise unknown_ending(path)


def _no_data(folder: Path) -> UserError:
    names = sorted(one.name for one in folder.iterdir() if not one.name.startswith("."))
    if any(Path(name).suffix.lower() in IMAGE_SUFFIXES for name in names):
        return UserError(
            f"{folder} holds images and nothing that says what they show: write pairs with their paths into a file, or "
            f"put the images of each class into a folder of its own ({folder}/cat/1.jpg)"
        )
    return UserError(
        f"{folder} is a folder without data files of one kind ({', '.join(READ)}), without folders of images and not "
        f"saved by `datasets`; it holds {listed(names) or 'nothing'}: name a file"
    )


def unknown_ending(path: Path) -> UserError:
    """Return the error for a file whose ending no reader has."""
    kind = path.suffix.lower()
    if kind in PACKED:
        return UserError(
            f"{path} is packed, and records are read from any place of a file: unpack it ({PACKED[kind]})"
        )
    way_out = f": {WAYS_OUT[kind]}" if kind in WAYS_OUT else ""
    return UserError(
        f"{path} has the ending {kind or '(none)'}, and vembed reads {FORMATS}{way_out}"
    )


def _open_name(path: str, columns: Columns, role: Role) -> Reader:
    if not is_hub_dataset(path):
        raise UserError(
            f"{path} does not exist (looked from {Path.cwd()}){similar_path(path)}"
        )
    return open_hub(path, columns, role)
