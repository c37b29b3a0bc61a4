"""edit(): a model and two sets of texts in, a model without what tells them apart out, with scores before and after."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from vembed.config.schema import TrainConfig
from vembed.data.examples import Kind
from vembed.errors import UserError
from vembed.evaluation.dataset import TEST_FIRST, open_eval_data
from vembed.evaluation.report.pictures import write_picture
from vembed.evaluation.report.plots import front_svg
from vembed.evaluation.report.record import metric_name
from vembed.inference.embedder import Embedder
from vembed.parallel import collectives
from vembed.parallel.session import Session
from vembed.saving.layout import write_json
from vembed.weights.directions import Direction
from vembed.weights.editing import Editor, EditPlan, TextSets, Where

log = logging.getLogger("vembed")

EDIT_FILE = "edit.json"
FEWEST_TEXTS = 8
"""In each set: half of them estimate the direction, the other half test the probe."""
MOST_STRENGTH = 1.5
DEFAULT_DROP = 0.01


@dataclass(frozen=True)
class EditTrial:
    """One plan that was tried."""

    plan: EditPlan
    scores: dict[str, float]


@dataclass(frozen=True)
class EditResult:
    """Result of an edit."""

    model_dir: Path
    plan: EditPlan
    before: dict[str, float]
    after: dict[str, float]
    """`probe`, `across` and the scores on the evaluation data."""
    trials: tuple[EditTrial, ...] = field(default=())


def edit(
    model: str | Path,
    output: str | Path,
    first: str | Path | Sequence[str],
    second: str | Path | Sequence[str],
    *,
    where: Where = "layers",
    direction: Direction = "mean_difference",
    components: int = 1,
    strength: float = 1.0,
    layers: Sequence[int] | None = None,
    kind: Kind = "document",
    data: str | Path | None = None,
    trials: int = 0,
    max_drop: float = DEFAULT_DROP,
    seed: int = 42,
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    trust_remote_code: bool = False,
    session: Session | None = None,
) -> EditResult:
    """Remove what tells two sets of texts apart from a model, and write it to the new folder `output`.

    Args:
        model: a folder, a run or a Hub name.
        output: the new folder.
        first: texts of one kind, as a list or a file with one text per line.
        second: texts of the other kind.
        where: layers (the weights), embedding (a linear layer behind the model) or both.
        data: evaluation data, scored before and after.
        trials: search over strength, layers and components with so many trials. 0: no search.
        max_drop: largest loss of the main score that the search accepts.
        session: the process group. If its strategy is fsdp, the model is sharded.
    """
    target = Path(output)
    sets = TextSets(_texts(first), _texts(second))
    plan = EditPlan(
        where,
        direction,
        components,
        strength,
        None if layers is None else tuple(layers),
    )
    _check(target, sets, plan, trials)
    # Opened before the model is loaded: a mistake in the data shows at once. TrainConfig only carries how records are
    # read.
    evaluation = None
    if data is not None:
        config = TrainConfig(model_name=str(model), data_path=str(data))
        evaluation = open_eval_data(config, str(data), splits=TEST_FIRST)
    embedder = Embedder(
        model,
        torch_dtype=torch_dtype,
        mixed_precision="no",
        trust_remote_code=trust_remote_code,
        session=session,
    )
    editor = Editor(embedder, sets, kind, evaluation, keeps_original=trials > 0)
    before = editor.scores()
    log.info("before: %s", _line(before))
    tried: list[EditTrial] = []
    if trials:
        tried = _search(editor, plan, trials, seed)
        plan = _chosen(tried, before, editor.metric, max_drop)
    editor.apply(plan)
    after = editor.scores()
    log.info("after: %s", _line(after))
    editor.save(target)
    result = EditResult(target, plan, before, after, tuple(tried))
    if session is None or session.is_main:
        _write(result, editor.metric)
    collectives.barrier()
    return result


def _texts(given: str | Path | Sequence[str]) -> tuple[str, ...]:
    if not isinstance(given, str | Path):
        return tuple(given)
    try:
        # Not splitlines(): it splits at line separators inside a text too, and pairs of the two files would shift.
        lines = Path(given).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{given} cannot be read as a file of texts, one per line: {error}"
        ) from error
    return tuple(line for line in lines if line.strip())


def _check(target: Path, sets: TextSets, plan: EditPlan, trials: int) -> None:
    if target.exists():
        raise UserError(f"{target} exists already; give a new folder")
    for texts in (sets.first, sets.second):
        if len(texts) < FEWEST_TEXTS:
            raise UserError(
                f"a set has {len(texts)} texts, and each needs at least {FEWEST_TEXTS}: half of them estimate the "
                "direction, the other half test what is left of it"
            )
    if plan.direction == "erase" and plan.where != "embedding":
        raise UserError(
            "direction: erase is a map behind the model: use it with where: embedding"
        )
    if plan.components != 1 and plan.direction != "principal":
        raise UserError(
            f"components: {plan.components} is for direction: principal; {plan.direction} has one"
        )
    if plan.layers is not None and plan.where == "embedding":
        raise UserError("layers are of where: layers; the embedding has none")
    if trials and find_spec("optuna") is None:
        raise UserError(
            "trials are searched by optuna, which is not installed: pip install optuna"
        )


# ---- the search ------------------------------------------------------------------------------------------------


def _search(editor: Editor, plan: EditPlan, trials: int, seed: int) -> list[EditTrial]:
    """Try plans that rank 0 proposes, by strength, range of layers and number of components."""
    if editor.metric is None:
        raise UserError(
            "a search weighs the probe against a main score: give data, or sets of equal length"
        )
    deepest = editor.deepest
    with ExitStack() as stack:
        study = _study(seed, stack) if collectives.rank() == 0 else None
        found: list[EditTrial] = []
        for number in range(trials):
            # Rank 0 alone has the study; the others apply what it proposes, since every method of the editor is
            # collective.
            asked = study.ask() if study is not None else None
            proposed = collectives.broadcast_json(
                _proposal(asked, plan, deepest) if asked is not None else None
            )
            candidate = EditPlan(
                plan.where,
                plan.direction,
                proposed["components"],
                proposed["strength"],
                None if proposed["layers"] is None else tuple(proposed["layers"]),
            )
            editor.apply(candidate)
            scores = editor.scores()
            editor.undo()
            found.append(EditTrial(candidate, scores))
            if study is not None and asked is not None:
                study.tell(asked, [scores["probe"], scores[editor.metric]])
            log.info(
                "trial %d of %d: %s; strength %.3f",
                number + 1,
                trials,
                _line(scores),
                candidate.strength,
            )
    return found


def _study(seed: int, stack: ExitStack) -> Any:
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    stack.callback(optuna.logging.set_verbosity, before)
    return optuna.create_study(
        directions=["minimize", "maximize"],
        sampler=optuna.samplers.TPESampler(seed=seed),
    )


def _proposal(asked: Any, plan: EditPlan, deepest: int) -> dict[str, Any]:
    strength = asked.suggest_float("strength", 0.0, MOST_STRENGTH)
    components = (
        asked.suggest_int("components", 1, plan.components)
        if plan.direction == "principal"
        else 1
    )
    layers = None
    if plan.where != "embedding":
        first, last = (
            asked.suggest_int("first_layer", 0, deepest),
            asked.suggest_int("last_layer", 0, deepest),
        )
        # Two independent ends, put in order: a range that depends on the other end would be another distribution in
        # every trial.
        layers = list(range(min(first, last), max(first, last) + 1))
    return {"strength": strength, "components": components, "layers": layers}


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the places of the points (low is good, high is good) that no other point beats in both."""
    return [
        place
        for place, (low, high) in enumerate(points)
        if not any(x <= low and y >= high and (x, y) != (low, high) for x, y in points)
    ]


def _chosen(
    tried: Sequence[EditTrial],
    before: dict[str, float],
    metric: str | None,
    max_drop: float,
) -> EditPlan:
    """Return the plan of the lowest probe among those that hold the main score, else of the best main score."""
    assert metric is not None
    holding = [one for one in tried if one.scores[metric] >= before[metric] - max_drop]
    if holding:
        return min(
            holding, key=lambda one: (one.scores["probe"], -one.scores[metric])
        ).plan
    log.warning(
        "no trial held %s within %g of %.4f: the best of them is taken",
        metric,
        max_drop,
        before[metric],
    )
    return max(tried, key=lambda one: one.scores[metric]).plan


# ---- what is written -------------------------------------------------------------------------------------------


def _write(result: EditResult, metric: str | None) -> None:
    described: dict[str, Any] = {
        "plan": asdict(result.plan),
        "before": result.before,
        "after": result.after,
    }
    if result.trials:
        assert metric is not None
        points = [(one.scores["probe"], one.scores[metric]) for one in result.trials]
        front = pareto_front(points)
        described["trials"] = [asdict(one) for one in result.trials]
        described["front"] = front
        start = (result.before["probe"], result.before[metric])
        svg = front_svg(points, front, start, "accuracy of the probe (low: removed)")
        for kind in ("svg", "png"):
            write_picture(result.model_dir / f"trials.{kind}", svg, metric_name(metric))
    write_json(result.model_dir / EDIT_FILE, described)
    card = result.model_dir / "README.md"
    text = json.dumps(
        {key: described[key] for key in ("plan", "before", "after")}, indent=2
    )
    card.write_text(
        f"{card.read_text(encoding='utf-8')}\n## Edit\n\n```json\n{text}\n```\n",
        encoding="utf-8",
    )


def _line(scores: dict[str, float]) -> str:
    shown = [key for key in scores if key in ("probe", "across", "ndcg@10", "spearman")]
    return ", ".join(f"{key} {scores[key]:.4f}" for key in shown)
