"""`vembed data`, `report`, `compare` and `card`: what a run reads, and what has become of it."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from vembed.cli.arguments import NO_FLAGS, LaunchFlags
from vembed.cli.support import ConfigArguments, Result, print_lines, require_folder
from vembed.errors import UserError


def data(args: ConfigArguments = None, use: LaunchFlags = NO_FLAGS) -> Result | None:
    """Look at the data of a config: samples as the model reads them, lengths, repetitions, overlap."""
    config = use.with_words(args).resolve().config
    from vembed.data_tools.data_page import data_facts

    page, figures = data_facts(config)
    sys.stdout.write(page)
    return figures


def report(run: str) -> Result:
    """Write report.html and report.md of a run, also of one that was stopped or killed.

    Args:
        run: The output_dir of a run, finished or not.
    """
    from vembed.evaluation.report.record import read_run
    from vembed.evaluation.report.report import run_json, write_report

    path = write_report(run)
    print_lines(f"wrote {path}")
    return {"report": path, **run_json(read_run(run))}


def compare(
    ctx: typer.Context,
    runs: Annotated[list[str], Argument(metavar="RUN")],
    output: Annotated[str | None, Option("--output", "-o")] = None,
) -> Result:
    """Compare several runs on one page: curves, scores with intervals, settings that differ, queries won and lost.

    Args:
        runs: Folders of runs, finished or not. The first is the baseline.
        output: The page. Default: comparison.html.
    """
    from vembed.evaluation.report.report import (
        as_json,
        read_several,
        score_lines,
        write_comparison,
    )

    page = Path(output or "comparison.html")
    require_folder(page)
    compared_runs = read_several(runs)
    result = as_json(compared_runs)
    sys.stdout.write(score_lines(compared_runs))
    if output is not None or ctx.obj is None:  # --json alone needs no page
        write_comparison(compared_runs, page)
        print_lines(f"wrote {page}")
    return result


def card(model: str) -> Result:
    """Write the model card (README.md) of a trained model again, from the run's scores, data and settings.

    Args:
        model: The output_dir of a finished run, or its final/.
    """
    from vembed.config.loading import resolve_run
    from vembed.evaluation.report.record import changed_settings, read_run
    from vembed.models.families.description import describe_trained
    from vembed.saving.card import Card, render_card
    from vembed.saving.publication import CARD, MODEL_FOLDER

    path = Path(model).expanduser().resolve()
    folder = path / MODEL_FOLDER if (path / "config.yaml").is_file() else path
    run = folder.parent
    if not folder.is_dir() or not (run / "config.yaml").is_file():
        raise UserError(
            f"{model} is neither the folder of a finished run nor the {MODEL_FOLDER}/ in one, so there is nothing to "
            "write a card from; give the output_dir of the run"
        )
    record = read_run(run)
    facts = Card(
        record.summary, changed_settings(record.config), record.after, record.before
    )
    config = resolve_run(run / "config.yaml").config
    is_adapter = (folder / "adapter_config.json").is_file()
    text = render_card(
        describe_trained(
            config.model, config.matryoshka, config.objective, config.adapters
        ),
        facts,
        adapter_alone=is_adapter,
    )
    target = folder / CARD
    target.write_text(text, encoding="utf-8", errors="backslashreplace")
    print_lines(f"wrote {target}")
    return {"card": target}
