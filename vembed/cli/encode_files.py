"""What `vembed encode` reads, lines of a file, records of any source or images of a folder, and what it writes, files of
vectors that grow chunk by chunk and have their name only when they are whole: .npy and Parquet."""

import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vembed.data.example_store import IMAGE_THREADS, NUM_NAMED
from vembed.data.examples import BadRecord, ImageRoot, Item, Kind
from vembed.data.formats.saved_datasets import is_saved_dataset
from vembed.data.formats.table import (
    CODECS,
    FORMAT_BY_ENDING,
    ending_of,
    open_reader,
    unpacked_copy,
)
from vembed.data.images.files import IMAGE_SUFFIXES, image_problem
from vembed.data.records import (
    ID_FIELDS,
    IMAGE_FIELDS,
    TEXT_FIELDS,
    document_id,
    document_item,
)
from vembed.errors import UserError, did_you_mean, joined, listed
from vembed.files import replaced_file
from vembed.mining.output import write_rows
from vembed.parallel import collectives
from vembed.parallel.session import Session

FIRST_ROWS = 256
"""Inputs that are read and checked before the model is loaded."""
TEXT_COLUMNS: dict[Kind, tuple[str, ...]] = {
    "query": ("text", "query", *TEXT_FIELDS[1:]),
    "document": (*TEXT_FIELDS, "query"),
}
"""Fields that are taken for the text of a record when nobody names one; the first that is there. A title goes before
`text`, as in evaluation."""
ENCODED_COLUMNS = frozenset({*TEXT_COLUMNS["document"], *IMAGE_FIELDS, "title"})
"""Fields of which a record needs one, unless --column names another."""
BOM = b"\xef\xbb\xbf"
Problem = tuple[int, str]
"""Number of a row, and why it cannot be encoded."""
RawRow = tuple[str, Any]
"""Place for messages, and the record. A BadRecord where it cannot be read."""


@dataclass(frozen=True, slots=True)
class EncodeRow:
    """One input, with what is written beside its vector."""

    number: int
    """Of the line or row, from 1."""
    item: Item
    identity: str | None
    fields: dict[str, Any]
    """All fields of the record."""


@dataclass
class EncodeInput:
    """Inputs in chunks, which every process reads. Making it, which reads the first ones, and iterating are collective.

    Inputs that cannot be encoded are refused together with the others of their chunk, or left out.
    """

    source: str
    session: Session
    kind: Kind
    column: str | None
    keep: Sequence[str]
    """Columns that are written too."""
    image_root: str | None
    skips: bool
    chunk_rows: int
    total: int | None = None
    """Number of rows, where it is known."""

    def __post_init__(self) -> None:
        self.left_out: list[Problem] = []
        """Inputs that are left out."""
        self.is_stdin = self.source == "-"
        self.name = "standard input" if self.is_stdin else self.source
        self.path = Path(self.source)
        is_folder = self.path.is_dir()
        self.has_images = is_folder and not is_saved_dataset(self.path)
        folder = self.path if is_folder else self.path.absolute().parent
        self.images = ImageRoot(self.image_root or str(folder), allow_urls=False)
        self.written = {*ID_FIELDS, *self.keep}
        self.num_read = 0
        self.rows = self._rows()
        self.first_rows = self._filled([], min(FIRST_ROWS, self.chunk_rows))

    def _rows(self) -> Iterator[RawRow]:
        """Return the rows of the source."""
        if self.has_images:
            return self._image_rows()
        ending = ending_of(self.path)
        if self.path.is_dir() or (ending in FORMAT_BY_ENDING and not self.is_stdin):
            return self._reader_rows()
        if self.column is not None:
            raise UserError(
                f"{self.name} is read as plain text, which has no column {self.column}: leave out --column"
            )
        if self.is_stdin:
            return self._text_rows(sys.stdin.buffer)
        try:
            if self.path.suffix.lower() in CODECS:
                self.path = unpacked_copy(self.path)
            with self.path.open("rb") as file:
                self.total = sum(1 for _ in file)
            return self._text_rows(self.path.open("rb"))
        except OSError as error:
            raise UserError(
                f"{self.source} cannot be read: {error.strerror}"
            ) from error

    def _image_rows(self) -> Iterator[RawRow]:
        """Return the images of a folder and its subfolders, in the order of their paths."""
        images = [
            str(path.relative_to(self.path))
            for path in self.path.rglob("*")
            if path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")
        ]
        if not images:
            endings = ", ".join(sorted(IMAGE_SUFFIXES))
            raise UserError(
                f"{self.path} is a folder without images ({endings}); for texts give a file"
            )
        self.total = len(images)
        for number, name in enumerate(sorted(images), 1):
            yield f"{self.name}:{number}", {"id": name, "image": name}

    def _reader_rows(self) -> Iterator[RawRow]:
        """Return the records of a source of data."""
        if (self.path / "dataset_dict.json").is_file():
            raise UserError(
                f"{self.path} holds several data sets: give the folder of one of them"
            )
        reader = open_reader(self.source)
        encoded = {self.column} if self.column else ENCODED_COLUMNS
        names = set(reader.columns or ())
        # Where a column is missing, all are read, so that the refusal can list them.
        if names.issuperset(self.keep) and not names.isdisjoint(encoded):
            needed = {*self.written, *encoded, "title"}
            columns = [name for name in reader.columns or () if name in needed]
            reader.select(columns)
        self.total = reader.num_records()
        for _, line, record in reader.rows():
            yield reader.where(line), record

    def _text_rows(self, file: BinaryIO) -> Iterator[RawRow]:
        """Return the lines of a text file."""
        with file:
            for number, line in enumerate(file, 1):
                # A byte order mark may stand at the beginning of any line where files were joined.
                row: str | BadRecord
                try:
                    row = line.removeprefix(BOM).decode().rstrip("\r\n")
                except UnicodeDecodeError:
                    row = BadRecord("not UTF-8 text; save the file as UTF-8")
                else:
                    if self.is_stdin and number == 1 and row.startswith('{"'):
                        raise UserError(
                            "give records in a file of their format: standard input is text"
                        )
                    if not row.strip():
                        row = BadRecord("empty: each line has to give one embedding")
                yield f"{self.name}:{number}", row

    def __iter__(self) -> Iterator[list[EncodeRow]]:
        chunk = self._filled(self.first_rows, self.chunk_rows)
        while chunk:
            yield chunk
            chunk = self._filled([], self.chunk_rows)

    def _filled(self, inputs: list[EncodeRow], count: int) -> list[EncodeRow]:
        """Return inputs with those that follow, so many in all where the source has them. Collective."""
        while len(inputs) < count:
            chunk = list(itertools.islice(self.rows, count - len(inputs)))
            if not chunk:
                break
            inputs = inputs + self._checked(chunk)
        return inputs

    def _checked(self, chunk: Sequence[RawRow]) -> list[EncodeRow]:
        """Return the inputs of the next rows. Collective."""
        rows = []
        problems = []
        first = self.num_read + 1
        self.num_read += len(chunk)
        # As a set that keeps the order.
        columns: dict[str, None] = {}
        for number, (where, record) in enumerate(chunk, first):
            value = record
            fields = record if isinstance(record, dict) else {}
            try:
                if self.column is not None and fields:
                    columns |= dict.fromkeys(fields)
                    value = fields.get(self.column)
                    if value is None:
                        raise BadRecord(
                            f"{self.column} is empty or not there (it has {listed(fields)})"
                        )
                item = document_item(value, self.images, TEXT_COLUMNS[self.kind])
                item = item.read_from("" if self.has_images else where)
            except BadRecord as error:
                problems.append((number, f"{where}: {error}"))
                continue
            for name in self.keep:
                value = fields.get(name)
                parts = value.values() if isinstance(value, dict) else [value]
                if any(isinstance(part, bytes) for part in parts):
                    raise UserError(
                        f"--keep {name}: {where} has bytes there, as those of an image, and only text and numbers are "
                        "written beside the vectors: keep a column with a name or an id"
                    )
            written = {name: fields[name] for name in self.written if name in fields}
            # Dates of tables become text.
            written = json.loads(json.dumps(written, default=str))
            identity = document_id(written)
            rows.append(EncodeRow(number, item, identity, fields | written))
        # With the first rows wrong folders are found before the model is loaded.
        if (first == 1 or self.skips) and any(row.item.images for row in rows):
            part = rows[self.session.rank :: self.session.world_size]
            for rank_problems in collectives.gather_objects(broken_images(part)):
                problems += rank_problems
        is_missing = bool(columns) and self.column not in columns
        if self.column and is_missing and first == 1 and not self.skips:
            hint = did_you_mean(self.column, columns)
            raise UserError(
                f"--column {self.column}: no such column in {self.name}{hint} (it has {listed(columns)})"
            )
        self.leave_out(sorted(problems))
        bad = {number for number, _ in problems}
        return [row for row in rows if row.number not in bad]

    def leave_out(self, problems: Sequence[Problem]) -> None:
        """Leave inputs out, or raise UserError with the first of them."""
        if problems and not self.skips:
            reasons = joined([reason for _, reason in problems[:NUM_NAMED]])
            if len(problems) > NUM_NAMED:
                reasons.append(f"and {len(problems) - NUM_NAMED:,d} more")
            raise UserError(
                f"{len(problems):,d} input(s) cannot be encoded: fix them, name the column to encode by --column, or leave "
                "them out by --on-bad-record skip:\n  " + "\n  ".join(reasons)
            )
        self.left_out += problems

    def save_left_out(self, path: Path) -> Path | None:
        """Write what was left out beside the vectors, one object per line. Return the file; None for nothing."""
        if not self.left_out:
            path.unlink(missing_ok=True)  # of an earlier run
            return None
        rows = ({"row": number, "reason": reason} for number, reason in self.left_out)
        write_rows(path, rows)
        return path


def broken_images(rows: Sequence[EncodeRow]) -> list[Problem]:
    """Return the rows whose images cannot be read, with the reason. The images are decoded."""
    images = []
    for row in rows:
        images += [(row.number, image) for image in row.item.images]
    problems = []
    with ThreadPoolExecutor(IMAGE_THREADS, thread_name_prefix="vembed-check") as pool:
        reasons = pool.map(image_problem, [image for _, image in images])
        for (number, _), reason in zip(images, reasons, strict=True):
            if reason:
                problems.append((number, reason))
    return problems


# ---- files of vectors ---------------------------------------------------------------------------------------


@dataclass
class NpyWriter:
    """A .npy file that grows. It has no columns beside the vectors."""

    file: BinaryIO
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    num_rows: int = 0

    def __post_init__(self) -> None:
        self._write_header()

    def write(self, vectors: np.ndarray, _: Mapping[str, list[Any]]) -> None:
        """Append rows."""
        self.num_rows += len(vectors)
        self.file.write(np.ascontiguousarray(vectors, self.dtype).tobytes())

    def close(self) -> None:
        """Write the header again, with the number of rows."""
        self.file.seek(0)
        self._write_header()

    def _write_header(self) -> None:
        # NumPy pads it for any number of rows, so that it keeps its size.
        header = {
            "descr": self.dtype.str,
            "fortran_order": False,
            "shape": (self.num_rows, *self.shape),
        }
        np.lib.format.write_array_header_1_0(self.file, header)


@dataclass
class ParquetWriter:
    """A row group per chunk: the kept columns, and the embedding."""

    file: BinaryIO
    num_dims: int
    dtype: np.dtype[Any]
    writer: pq.ParquetWriter | None = None

    def write(self, vectors: np.ndarray, columns: Mapping[str, list[Any]]) -> None:
        """Append rows. The first ones decide on the schema, which is written before the first row group."""
        arrays = {}
        for name, values in columns.items():
            kind = None if self.writer is None else self.writer.schema.field(name).type
            try:
                column = pa.array(values, kind)
            except pa.ArrowException as error:
                raise UserError(
                    f"--keep {name}: values of several types: {error}"
                ) from error
            if pa.types.is_null(column.type):  # without any value yet
                column = column.cast(pa.string())
            arrays[name] = column
        flat = pa.array(np.ascontiguousarray(vectors, self.dtype).reshape(-1))
        arrays["embedding"] = pa.FixedSizeListArray.from_arrays(flat, self.num_dims)
        table = pa.table(arrays)
        if self.writer is None:
            self.writer = pq.ParquetWriter(
                self.file,
                table.schema,
                compression="zstd",
                use_dictionary=list(columns),
            )
        self.writer.write_table(table)

    def close(self) -> None:
        """Write the footer."""
        if self.writer is None:
            self.write(np.empty((0, self.num_dims)), {})
        assert self.writer is not None
        self.writer.close()


@contextmanager
def vector_writer(
    target: Path,
    shape: tuple[int, ...],
    dtype: str,
) -> Iterator[NpyWriter | ParquetWriter]:
    """Write beside the target and move it there at the end. `shape`: of what stands for one input, more than one
    dimension in .npy alone."""
    # Closed before it is renamed.
    with replaced_file(target) as partial, partial.open("wb") as file:
        writer: NpyWriter | ParquetWriter
        if target.suffix == ".npy":
            writer = NpyWriter(file, shape, np.dtype(dtype))
        else:
            writer = ParquetWriter(file, shape[0], np.dtype(dtype))
        try:
            yield writer
        finally:
            # Also after an error: pyarrow's writer would complain of the closed file.
            writer.close()
