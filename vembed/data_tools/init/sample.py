"""FileSample: the first records of a data file, and how many records it has in all. Imports no torch."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from vembed.config.user_folders import cache_folder
from vembed.data.columns import Columns
from vembed.data.formats.class_folders import class_records, is_class_folder
from vembed.data.formats.copies import CODECS, is_address, is_pattern, unpacked_copy
from vembed.data.formats.delimited import DelimitedFile
from vembed.data.formats.opening import data_files, files_of_pattern, unknown_ending
from vembed.data.formats.saved_datasets import is_saved_dataset, saved_split
from vembed.errors import UserError
from vembed.saving.durability import replace_text

NUM_RECORDS = 1000
"""Number of records to look at."""
MAX_LINE = 1_000_000
COUNTED_BYTES = 256 * 2**20
"""Larger files are not counted but estimated, from the size of the first records."""

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
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        is_several = is_pattern(str(path)) and not is_address(str(path))
        return _joined(files_of_pattern(str(path))) if is_several else FileSample()
    kind = path.suffix.lower()
    if kind in CODECS:
        return read_sample(unpacked_copy(path, cache_folder()))
    if kind not in _READERS:
        raise unknown_ending(path)
    try:
        return _READERS[kind](path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def texts_of(value: Any) -> list[str | None]:
    """Return the texts of a field, which may be a list and have objects; None for each entry that is not text alone."""
    entries: list[Any] = value if isinstance(value, list) else [value]
    return [_text_of(one) for one in entries if one is not None]


def _text_of(entry: Any) -> str | None:
    if not isinstance(entry, dict):
        return entry if isinstance(entry, str) else None
    text, title = entry.get("text"), entry.get("title")
    if not isinstance(text, str) or any(
        entry.get(name) is not None for name in ("image", "images", "bytes", "path")
    ):
        return None
    return f"{title} {text}".strip() if isinstance(title, str) else text


def _folder(path: Path) -> FileSample:
    """Return the first records of a folder: those of its first file, or of one that `datasets` has saved."""
    if not is_saved_dataset(path) and (files := data_files(path)):
        return _joined(files)
    if not is_saved_dataset(path) and is_class_folder(path):
        return _json(class_records(path, cache_folder()))
    found = saved_split(path, "train")
    if not len(found):
        raise UserError(f"{path}: has no rows")
    return FileSample(found.with_format("arrow")[:NUM_RECORDS].to_pylist(), len(found))


def _joined(files: list[Path]) -> FileSample:
    samples = [read_sample(one) for one in files]
    total = sum(one.num_records for one in samples)
    return replace(
        samples[0],
        num_records=total,
        is_estimate=any(one.is_estimate for one in samples),
    )


def _json(path: Path) -> FileSample:
    with path.open(encoding="utf-8-sig") as file:
        if file.read(1) == "[":
            records = _json_list(file.read(MAX_LINE))
            return FileSample(records, *_counted(path, records, by_lines=False))
        file.seek(0)
        # readline with a limit: a file without line ends must not be read whole.
        lines = [
            line
            for line in islice(iter(lambda: file.readline(MAX_LINE), ""), NUM_RECORDS)
            if line.strip()
        ]
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(
                f"{path}, line {number}: not JSON; the file must hold one object per line"
            ) from None
        if not isinstance(record, dict):
            raise UserError(
                f"{path}, line {number}: a {type(record).__name__}, where an object with columns is expected"
            )
        records.append(record)
    if not records:
        raise UserError(f"{path}: is empty")
    return FileSample(records, *_counted(path, records, by_lines=True))


def _json_list(text: str) -> list[Record]:
    """Return the first objects of a JSON list whose bracket is already read. The data reader validates the rest."""
    records: list[Record] = []
    position, decoder = 0, json.JSONDecoder()
    while len(records) < NUM_RECORDS and (start := text.find("{", position)) >= 0:
        try:
            record, position = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            break
        records.append(record)
    return records


def _delimited(path: Path) -> FileSample:
    reader = DelimitedFile(
        path, "\t" if path.suffix.lower() == ".tsv" else ",", _AnyColumns()
    )
    found = reader.scan()
    # A row that is no record has no cells here; training says where it is and what is wrong.
    records = [
        record if isinstance(record, dict) else dict.fromkeys(reader.header)
        for _, _, _, record in islice(found, NUM_RECORDS)
    ]
    if not records:
        raise UserError(f"{path}: has no rows below its header")
    if path.stat().st_size <= COUNTED_BYTES:
        return FileSample(
            records, len(records) + sum(1 for _ in found), is_delimited=True
        )
    return FileSample(
        records, _estimated(path, records), is_estimate=True, is_delimited=True
    )


class _AnyColumns(Columns):
    """Columns of a file whose header is only looked at."""

    def check(self, columns: Iterable[str]) -> None:
        """Accept any header."""


def _parquet(path: Path) -> FileSample:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        batch = next(file.iter_batches(batch_size=NUM_RECORDS), None)
    except pyarrow.ArrowException as error:
        raise UserError(
            f"{path}: not a Parquet file: {str(error).splitlines()[0]}"
        ) from None
    if batch is None or batch.num_rows == 0:
        raise UserError(f"{path}: has no rows")
    return FileSample(batch.to_pylist(), file.metadata.num_rows)


def _counted(path: Path, records: list[Record], *, by_lines: bool) -> tuple[int, bool]:
    """Return the number of records, and whether it is estimated. `by_lines`: each record is a line."""
    if len(records) < NUM_RECORDS:
        return len(records), False
    if path.stat().st_size > COUNTED_BYTES or not by_lines:
        return _estimated(path, records), True
    return sum(block.count(b"\n") for block in _blocks(path)), False


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(2**20):
            yield block


def _estimated(path: Path, records: list[Record]) -> int:
    # The size of the same records as JSON, which for CSV is somewhat too large: an estimate from below.
    size = sum(
        len(json.dumps(record, ensure_ascii=False, default=str).encode())
        for record in records
    )
    return max(len(records), round(path.stat().st_size * len(records) / max(size, 1)))


_READERS = {
    **dict.fromkeys((".csv", ".tsv"), _delimited),
    **dict.fromkeys((".parquet", ".pq"), _parquet),
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), _json),
}
"""Reader by the ending of the file."""


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
