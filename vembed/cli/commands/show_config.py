"""`vembed config` and `vembed schema`: the resolved config, and the schema of all options."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Literal

from vembed.cli.commands.options_page import options_page
from vembed.config.arguments import TrainArguments
from vembed.config.loading import render, resolve_run
from vembed.config.paths import require_paths
from vembed.config.schema import json_schema


def show_config(
    arguments: TrainArguments, *, on_result: Callable[[Any], None] = lambda _: None
) -> int:
    """Print the resolved config as YAML, with the origin of each value, what was translated and what has no effect.
    Raise UserError, after that, if a file that the config names is missing. `on_result` takes the same as a dict."""
    resolved = resolve_run(arguments.source, arguments.overrides, stage=arguments.stage)
    lines = [f"# translated: {line}" for line in resolved.translated] + [
        f"# note: {line}" for line in resolved.notes
    ]
    sys.stdout.write(
        render(resolved.config, resolved.origins)
        + "".join(f"\n{line}" for line in lines)
    )
    sys.stdout.write("\n" if lines else "")
    sys.stdout.flush()
    on_result(
        {
            "options": resolved.config.to_dict(),
            "origins": resolved.origins,
            "translated": resolved.translated,
            "notes": resolved.notes,
        }
    )
    require_paths(resolved.config.model, resolved.config.data, resolved.origins)
    return 0


def schema_text(form: Literal["json", "markdown"] = "json") -> str:
    """Return the JSON schema, which editors use for completion and checks, or the page of all options."""
    if form == "markdown":
        return options_page()
    return json.dumps(json_schema(), indent=2) + "\n"
