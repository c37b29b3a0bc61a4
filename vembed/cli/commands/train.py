"""`vembed train`: one training run, or the stages of a config in order."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import typer

from vembed.cli.support import MODE, ConfigArguments


def train(ctx: typer.Context, args: ConfigArguments = None) -> Any:
    """Train a model as a config file says, on all local devices."""
    from vembed.config.arguments import parse_train_arguments, train_help

    if {"-h", "--help"} & set(args or []):
        sys.stdout.write(train_help())
        return 0
    arguments = parse_train_arguments(args or [])
    from vembed.cli.run_train import run_train
    from vembed.pipelines.stages import (
        pipeline_of_arguments,
        results_of,
        run_stages,
    )

    writes_json = ctx.obj is not None
    train_one = partial(run_train, starts_processes=MODE.get() != "process")
    pipeline = pipeline_of_arguments(arguments)
    if pipeline is None:
        code, result = train_one(arguments, returns_result=writes_json)
        return result or code
    code = run_stages(pipeline, arguments, lambda stage: train_one(stage)[0])
    if code or not writes_json or arguments.is_dry_run:
        return code
    return results_of(pipeline)
