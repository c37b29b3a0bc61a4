"""merge(): several models, adapters or checkpoints in, one model folder out, written piece by piece."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vembed.config.values import ModelDtype
from vembed.errors import UserError
from vembed.evaluation.dataset import open_test_data
from vembed.evaluation.report.record import Scores
from vembed.evaluation.scores import evaluate
from vembed.files import CHECKSUMS, replace_text, write_json
from vembed.models.families.model_files import CODES, read_header, read_object
from vembed.parallel import collectives
from vembed.parallel.session import Session
from vembed.saving.files import ADAPTER_FOLDER, replaced_folder
from vembed.weights.merge_rules import (
    OF_DIFFERENCES,
    MergeMethod,
    Method,
    SlerpOf,
    check_merge,
)
from vembed.weights.sources import (
    DTYPE_BY_CODE,
    ModelFolder,
    Read,
    check_fit,
    default_base,
    is_checkpoint,
    last_checkpoints,
    matched,
    open_source,
    read_range,
    whole_model,
    write_header,
)

log = logging.getLogger("vembed")

RECIPE_FILE = "merge.json"
"""File in a merged model's folder that lists its sources."""
NOT_COPIED = (
    ADAPTER_FOLDER,
    CHECKSUMS,
    RECIPE_FILE,
    "README.md",
    "onnx",
    "openvino",
    "checkpoint-*",
    ".*",
    "*.safetensors",
)
"""In a model's folder: what is of this model alone, and the weights, which are written anew."""


@dataclass(frozen=True)
class MergeTrial:
    """A point of a sweep that was evaluated."""

    at: float
    """Place on the line of two models, or of a base and one model."""
    score: float
    scores: Scores


@dataclass(frozen=True)
class MergeResult:
    """Result of a merge."""

    model_dir: Path
    recipe: Recipe
    models: tuple[str, ...]
    """Those that are in it."""
    score: float | None
    """On the evaluation data, where some were given."""
    trials: tuple[MergeTrial, ...]
    """The points of a sweep."""


def merge(
    models: str | Path | Sequence[str | Path],
    output: str | Path,
    method: MergeMethod = "mean",
    *,
    weights: Sequence[float] | None = None,
    base: str | Path | None = None,
    of: SlerpOf | None = None,
    density: float | None = None,
    scale: float | None = None,
    interpolate: float | None = None,
    last: int | None = None,
    sweep_points: Sequence[float] | None = None,
    data: str | Path | None = None,
    metric: str = "auto",
    dtype: ModelDtype = "auto",
    seed: int | None = None,
    session: Session | None = None,
) -> MergeResult:
    """Merge models into the new folder `output`, one piece of one tensor at a time.

    Args:
        models: folders, Hub names, adapters, checkpoints, or runs (with `last`: their last checkpoints).
        output: the new folder.
        method: mean, weighted, slerp, task_arithmetic, ties, dare or soup.
        weights: one weight per model.
        base: the model that differences are taken from. Default: the one that all were tuned from.
        of: slerp: auto takes the differences where a base is given.
        density: ties, dare: the share that is kept. Default: 0.2.
        scale: task_arithmetic, ties, dare: factor of the difference. Default: 1.
        interpolate: 1, the default, is the merged model, 0 the base.
        sweep_points: evaluate these points of the line between two models, or a base and a model, and write the best.
        data: evaluation data for soup and sweep.
        seed: dare: what its draws depend on. Default: 42.
        session: the process group, if several processes call this together.
    """
    if isinstance(models, str | Path):
        models = [models]
    target = Path(output)
    names = _with_checkpoints([str(model) for model in models], last)
    if target.exists():
        raise UserError(f"{target} exists already; give a new folder")
    options: dict[str, Any] = {
        "density": density,
        "scale": scale,
        "interpolate": interpolate,
        "seed": seed,
    }
    check_merge(
        names,
        method,
        weights=weights,
        base=base,
        of=of,
        sweep_points=sweep_points,
        data=data,
        **options,
    )
    takes_differences = of == "differences" or (of != "weights" and base is not None)
    recipe = Recipe(
        method="mean" if method == "soup" else method,
        weights=tuple(weights or [1.0] * len(names)),
        of_differences=method == "slerp" and takes_differences,
        **{name: value for name, value in options.items() if value is not None},
    )
    is_main = collectives.rank() == 0
    stored_dtype = None if dtype == "auto" else dtype
    evaluation = None
    if data is not None:
        evaluation = open_test_data(data)
        metric = evaluation.metric if metric == "auto" else metric
    # A folder beside the target for models that are made on the way, of the same name on all ranks.
    scratch = target.absolute().with_name(f".{target.name}.merging")

    def scores_of(folder: Path) -> Scores:
        """Return all metrics of a model. Collective."""
        assert evaluation is not None
        scores = evaluate(folder, evaluation, session=session)
        if metric not in scores:
            raise UserError(
                f"metric {metric} is not among what is measured: {', '.join(scores)}"
            )
        return scores

    def write(numbers: Sequence[int], recipe: Recipe, folder: Path) -> None:
        """Write the merge of some of the models. Collective: the first process writes."""
        if is_main:
            members = [sources[number] for number in numbers]
            write_merge(members, base_source, stored_dtype, recipe, folder)
        collectives.barrier()

    def scores_of_merge(numbers: Sequence[int], recipe: Recipe) -> Scores:
        """Return all metrics of the merge of some of the models. Collective."""
        candidate = scratch / "candidate"
        write(numbers, recipe, candidate)
        return scores_of(candidate)

    if is_main:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    collectives.barrier()
    try:
        # Adapters and checkpoints become whole models first. One rank writes, and the others wait for the files.
        folders = [scratch / f"model-{number}" for number in range(len(names))]
        if is_main:
            for name, folder in zip(names, folders, strict=True):
                whole_model(name, folder)
        collectives.barrier()
        sources = []
        for name, folder in zip(names, folders, strict=True):
            # There is no folder for what is a whole model already.
            sources.append(open_source(name, folder if folder.is_dir() else None))
        base_name = None
        base_source = None
        if recipe.needs_base or (sweep_points is not None and len(names) == 1):
            base_name = default_base(sources) if base is None else str(base)
            if base_name is None:
                raise UserError(
                    f"{method} needs the model that the others were tuned from: give it as base (--base)"
                )
            log.info("base: %s", base_name)
            base_source = open_source(base_name)
        # What does not fit is said by every rank, before anything is written.
        check_fit(sources, base_source)
        chosen = list(range(len(names)))
        trials = []
        if method == "soup":
            chosen = _choose_members(
                [scores_of(source.folder)[metric] for source in sources],
                lambda members: scores_of_merge(members, _mean(members))[metric],
                names,
            )
            recipe = _mean(chosen)
        for at in sweep_points or ():
            scores = scores_of_merge(chosen, _at_point(recipe, at))
            trials.append(MergeTrial(at, scores[metric], scores))
            log.info("sweep: at %.3g: %s %.4f", at, metric, scores[metric])
        if trials:
            best = max(trials, key=lambda trial: trial.score)
            recipe = _at_point(recipe, best.at)
        write(chosen, recipe, target)
        if trials and is_main:
            start, end = names if len(names) == 2 else (base_name, names[0])
            points = [asdict(trial) for trial in trials]
            sweep = {"metric": metric, "from": start, "to": end, "points": points}
            write_json(target / "sweep.json", sweep)
    finally:
        if is_main:
            shutil.rmtree(scratch, ignore_errors=True)
    score = None if evaluation is None else scores_of(target)[metric]
    merged = tuple(names[number] for number in chosen)
    return MergeResult(target, recipe, merged, score, tuple(trials))


def _mean(members: Sequence[int]) -> Recipe:
    return Recipe("mean", (1.0,) * len(members))


def _choose_members(
    alone: Sequence[float],
    score_of: Callable[[Sequence[int]], float],
    names: Sequence[str],
) -> list[int]:
    """Return the members of a greedy soup. `alone`: the score of each model. `score_of`: that of a mean of some.

    The best member is in it. In the order of their own scores the others are tried one by one, and one is kept if the
    mean with it scores no worse, so the soup is never below its best member on these data.
    """
    for name, score in zip(names, alone, strict=True):
        log.info("soup: %s alone: %.4f", name, score)
    first, *others = sorted(range(len(alone)), key=lambda number: -alone[number])
    chosen = [first]
    best = alone[first]
    for number in others:
        score = score_of([*chosen, number])
        outcome = "kept" if score >= best else "left out"
        log.info("soup: with %s: %.4f (%s)", names[number], score, outcome)
        if score >= best:
            chosen.append(number)
            best = score
    return chosen


def _at_point(recipe: Recipe, at: float) -> Recipe:
    """Return the recipe at a point of the line: of two models, from the first (0) to the second (1); of one model, from
    its base to itself."""
    if len(recipe.weights) == 1:
        return replace(recipe, interpolate=at)
    method = "weighted" if recipe.method == "mean" else recipe.method
    return replace(recipe, method=method, weights=(1 - at, at))


def _with_checkpoints(names: Sequence[str], last: int | None) -> list[str]:
    """Return the models with each run replaced by its last checkpoints, if these are asked for."""
    if last is None:
        return list(names)
    expanded = []
    has_run = False
    for name in names:
        path = Path(name).expanduser()
        if (path / "config.yaml").is_file() and not is_checkpoint(path):
            has_run = True
            expanded += [str(checkpoint) for checkpoint in last_checkpoints(path, last)]
        else:
            expanded.append(name)
    if not has_run:
        raise UserError(
            f"last: {last} asks for checkpoints of a run, and {names[0]} is no run's output folder"
        )
    return expanded


# ---- writing -------------------------------------------------------------------------------------------------------


def write_merge(
    sources: Sequence[ModelFolder],
    base: ModelFolder | None,
    dtype: str | None,
    recipe: Recipe,
    target: Path,
) -> None:
    """Write the merged model: the files of the first one, with the weights of all. The models fit together
    (`check_fit`). `dtype`: of the stored weights. None: the first model's."""
    root = sources[0].folder
    files = set()
    for tensors in sources[0].files.values():
        files |= {entry.path for entry in tensors.values()}
    not_copied = shutil.ignore_patterns(*NOT_COPIED)
    described = {
        "models": [source.name for source in sources],
        "base": base.name if base is not None and recipe.needs_base else None,
        **asdict(recipe),
    }
    with replaced_folder(target) as folder:
        shutil.copytree(root, folder, dirs_exist_ok=True, ignore=not_copied)
        for path in sorted(files):
            merged_file = folder / path.relative_to(root)
            _write_file(sources, base, dtype, recipe, path, merged_file)
        settings = read_object(folder / "config.json")
        if dtype is not None and settings:
            # The key's older name would contradict.
            settings.pop("torch_dtype", None)
            write_json(folder / "config.json", {**settings, "dtype": dtype})
        write_json(folder / RECIPE_FILE, described)
        replace_text(folder / "README.md", _card(described))


def _write_file(
    sources: Sequence[ModelFolder],
    base: ModelFolder | None,
    dtype: str | None,
    recipe: Recipe,
    path: Path,
    target: Path,
) -> None:
    """Write the merged tensors of the first model's file `path`."""
    first = sources[0]
    subfolder = path.parent.relative_to(first.folder).as_posix().removeprefix(".")
    stored, metadata = read_header(path)
    entries = {}
    for name, entry in stored.items():
        entries[name] = entry
        if dtype is not None and DTYPE_BY_CODE[entry.dtype].is_floating_point:
            entries[name] = replace(entry, dtype=CODES[dtype])
    names_of_sources = [matched(first, source)[subfolder] for source in sources]
    base_names = {} if base is None else matched(first, base)[subfolder]
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        write_header(file, entries, metadata)
        for name, entry in entries.items():
            stored_dtype = DTYPE_BY_CODE[entry.dtype]
            models = []
            for source, names in zip(sources, names_of_sources, strict=True):
                if name in names:
                    models.append(source.reader(subfolder, names[name]))
            below = None
            if base is not None and name in base_names:
                below = base.reader(subfolder, base_names[name])
            # Counts and tables of positions have no mean; a pooler that some lack is never used.
            is_merged = stored_dtype.is_floating_point and len(models) == len(sources)
            if not is_merged or (recipe.needs_base and below is None):
                pieces = iter([read_range(stored[name], 0, entry.size)])
            else:
                pieces = merged_pieces(recipe, name, entry.size, models, below)
            for piece in pieces:
                file.write(piece.to(stored_dtype).view(torch.uint8).numpy().data)


def _card(described: dict[str, Any]) -> str:
    """Return a card with what the model was merged from."""
    public = {**described, "models": list(map(_public, described["models"]))}
    if described["base"]:
        public["base"] = _public(described["base"])
    front = "---\nlibrary_name: sentence-transformers\ntags:\n- sentence-transformers\n- feature-extraction\n- merge\n---"
    settings = f"```json\n{json.dumps(public, indent=2)}\n```"
    return f"{front}\n\n# Embedding model\n\nMerged by vembed:\n\n{settings}\n"


def _public(name: str) -> str:
    """Return a Hub name as it is, and of a folder only its last two parts, which name nothing of the machine."""
    return "/".join(Path(name).parts[-2:])


# ---- arithmetic: how the values of one tensor in several models become one, in pieces and in float64 ---------------


PIECE = 2**20
"""Elements that are computed at once. `dare` draws by piece: another number would draw other elements."""
MIN_SINE = 1e-12
"""Below this sine of the angle between two tensors, slerp is a straight line."""


@dataclass(frozen=True)
class Recipe:
    """Method of a merge, with its options."""

    method: Method
    weights: tuple[float, ...]
    """One for each model."""
    density: float = 0.2
    """ties: share of each difference that is kept, the largest; dare: share that is kept, by chance."""
    scale: float = 1.0
    """task_arithmetic, ties, dare: factor of the merged difference."""
    interpolate: float = 1.0
    """1: the merged model; 0: the base."""
    of_differences: bool = False
    """slerp: of the differences from the base instead of the weights."""
    seed: int = 42
    """dare: what the draws depend on, besides the tensor's name and the model's place."""

    @property
    def needs_base(self) -> bool:
        """True if a base model takes part."""
        return (
            self.method in OF_DIFFERENCES
            or self.of_differences
            or self.interpolate != 1.0
        )


def merged_pieces(
    recipe: Recipe,
    name: str,
    size: int,
    models: Sequence[Read],
    base: Read | None,
) -> Iterator[Tensor]:
    """Yield the merged tensor's values in float64, piece by piece. `base`: needed where `recipe.needs_base`."""
    coefficients = list(recipe.weights)
    thresholds = [0.0] * len(models)
    if recipe.method == "mean":
        coefficients = [1 / len(models)] * len(models)
    elif recipe.method == "weighted":
        coefficients = [weight / sum(recipe.weights) for weight in recipe.weights]
    elif recipe.method == "slerp":
        coefficients = _slerp_coefficients(recipe, size, models, base)
    elif recipe.method == "ties":
        assert base is not None
        thresholds = [_threshold(read, base, size, recipe.density) for read in models]
    for start in range(0, size, PIECE):
        stop = min(start + PIECE, size)
        below = base(start, stop) if base is not None and recipe.needs_base else None
        if recipe.method in OF_DIFFERENCES or recipe.of_differences:
            assert below is not None
            if recipe.method == "ties":
                # It elects signs, so it needs the piece of all models at once.
                differences = [read(start, stop).sub_(below) for read in models]
                change = _ties(differences, recipe.weights, thresholds)
            else:
                # One after the other, so that only one model's values are in memory beside the sum.
                change = torch.zeros(stop - start, dtype=torch.float64)
                for number, read in enumerate(models):
                    difference = read(start, stop).sub_(below)
                    if recipe.method == "dare":
                        difference *= _drawn(recipe, name, number, start, stop - start)
                    change.add_(difference, alpha=coefficients[number])
            merged = below + recipe.scale * change
        else:
            merged = torch.zeros(stop - start, dtype=torch.float64)
            for read, factor in zip(models, coefficients, strict=True):
                merged.add_(read(start, stop), alpha=factor)
        if recipe.interpolate != 1.0:
            assert below is not None
            merged = below + recipe.interpolate * (merged - below)
        yield merged


def _slerp_coefficients(
    recipe: Recipe,
    size: int,
    models: Sequence[Read],
    base: Read | None,
) -> list[float]:
    """Return the coefficients of the point at w2 / (w1 + w2) of the arc from the first tensor to the second."""
    # The scalar products of both tensors [2, 2], which add up over the pieces.
    gram = torch.zeros(2, 2, dtype=torch.float64)
    for start in range(0, size, PIECE):
        stop = min(start + PIECE, size)
        values = torch.stack([read(start, stop) for read in models])
        if recipe.of_differences:
            assert base is not None
            values -= base(start, stop)
        gram += values @ values.T
    second = recipe.weights[1] / sum(recipe.weights)
    first = 1 - second
    lengths = float(gram[0, 0] * gram[1, 1]) ** 0.5
    # Between two directions only: a tensor of zeros has none.
    if lengths > 0:
        cosine = float(gram[0, 1]) / lengths
        angle = math.acos(min(max(cosine, -1.0), 1.0))
        # For an angle of 0 both tend to the shares themselves.
        if math.sin(angle) > MIN_SINE:
            first = math.sin(first * angle) / math.sin(angle)
            second = math.sin(second * angle) / math.sin(angle)
    return [first, second]


def _threshold(
    read: Read,
    base: Read,
    size: int,
    density: float,
) -> float:
    """Return the magnitude of a difference, rounded to float32, that the share `density` of the elements reach."""
    magnitudes = np.empty(size, dtype=np.float32)
    for start in range(0, size, PIECE):
        stop = min(start + PIECE, size)
        difference = read(start, stop).sub_(base(start, stop))
        magnitudes[start:stop] = difference.abs_().numpy()
    num_kept = max(round(density * size), 1)
    magnitudes.partition(size - num_kept)
    return float(magnitudes[size - num_kept])


def _ties(
    differences: list[Tensor],
    weights: Sequence[float],
    thresholds: Sequence[float],
) -> Tensor:
    """Trim each difference to its largest elements, elect a sign for each element, average those that have it."""
    total = torch.zeros_like(differences[0])
    for number, difference in enumerate(differences):
        difference.mul_(difference.abs().float() >= thresholds[number])
        total.add_(difference, alpha=weights[number])
    # A sign is elected by the sum of weighted differences, as TIES does it, not by the number of models.
    sign = total.sign()
    agreeing_sum = torch.zeros_like(total)
    agreeing_weight = torch.zeros_like(total)
    for difference, weight in zip(differences, weights, strict=True):
        agrees = (difference.sign() == sign) & (difference != 0)
        agreeing_sum.add_(difference * agrees, alpha=weight)
        agreeing_weight.add_(agrees, alpha=weight)
    return torch.where(agreeing_weight != 0, agreeing_sum / agreeing_weight, 0.0)


def _drawn(
    recipe: Recipe,
    name: str,
    model: int,
    start: int,
    count: int,
) -> Tensor:
    """Return 1 / density where an element is kept and 0 elsewhere, the same for every order of tensors and files."""
    text = f"{recipe.seed}/{name}/{model}/{start}".encode()
    # 7 bytes: manual_seed takes any number below 2**63.
    number = int.from_bytes(hashlib.sha256(text).digest()[:7], "little")
    draw = torch.Generator().manual_seed(number)
    is_kept = torch.rand(count, generator=draw) < recipe.density
    return is_kept.double() / recipe.density
