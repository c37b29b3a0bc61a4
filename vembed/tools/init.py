"""`vembed init`: a commented starter config for a kind of model and a data file, whose columns are inspected."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from vembed.config.loading import load_config, one_line_yaml
from vembed.config.options import join_words, nearest
from vembed.data.columns import Columns, guess_mapping
from vembed.data.delimited import delimiter_of
from vembed.errors import UserError
from vembed.families.table import FAMILIES, Family, named

NUM_RECORDS = 20
"""Number of records to inspect."""
MAX_LINE = 1_000_000


def run_init(
    family: str,
    data: str = "train.jsonl",
    output: str = "vembed.yaml",
    *,
    model: str | None = None,
    val_data: str | None = None,
    force: bool = False,
) -> Path:
    """Write the config. Raise UserError if the file exists already or the data file cannot be used for training."""
    path = Path(output)
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"--output {output}: a starter config is YAML: give a name that ends in .yaml")
    if path.exists() and not force:
        raise UserError(f"{output} exists already: give another --output, or --force to overwrite it")
    kind = named(family)
    if kind is None:
        near = nearest(family, FAMILIES)
        hint = f", did you mean {near!r}?" if near else f": give one of {join_words(list(FAMILIES))}"
        raise UserError(f"--family {family!r} is not known{hint}")
    text = starter(kind, data, model=model, val_data=val_data)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}") from None
    load_config(path)
    return path


def starter(family: Family, data: str, *, model: str | None = None, val_data: str | None = None) -> str:
    """Return the text of the config."""
    kind = family.starter
    records = peek(Path(data))
    mapping, loss, found = _look_at(records, data)
    lines = [
        "# A starter config for vembed. Train with:   vembed train <this file>",
        "# See what it comes to with:                 vembed config <this file>",
        "# Every option, with its default and meaning: docs/options.md, or `vembed schema` for your editor.",
        "",
        _line("model_name", model or kind.model_name, f"a name on the Hub or a local folder ({kind.about})"),
    ]
    if kind.image_model_name:
        lines += [
            _line("model_family", family.name, "two towers"),
            _line("image_model_name", kind.image_model_name, "images"),
        ]
    lines += [
        "",
        f"# Data: {found}",
        _line("data_path", data, "JSONL, CSV, TSV, Parquet, a folder of `datasets`, a Hub name"),
    ]
    if mapping:
        lines.append(_line("column_mapping", mapping, "names in your file: names that vembed reads"))
    if val_data:
        lines.append(_line("val_data_path", val_data, "scored before, during and after training"))
    else:
        lines.append(
            "# val_data_path: val.jsonl        # as data_path, or a BEIR-style folder; scored before and after"
        )
    if kind.retrieval_mode is not None:
        lines.append(_line("retrieval_mode", kind.retrieval_mode, "plain strings are paths of images"))
    if not family.reads_only_text:
        lines.append(
            "# image_root: images              # where relative image paths start; default: beside the data file"
        )
    if kind.max_length is not None:
        lines.append(_line("max_length", kind.max_length, "tokens; longer texts are cut"))
    if family.reads_only_text:
        lines.append('# query_prompt: "query: "         # put before every query; default: what the model brings along')
    lines += [
        "",
        "# Training",
        _line("loss", loss, "infonce: pairs; cosent: pairs with scores; triplet: given negatives"),
    ]
    if loss in ("infonce", "cosent"):
        lines.append(_line("temperature", 0.05, "smaller: harder"))
    lines += [
        _line(
            "batch_size", kind.batch_size, "examples per process; memory is bounded by micro-batches, so larger is fine"
        ),
        _line("epochs", 1, "passes over the data"),
        _line("learning_rate", kind.learning_rate, "used as it stands, on any number of processes"),
    ]
    if kind.head_learning_rate:
        lines.append(_line("head_learning_rate", kind.head_learning_rate, "of the two projections, which are new"))
    if kind.use_lora:
        lines.append(_line("use_lora", True, "train small adapters instead of all weights"))
    lines += [
        "# use_mrl: true                   # Matryoshka: embeddings that can be cut to fewer numbers",
        "# use_fsdp: true                  # shard a large model over several GPUs",
        "",
        "# Output",
        _line("output_dir", "output", "settings, logs, checkpoints, the model in final/, report.html"),
        "# eval_steps: 100                 # evaluate during training (needs val_data_path)",
        "# save_steps: 100                 # write checkpoints to go on from with --resume",
    ]
    return "\n".join(lines) + "\n"


def peek(path: Path) -> list[dict[str, Any]]:
    """Return the first records of a file; none if there is no file to inspect (a Hub name, a folder)."""
    try:
        if not path.is_file():
            return []
        readers = {".csv": _peek_delimited, ".tsv": _peek_delimited, ".parquet": _peek_parquet}
        return readers.get(path.suffix.lower(), _peek_json)(path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def _look_at(records: Sequence[dict[str, Any]], data: str) -> tuple[dict[str, str], str, str]:
    """Return (column_mapping, loss, description) for the first records."""
    if not records:
        return {}, "infonce", "not looked at (no file of that name here)"
    names = tuple(dict.fromkeys(name for record in records for name in record))
    layout = Columns().layout(names)
    has = {"query": layout.query or layout.query_image, "positive": layout.positive or layout.positive_image}
    taken = layout.columns()
    free = [name for name in names if name not in taken]
    mapping = guess_mapping(free, [role for role, name in has.items() if name is None])
    layout = Columns(mapping).layout(names)
    if layout.problem:
        raise UserError(f"{data}: {layout.problem}")
    scored = layout.score is not None and not layout.negatives
    read = ", ".join(layout.columns())
    return mapping, "cosent" if scored else "infonce", f"the first {len(records)} records have {read}"


def _line(name: str, value: Any, comment: str) -> str:
    return f"{name}: {one_line_yaml(value)}".ljust(32) + f"  # {comment}"


def _peek_json(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8-sig") as file:
        if file.read(1) == "[":
            return _peek_json_list(file.read(MAX_LINE))
        file.seek(0)
        lines = [line for line in islice(iter(lambda: file.readline(MAX_LINE), ""), NUM_RECORDS) if line.strip()]
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(f"{path}, line {number}: not JSON; the file must hold one object per line") from None
        if not isinstance(record, dict):
            raise UserError(
                f"{path}, line {number}: a {type(record).__name__}, where an object with columns is expected"
            )
        records.append(record)
    if not records:
        raise UserError(f"{path}: is empty")
    return records


def _peek_json_list(text: str) -> list[dict[str, Any]]:
    """Return the first objects of a JSON list whose bracket is already read. The data reader validates the rest."""
    records: list[dict[str, Any]] = []
    position, decoder = 0, json.JSONDecoder()
    while len(records) < NUM_RECORDS and (start := text.find("{", position)) >= 0:
        try:
            record, position = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            break
        records.append(record)
    return records


def _peek_delimited(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        delimiter = delimiter_of(file.readline(MAX_LINE), "\t" if path.suffix.lower() == ".tsv" else ",")
        file.seek(0)
        rows = list(islice(csv.DictReader(file, delimiter=delimiter), NUM_RECORDS))
    if not rows:
        raise UserError(f"{path}: has no rows below its header")
    return [{str(name): value for name, value in row.items() if name is not None} for row in rows]


def _peek_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        batch = next(parquet.ParquetFile(path).iter_batches(batch_size=NUM_RECORDS), None)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not a Parquet file: {str(error).splitlines()[0]}") from None
    if batch is None or batch.num_rows == 0:
        raise UserError(f"{path}: has no rows")
    return [dict.fromkeys(batch.schema.names) for _ in range(batch.num_rows)]
