"""merge(): several models, adapters or checkpoints in, one model folder out."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch

from vembed.errors import UserError
from vembed.evaluation.report.pictures import write_picture
from vembed.evaluation.report.plots import sweep_svg
from vembed.evaluation.report.record import metric_name
from vembed.parallel import collectives
from vembed.parallel.session import Session
from vembed.saving.layout import write_json
from vembed.weights.checkpoints import is_checkpoint, last_checkpoints, whole_model
from vembed.weights.inputs import Source, default_base, open_source
from vembed.weights.merge_rules import MergeMethod, check_merge, check_numbers
from vembed.weights.merging import Merge
from vembed.weights.methods import Recipe
from vembed.weights.trials import Judge, Trial, at_point, greedy_soup, sweep

log = logging.getLogger("vembed")

Of = Literal["auto", "weights", "differences"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class MergeResult:
    """Result of a merge."""

    model_dir: Path
    recipe: Recipe
    models: tuple[str, ...]
    """Those that are in it."""
    score: float | None = None
    """On the evaluation data, where some were given."""
    trials: tuple[Trial, ...] = field(default=())
    """The points of a sweep."""


def merge(
    models: str | Path | Sequence[str | Path],
    output: str | Path,
    method: MergeMethod = "mean",
    *,
    weights: Sequence[float] | None = None,
    base: str | Path | None = None,
    of: Of = "auto",
    density: float = 0.2,
    scale: float = 1.0,
    interpolate: float = 1.0,
    last: int | None = None,
    sweep_points: Sequence[float] | None = None,
    data: str | Path | None = None,
    metric: str = "auto",
    dtype: Dtype = "auto",
    seed: int = 42,
    session: Session | None = None,
) -> MergeResult:
    """Merge models into the new folder `output`, one piece of one tensor at a time.

    Args:
        models: folders, Hub names, adapters, checkpoints, or runs (with `last`: their last checkpoints).
        output: the new folder.
        method: mean, weighted, slerp, task_arithmetic, ties, dare or soup.
        weights: one weight per model.
        base: the model that differences are taken from. Default: the one that all were tuned from.
        interpolate: 1 is the merged model, 0 the base.
        sweep_points: evaluate these points of the line between two models, or a base and a model, and write the best.
        data: evaluation data for soup and sweep.
        session: the process group, if several processes call this together.
    """
    given = [
        str(one) for one in ([models] if isinstance(models, str | Path) else models)
    ]
    target = Path(output)
    names = _expanded(given, last)
    if target.exists():
        raise UserError(f"{target} exists already; give a new folder")
    check_merge(
        names,
        method,
        weights,
        sweep_points,
        has_data=data is not None,
        interpolate=interpolate,
    )
    check_numbers(
        method,
        density,
        scale=scale,
        interpolate=interpolate,
        weights=weights,
        points=sweep_points,
    )
    recipe = Recipe(
        method="mean" if method == "soup" else method,
        weights=tuple(weights) if weights is not None else (1.0,) * len(names),
        density=density,
        scale=scale,
        interpolate=interpolate,
        of_differences=method == "slerp"
        and (of == "differences" or (of == "auto" and base is not None)),
        seed=seed,
    )
    stored = None if dtype == "auto" else getattr(torch, dtype)
    is_main = session is None or session.is_main
    judge = Judge(str(data), metric, session) if data is not None else None
    with _scratch(target, is_main=is_main) as scratch:
        sources = _opened(names, scratch, is_main=is_main)
        wants_base = recipe.needs_base or (sweep_points is not None and len(names) == 1)
        base_name = _base_name(base, sources, method) if wants_base else None
        below = open_source(base_name) if base_name is not None else None
        fitting = Merge(sources, below)

        def write(chosen: Sequence[int], recipe: Recipe, folder: Path) -> None:
            part = (
                fitting
                if list(chosen) == list(range(len(sources)))
                else fitting.of(chosen)
            )
            part.write(recipe, folder, dtype=stored)

        chosen, score, trials = list(range(len(names))), None, []
        if method == "soup":
            assert judge is not None
            members = [one.folder for one in sources]
            chosen, score = greedy_soup(judge, members, write, scratch / "candidate")
            recipe = Recipe("mean", (1.0,) * len(chosen))
        elif sweep_points is not None:
            assert judge is not None
            trials = sweep(judge, recipe, sweep_points, write, scratch / "candidate")
            best = max(range(len(trials)), key=lambda place: trials[place].score)
            recipe, score = at_point(recipe, trials[best].at), trials[best].score
        if is_main:
            write(chosen, recipe, target)
            if trials:
                assert judge is not None
                _draw(target, trials, judge.metric, names, base_name)
        collectives.barrier()
    if judge is not None and score is None:
        score = judge.score(target)
    return MergeResult(
        target, recipe, tuple(names[place] for place in chosen), score, tuple(trials)
    )


def _opened(names: Sequence[str], scratch: Path, *, is_main: bool) -> list[Source]:
    """Open the models. Adapters and checkpoints become whole models in `scratch` first. Collective."""
    folders = {name: scratch / f"model-{place}" for place, name in enumerate(names)}
    if is_main:
        made = {name: whole_model(name, folder) for name, folder in folders.items()}
    collectives.barrier()
    # whole_model gives None for a name that is a model already, which only rank 0 knows; a folder says so to the
    # others.
    if not is_main:
        made = {
            name: folder if folder.is_dir() else None
            for name, folder in folders.items()
        }
    return [open_source(name, made[name]) for name in names]


def _base_name(
    base: str | Path | None, sources: Sequence[Source], method: MergeMethod
) -> str:
    """Return the name of the base model: the one given, or the one that all sources were tuned from."""
    if base is not None:
        return str(base)
    found = default_base(sources)
    if found is None:
        raise UserError(
            f"{method} needs the model that the others were tuned from: give it as base (--base)"
        )
    log.info("base: %s (the model that all were tuned from)", found)
    return found


def _expanded(names: Sequence[str], last: int | None) -> list[str]:
    """Return the models with each run replaced by its last checkpoints."""
    found: list[str] = []
    for name in names:
        path = Path(name).expanduser()
        is_run = (
            path.is_dir()
            and not is_checkpoint(path)
            and (path / "config.yaml").is_file()
        )
        if last is not None and is_run:
            found += [str(one) for one in last_checkpoints(path, last)]
        elif is_run and (path / "final").is_dir():
            found.append(str(path / "final"))
        else:
            found.append(name)
    if last is not None and len(found) == len(names) and last != 1:
        raise UserError(
            f"last: {last} asks for checkpoints of a run, and {names[0]} is no run's output folder"
        )
    return found


@contextmanager
def _scratch(target: Path, *, is_main: bool) -> Iterator[Path]:
    """A folder beside the target for models that are made on the way; of the same name on all ranks."""
    folder = target.absolute().with_name(f".{target.name}.merging")
    if is_main:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    collectives.barrier()
    try:
        yield folder
    finally:
        if is_main:
            shutil.rmtree(folder, ignore_errors=True)


def _draw(
    target: Path,
    trials: Sequence[Trial],
    metric: str,
    names: Sequence[str],
    base: str | None,
) -> None:
    ends = (names[0], names[1]) if len(names) == 2 else (base or "base", names[0])
    scores = [one.score for one in trials]
    label = f"0: {Path(ends[0]).name}    1: {Path(ends[1]).name}"
    svg = sweep_svg(
        [one.at for one in trials],
        scores,
        label,
        max(range(len(scores)), key=scores.__getitem__),
    )
    for kind in ("svg", "png"):
        write_picture(target / f"sweep.{kind}", svg, metric_name(metric))
    write_json(
        target / "sweep.json",
        {
            "metric": metric,
            "from": ends[0],
            "to": ends[1],
            "points": list(map(asdict, trials)),
        },
    )
