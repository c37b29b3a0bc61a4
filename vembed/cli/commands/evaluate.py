"""`vembed eval`: a model folder and evaluation data in, tables of scores out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from vembed.cli.support import (
    AnyModel,
    BatchTokens,
    ColumnMapping,
    Nproc,
    OnBadRecord,
    Strategy,
    TrustRemoteCode,
    WeightsDtype,
    number_table,
    numbers,
    open_model,
    option,
    share,
)
from vembed.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table


def eval(
    model: AnyModel,
    data: Annotated[
        str,
        Argument(
            metavar="DATA",
            help="A BEIR-style folder, or a file of pairs or scored pairs.",
        ),
    ],
    dims: Annotated[
        str,
        Option(help="Also score at these sizes, as 256,128. Default: the model's own."),
    ] = "",
    ks: Annotated[str, Option(help="Cut-offs of the metrics.")] = "1,5,10,100",
    task: Annotated[
        Literal["auto", "retrieval", "similarity"],
        Option(help="auto, retrieval or similarity."),
    ] = "auto",
    split: Annotated[
        str | None,
        Option(help="Split of the qrels of a BEIR-style folder. Default: test."),
    ] = None,
    compressed: Annotated[
        str | None,
        Option(
            help="Also score int8 and binary documents, and draw quality against bytes (.png, .svg)."
        ),
    ] = None,
    column_mapping: ColumnMapping = "",
    on_bad_record: Annotated[OnBadRecord, Option(help="stop or skip.")] = "stop",
    batch_tokens: BatchTokens = None,
    torch_dtype: WeightsDtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    strategy: Strategy = "ddp",
    nproc: Nproc = 1,
) -> dict[str, float]:
    """Score a model: nDCG, MRR, Recall and MAP over the whole corpus, or correlations for scored pairs."""
    sizes = numbers("--dims", dims) or None
    cuts = numbers("--ks", ks)
    mapping = option("column_mapping", column_mapping)
    dtype = option("torch_dtype", torch_dtype)
    if compressed is not None and Path(compressed).suffix not in (".png", ".svg"):
        raise UserError(
            f"--compressed {compressed}: the picture is written as .png or .svg"
        )
    share(nproc)
    from rich.console import Console

    from vembed.evaluation.report.plots import plot_stored
    from vembed.evaluation.report.report import stored_points, stored_table
    from vembed.evaluation.scores import evaluate

    with open_model(model, strategy, trust_remote_code=trust_remote_code) as (
        model_path,
        session,
    ):
        scores = evaluate(
            model_path,
            data,
            dims=sizes,
            ks=cuts,
            task=task,
            split=split,
            batch_tokens=batch_tokens,
            column_mapping=mapping,
            on_bad_record=on_bad_record,
            torch_dtype=dtype,
            trust_remote_code=trust_remote_code,
            session=session,
            compressed=compressed is not None,
            show_progress=True,
        )
        if session.is_main:
            console = Console()
            for table in score_tables(scores):
                console.print(table)
            stored = stored_table(scores)
            if compressed is not None and stored is not None:
                table = number_table(stored.header[0], stored.header[1:])
                for row in stored.rows:
                    table.add_row(*row)
                console.print(" ", table, sep="\n")
                plot = plot_stored(stored_points(scores), "nDCG@10")
                plot.write(Path(compressed), "nDCG@10")
    return scores


def score_tables(scores: dict[str, float]) -> list[Table]:
    """The main metrics by size of the embedding, and for retrieval all metrics by cut-off."""
    from vembed.evaluation.report.record import metric_name
    from vembed.evaluation.scores import REPORTED_K

    whole = [key for key in scores if "/" not in key]
    columns = [key for key in whole if "@" not in key or key.endswith(f"@{REPORTED_K}")]
    by_dim = number_table("size", [metric_name(key) for key in columns])
    sizes = [match[0] for key in scores if (match := re.match(r"dim\d+/", key))]
    for prefix in ("", *dict.fromkeys(sizes)):
        name = prefix.removeprefix("dim").removesuffix("/") or "whole"
        by_dim.add_row(name, *(f"{scores[prefix + key]:.4f}" for key in columns))
    ks = sorted({int(key.split("@")[1]) for key in whole if "@" in key})
    if len(ks) < 2:
        return [by_dim]
    metrics = [key.split("@")[0] for key in columns]
    by_cut = number_table(
        "cut-off", [metric_name(key).split("@")[0] for key in columns], title=" "
    )
    for k in ks:
        values = (f"{scores[f'{metric}@{k}']:.4f}" for metric in metrics)
        by_cut.add_row(str(k), *values)
    return [by_dim, by_cut]
