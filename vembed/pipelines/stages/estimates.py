"""Estimates of memory and time for every step of a pipeline, from the shapes of its model, without weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vembed.config.arguments import TrainArguments
from vembed.config.loading import resolve_run
from vembed.config.stages import MINED, Pipeline, Step
from vembed.errors import UserError
from vembed.progress import duration
from vembed.training.fingerprints import of_model

if TYPE_CHECKING:
    from vembed.cli.commands.plan import Prediction

Predict = Callable[[TrainArguments], "Prediction"]
Show = Callable[["Prediction"], None]

GIB = 2**30
UNKNOWN = "not estimated"
WITHOUT_MINED = " (without the negatives that are to be mined)"
COLUMNS = ("stage", "step", "memory", "time")


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory of each process and time of a step, in words."""

    step: Step
    memory: str
    time: str = UNKNOWN
    seconds: float | None = None
    fits: bool = True


def plan_stages(
    pipeline: Pipeline, arguments: TrainArguments, predict: Predict, show: Show
) -> int:
    """Print the prediction of each training, then the estimates of all steps; exit code 1 if one does not fit."""

    def predict_and_show(stage_arguments: TrainArguments) -> Prediction:
        sys.stdout.write(f"==== {stage_arguments.stage}\n")
        sys.stdout.flush()
        prediction = predict(stage_arguments)
        show(prediction)
        return prediction

    step_estimates = estimates(pipeline, arguments, predict_and_show)
    sys.stdout.write(table(step_estimates))
    return 0 if all(estimate.fits for estimate in step_estimates) else 1


def pipeline_table(
    pipeline: Pipeline, arguments: TrainArguments, env: Mapping[str, str]
) -> str:
    """Return the estimates of all steps for a dry run, which fetches nothing and without a model imports no torch."""

    def predicted(stage_arguments: TrainArguments) -> Prediction:
        config = resolve_run(
            stage_arguments.source,
            stage_arguments.overrides,
            stage=stage_arguments.stage,
            env=env,
        ).config
        if of_model(config.model.model_name, config.model.model_revision) is None:
            raise UserError(
                f"no files of {config.model.model_name} here; `vembed plan` looks further"
            )
        from vembed.cli.commands.plan import predict  # imports torch

        return predict(stage_arguments, env)

    return table(estimates(pipeline, arguments, predicted, skips_missing=True))


def estimates(
    pipeline: Pipeline,
    arguments: TrainArguments,
    predict: Predict,
    *,
    skips_missing: bool = False,
) -> list[Estimate]:
    """Return the estimate of each step. The weights of a stage's model need not be there yet: every stage has the
    architecture of the model that the first one starts from. `skips_missing`: a model that is not here is no error."""
    models: dict[str, str] = {}
    step_estimates: list[Estimate] = []
    newest: Prediction | None = None
    for step in pipeline.steps:
        before = pipeline.model_before(step.name)
        if step.kind != "train":
            models[step.name] = models[before.name] if before is not None else ""
            step_estimates.append(_between(step, newest))
            continue
        stage_arguments = replace(
            arguments, stage=step.name, first_stage=None, last_stage=None
        )
        if before is not None and step.option("model_name") is None:
            stage_arguments = replace(
                stage_arguments,
                overrides=(
                    *stage_arguments.overrides,
                    f"model_name={models[before.name]}",
                ),
            )
        # For a stage that starts from an earlier one this is the name given above: of the first model, whose shapes
        # it has.
        models[step.name] = resolve_run(
            stage_arguments.source, stage_arguments.overrides, stage=step.name
        ).config.model.model_name
        unmined = _data_before_mining(pipeline, step)
        if unmined is not None:
            stage_arguments = replace(
                stage_arguments,
                overrides=(*stage_arguments.overrides, f"data_path={unmined}"),
            )
        try:
            newest = predict(stage_arguments)
            step_estimates.append(
                _of_training(step, newest, WITHOUT_MINED if unmined is not None else "")
            )
        except UserError as error:
            if not skips_missing:
                raise
            newest = None
            step_estimates.append(
                Estimate(step, f"{UNKNOWN} ({str(error).splitlines()[0]})")
            )
    return step_estimates


def table(step_estimates: Sequence[Estimate]) -> str:
    """Return the lines of all steps, and the sum of what is estimated."""
    rows = [
        COLUMNS,
        *(
            (estimate.step.name, estimate.step.kind, estimate.memory, estimate.time)
            for estimate in step_estimates
        ),
    ]
    known = [
        estimate.seconds for estimate in step_estimates if estimate.seconds is not None
    ]
    if known:
        left_out = (
            ""
            if len(known) == len(step_estimates)
            else f", without the {len(step_estimates) - len(known)} not estimated"
        )
        rows.append(("all", "", "", f"{_about(sum(known))}{left_out}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = [
        "  ".join(
            word.ljust(width) for word, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
    return (
        "==== memory of each process and time of each step, estimated\n"
        + "\n".join(lines)
        + "\n"
    )


def _data_before_mining(pipeline: Pipeline, step: Step) -> str | None:
    """Return the file that is mined for a training, while its own data, which come from that step, are not there."""
    mined = pipeline.mined_before(step.name)
    if (
        mined is None
        or step.option("data_path") is not None
        or (pipeline.folder(mined.name) / MINED).is_file()
    ):
        return None
    data = mined.options().get("data_path")
    return data if isinstance(data, str) else None


def _of_training(step: Step, prediction: Prediction, remark: str) -> Estimate:
    memory = f"{prediction.needed}: {'fits' if prediction.fits else 'does not fit'}"
    if prediction.seconds is None:
        return Estimate(step, memory, fits=prediction.fits)
    return Estimate(
        step,
        memory,
        _about(prediction.seconds) + remark,
        prediction.seconds,
        prediction.fits,
    )


def _between(step: Step, newest: Prediction | None) -> Estimate:
    """Return the estimate of a step between trainings. `newest`: the training before it, whose model has its shapes."""
    # 2**20 elements in float64: PIECE of weights/methods.py, which is not imported because it imports torch.
    if step.kind == "merge":
        return Estimate(
            step, "pieces of 8 MB of each model", "that of reading each model once"
        )
    if newest is None:
        return Estimate(step, UNKNOWN)
    from vembed.cli.commands.hours import encoding_seconds

    # Weights in float32.
    memory = f"{4 * newest.size.total / GIB:.1f} GB (weights), and micro-batches"
    options = step.options()
    places = _places(
        options.get("data_path"), options.get("corpus_path"), options.get("data")
    )
    times = [
        encoding_seconds(newest.placement, newest.size, newest.speed_alone, place)
        for place in places
    ]
    known = [seconds for seconds in times if seconds is not None]
    if len(known) < len(times) or not known:
        return Estimate(step, memory)
    return Estimate(step, memory, f"{_about(sum(known))} (encoding)", sum(known))


def _about(seconds: float) -> str:
    return "below 1 s" if seconds < 1.0 else f"about {duration(seconds)}"


def _places(*values: Any) -> list[str]:
    """Return the files that options name, each a path or a list of paths and entries with one."""
    entries = [
        path
        for value in values
        for path in (value if isinstance(value, list) else [value])
        if path is not None
    ]
    return [
        str(entry["path"] if isinstance(entry, Mapping) else entry) for entry in entries
    ]
