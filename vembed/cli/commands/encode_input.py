"""Input of `vembed encode`: lines of a file, rows of a table or images of a folder, as records with what is kept."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vembed.cli.commands.table_rows import is_table, open_table, row_line, table_rows
from vembed.config.options import nearest
from vembed.config.user_folders import cache_folder
from vembed.data.documents import (
    IMAGE_FIELDS,
    TEXT_FIELDS,
    document_id,
    document_text,
)
from vembed.data.examples import BadRecord, Item
from vembed.data.first_pass import IMAGE_THREADS, NUM_NAMED, image_problem
from vembed.data.formats.copies import CODECS, unpacked_copy
from vembed.data.formats.opening import UNPACKERS, WAYS_OUT
from vembed.data.formats.saved_datasets import is_saved_dataset
from vembed.data.formats.table import ending_of
from vembed.data.images.files import IMAGE_SUFFIXES, ImageRoot
from vembed.data.messages import listed
from vembed.data.records import described
from vembed.errors import UserError
from vembed.parallel import collectives
from vembed.parallel.session import Session

FIRST_LINES = 256
"""Lines that are read and checked before the model is loaded."""
TEXT_COLUMNS = ("text", "query", *TEXT_FIELDS[1:])
"""Fields that are taken for the text of a record when nobody names one; the first that is there. A title goes before
`text`, as in evaluation."""
ITEM_COLUMNS = (*TEXT_COLUMNS, *IMAGE_FIELDS, "title")
READ = "plain text, JSON Lines, CSV, TSV and Parquet, also packed (.gz, .zst, .bz2)"
NO_LINES = {
    **{kind: f"unpack it ({command})" for kind, command in UNPACKERS.items()},
    **dict.fromkeys(WAYS_OUT.keys() - {".txt", ".text"}, "write it as Parquet or CSV"),
}
"""Endings of files that hold no lines of text, and what to do with them."""
BOM = b"\xef\xbb\xbf"

Format = Literal["auto", "jsonl", "text"]


@dataclass(frozen=True, slots=True)
class Row:
    """One input, with what is written beside its vector."""

    number: int
    """Of the line or row, from 1."""
    item: Item
    identity: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    """All fields of the record."""


def rows_of(source: str, requested: Format) -> Path | None:
    """Return the path of a table or a folder of images, whose rows are numbered; None for lines."""
    path = Path(source)
    return (
        path
        if requested == "auto" and source != "-" and (path.is_dir() or is_table(path))
        else None
    )


def holds_images(path: Path) -> bool:
    """Return whether the rows of a path are the images of a folder."""
    return path.is_dir() and not is_saved_dataset(path)


def images_in(folder: Path) -> list[str]:
    """Return the images of a folder and its subfolders, in the order of their paths. Raise UserError without any."""
    images = sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")
    )
    if not images:
        endings = ", ".join(sorted(IMAGE_SUFFIXES))
        raise UserError(
            f"{folder} is a folder without images ({endings}); for texts give a file"
        )
    return images


def check_kept(keep: Sequence[str], rows: Sequence[Row], source: str) -> None:
    """Raise UserError if a column to be kept is in none of the first records."""
    names = list(dict.fromkeys(name for row in rows for name in row.fields))
    for name in keep:
        if rows and name not in names:
            near = nearest(name, names)
            hint = f", did you mean {near!r}?" if near else ""
            has = f"it has {listed(names)}" if names else "plain text has no columns"
            raise UserError(f"--keep {name}: {source} has no such column{hint} ({has})")


class InputLines:
    """Chunks of lines with the number of the first, read by the first process and handed to all."""

    def __init__(
        self,
        source: str,
        session: Session,
        rows_of: Path | None,
        columns: Collection[str],
        chunk: int,
    ) -> None:
        """`rows_of`: the table whose rows are the lines; `columns`: those of it that may be needed."""
        self.source = source
        self.session = session
        self.rows_of = rows_of
        self.columns = columns
        self.chunk = chunk
        # An error of rank 0 goes to all, so that none waits for lines that never come.
        count = {"total": None, "error": None}
        self.path = Path(source)
        """Of the first process; of a packed file its unpacked copy."""
        if session.is_main and source != "-":
            count = self._count_lines()
        count = collectives.broadcast_json(count)
        if count["error"]:
            raise UserError(count["error"])
        self.total: int | None = count["total"]

    def _count_lines(self) -> dict[str, Any]:
        try:
            if holds_images(self.path):
                return {"total": len(images_in(self.path)), "error": None}
            if self.path.suffix.lower() in CODECS:
                self.path = unpacked_copy(self.path, cache_folder())
            if self.rows_of is not None:
                return {"total": open_table(self.path).num_records(), "error": None}
            with self.path.open("rb") as file:
                total = 0
                last = b"\n"
                while block := file.read(2**20):
                    total = total + block.count(b"\n")
                    last = block[-1:]
                # The last line may have no end.
                return {"total": total + (last != b"\n"), "error": None}
        except OSError as error:
            return {
                "total": None,
                "error": f"{self.source} cannot be read: {error.strerror}",
            }
        except UserError as error:
            return {"total": None, "error": str(error)}

    def __iter__(self) -> Iterator[tuple[int, list[str]]]:
        with ExitStack() as stack:
            file: Iterator[bytes] | None = None
            if (
                self.session.is_main
                and self.rows_of is not None
                and holds_images(self.rows_of)
            ):
                file = (
                    row_line(number, {"id": name, "image": name})
                    for number, name in enumerate(images_in(self.rows_of), 1)
                )
            elif self.session.is_main and self.rows_of is not None:
                file = table_rows(self.path, self.columns)
            elif self.session.is_main:
                file = (
                    sys.stdin.buffer
                    if self.source == "-"
                    else stack.enter_context(self.path.open("rb"))
                )
            first = 1
            while True:
                size = min(self.chunk, FIRST_LINES) if first == 1 else self.chunk
                chunk: list[str] = collectives.broadcast_json(
                    _decoded(file, size) if file is not None else []
                )
                if not chunk:
                    return
                yield first, chunk
                first += len(chunk)


def _decoded(file: Iterator[bytes], count: int) -> list[str]:
    """The next lines without their ends. Bytes that are no UTF-8 become lone surrogates, which the parser refuses with
    the number of the line."""
    # A byte order mark may stand at the beginning of any line where files were joined.
    lines = itertools.islice(file, count)
    return [
        line.removeprefix(BOM).decode("utf-8", "surrogateescape").rstrip("\r\n")
        for line in lines
    ]


class BadInputs:
    """Inputs that cannot be encoded: refused together with the others of their chunk, or left out."""

    def __init__(self, session: Session, *, skips: bool) -> None:
        self.session = session
        self.skips = skips
        self.found: list[tuple[int, str]] = []
        """Number of the line or row, and the reason, of each that is left out."""

    def add(self, refusals: Sequence[tuple[int, str]]) -> None:
        """Leave inputs out, or raise UserError with the first of them."""
        if refusals and not self.skips:
            more = (
                [f"and {len(refusals) - NUM_NAMED:,d} more"]
                if len(refusals) > NUM_NAMED
                else []
            )
            count = "1 input" if len(refusals) == 1 else f"{len(refusals):,d} inputs"
            raise UserError(
                f"{count} cannot be encoded, fix them, or leave them out by --on-bad-record skip:\n  "
                + "\n  ".join([reason for _, reason in refusals[:NUM_NAMED]] + more)
            )
        self.found += refusals

    def images_of(self, rows: Sequence[Row]) -> list[tuple[int, str]]:
        """Return the rows whose images cannot be read. The images are decoded."""
        images = [(row.number, image) for row in rows for image in row.item.images]
        if not images:
            return []
        with ThreadPoolExecutor(
            IMAGE_THREADS, thread_name_prefix="vembed-check"
        ) as pool:
            problems = pool.map(image_problem, [image for _, image in images])
            return [
                (number, problem)
                for (number, _), problem in zip(images, problems, strict=True)
                if problem
            ]

    def images_of_all(self, rows: Sequence[Row]) -> list[tuple[int, str]]:
        """Return the rows whose images cannot be read, each process looking at a part. Collective."""
        if not any(row.item.images for row in rows):
            return []
        shares = collectives.gather_objects_as_json(
            self.images_of(rows[self.session.rank :: self.session.world_size])
        )
        return [(number, reason) for share in shares for number, reason in share]

    def save(self, target: Path) -> Path | None:
        """Write what was left out beside the vectors, one object per line. Return the file; None for nothing."""
        path = target.with_suffix(".skipped.jsonl")
        if not self.found:
            path.unlink(missing_ok=True)  # of an earlier run
            return None
        lines = (
            json.dumps({"row": number, "reason": reason}, ensure_ascii=False)
            for number, reason in self.found
        )
        # Names of files may be no UTF-8: their bytes become escapes, as JSON has them.
        path.write_text(
            "".join(f"{line}\n" for line in lines),
            encoding="utf-8",
            errors="backslashreplace",
        )
        return path


class InputParser:
    """One line to an item and its id."""

    def __init__(
        self,
        source: str,
        column: str | None,
        requested: Format,
        image_root: str | None,
        bad: BadInputs,
        *,
        of_rows: bool,
    ) -> None:
        self.bad = bad
        self.of_rows = of_rows
        self.of_images = source != "-" and holds_images(
            Path(source)
        )  # each names itself
        self.source = "standard input" if source == "-" else source
        self.column = column
        self.format = requested
        if requested == "auto" and source != "-":
            self.format = (
                "jsonl"
                if ending_of(Path(source)) in (".jsonl", ".ndjson", ".json")
                else "text"
            )
        kind = ending_of(Path(source))
        if requested == "auto" and source != "-" and kind in NO_LINES:
            raise UserError(
                f"{source} has the ending {kind}, and vembed encode reads {READ}: {NO_LINES[kind]}"
            )
        if column is not None and self.format == "text":
            raise UserError(
                f"{self.source} is read as plain text, which has no column {column}: leave out --column, or give "
                "--input-format jsonl"
            )
        folder = image_root or "."
        if image_root is None and source != "-":
            path = Path(source).absolute()
            folder = str(path if path.is_dir() else path.parent)
        self.images = ImageRoot(folder, allow_urls=False)

    def rows(self, lines: Sequence[str], first: int) -> list[Row]:
        """Return the inputs on lines, of which the first one has this number. Collective."""
        rows_read: list[Row] = []
        problems: list[tuple[int, str]] = []
        for number, line in enumerate(lines, first):
            try:
                rows_read.append(self._record(line, number))
            except BadRecord as error:
                problems.append((number, str(error)))
        if (
            first == 1 or self.bad.skips
        ):  # with the first lines wrong folders are found before the model is loaded
            problems += self.bad.images_of_all(rows_read)
        self.bad.add(sorted(problems))
        bad = {number for number, _ in problems}
        return [row for row in rows_read if row.number not in bad]

    def _record(self, line: str, number: int) -> Row:
        """Return the input on a line. Raise BadRecord if it cannot be encoded."""
        where = f"{self.source}:{number}"
        if not line.strip():
            raise BadRecord(
                f"{where} is empty, and every line has to give one embedding; remove it"
            )
        if not line.isascii():
            try:
                line.encode()
            except UnicodeEncodeError as error:
                raise BadRecord(
                    f"{where} is not UTF-8 text; save the file as UTF-8"
                ) from error
        if self.format == "auto":  # standard input: the first line tells
            self.format = "jsonl" if line.lstrip()[0] in '{"' else "text"
        if self.format == "text":
            return Row(number, Item(text=line))
        try:
            value = json.loads(line)
        except ValueError as error:
            raise BadRecord(
                f"{where} is not JSON ({error}); for plain text use --input-format text"
            ) from error
        except RecursionError as error:
            raise BadRecord(f"{where} is nested too deeply to be read") from error
        if self.of_rows:
            place, value = value
            where = f"{self.source}:{place}"
            if isinstance(value, str):  # the reason why the row cannot be read
                raise BadRecord(f"{where}: {value}")
        identity = None
        if isinstance(value, dict):
            identity = document_id(value)
        try:
            item = self._item(value).read_from("" if self.of_images else where)
            return Row(number, item, identity, value if isinstance(value, dict) else {})
        except BadRecord as error:
            raise BadRecord(f"{where}: {error}") from error

    def _item(self, value: Any) -> Item:
        if isinstance(value, dict):
            if self.column is not None:
                if self.column in value and value[self.column] is None:
                    raise BadRecord(
                        f"{self.column} is empty, and every row has to give one embedding; remove it"
                    )
                if self.column not in value:
                    raise BadRecord(f"no field {self.column} (it has {listed(value)})")
                return self._of_field(value[self.column], self.column)
            if value.get("image") is None:
                name = next(
                    (name for name in TEXT_COLUMNS if value.get(name) is not None), None
                )
                if name is None:
                    raise BadRecord(
                        f"none of the fields {', '.join(TEXT_COLUMNS)} (it has {listed(value)}): use --column"
                    )
                if name == "text" and isinstance(value.get("title"), str):
                    return self._of_field(document_text(value), name)
                return self._of_field(value[name], name)
        return self._of_field(value, "the record")

    def _of_field(self, value: Any, name: str) -> Item:
        if isinstance(value, dict):
            text = value.get("text")
            requested = value.get("image")
            images = (
                []
                if requested is None
                else requested
                if isinstance(requested, list)
                else [requested]
            )
            if (text is not None and not isinstance(text, str)) or not all(
                isinstance(image, str) for image in images
            ):
                raise BadRecord(f"{name} has a text or image that is no string")
            if images:
                return Item(
                    text=text or None,
                    images=tuple(self.images.reference(image) for image in images),
                )
            value = text
        if not isinstance(value, str):
            raise BadRecord(f"{name} is {described(value)}, not a text")
        if not value.strip():
            raise BadRecord(f"{name} is empty")
        return Item(text=value)
