"""`vembed edit`: a model and two sets of texts in, a model without what tells them apart out."""

from __future__ import annotations

from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from vembed.cli.commands.encode import session_config
from vembed.parallel.session import start_session
from vembed.weights.edit import EditResult, edit

_NAMES = {
    "probe": "probe's accuracy",
    "across": "nDCG@10 across the sets",
    "ndcg@10": "nDCG@10",
    "spearman": "Spearman",
}


def run_edit(
    model: str,
    output: str,
    first: str,
    second: str,
    *,
    strategy: Literal["auto", "ddp", "fsdp"] = "ddp",
    trust_remote_code: bool = False,
    **options: Any,
) -> EditResult:
    """Edit and say what it did. Runs on as many processes as were started; with `strategy: fsdp` each holds a shard."""
    console = Console()
    with start_session(
        session_config(model, strategy, trust_remote_code=trust_remote_code)
    ) as session:
        result = edit(
            model,
            output,
            first,
            second,
            trust_remote_code=trust_remote_code,
            session=session,
            **options,
        )
        if session.is_main:
            table = Table("", "before", "after", box=None, pad_edge=False)
            for key, name in _NAMES.items():
                if key in result.before:
                    table.add_row(
                        name, f"{result.before[key]:.4f}", f"{result.after[key]:.4f}"
                    )
            console.print(table)
            console.print(
                f"wrote {result.model_dir}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    return result
