"""`vembed encode`: a file of texts, records or rows in, one embedding per each out, in the order of the input."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from vembed.cli.support import (
    ALONE,
    AnyModel,
    BatchTokens,
    ImageRootOption,
    KindOption,
    ModelUse,
    TruncateDim,
    parts_of,
    plain_console,
    require_folder,
)
from vembed.config.values import EmbeddingPrecision, OnBadRecord
from vembed.errors import UserError, did_you_mean, listed
from vembed.models.poolings.table import PoolingName

if TYPE_CHECKING:
    import numpy as np

    from vembed.data.examples import Item
    from vembed.inference.encoding import Progress

CHUNK_ROWS = 65_536
"""Inputs that are read, sorted by length, encoded and written together; memory does not grow with the file."""
STORED_DTYPES = {"binary": "int8", "ubinary": "uint8"}
"""Dtype of the stored numbers, of precisions that have another name."""


@dataclass(frozen=True)
class EncodeResult:
    """Result: files and counts."""

    path: Path
    num_rows: int
    num_dims: int
    seconds: float
    ranges: Path | None
    """File with the ranges of int8 and uint8."""
    num_skipped: int
    skipped: Path | None
    """File with the number of each row that was left out, and the reason."""


def encode(
    model: AnyModel,
    input_file: Annotated[str, Argument(metavar="INPUT")],
    output: str,
    kind: KindOption = "document",
    column: str | None = None,
    keep: str = "",
    truncate_dim: TruncateDim = None,
    normalize: bool | None = None,
    layers: str = "",
    pooling: PoolingName | None = None,
    precision: EmbeddingPrecision = "float32",
    ranges: str | None = None,
    image_root: ImageRootOption = None,
    on_bad_record: OnBadRecord = "stop",
    batch_tokens: BatchTokens = None,
    use: ModelUse = ALONE,
) -> EncodeResult:
    """Turn a file of texts or records, or a folder of images, into embeddings, in the order of the input.

    Args:
        input_file: Texts (one per line), JSONL, a table or a folder of images. -: texts on standard input.
        output: Where to write: NAME.npy or NAME.parquet.
        column: The field or column that holds the text.
        keep: Columns to write beside the vectors in NAME.parquet, as id,title.
        normalize: Vectors of length 1. Default: as the model says.
        layers: Hidden states instead of embeddings: all, or layers as 0,6,12 (0: the embeddings).
        pooling: --layers: cls, mean, last, ... Default: the model's own.
        precision: Of the vectors: float32, int8, uint8, binary or ubinary (one bit per coordinate).
        ranges: int8, uint8: NAME.ranges.npy of an earlier file, so that levels mean the same in both.
        on_bad_record: stop, or skip: leave out what cannot be encoded, named in NAME.skipped.jsonl.
    """
    chosen_layers: Any = "all"
    if layers != "all":
        chosen_layers = parts_of("--layers", layers.strip("[]")) or None
    target = Path(output)
    if target.suffix not in (".npy", ".parquet"):
        raise UserError(f"{output}: vembed encode writes .npy and .parquet")
    require_folder(target)
    kept_fields = parts_of("--keep", keep, str)
    if "embedding" in kept_fields or (kept_fields and target.suffix == ".npy"):
        raise UserError(
            f"--keep {keep}: give NAME.parquet, as .npy has no columns. Its column embedding has the vectors"
        )
    has_ranges = precision in ("int8", "uint8")
    if ranges is not None and not has_ranges:
        raise UserError(
            f"--ranges needs --precision int8 or uint8, and the precision is {precision}"
        )
    if pooling is not None and not layers:
        raise UserError(
            "--pooling is for hidden states (--layers); embeddings are pooled as the model says"
        )
    is_plain = (truncate_dim, normalize, precision) == (None, None, "float32")
    if layers and not (is_plain and target.suffix == ".npy"):
        raise UserError(
            "hidden states (--layers) are written as they are, in float32, to a .npy file"
        )
    use.share(input_file)
    import numpy as np

    from vembed.cli.encode_files import (
        TEXT_COLUMNS,
        EncodeInput,
        broken_images,
        vector_writer,
    )
    from vembed.data.images.files import IMAGE_PATH
    from vembed.inference.embedder import Embedder
    from vembed.inference.encoding import (
        encode_items,
        quantized,
        ranges_of,
        read_ranges,
    )
    from vembed.progress import ProgressReport, duration

    console = plain_console(stderr=True)
    with ExitStack() as stack:
        model_path, options = stack.enter_context(use.open(model))
        session = options["session"]
        rows = EncodeInput(
            input_file,
            session,
            kind,
            column=column,
            keep=kept_fields,
            image_root=image_root,
            skips=on_bad_record == "skip",
            chunk_rows=CHUNK_ROWS,
        )
        # Mistakes in the first rows are found before the model is loaded.
        first_rows = rows.first_rows
        for name in kept_fields:
            if first_rows and not any(name in row.fields for row in first_rows):
                hint = did_you_mean(name, first_rows[0].fields)
                raise UserError(
                    f"--keep {name}: no such column in {rows.name}{hint} (it has {listed(first_rows[0].fields)})"
                )
        if first_rows and column is None and session.is_main:
            fields = first_rows[0].fields
            names = TEXT_COLUMNS[kind]
            texts = [name for name in names if isinstance(fields.get(name), str)]
            if len(texts) > 1:
                console.print(
                    f"{rows.name}: encoding {texts[0]}, not {listed(texts[1:])} (--kind {kind}; --column names another)"
                )
        texts_read = [row.item.text or "" for row in first_rows]
        if texts_read and all(map(IMAGE_PATH.fullmatch, texts_read)):
            console.print(
                f"warning: the texts of {rows.name} look like paths of images ({texts_read[0]!r:.80}), and are encoded as "
                "texts: call the column image, without --column, to encode the images"
            )
        if rows.has_images and target.suffix == ".npy":
            raise UserError(
                f"{target} would not say which image a vector is of: give NAME.parquet"
            )
        embedder = Embedder(model_path, truncate_dim=truncate_dim, **options)
        dim = embedder.description.output_dim
        levels = None if ranges is None else read_ranges(ranges, dim)

        def vectors_of(items: list[Item], progress: Progress) -> np.ndarray:
            """Return what is written for some inputs. Collective."""
            nonlocal levels
            if chosen_layers is not None:
                states = embedder.hidden_states(
                    items,
                    chosen_layers,
                    kind,
                    pooling=pooling,
                    budget_tokens=batch_tokens,
                )
                progress(len(items), len(items))
                return states
            full = encode_items(
                embedder.model,
                embedder.featuriser,
                items,
                kind,
                budget_tokens=batch_tokens,
                session=session,
                progress=progress,
            )
            vectors = embedder.finish(full, normalize)
            if levels is None and len(vectors) > 1:
                # Of the first inputs, for all: levels mean the same in the whole file.
                levels = ranges_of(vectors)
            return quantized(vectors, precision, levels)

        shape: tuple[int, ...] = (dim,)
        if precision in STORED_DTYPES:
            shape = (-(-dim // 8),)  # 8 coordinates in a byte
        if chosen_layers is not None:
            shape = vectors_of([], lambda *_: None).shape[1:]  # [layers, width]
            # Fewer inputs at once, so that a chunk takes as much memory as one of embeddings.
            rows.chunk_rows = max(CHUNK_ROWS // (10 * shape[0]), 1)
        began = time.monotonic()
        writer = None
        if session.is_main:
            stored = STORED_DTYPES.get(precision, precision)
            writer = stack.enter_context(vector_writer(target, shape, stored))
        progress = stack.enter_context(
            ProgressReport("encoding", active=session.is_main, console=console)
        )
        num_done = 0

        def advance(count: int, _: int) -> None:
            progress(num_done + count, rows.total)

        has_ids = False
        for chunk in rows:
            if target.suffix == ".parquet":
                with_ids = [row for row in chunk if row.identity]
                if not num_done:
                    has_ids = bool(with_ids)
                elif with_ids and not has_ids:
                    raise UserError(
                        f"row {with_ids[0].number:,d} of {rows.name} is the first one with an id, and the columns of {target} "
                        f"follow from the first {num_done:,d} rows: give one of those an id too, or leave all ids out"
                    )
            try:
                vectors = vectors_of([row.item for row in chunk], advance)
            except UserError:
                # An image: all of the chunk that cannot be read are named.
                rows.leave_out(broken_images(chunk))
                raise
            if writer is not None:
                columns = {}
                if has_ids:
                    columns["id"] = [row.identity for row in chunk]
                for name in kept_fields:
                    columns[name] = [row.fields.get(name) for row in chunk]
                writer.write(vectors, columns)
            num_done += len(chunk)
        if not num_done and rows.left_out:
            raise UserError(
                f"none of the {len(rows.left_out):,d} inputs can be encoded; the first one: {rows.left_out[0][1]}"
            )
        seconds = time.monotonic() - began
    # The files have their names now.
    ranges_file = None
    if has_ranges and levels is not None:
        ranges_file = target.with_name(f"{target.stem}.ranges.npy")
        if session.is_main:
            np.save(ranges_file, levels)
    skipped = None
    if session.is_main:
        skipped = rows.save_left_out(target.with_suffix(".skipped.jsonl"))
        sizes = " x ".join(f"{size:,d}" for size in (num_done, *shape))
        console.print(
            f"{target}: {sizes} {precision}, computed in {embedder.arithmetic}, in {duration(seconds)} "
            f"({num_done / max(seconds, 1e-9):,.0f}/s)"
        )
        if skipped:
            console.print(f"{len(rows.left_out):,d} left out ({skipped})")
        if not num_done:
            console.print(f"warning: {rows.name} is empty, and {target} has no rows")
    return EncodeResult(
        target, num_done, shape[-1], seconds, ranges_file, len(rows.left_out), skipped
    )
