"""`vembed eval`: a model folder and evaluation data in, tables of scores out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from vembed.cli.commands.compressed_plot import compressed_picture, compressed_table
from vembed.cli.commands.encode import session_config
from vembed.errors import UserError
from vembed.evaluation.dataset import Task
from vembed.evaluation.report.record import metric_name
from vembed.evaluation.scores import REPORTED_K, evaluate
from vembed.parallel.session import start_session


def run_evaluate(
    model: str,
    data: str,
    *,
    dims: Sequence[int] | None = None,
    ks: Sequence[int] = (1, 5, 10, 100),
    task: Task = "auto",
    split: str | None = None,
    compressed: str | None = None,
    batch_tokens: int | None = None,
    column_mapping: dict[str, str] | None = None,
    on_bad_record: Literal["stop", "skip"] = "stop",
    strategy: Literal["auto", "ddp", "fsdp"] = "ddp",
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    trust_remote_code: bool = False,
    console: Console | None = None,
) -> dict[str, float]:
    """Score `model` on `data`, and print the scores. `compressed`: also score int8 and binary documents, and draw
    their quality against their bytes to this file. Runs on as many processes as were
    started: all encode and search, the first one speaks; with `strategy: fsdp` each holds a shard of the model."""
    console = console or Console()
    if compressed is not None and Path(compressed).suffix not in (".png", ".svg"):
        raise UserError(
            f"--compressed {compressed}: the picture is written as .png or .svg"
        )
    with start_session(
        session_config(model, strategy, trust_remote_code=trust_remote_code)
    ) as session:
        scores = evaluate(
            model,
            data,
            dims=dims,
            ks=ks,
            task=task,
            split=split,
            batch_tokens=batch_tokens,
            column_mapping=column_mapping,
            on_bad_record=on_bad_record,
            torch_dtype=torch_dtype,
            trust_remote_code=trust_remote_code,
            session=session,
            compressed=compressed is not None,
            show_progress=True,
        )
        if session.is_main:
            for table in score_tables(scores):
                console.print(table)
            if compressed is not None:
                console.print(" ", compressed_table(scores), sep="\n")
                compressed_picture(scores, Path(compressed))
    return scores


def score_tables(scores: dict[str, float]) -> list[Table]:
    """The main metrics by size of the embedding, and for retrieval all metrics by cut-off."""
    prefixes = [
        "",
        *dict.fromkeys(
            match[0] for key in scores if (match := re.match(r"dim\d+/", key))
        ),
    ]
    columns = [
        key
        for key in scores
        if "/" not in key and ("@" not in key or key.endswith(f"@{REPORTED_K}"))
    ]
    by_dim = _table("size", [metric_name(key) for key in columns])
    for prefix in prefixes:
        name = prefix.removeprefix("dim").removesuffix("/") or "whole"
        by_dim.add_row(name, *(f"{scores[prefix + key]:.4f}" for key in columns))
    ks = sorted(
        {int(key.split("@")[1]) for key in scores if "/" not in key and "@" in key}
    )
    if len(ks) < 2:
        return [by_dim]
    by_cut = _table("cut-off", [metric_name(key).split("@")[0] for key in columns])
    for k in ks:
        by_cut.add_row(
            str(k), *(f"{scores[key.split('@')[0] + f'@{k}']:.4f}" for key in columns)
        )
    by_cut.title = " "  # an empty line between the two
    return [by_dim, by_cut]


def _table(first: str, names: Sequence[str]) -> Table:
    table = Table(first, box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right")
    return table
