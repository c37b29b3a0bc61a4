"""Checks of the steps between trainings before any step is run: their paths, the models that they name, conditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vembed.config.options import nearest
from vembed.config.paths import is_hub_model, is_inside, missing_path, similar_path
from vembed.config.stages import Pipeline, Step
from vembed.errors import UserError
from vembed.pipelines.stages.requirements import check_conditions

DATA = ("data_path", "corpus_path", "qrels_path", "data")
"""Options that name files of data, as of `mine`, `merge` and `evaluate` together."""
MODELS = ("model_name", "model", "models", "base")
CUTS = "1,5,10,100"
"""Cut-offs of `vembed eval` without `--ks`."""


def located(options: Mapping[str, Any], config: str | None) -> dict[str, Any]:
    """Return the options with relative paths that are not in the current folder, but beside the config file, as those
    of a training are."""
    if config is None:
        return dict(options)
    beside = Path(config).parent

    def locate(value: Any) -> Any:
        if isinstance(value, list):
            return [locate(entry) for entry in value]
        if (
            not isinstance(value, str)
            or Path(value).exists()
            or not (beside / value).exists()
        ):
            return value
        return str(beside / value)

    return {
        key: locate(value) if key in (*DATA, *MODELS) else value
        for key, value in options.items()
    }


def check_options(
    pipeline: Pipeline, step: Step, options: Mapping[str, Any], made: Sequence[Path]
) -> None:
    """Raise UserError where a step between names what is not there. `made`: folders of the steps before it."""
    problem = (
        _missing_data(options, made)
        or _missing_model(pipeline, step, options, made)
        or _unmeasured(step, options)
    )
    if problem is not None:
        raise UserError(f"{pipeline.source}: stage {step.name}: {problem}")


def _missing_data(options: Mapping[str, Any], made: Sequence[Path]) -> str | None:
    for key in DATA:
        for path in _texts(options.get(key)):
            if (
                not is_inside(path, made)
                and (sentence := missing_path(key, path)) is not None
            ):
                return sentence
    return None


def _missing_model(
    pipeline: Pipeline, step: Step, options: Mapping[str, Any], made: Sequence[Path]
) -> str | None:
    before = [
        earlier.name for earlier in pipeline.before(step.name) if earlier.has_model
    ]
    others = {earlier.name for earlier in pipeline.steps} - set(before)
    for key in MODELS:
        for name in _texts(options.get(key)):
            if (
                name in before
                or Path(name).expanduser().exists()
                or is_inside(name, made)
            ):
                continue
            known = (
                f"the stages before it with a model are {', '.join(before) or 'none'}"
            )
            near = nearest(name, before)
            if name in others or near is not None:
                meant = f", did you mean {near!r}?" if near else ""
                return f"{key}: {name} is neither a folder nor a stage before it with a model{meant} ({known})"
            if not is_hub_model(name):
                return f"{key}: {name} is not a folder (looked from {Path.cwd()}){similar_path(name)}; {known}"
    return None


def _unmeasured(step: Step, options: Mapping[str, Any]) -> str | None:
    if step.kind != "evaluate" or options.get("require") is None:
        return None
    cuts = options.get("ks", CUTS)
    try:
        check_conditions(
            options["require"],
            ",".join(map(str, cuts)) if isinstance(cuts, list) else str(cuts),
        )
    except UserError as error:
        return str(error)
    return None


def _texts(value: Any) -> list[str]:
    """Return the paths and names of an option: a text, a list of them, or entries with a path."""
    entries = [
        earlier["path"]
        if isinstance(earlier, Mapping) and "path" in earlier
        else earlier
        for earlier in _listed(value)
    ]
    return [entry for entry in entries if isinstance(entry, str)]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]
