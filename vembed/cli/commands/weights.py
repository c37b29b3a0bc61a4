"""`vembed merge` and `edit`: models in, one model out; and a model without what tells two sets of texts apart."""

from typing import Annotated, Any

from typer import Argument, Option

from vembed.cli.support import (
    ALONE,
    KindOption,
    ModelUse,
    NewFolder,
    Nproc,
    PositiveNumber,
    is_first_rank,
    number_table,
    parts_of,
    plain_console,
    share,
)
from vembed.config.values import EditDirection, EditPlace, ModelDtype
from vembed.weights.merge_rules import MergeMethod, SlerpOf, check_merge

EDIT_METRICS = {
    "probe": "probe's accuracy",
    "across": "nDCG@10 across the sets",
    "ndcg@10": "nDCG@10",
    "spearman": "Spearman",
}


def merge(
    models: Annotated[list[str], Argument(metavar="MODEL")],
    output: NewFolder,
    method: MergeMethod = "mean",
    weights: str = "",
    base: str | None = None,
    of: SlerpOf | None = None,
    density: Annotated[float | None, Option(min=0.0, max=1.0)] = None,
    scale: float | None = None,
    interpolate: float | None = None,
    last: PositiveNumber = None,
    sweep: str = "",
    data: str | None = None,
    metric: str = "auto",
    dtype: ModelDtype = "auto",
    seed: int | None = None,
    nproc: Nproc = 1,
) -> Any:
    """Merge models of one architecture into one: means, slerp, task arithmetic, TIES, DARE, greedy soups.

    Args:
        models: Folders, Hub names, adapters, checkpoints or runs.
        method: mean, weighted, slerp, task_arithmetic, ties, dare or soup.
        weights: One number for each model, as 0.7,0.3.
        base: What differences are taken from. Default: what all share.
        of: slerp: of the weights or of the differences from the base. Default: auto, by whether a base is given.
        density: ties, dare: the share that is kept. Default: 0.2.
        scale: task_arithmetic, ties, dare: factor of the difference. Default: 1.
        interpolate: 1: the merged model, 0: the base. Default: 1.
        last: Of a run: its last so many checkpoints.
        sweep: Evaluate a line of weights, as 0,0.25,0.5,0.75,1, and keep the best.
        data: Evaluation data, for soup and --sweep.
        metric: What decides. Default: nDCG@10 or Spearman.
        dtype: auto, float32, bfloat16 or float16.
        seed: dare: what its draws depend on. Default: 42.
    """
    options: dict[str, Any] = {
        "method": method,
        "weights": parts_of("--weights", weights, float) or None,
        "base": base,
        "of": of,
        "density": density,
        "scale": scale,
        "interpolate": interpolate,
        "sweep_points": parts_of("--sweep", sweep, float) or None,
        "data": data,
        "seed": seed,
    }
    # With --last the models are checkpoints, which are counted when they are there.
    check_merge(models if last is None else None, **options)
    share(nproc)
    from vembed.parallel.session import start_command_session
    from vembed.weights.merge import merge as merge_models

    with start_command_session() as session:
        result = merge_models(
            models,
            output,
            **options,
            last=last,
            metric=metric,
            dtype=dtype,
            session=session,
        )
        if is_first_rank():
            console = plain_console()
            if result.trials:
                rows = [
                    (f"{trial.at:g}", f"{trial.score:.4f}") for trial in result.trials
                ]
                console.print(number_table(("at", "score"), rows))
            if result.score is not None:
                console.print(f"score: {result.score:.4f}")
            console.print(f"wrote {result.model_dir}")
    return result


def edit(
    model: str,
    first: str,
    second: str,
    output: NewFolder,
    direction: Annotated[
        EditDirection, Option("--remove-direction")
    ] = "mean_difference",
    where: EditPlace = "layers",
    components: Annotated[int, Option(min=1)] = 1,
    strength: float = 1.0,
    layers: str = "",
    kind: KindOption = "document",
    data: str | None = None,
    trials: Annotated[int, Option(min=0)] = 0,
    max_drop: float = 0.01,
    seed: int = 42,
    use: ModelUse = ALONE,
) -> Any:
    """Remove from a model what tells two sets of texts apart (a language, a source, a length).

    Args:
        model: A model folder or a Hub name.
        first: Texts of one kind, one per line.
        second: Texts of the other kind: what tells them apart is removed.
        direction: mean_difference, principal, or erase (with --where embedding).
        where: layers: the weights that write to it, embedding: a layer behind the model, or both.
        components: principal: how many directions.
        strength: 1: all of it, less: a part, more: beyond it.
        layers: Of which layers' weights, as 4,5,6 (0: the embeddings).
        data: Evaluation data: what must not be lost.
        trials: Search over strengths and layers by so many trials.
        max_drop: --trials: what the score on the data may lose.
        seed: --trials: seed of the search.
    """
    chosen_layers = parts_of("--layers", layers) or None
    use.share()
    from vembed.weights.edit import edit as edit_model

    with use.open(model) as (path, options):
        result = edit_model(
            path,
            output,
            first,
            second,
            direction=direction,
            where=where,
            components=components,
            strength=strength,
            layers=chosen_layers,
            kind=kind,
            data=data,
            trials=trials,
            max_drop=max_drop,
            seed=seed,
            **options,
        )
        if is_first_rank():
            rows = [
                (name, f"{result.before[key]:.4f}", f"{result.after[key]:.4f}")
                for key, name in EDIT_METRICS.items()
                if key in result.before
            ]
            console = plain_console()
            console.print(number_table(("", "before", "after"), rows))
            console.print(f"wrote {result.model_dir}")
    return result
