"""`vembed encode`: a file of texts, records or rows in, one embedding per each out, in the order of the input."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from rich.console import Console

from vembed.config.schema import TrainConfig
from vembed.data.examples import BadRecord, Item, Kind
from vembed.data.images import ImageRoot
from vembed.data.messages import listed
from vembed.distributed import collectives
from vembed.distributed.session import Session, start_session
from vembed.errors import UserError
from vembed.evaluation.dataset import titled_text
from vembed.families.table import Pooling
from vembed.inference.embedder import Embedder
from vembed.inference.encoding import Progress, encode_items
from vembed.progress import ProgressReport, duration
from vembed.tools.table_rows import is_table, num_rows, table_rows
from vembed.tools.vector_files import check_target, vector_writer

CHUNK_LINES = 65_536
"""Lines that are read, sorted by length, encoded and written together; memory does not grow with the file."""
TEXT_COLUMNS = ("text", "query", "positive", "document", "sentence")
"""Fields that are taken for the text of a record when nobody names one; the first that is there. A title goes before
`text`, as in evaluation."""
ITEM_COLUMNS = (*TEXT_COLUMNS, "title", "image")
ID_COLUMNS = ("_id", "id")
BOM = b"\xef\xbb\xbf"

Format = Literal["auto", "jsonl", "text"]


@dataclass(frozen=True)
class Encoded:
    """Result: files and counts."""

    path: Path
    num_rows: int
    num_dims: int
    seconds: float


def run_encode(
    model: str,
    input: str,
    output: str,
    kind: Kind = "document",
    *,
    truncate_dim: int | None = None,
    normalize: bool | None = None,
    layers: Literal["all"] | Sequence[int] | None = None,
    pooling: Pooling | None = None,
    column: str | None = None,
    input_format: Format = "auto",
    batch_tokens: int | None = None,
    image_root: str | None = None,
    strategy: Literal["auto", "ddp", "fsdp"] = "ddp",
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    trust_remote_code: bool = False,
) -> Encoded:
    """Encode every line of `input` (`-` is standard input) into `output` (.npy or .parquet).

    Runs on as many processes as were started: the first one reads and writes, all encode; with `strategy: fsdp` each
    holds a shard of the model. Vectors have length 1 where the model says so, also after `truncate_dim`; `normalize`
    decides otherwise. `layers`: hidden states of these layers, pooled by `pooling`, instead of embeddings.
    """
    target = check_target(output)
    if layers is not None and (target.suffix != ".npy" or truncate_dim is not None or normalize is not None):
        raise UserError("hidden states (--layers) are written as they are, to a .npy file")
    if pooling is not None and layers is None:
        raise UserError("--pooling is for hidden states (--layers); embeddings are pooled as the model says")
    console = Console(stderr=True)
    config = session_config(model, strategy, trust_remote_code=trust_remote_code)
    with start_session(config) as session:
        rows_of = Path(input) if input_format == "auto" and input != "-" and is_table(Path(input)) else None
        lines = _Lines(input, session, rows_of, (*ID_COLUMNS, *([column] if column else ITEM_COLUMNS)))
        embedder = Embedder(
            model,
            torch_dtype=torch_dtype,
            truncate_dim=truncate_dim,
            trust_remote_code=trust_remote_code,
            session=session,
        )
        parser = _Parser(input, column, "jsonl" if rows_of else input_format, image_root, of_rows=rows_of is not None)
        work: _Work = _Embeddings(embedder, kind, batch_tokens, normalize)
        if layers is not None:
            work = _Layers(embedder, kind, batch_tokens, layers, pooling)
            lines.chunk = max(CHUNK_LINES // (10 * work.shape[0]), 1)
        began = time.monotonic()
        with (
            vector_writer(target, work.shape, active=session.is_main) as writer,
            ProgressReport("encoding", active=session.is_main, console=console) as progress,
        ):
            done = 0
            for first, chunk in lines:
                records = [parser.record(line, first + rank_info) for rank_info, line in enumerate(chunk)]

                def report(part: int, _: int, before: int = done) -> None:
                    progress(before + part, lines.total)

                writer.write(work([item for item, _ in records], report), [identity for _, identity in records])
                done += len(chunk)
        seconds = time.monotonic() - began
        result = Encoded(target, done, work.shape[-1], seconds)
        if session.is_main:
            console.print(
                f"{target}: {' x '.join(f'{size:,d}' for size in (done, *work.shape))} float32, in {duration(seconds)} "
                f"({done / max(seconds, 1e-9):,.0f}/s)",
                markup=False, highlight=False, soft_wrap=True,
            )  # fmt: skip
    return result


def session_config(model: str, strategy: Literal["auto", "ddp", "fsdp"], *, trust_remote_code: bool) -> TrainConfig:
    """The config of a session that uses a model and does not train it: copies or shards, in the dtype of its file."""
    return TrainConfig(
        model_name=model,
        data_path="unused",
        strategy=strategy,
        mixed_precision="no",
        trust_remote_code=trust_remote_code,
    )


class _Work(Protocol):
    """Operation on the inputs."""

    shape: tuple[int, ...]
    """Of what stands for one input."""

    def __call__(self, items: list[Item], progress: Progress) -> np.ndarray:
        """The rows of some inputs; collective."""
        ...


class _Embeddings:
    """Embeddings."""

    def __init__(self, embedder: Embedder, kind: Kind, batch_tokens: int | None, normalize: bool | None) -> None:
        self.embedder = embedder
        self.kind: Kind = kind
        self.batch_tokens = batch_tokens
        self.unit = embedder.description.normalize if normalize is None else normalize
        self.shape: tuple[int, ...] = (embedder.truncate_dim or embedder.description.embedding_dim,)

    def __call__(self, items: list[Item], progress: Progress) -> np.ndarray:
        """The rows of some inputs; collective."""
        return encode_items(
            self.embedder.model,
            self.embedder.featuriser,
            items,
            self.kind,
            budget_tokens=self.batch_tokens,
            session=self.embedder.session,
            normalize=self.unit,
            truncate_dim=self.embedder.truncate_dim,
            progress=progress,
        )


class _Layers:
    """Hidden states by layer."""

    def __init__(
        self,
        embedder: Embedder,
        kind: Kind,
        batch_tokens: int | None,
        layers: Literal["all"] | Sequence[int],
        pooling: Pooling | None,
    ) -> None:
        self.embedder = embedder
        self.kind: Kind = kind
        self.batch_tokens = batch_tokens
        self.layers = layers
        self.pooling = pooling
        self.shape: tuple[int, ...] = self([], lambda *_: None).shape[1:]

    def __call__(self, items: list[Item], progress: Progress) -> np.ndarray:
        """The rows of some inputs; collective."""
        found = self.embedder.hidden_states(
            items, self.layers, self.kind, pooling=self.pooling, budget_tokens=self.batch_tokens
        )
        progress(len(items), len(items))
        return found


class _Lines:
    """Chunks of lines with the number of the first, read by the first process and handed to all."""

    def __init__(self, source: str, session: Session, rows_of: Path | None, columns: Collection[str]) -> None:
        """`rows_of`: the table whose rows are the lines; `columns`: those of it that may be needed."""
        self.source = source
        self.session = session
        self.rows_of = rows_of
        self.columns = columns
        self.chunk = CHUNK_LINES
        found = {"total": None, "error": None}
        if session.is_main and source != "-":
            found = _count_lines(Path(source), of_rows=rows_of is not None)
        found = collectives.broadcast_json(found)
        if found["error"]:
            raise UserError(found["error"])
        self.total: int | None = found["total"]

    def __iter__(self) -> Iterator[tuple[int, list[str]]]:
        with ExitStack() as stack:
            file: Iterator[bytes] | None = None
            if self.session.is_main and self.rows_of is not None:
                file = table_rows(self.rows_of, self.columns)
            elif self.session.is_main:
                file = sys.stdin.buffer if self.source == "-" else stack.enter_context(Path(self.source).open("rb"))
            first = 1
            while True:
                chunk: list[str] = collectives.broadcast_json(_decoded(file, self.chunk) if file is not None else [])
                if not chunk:
                    return
                yield first, chunk
                first += len(chunk)


def _decoded(file: Iterator[bytes], count: int) -> list[str]:
    """The next lines without their ends. Bytes that are no UTF-8 become lone surrogates, which the parser refuses with
    the number of the line."""
    lines = itertools.islice(file, count)
    return [line.removeprefix(BOM).decode("utf-8", "surrogateescape").rstrip("\r\n") for line in lines]


def _count_lines(path: Path, *, of_rows: bool) -> dict[str, Any]:
    try:
        if of_rows:
            path.open("rb").close()
            return {"total": num_rows(path), "error": None}
        with path.open("rb") as file:
            total, last = 0, b"\n"
            while block := file.read(2**20):
                total, last = total + block.count(b"\n"), block[-1:]
            return {"total": total + (last != b"\n"), "error": None}
    except OSError as error:
        return {"total": None, "error": f"{path} cannot be read: {error.strerror}"}
    except UserError as error:
        return {"total": None, "error": str(error)}


class _Parser:
    """One line to an item and its id."""

    def __init__(
        self, source: str, column: str | None, given: Format, image_root: str | None, *, of_rows: bool
    ) -> None:
        self.of_rows = of_rows
        self.source = "standard input" if source == "-" else source
        self.column = column
        self.format = given
        if given == "auto" and source != "-":
            self.format = "jsonl" if Path(source).suffix in (".jsonl", ".ndjson", ".json") else "text"
        if column is not None and self.format == "text":
            raise UserError(
                f"{self.source} is read as plain text, which has no column {column}: leave out --column, or give "
                "--input-format jsonl"
            )
        folder = image_root or (str(Path(source).absolute().parent) if source != "-" else ".")
        self.images = ImageRoot(folder, allow_urls=False)

    def record(self, line: str, number: int) -> tuple[Item, str | None]:
        """Return the input on a line. Raise UserError if it cannot be encoded."""
        where = f"{self.source}, row {number:,d}" if self.of_rows else f"{self.source}:{number}"
        if not line.strip():
            raise UserError(f"{where} is empty, and every line has to give one embedding; remove it")
        if not line.isascii():
            try:
                line.encode()
            except UnicodeEncodeError as error:
                raise UserError(f"{where} is not UTF-8 text; save the file as UTF-8") from error
        if self.format == "auto":  # standard input: the first line tells
            self.format = "jsonl" if line.lstrip()[0] in '{"' else "text"
        if self.format == "text":
            return Item(text=line), None
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where} is not JSON ({error}); for plain text use --input-format text") from error
        identity = None
        if isinstance(value, dict):
            found = next((value[name] for name in ID_COLUMNS if value.get(name) is not None), None)
            identity = None if found is None else str(found)
        try:
            return self._item(value), identity
        except BadRecord as error:
            raise UserError(f"{where}: {error}") from error

    def _item(self, value: Any) -> Item:
        if isinstance(value, dict):
            if self.column is not None:
                if value.get(self.column) is None:
                    raise BadRecord(f"no field {self.column} (it has {listed(value)})")
                return self._of_field(value[self.column], self.column)
            if value.get("image") is None:
                name = next((name for name in TEXT_COLUMNS if value.get(name) is not None), None)
                if name is None:
                    raise BadRecord(
                        f"none of the fields {', '.join(TEXT_COLUMNS)} (it has {listed(value)}): use --column"
                    )
                if name == "text" and isinstance(value.get("title"), str):  # a document of a BEIR folder
                    return self._of_field(titled_text(value), name)
                return self._of_field(value[name], name)
        return self._of_field(value, "the record")

    def _of_field(self, value: Any, name: str) -> Item:
        if isinstance(value, dict):
            text = value.get("text")
            given = value.get("image")
            images = [] if given is None else given if isinstance(given, list) else [given]
            if (text is not None and not isinstance(text, str)) or not all(isinstance(one, str) for one in images):
                raise BadRecord(f"{name} has a text or image that is no string")
            if images:
                return Item(text=text or None, images=tuple(self.images.reference(image) for image in images))
            value = text
        if not isinstance(value, str):
            raise BadRecord(f"{name} is no text")
        if not value.strip():
            raise BadRecord(f"{name} is empty")
        return Item(text=value)
