"""Checks of the steps between trainings before any step is run: their paths, models and conditions on scores."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vembed.config.options import nearest
from vembed.config.paths import is_hub_model, is_inside, missing_path, similar_path
from vembed.config.stages import Pipeline, Step
from vembed.errors import UserError

DATA = ("data_path", "corpus_path", "qrels_path", "data")
"""Options that name files of data, as of `mine`, `merge` and `evaluate` together."""
MODELS = ("model_name", "model", "models", "base")
CUTS = "1,5,10,100"
"""Cut-offs of `vembed eval` without `--ks`."""
COMPARE = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}
# An optional comparison and a decimal number, also `.5` and `1e-3`.
CONDITION = re.compile(r"\s*(>=|<=|>|<)?\s*([+-]?\d*\.?\d+(?:[eE][+-]?\d+)?)\s*")


def located(options: Mapping[str, Any], config: str | None) -> dict[str, Any]:
    """Return the options with relative paths that are not in the current folder, but beside the config file, as those
    of a training are."""

    def locate(value: Any) -> Any:
        if isinstance(value, list):
            return [locate(entry) for entry in value]
        if config is None or not isinstance(value, str) or Path(value).exists():
            return value
        beside = Path(config).parent / value
        return str(beside) if beside.exists() else value

    names = (*DATA, *MODELS)
    return {
        key: locate(value) if key in names else value for key, value in options.items()
    }


def named_paths(value: Any) -> list[str]:
    """Return the paths and names of an option: a text, a list of them, or entries with a path."""
    paths = []
    for entry in value if isinstance(value, list) else [value]:
        path = entry.get("path") if isinstance(entry, Mapping) else entry
        if isinstance(path, str):
            paths.append(path)
    return paths


def check_options(
    pipeline: Pipeline, step: Step, options: Mapping[str, Any], made: Sequence[Path]
) -> None:
    """Raise UserError where a step between names what is not there. `made`: folders of the steps before it."""
    where = f"{pipeline.source}: stage {step.name}: "
    for key in DATA:
        for path in named_paths(options.get(key)):
            problem = None if is_inside(path, made) else missing_path(key, path)
            if problem is not None:
                raise UserError(where + problem)
    before = [
        earlier.name for earlier in pipeline.before(step.name) if earlier.has_model
    ]
    others = {earlier.name for earlier in pipeline.steps} - set(before)
    known = f"the stages before it with a model are {', '.join(before) or 'none'}"
    for key in MODELS:
        for name in named_paths(options.get(key)):
            is_folder = Path(name).expanduser().exists() or is_inside(name, made)
            if name in before or is_folder:
                continue
            near = nearest(name, before)
            if name in others or near is not None:
                hint = f", did you mean {near!r}?" if near else ""
                raise UserError(
                    f"{where}{key}: {name} is neither a folder nor a stage before it with a model{hint} ({known})"
                )
            if not is_hub_model(name):
                raise UserError(
                    f"{where}{key}: {name} is not a folder (looked from {Path.cwd()}){similar_path(name)}; {known}"
                )
    required = options.get("require")
    if step.kind != "evaluate" or required is None:
        return
    if not isinstance(required, Mapping):
        raise UserError(
            f'{where}require: {required!r} is no condition by name; write it as {{nDCG@10: ">= 0.60"}}'
        )
    cuts = options.get("ks", CUTS)
    cuts = cuts if isinstance(cuts, list) else str(cuts).split(",")
    measured = ["spearman", "pearson"]
    for metric in ("ndcg", "mrr", "recall", "map"):
        measured += [f"{metric}@{str(cut).strip()}" for cut in cuts]
    for name, condition in required.items():
        try:
            _parse(name, condition)
        except UserError as error:
            raise UserError(f"{where}{error}") from None
        if str(name).lower().rpartition("/")[2] not in measured:  # also dim256/ndcg@10
            raise UserError(
                f"{where}require: {name} is not among what is measured: {', '.join(measured)}"
            )


def check_requirements(
    scores: Mapping[str, float], required: Mapping[str, Any]
) -> str | None:
    """Return what is not met, in words; None where all is. A plain number is the least that is required."""
    by_name = {name.lower(): value for name, value in scores.items()}
    for name, condition in required.items():
        sign, limit = _parse(name, condition)
        score = by_name.get(name.lower())
        if score is None:
            raise UserError(
                f"require: {name} is not among what is measured: {', '.join(scores)}"
            )
        if not COMPARE[sign](score, limit):
            return f"{name} is {score:.4f}, and {sign} {limit:g} is required"
    return None


def _parse(name: str, condition: Any) -> tuple[str, float]:
    match = CONDITION.fullmatch(str(condition))
    if match is None:
        raise UserError(
            f'require: {name}: {condition!r} is no condition; write it as ">= 0.60"'
        )
    return match[1] or ">=", float(match[2])
