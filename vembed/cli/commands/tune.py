"""`vembed tune`: search for better options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option


def tune(
    config: Annotated[
        str,
        Argument(metavar="CFG", help="The config to start from, with validation data."),
    ],
    overrides: Annotated[list[str] | None, Argument(metavar="KEY=VALUE")] = None,
    trials: Annotated[
        int,
        Option(min=1, help="Trials in all, those of an earlier start included."),
    ] = 20,
    options: Annotated[
        str, Option(help="Options to search, as learning_rate,temperature.")
    ] = "",
    output: Annotated[
        str, Option(help="Folder of the search, in which it goes on.")
    ] = "tune",
    nproc: Annotated[
        int, Option("--nproc", min=0, help="Trials at once. 0: one for each GPU.")
    ] = 0,
    seed: Annotated[int, Option(help="Seed of the search.")] = 0,
    dry_run: Annotated[
        bool,
        Option("--dry-run", help="Show the options, their ranges and the trials."),
    ] = False,
) -> dict[str, Any] | None:
    """Search for better values of a few options, and write the best config as YAML."""
    from vembed.pipelines.option_search import Search, run_tune

    names = tuple(name.strip() for name in options.split(",") if name.strip())
    search = Search(config, tuple(overrides or ()), Path(output), trials, names, seed)
    return run_tune(search, nproc=nproc, is_dry_run=dry_run)
