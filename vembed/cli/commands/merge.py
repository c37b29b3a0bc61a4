"""`vembed merge`: models, adapters or checkpoints in, one model out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from vembed.config.schema import TrainConfig
from vembed.parallel.session import start_session
from vembed.weights.merge import MergeResult, merge
from vembed.weights.merge_rules import MergeMethod


def run_merge(
    models: Sequence[str], output: str, method: MergeMethod, **options: Any
) -> MergeResult:
    """Merge and say what came of it. Runs on as many processes as were started: one merges, all evaluate."""
    console = Console()
    config = TrainConfig(model_name=models[0], data_path="unused", strategy="ddp")
    with start_session(config) as session:
        result = merge(models, output, method, session=session, **options)
        if session.is_main:
            for line in _lines(result):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
    return result


def _lines(result: MergeResult) -> list[Table | str]:
    lines: list[Table | str] = []
    if result.trials:
        table = Table("at", "score", box=None, pad_edge=False)
        for trial in result.trials:
            table.add_row(f"{trial.at:g}", f"{trial.score:.4f}")
        lines.append(table)
    names = ", ".join(result.models)  # as they were given: most are called final
    method: str = result.recipe.method
    if result.recipe.of_differences:
        method += " of the differences from the base"
    lines.append(f"merged by {method}: {names}")
    if result.score is not None:
        lines.append(f"score: {result.score:.4f}")
    return [*lines, f"wrote {result.model_dir}"]
