"""`vembed config`, `schema` and `version`: the resolved config, all options, and what is installed."""

import json
import sys
from typing import Annotated, Literal

from typer import Option

from vembed.cli.arguments import NO_FLAGS, LaunchFlags
from vembed.cli.support import ConfigArguments, Result, print_lines


def config(args: ConfigArguments = None, use: LaunchFlags = NO_FLAGS) -> Result:
    """Print the resolved config, with where each value comes from. Fails if a file is missing."""
    from vembed.config.loading import config_yaml
    from vembed.config.rules import require_paths

    run = use.with_words(args).resolve()
    sys.stdout.write(config_yaml(run.config, run.origins))
    print_lines(*(f"# note: {line}" for line in run.notes))
    require_paths(run)
    return {
        "options": run.config.to_dict(),
        "origins": run.origins,
        "notes": run.notes,
    }


def schema(
    form: Annotated[Literal["json", "markdown"], Option("--format")] = "json",
) -> None:
    """Print the JSON schema of a config, with which editors complete and check it.

    Args:
        form: json, for editors, or markdown, the page of options.
    """
    from vembed.config.schema import json_schema

    if form == "markdown":
        sys.stdout.write(options_page())
    else:
        print_lines(json.dumps(json_schema(), indent=2))


def version() -> dict[str, str]:
    """Print the versions of vembed, Python and its main dependencies."""
    from vembed.evaluation.report.record import collect_versions

    versions = collect_versions()
    for name, number in versions.items():
        print_lines(f"{name} {number}")
    return versions


def options_page() -> str:
    """Return docs/options.md: every option with type, default, meaning and other names."""
    from vembed.config.options import (
        ALIASES,
        OPTION_BLOCKS,
        SPELLINGS,
        TRANSLATED,
        all_options,
    )
    from vembed.evaluation.report.page import render_page

    return render_page(
        "options.md.j2",
        options=all_options().values(),
        aliases=ALIASES,
        spellings=SPELLINGS,
        translated=TRANSLATED,
        blocks=OPTION_BLOCKS,
    )
