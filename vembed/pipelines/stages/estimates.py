"""Estimates of memory and time for every step of a pipeline, from the shapes of its model, without weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vembed.config.arguments import TrainArguments
from vembed.config.loading import resolve_run
from vembed.config.stages import MINED, Pipeline, Step
from vembed.errors import UserError
from vembed.pipelines.stages.checks import named_paths
from vembed.progress import duration
from vembed.training.fingerprints import of_model

if TYPE_CHECKING:
    from vembed.pipelines.prediction import Prediction

GIB = 2**30
UNKNOWN = "not estimated"


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory of each process and time of a step, in words."""

    step: Step
    memory: str
    time: str = UNKNOWN
    seconds: float | None = None
    fits: bool = True


def pipeline_table(pipeline: Pipeline, arguments: TrainArguments) -> str:
    """Return the estimates of all steps for a dry run, which fetches nothing and without a model imports no torch."""

    def predict_if_here(stage: TrainArguments) -> Prediction:
        run = resolve_run(stage.source, stage.overrides, stage=stage.stage)
        model = run.config.model
        if of_model(model.model_name, model.model_revision) is None:
            raise UserError(
                f"no files of {model.model_name} here; `vembed plan` looks further"
            )
        from vembed.pipelines.prediction import predict  # imports torch

        return predict(stage)

    return table(estimates(pipeline, arguments, predict_if_here, skips_missing=True))


def estimates(
    pipeline: Pipeline,
    arguments: TrainArguments,
    predict: Callable[[TrainArguments], Prediction],
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
        stage = replace(arguments, stage=step.name, first_stage=None, last_stage=None)
        if before is not None and step.option("model_name") is None:
            stage = _with(stage, f"model_name={models[before.name]}")
        # For a stage that starts from an earlier one this is the name given above: of the first model, whose shapes
        # it has.
        run = resolve_run(stage.source, stage.overrides, stage=step.name)
        models[step.name] = run.config.model.model_name
        remark = ""
        mined = pipeline.mined_before(step.name)
        if mined is not None and step.option("data_path") is None:
            # Until its data are mined, those that they come from stand for them.
            unmined = mined.options().get("data_path")
            is_mined = (pipeline.folder(mined.name) / MINED).is_file()
            if not is_mined and isinstance(unmined, str):
                stage = _with(stage, f"data_path={unmined}")
                remark = " (without the negatives that are to be mined)"
        try:
            newest = predict(stage)
        except UserError as error:
            if not skips_missing:
                raise
            newest = None
            memory = f"{UNKNOWN} ({str(error).splitlines()[0]})"
            step_estimates.append(Estimate(step, memory))
            continue
        memory = f"{newest.needed}: {'fits' if newest.fits else 'does not fit'}"
        time = UNKNOWN
        if newest.seconds is not None:
            time = _about(newest.seconds) + remark
        step_estimates.append(Estimate(step, memory, time, newest.seconds, newest.fits))
    return step_estimates


def table(step_estimates: Sequence[Estimate]) -> str:
    """Return the lines of all steps, and the sum of what is estimated."""
    rows = [("stage", "step", "memory", "time")]
    for estimate in step_estimates:
        step = estimate.step
        rows.append((step.name, step.kind, estimate.memory, estimate.time))
    known = [
        estimate.seconds for estimate in step_estimates if estimate.seconds is not None
    ]
    if known:
        total = _about(sum(known))
        if len(known) < len(step_estimates):
            total += f", without the {len(step_estimates) - len(known)} not estimated"
        rows.append(("all", "", "", total))
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    text = "==== memory of each process and time of each step, estimated\n"
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        text += "  ".join(cells).rstrip() + "\n"
    return text


def _with(arguments: TrainArguments, override: str) -> TrainArguments:
    return replace(arguments, overrides=(*arguments.overrides, override))


def _between(step: Step, newest: Prediction | None) -> Estimate:
    """Return the estimate of a step between trainings. `newest`: the training before it, whose model has its shapes."""
    # 2**20 elements in float64: PIECE of weights/methods.py, which is not imported because it imports torch.
    if step.kind == "merge":
        return Estimate(
            step, "pieces of 8 MB of each model", "that of reading each model once"
        )
    if newest is None:
        return Estimate(step, UNKNOWN)
    from vembed.pipelines.prediction import encoding_seconds

    # Weights in float32.
    memory = f"{4 * newest.size.total / GIB:.1f} GB (weights), and micro-batches"
    options = step.options()
    total = 0.0
    for name in ("data_path", "corpus_path", "data"):
        for path in named_paths(options.get(name)):
            seconds = encoding_seconds(newest, path)
            if seconds is None:
                return Estimate(step, memory)
            total += seconds
    return Estimate(step, memory, f"{_about(total)} (encoding)", total)


def _about(seconds: float) -> str:
    return "below 1 s" if seconds < 1.0 else f"about {duration(seconds)}"
