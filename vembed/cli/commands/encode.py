"""`vembed encode`: a file of texts, records or rows in, one embedding per each out, in the order of the input."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from rich.console import Console

from vembed.cli.commands.encode_input import (
    ITEM_COLUMNS,
    BadInputs,
    Format,
    InputLines,
    InputParser,
    Row,
    check_kept,
    holds_images,
    rows_of,
)
from vembed.cli.commands.vector_files import (
    VectorWriter,
    check_kept_names,
    check_target,
    kept_beside,
    vector_writer,
)
from vembed.config.schema import TrainConfig
from vembed.data.documents import ID_FIELDS
from vembed.data.examples import Item, Kind
from vembed.errors import UserError
from vembed.inference.embedder import Embedder
from vembed.inference.encoding import Progress, encode_items
from vembed.inference.quantization import Precision as VectorPrecision
from vembed.inference.quantization import quantized, ranges_of, read_ranges
from vembed.parallel.session import start_session
from vembed.progress import ProgressReport, duration

CHUNK_LINES = 65_536
"""Lines that are read, sorted by length, encoded and written together; memory does not grow with the file."""

DTYPES: dict[VectorPrecision, Literal["float32", "int8", "uint8"]] = {
    "float32": "float32",
    "int8": "int8",
    "uint8": "uint8",
    "binary": "int8",
    "ubinary": "uint8",
}
"""Dtype of the stored numbers by precision."""
WITH_RANGES: tuple[VectorPrecision, ...] = ("int8", "uint8")


@dataclass(frozen=True)
class Encoded:
    """Result: files and counts."""

    path: Path
    num_rows: int
    num_dims: int
    seconds: float
    ranges: Path | None = None
    """File with the ranges of int8 and uint8."""
    num_skipped: int = 0
    skipped: Path | None = None
    """File with the number of each row that was left out, and the reason."""

    def summary(self, shape: Sequence[int], precision: str, arithmetic: str) -> str:
        """Return the line for the console. `precision`: of the file. `arithmetic`: of the model."""
        sizes = " x ".join(f"{size:,d}" for size in (self.num_rows, *shape))
        left_out = (
            f", {self.num_skipped:,d} left out ({self.skipped})" if self.skipped else ""
        )
        rate = f"{self.num_rows / max(self.seconds, 1e-9):,.0f}/s"
        return f"{self.path}: {sizes} {precision}, computed in {arithmetic}{left_out}, in {duration(self.seconds)} ({rate})"


def run_encode(
    model: str,
    input: str,
    output: str,
    kind: Kind = "document",
    *,
    truncate_dim: int | None = None,
    normalize: bool | None = None,
    layers: Literal["all"] | Sequence[int] | None = None,
    pooling: str | None = None,
    precision: VectorPrecision = "float32",
    ranges: str | None = None,
    column: str | None = None,
    keep: Sequence[str] = (),
    input_format: Format = "auto",
    on_bad_record: Literal["stop", "skip"] = "stop",
    batch_tokens: int | None = None,
    image_root: str | None = None,
    strategy: Literal["auto", "ddp", "fsdp"] = "ddp",
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    trust_remote_code: bool = False,
) -> Encoded:
    """Encode every line of `input` (`-` is standard input), every row of a table or every image of a folder into
    `output` (.npy or .parquet). `keep`: columns that are written beside the vectors, for .npy to NAME.kept.jsonl.

    Runs on as many processes as were started: the first one reads and writes, all encode; with `strategy: fsdp` each
    holds a shard of the model. Vectors have length 1 where the model says so, also after `truncate_dim`; `normalize`
    decides otherwise. `precision`: of the vectors; for int8 and uint8 the range of each coordinate is that of the file
    `ranges`, otherwise that of the first CHUNK_LINES inputs, and is written to NAME.ranges.npy. `layers`: hidden states
    of these layers, pooled by `pooling`, instead of embeddings. `on_bad_record`: `skip` leaves out inputs that cannot
    be encoded and names them in NAME.skipped.jsonl; images are decoded twice then.
    """
    target = check_target(output)
    check_kept_names(keep)
    _check_ranges(precision, ranges)
    if layers is not None:
        _check_layers(
            target, precision, changed=truncate_dim is not None or normalize is not None
        )
    elif pooling is not None:
        raise UserError(
            "--pooling is for hidden states (--layers); embeddings are pooled as the model says"
        )
    console = Console(stderr=True)
    config = session_config(model, strategy, trust_remote_code=trust_remote_code)
    with start_session(config) as session:
        rows = rows_of(input, input_format)
        fields = (*ID_FIELDS, *keep, *([column] if column else ITEM_COLUMNS))
        lines = InputLines(input, session, rows, fields, CHUNK_LINES)
        bad = BadInputs(session, skips=on_bad_record == "skip")
        chosen_format: Format = "jsonl" if rows else input_format
        parser = InputParser(
            input, column, chosen_format, image_root, bad, of_rows=rows is not None
        )
        chunks = (parser.rows(part, first) for first, part in lines)
        start = next(
            chunks, []
        )  # mistakes in the first lines are found before the model is loaded
        check_kept(keep, start, input)
        if (
            rows is not None
            and holds_images(rows)
            and target.suffix == ".npy"
            and not keep
        ):
            keep = ("image",)  # nothing else says which image a vector is of
        embedder = Embedder(
            model,
            torch_dtype=torch_dtype,
            truncate_dim=truncate_dim,
            trust_remote_code=trust_remote_code,
            session=session,
        )
        work: _Work = (
            of_vectors := _Embeddings(
                embedder, kind, batch_tokens, normalize, precision, ranges
            )
        )
        if layers is not None:
            work = _Layers(embedder, kind, batch_tokens, layers, pooling)
            # An input has [layers, width] numbers now; fewer at once, so that a chunk takes as much memory as one of
            # embeddings.
            lines.chunk = max(CHUNK_LINES // (10 * work.shape[0]), 1)
        dtype = DTYPES[precision]
        began = time.monotonic()
        with (
            vector_writer(
                target, work.shape, keep, active=session.is_main, dtype=dtype
            ) as writer,
            ProgressReport(
                "encoding", active=session.is_main, console=console
            ) as progress,
        ):
            every = filter(None, itertools.chain([start], chunks))
            done = _write_all(
                every, work, writer, keep, bad, lambda rows: progress(rows, lines.total)
            )
        seconds = time.monotonic() - began
        ranges_file = of_vectors.save_ranges(target, active=session.is_main)
        skipped = bad.save(target) if session.is_main else None
        result = Encoded(
            target, done, work.shape[-1], seconds, ranges_file, len(bad.found), skipped
        )
        if session.is_main:
            text = result.summary(
                work.shape, precision, embedder.arithmetic
            ) + kept_beside(target, keep)
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    return result


def _write_all(
    chunks: Iterable[list[Row]],
    work: _Work,
    writer: VectorWriter,
    keep: Sequence[str],
    bad: BadInputs,
    progress: Callable[[int], None],
) -> int:
    """Write what stands for each input, chunk by chunk, and return the number of inputs. Collective."""
    done = 0
    for chunk in chunks:
        # `before` as default: the value of this round, whenever it is called.
        def report(part: int, _: int, before: int = done) -> None:
            progress(before + part)

        try:
            vectors = work([row.item for row in chunk], report)
        except UserError:  # an image: all of the chunk that cannot be read are named
            bad.add(bad.images_of(chunk))
            raise
        writer.write(
            vectors,
            [row.identity for row in chunk],
            {name: [row.fields.get(name) for row in chunk] for name in keep},
        )
        done += len(chunk)
    if not done and bad.found:
        raise UserError(
            f"none of the {len(bad.found):,d} inputs can be encoded; the first one: {bad.found[0][1]}"
        )
    return done


def _check_ranges(precision: VectorPrecision, ranges: str | None) -> None:
    """Raise UserError if ranges are given for vectors that have none."""
    if ranges is not None and precision not in WITH_RANGES:
        raise UserError(
            f"--ranges goes with --precision int8 or uint8, and {precision} has none"
        )


def _check_layers(target: Path, precision: VectorPrecision, *, changed: bool) -> None:
    """Raise UserError if hidden states are to be written in another way than as they are."""
    if target.suffix != ".npy" or changed:
        raise UserError(
            "hidden states (--layers) are written as they are, to a .npy file"
        )
    if precision != "float32":
        raise UserError(
            f"--precision {precision} is of embeddings; hidden states (--layers) are float32"
        )


def session_config(
    model: str, strategy: Literal["auto", "ddp", "fsdp"], *, trust_remote_code: bool
) -> TrainConfig:
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

    def __init__(
        self,
        embedder: Embedder,
        kind: Kind,
        batch_tokens: int | None,
        normalize: bool | None,
        precision: VectorPrecision,
        ranges: str | None,
    ) -> None:
        self.precision = precision
        self.embedder = embedder
        self.kind: Kind = kind
        self.batch_tokens = batch_tokens
        self.unit = embedder.description.normalize if normalize is None else normalize
        dim = embedder.truncate_dim or embedder.description.embedding_dim
        self.ranges = None if ranges is None else read_ranges(ranges, dim)
        self.shape: tuple[int, ...] = (
            -(-dim // 8) if precision in ("binary", "ubinary") else dim,
        )

    def __call__(self, items: list[Item], progress: Progress) -> np.ndarray:
        """The rows of some inputs; collective."""
        vectors = encode_items(
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
        if self.ranges is None and len(vectors) > 1:
            self.ranges = ranges_of(
                vectors
            )  # of the first inputs, for all: levels mean the same in the whole file
        return quantized(vectors, self.precision, self.ranges)

    def save_ranges(self, target: Path, *, active: bool) -> Path | None:
        """Write the ranges of int8 and uint8 beside the vectors and return their file; None for other precisions."""
        if self.precision not in WITH_RANGES or self.ranges is None:
            return None
        path = target.with_name(f"{target.stem}.ranges.npy")
        if active:
            np.save(path, self.ranges)
        return path


class _Layers:
    """Hidden states by layer."""

    def __init__(
        self,
        embedder: Embedder,
        kind: Kind,
        batch_tokens: int | None,
        layers: Literal["all"] | Sequence[int],
        pooling: str | None,
    ) -> None:
        self.embedder = embedder
        self.kind: Kind = kind
        self.batch_tokens = batch_tokens
        self.layers = layers
        self.pooling = pooling
        # No input gives an array [0, layers, width].
        self.shape: tuple[int, ...] = self([], lambda *_: None).shape[1:]

    def __call__(self, items: list[Item], progress: Progress) -> np.ndarray:
        """The rows of some inputs; collective."""
        states = self.embedder.hidden_states(
            items,
            self.layers,
            self.kind,
            pooling=self.pooling,
            budget_tokens=self.batch_tokens,
        )
        progress(len(items), len(items))
        return states
