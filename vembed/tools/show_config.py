"""`vembed config` and `vembed schema`: the resolved config, and the schema of all options."""

from __future__ import annotations

import json
from typing import Literal

from vembed.config.arguments import TrainArguments
from vembed.config.loading import render, resolve_run
from vembed.config.schema import TrainConfig
from vembed.tools.options_page import options_page


def config_text(arguments: TrainArguments) -> str:
    """The resolved config as YAML, with the origin of each value, what was translated and what has no effect."""
    resolved = resolve_run(arguments.source, arguments.overrides, stage=arguments.stage)
    lines = [f"# translated: {line}" for line in resolved.translated] + [f"# note: {line}" for line in resolved.notes]
    return render(resolved.config, resolved.origins) + "".join(f"\n{line}" for line in lines) + ("\n" if lines else "")


def schema_text(form: Literal["json", "markdown"] = "json") -> str:
    """Return the JSON schema, which editors use for completion and checks, or the page of all options."""
    if form == "markdown":
        return options_page()
    return json.dumps(TrainConfig.model_json_schema(), indent=2) + "\n"
