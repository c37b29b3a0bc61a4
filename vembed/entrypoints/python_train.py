"""vembed.train: one training run, or all stages of a config in order, in the calling process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vembed.config.decisions import ResolvedRun
from vembed.config.loading import ConfigSource, chosen_pipeline, resolve_run
from vembed.data.in_memory import as_path
from vembed.errors import RunError, UserError
from vembed.models.custom.own_code import as_options
from vembed.training.checkpoint.folders import finished_run
from vembed.training.hooks.base import Callbacks, Hook, OnEvaluation, OnStep
from vembed.training.trainer import TrainResult, train_run

OBJECT_OPTIONS = ("data_path", "val_data_path", "train_data", "train_file", "val_data")
"""Options that may be Python objects, and the likeliest of their other names."""

if TYPE_CHECKING:
    from torch import nn


def train(
    config: ConfigSource | ResolvedRun,
    overrides: Sequence[str] = (),
    hooks: Sequence[Hook] = (),
    *,
    on_step: OnStep | None = None,
    on_evaluation: OnEvaluation | None = None,
    model: nn.Module | type[nn.Module] | None = None,
) -> TrainResult:
    """Train and return the model's folder and its scores.

    Args:
        config: a path, a dict or a `TrainConfig`. In a dict, `data_path` and `val_data_path` may also be lists of dicts,
            a `datasets.Dataset`, a `pandas.DataFrame` or a `pyarrow.Table`.
        overrides: `key=value` options, which win over the config. `stage=NAME` runs one of its stages.
        hooks: additions to the training loop.
        on_step: called with a `StepInfo` after each step. If it returns "stop", the run ends with a model and a report.
        on_evaluation: the same with an `Evaluation` after each evaluation.
        model: a torch module or its class, as `model_class`. With a module, training starts from its weights.

    With `stages` all of them run in this process, and the result is that of the last training.
    """
    source = config
    if isinstance(config, Mapping):
        source = as_options(_stored(config), model)
    elif model is not None:
        raise UserError(
            "model= needs a config that is a dict. For a config file, set model_class to the class"
        )
    callbacks = []
    if on_step is not None or on_evaluation is not None:
        callbacks = [Callbacks(on_step, on_evaluation)]
    pipeline = None
    if isinstance(source, str | Path | Mapping):
        pipeline = chosen_pipeline(source, overrides)
    if pipeline is None:
        return train_run(resolve_run(source, overrides), [*hooks, *callbacks])
    if hooks or model is not None:
        raise UserError(
            "hooks and model= are for one training: name one of the stages, as overrides=['stage=NAME']"
        )

    # Commands of the steps between, and the arguments of their processes.
    from vembed.cli.arguments import TrainArguments
    from vembed.pipelines.stages import run_stages

    arguments = TrainArguments(
        source=source if isinstance(source, Mapping) else str(source),
        overrides=tuple(overrides),
    )

    def train_stage(stage: TrainArguments) -> int:
        train_run(stage.resolve(), callbacks)
        return 0

    code = run_stages(pipeline, arguments, train_stage)
    if code:
        raise RunError(
            f"a step between the stages has failed with exit code {code}; what it said is above"
        )
    last = next(
        (stage for stage in reversed(pipeline.stages) if stage.kind == "train"), None
    )
    done = None if last is None else finished_run(last.folder)
    if done is None:
        raise RunError(
            f"{pipeline.config_name}: none of its stages is a finished training"
        )
    return TrainResult(done.model_dir, done.folder, done.scores(), done.step)


def _stored(config: Any) -> Any:
    """Return the config with data that are objects as paths, in the stages too."""
    if isinstance(config, list):
        return [_stored(entry) for entry in config]
    if not isinstance(config, Mapping):
        return config
    stored = {}
    for key, value in config.items():
        stored[key] = as_path(key, value) if key in OBJECT_OPTIONS else _stored(value)
    return stored
