"""The file formats that vembed reads, and the reader of a path, an address or a Hub dataset name.

A new format needs its class in a file of this folder and its entry in the list below. Packed and remote files are copied
before they are read.
"""

import json
import logging
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from vembed.data.examples import BadRecord
from vembed.data.formats.base import FILE_BITS, Format, LineFormat, Row, first_line
from vembed.data.formats.delimited import DelimitedFile, TsvFile
from vembed.data.formats.json_lines import JsonLines
from vembed.data.formats.parquet import ParquetFile
from vembed.data.formats.saved_datasets import (
    Role,
    is_saved_dataset,
    open_folder,
    open_hub,
)
from vembed.data.images.files import IMAGE_SUFFIXES
from vembed.data.records import Columns
from vembed.declarations import check_parts
from vembed.errors import UserError, listed
from vembed.files import (
    cache_folder,
    is_address,
    is_pattern,
    new_copy,
    short_hash,
    similar_path,
    stamp,
    written_aside,
)
from vembed.progress import ProgressReport

log = logging.getLogger("vembed")

# user/name:config:split, where the user, the config and the split may be missing.
_HUB_DATASET = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?(:[^/:]*){0,2}")

CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
"""Endings of packed files, which may follow each of the others, and pyarrow's names of their codecs."""
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
        taken_names=tuple(CODECS),
    )
    for ending, form in by_ending.items():
        if not re.fullmatch(r"\.[a-z0-9_]+", ending):
            raise TypeError(
                f"format {form.__name__} of {form.__module__} has the ending {ending!r}: write what follows the last dot "
                "of the file's name in lower case, with the dot, such as .csv"
            )
    return by_ending


FORMAT_BY_ENDING = check_formats(FORMATS)
"""Format by the ending of the file."""


def ending_of(path: Path) -> str:
    """Return the ending of a file, of a packed one that of its content."""
    ending = path.suffix.lower()
    return path.with_suffix("").suffix.lower() if ending in CODECS else ending


def is_hub_dataset(path: str) -> bool:
    """Return whether a path that does not exist can be the name of a data set on the Hub."""
    folder = Path(path).parent
    is_file = Path(path).suffix.lower() in FORMAT_BY_ENDING or (
        folder != Path() and folder.is_dir()
    )
    return not is_file and _HUB_DATASET.fullmatch(path) is not None


SPLIT_FOLDERS = frozenset(
    {"train", "training", "val", "valid", "validation", "dev", "test"}
)
"""Names of folders and files that are splits, not classes."""


class SeveralFiles(Format):
    """The files of a folder or pattern as one source."""

    def __init__(self, name: str, readers: Sequence[Format]) -> None:
        super().__init__(readers[0].path)
        self.name = name
        self.readers = tuple(readers)
        self.columns = readers[0].columns
        self.numbers_are_text = readers[0].numbers_are_text  # type: ignore[misc]

    def __reduce__(self) -> tuple[Any, ...]:
        """Each file is opened again."""
        return SeveralFiles, (self.name, self.readers)

    @property
    def single_files(self) -> Sequence[Format]:
        """See Format."""
        return self.readers

    @property
    def stop(self) -> int:
        """Number behind the last one."""
        return len(self.readers) << FILE_BITS

    def parts(self) -> list[range]:
        """Return the parts of all files."""
        parts = []
        for number, reader in enumerate(self.readers):
            shift = number << FILE_BITS
            for part in reader.parts():
                parts.append(range(part.start + shift, part.stop + shift))
        return parts

    def rows(self, part: range | None = None) -> Iterator[Row]:
        """Yield the rows of a part of one file; without one those of all files."""
        readers = self.readers
        file = 0
        if part is not None:
            file = part.start >> FILE_BITS
            readers = readers[file : file + 1]
        for reader in readers:
            shift = file << FILE_BITS
            if part is not None:
                part = range(part.start - shift, part.stop - shift)
            for number, line, record in reader.rows(part):
                yield number + shift, line + shift, record
            file += 1

    def where(self, line: int) -> str:
        """Return the name of a record for messages."""
        reader, line, _ = self._located(line)
        return reader.where(line)

    def read(self, number: int) -> Any:
        """Return one record again."""
        reader, number, _ = self._located(number)
        return reader.read(number)

    def num_lines(self, part: range) -> int:
        """Return the number of lines of a part."""
        reader, start, shift = self._located(part.start)
        return reader.num_lines(range(start, part.stop - shift))

    def select(self, columns: Sequence[str]) -> None:
        """Read only these columns from now on, of each file those that it has."""
        for reader in self.readers:
            if reader.columns is not None:
                names = [name for name in columns if name in reader.columns]
                reader.select(names or reader.columns)

    def num_records(self) -> int | None:
        """Return the number of records where it is known without reading them."""
        counts = [reader.num_records() for reader in self.readers]
        return None if None in counts else sum(filter(None, counts))

    def files(self) -> Sequence[Path]:
        """Return the files that the records come from."""
        paths: list[Path] = []
        for reader in self.readers:
            paths += reader.files()
        return paths

    def _located(self, number: int) -> tuple[Format, int, int]:
        """Return the file of a number or line, the number in it, and what was added to that."""
        file = number >> FILE_BITS
        shift = file << FILE_BITS
        return self.readers[file], number - shift, shift


def open_reader(
    path: str | Path,
    columns: Columns | None = None,
    role: Role = "train",
) -> Format:
    """Return the reader of a file, a pattern such as `data/*.parquet`, a folder, an address that fsspec opens, or a Hub
    dataset. Without `columns` any header is accepted and all columns are read. Raise UserError if a table lacks a
    required column, or has two of one name."""
    readers = _readers(str(path), role)
    for reader in readers:
        if columns is None or reader.columns is None:
            continue
        try:
            read = columns.of_table(reader.columns)
        except UserError as error:
            hint = ""
            if reader.numbers_are_text:
                hint = (
                    "; the first line of the file is taken for the names of the columns"
                )
            raise UserError(f"{reader.name}: {error}{hint}") from error
        reader.select(read)
    return readers[0] if len(readers) == 1 else SeveralFiles(str(path), readers)


def _readers(path: str, role: Role) -> list[Format]:
    if is_address(path):
        copies = fetched_copies(path)
        return [_open_file(copy, name) for name, copy in copies]
    try:
        file = Path(path).expanduser()
        status = file.stat()
    except FileNotFoundError:
        if is_pattern(path):
            return [_open_file(match) for match in files_of_pattern(path)]
        if is_hub_dataset(path):
            return [open_hub(path, role)]
        raise UserError(
            f"{path} does not exist (looked from {Path.cwd()}){similar_path(path)}"
        ) from None
    except (OSError, ValueError, RuntimeError) as error:
        # A symlink loop, a NUL character, or an unknown home folder.
        raise UserError(f"{path} cannot be read: {error}") from error
    if stat.S_ISDIR(status.st_mode):
        return _open_folder(file, role)
    if not stat.S_ISREG(status.st_mode):
        # A pipe, for example, blocks and can be read only once.
        raise UserError(f"{path} is not a regular file")
    if status.st_size == 0:
        raise UserError(f"{path} is empty")
    try:
        return [_open_file(file)]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _open_folder(folder: Path, role: Role) -> list[Format]:
    if is_saved_dataset(folder):
        return [open_folder(folder, role)]
    files = data_files(folder)
    # train-00000-of-00002.parquet and train.jsonl are of the split train.
    splits = {re.split(r"[-_.]", file.name)[0].lower() for file in files}
    splits &= SPLIT_FOLDERS
    if len(splits) > 1:
        raise UserError(
            f"{folder} holds files of several splits ({', '.join(sorted(splits))}): name those of one by a pattern, such as "
            f"{folder}/train*"
        )
    if files:
        return [_open_file(file) for file in files]
    records = class_records(folder)
    if records is not None:
        reader = _open_file(records, str(folder))
        reader.folder = folder
        return [reader]
    names = listed(sorted(path.name for path in folder.iterdir()))
    raise UserError(
        f"{folder} is a folder without data files of one kind ({', '.join(FORMAT_BY_ENDING)}), without folders of images and "
        f"not saved by `datasets`; it holds {names or 'nothing'}: name a file"
    )


def class_records(folder: Path) -> Path | None:
    """Return a file with a record for each image of a folder whose subfolders are classes, in the cache folder: the
    image's path and class. None for a folder without subfolders of images, or with images itself."""
    entries = sorted(folder.iterdir())
    if any(map(_is_image, entries)):
        return None
    lines = []
    classes: dict[str, None] = {}
    for entry in entries:
        for image in filter(_is_image, sorted(entry.rglob("*"))):
            # Jupyter and archives of macOS leave copies in such folders.
            parts = image.relative_to(folder).parts
            if any(part.startswith((".", "__MACOSX")) for part in parts):
                continue
            classes[entry.name] = None
            record = {"image": str(image.relative_to(folder)), "label": entry.name}
            lines.append(json.dumps(record) + "\n")
    if not classes:
        return None
    for name in classes:
        if name.lower() in SPLIT_FOLDERS:
            raise UserError(
                f"{folder} holds {listed(classes)}, and {name} is the name of a split, not of a class: give "
                f"{folder / name} itself, and other splits as val_data_path"
            )
    text = "".join(lines)
    path = (
        cache_folder()
        / "class_folders"
        / f"{short_hash(str(folder.absolute()), text)}.jsonl"
    )
    if not path.exists():
        with written_aside(path) as partial:
            partial.write_text(text, encoding="utf-8")
    return path


def _is_image(path: Path) -> bool:
    return (
        path.suffix.lower() in IMAGE_SUFFIXES
        and not path.name.startswith(".")
        and path.is_file()
    )


def _open_file(path: Path, name: str | None = None) -> Format:
    """Return the reader of a file. `name`: what messages call it, if it is a copy."""
    ending = path.suffix.lower()
    if ending in FORMAT_BY_ENDING:
        reader = FORMAT_BY_ENDING[ending].open(path)
    elif ending in CODECS:
        reader = _open_file(unpacked_copy(path), str(path))
        reader.folder = path.parent
    else:
        known = [f"{form.title} ({', '.join(form.endings)})" for form in FORMATS]
        raise UserError(
            f"{path} has the ending {ending or '(none)'}, and vembed reads {', '.join(known)}, also packed "
            f"({', '.join(CODECS)})"
        )
    reader.name = name or reader.name
    return reader


def files_of_pattern(path: str) -> list[Path]:
    """Return the files that a pattern such as `data/*.parquet` names, sorted by name. Raise UserError if it names
    none."""
    pattern = Path(path).expanduser()
    root = pattern.anchor
    paths = sorted(Path(root).glob(str(pattern.relative_to(root))))
    files = [path for path in paths if path.is_file() and path.stat().st_size]
    if not files:
        raise UserError(f"{path} names no file (looked from {Path.cwd()})")
    return files


def data_files(folder: Path) -> list[Path]:
    """Return the data files of a folder, sorted by name. A folder of one kind of file is one source."""
    files = [
        path
        for path in sorted(folder.iterdir())
        if ending_of(path) in FORMAT_BY_ENDING
        and path.is_file()
        and path.stat().st_size
    ]
    return files if len({ending_of(path) for path in files}) == 1 else []


VERSION_FACTS = ("size", "ETag", "etag", "md5", "mtime", "LastModified", "created")
COPY_PIECE_BYTES = 4 * 2**20


def unpacked_copy(path: Path) -> Path:
    """Return a file without gzip, zstd or bzip2, in the cache folder; unpacked once for each version of it."""
    version = f"{short_hash(str(path.absolute()))}-{short_hash(stamp(path))}"
    target = cache_folder() / "unpacked" / version / path.with_suffix("").name
    if target.exists():
        return target
    codec = CODECS[path.suffix.lower()]
    try:
        with pa.CompressedInputStream(pa.OSFile(str(path)), codec) as source:
            _copy(source, target, str(path))
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(
            f"{path} cannot be unpacked as {codec}: {first_line(error)}"
        ) from error
    return target


def fetched_copies(address: str) -> list[tuple[str, Path]]:
    """Return the addresses that an address (or a pattern with `*`) names, each with its copy in the cache folder."""
    import fsspec  # takes a tenth of a second, which local files need not wait for

    copies = []
    try:
        files, pattern = fsspec.core.url_to_fs(address)
        paths = [pattern]
        if is_pattern(pattern):
            paths = sorted(files.glob(pattern))
        for path in paths:
            name = files.unstrip_protocol(path)
            facts = files.info(path)
            if facts["type"] != "file":
                raise UserError(
                    f"{name} is a folder: name its files, as in .../*.jsonl"
                )
            # What tells versions apart depends on the store: an entity tag, a time, or the size alone.
            known = [str(facts.get(fact)) for fact in VERSION_FACTS]
            version = f"{short_hash(name)}-{short_hash(known)}"
            target = cache_folder() / "fetched" / version / Path(path).name
            if not target.exists():
                with files.open(path, "rb") as source:
                    _copy(source, target, name)
            copies.append((name, target))
    except (ImportError, OSError, ValueError) as error:
        raise UserError(f"{address} cannot be read: {first_line(error)}") from error
    if not copies:
        raise UserError(f"{address} names no file")
    return copies


def _copy(
    source: Any,
    target: Path,
    name: str,
) -> None:
    """Copy an open file."""
    num_bytes = 0
    progress = ProgressReport(f"copying {name}", log=log.info)
    with new_copy(target, name) as partial, partial.open("wb") as file:
        while piece := source.read(COPY_PIECE_BYTES):
            file.write(piece)
            num_bytes += len(piece)
            progress(num_bytes, None)


# ---- documents -------------------------------------------------------------------

PLAIN_TEXT_ENDINGS = (".txt", ".text")


class TextLines(LineFormat):
    """A plain text file: every line that is not blank is one record, a string."""

    def record(self, line: bytes) -> str | BadRecord:
        """See LineFormat."""
        try:
            return line.decode().strip()
        except UnicodeDecodeError:
            return BadRecord("not UTF-8: save the file as UTF-8")


def open_document_reader(path: str | Path) -> Format:
    """Return the reader of documents: of any source of data, or of a plain text file."""
    file = Path(path).expanduser()
    if file.suffix.lower() in PLAIN_TEXT_ENDINGS and file.is_file():
        return TextLines(file)
    return open_reader(path)
