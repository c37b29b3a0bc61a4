"""Commands of the `vembed` command for finished models: score, merge, edit."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from vembed.cli.support import (
    AnyModel,
    ColumnMapping,
    ImageRoot,
    JsonOutput,
    Kind,
    Nproc,
    Shards,
    TrustRemoteCode,
    WeightsDtype,
    column_mapping_of,
    end,
    floats,
    json_result,
    model_options,
    numbers,
    share,
    word,
)


def score(
    ctx: typer.Context,
    model: AnyModel,
    pairs: Annotated[
        str,
        typer.Argument(metavar="PAIRS", help="A file of pairs, as training reads it."),
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", help="NAME.npy or NAME.jsonl. - is standard output."
        ),
    ] = "-",
    column_mapping: ColumnMapping = "",
    image_root: ImageRoot = None,
    torch_dtype: WeightsDtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    strategy: Shards = "ddp",
    nproc: Nproc = 1,
) -> None:
    """Score given pairs: the similarity of each query with its positives, then its negatives.

    The scores are in the order of the file.
    """

    def call() -> int | None:
        options: dict[str, Any] = {
            "column_mapping": column_mapping_of(column_mapping),
            **model_options(torch_dtype, strategy),
        }
        if (code := share(ctx, nproc)) is not None:
            return code
        from vembed.cli.commands.model_argument import usable_model
        from vembed.cli.commands.score import run_score

        with usable_model(model) as model_path:
            run_score(
                model_path,
                pairs,
                output,
                image_root=image_root,
                trust_remote_code=trust_remote_code,
                **options,
            )
        return 0

    end(call)


def merge(
    ctx: typer.Context,
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL", help="Folders, Hub names, adapters, checkpoints or runs."
        ),
    ],
    output: Annotated[str, typer.Option("--output", "-o", help="A new folder.")],
    method: Annotated[
        str,
        typer.Option(
            help="mean, weighted, slerp, task_arithmetic, ties, dare or soup."
        ),
    ] = "mean",
    weights: Annotated[
        str, typer.Option(help="One number for each model, as 0.7,0.3.")
    ] = "",
    base: Annotated[
        str | None,
        typer.Option(help="What differences are taken from. Default: what all share."),
    ] = None,
    of: Annotated[
        str,
        typer.Option(help="slerp: of the weights or of the differences from the base."),
    ] = "auto",
    density: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="ties, dare: the share that is kept."),
    ] = 0.2,
    scale: Annotated[
        float,
        typer.Option(help="task_arithmetic, ties, dare: factor of the difference."),
    ] = 1.0,
    interpolate: Annotated[
        float, typer.Option(help="1: the merged model, 0: the base.")
    ] = 1.0,
    last: Annotated[
        int | None, typer.Option(min=1, help="Of a run: its last so many checkpoints.")
    ] = None,
    sweep: Annotated[
        str,
        typer.Option(
            help="Evaluate a line of weights, as 0,0.25,0.5,0.75,1, and keep the best."
        ),
    ] = "",
    data: Annotated[
        str | None, typer.Option(help="Evaluation data, for soup and --sweep.")
    ] = None,
    metric: Annotated[
        str, typer.Option(help="What decides. Default: nDCG@10 or Spearman.")
    ] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto, float32, bfloat16 or float16.")
    ] = "auto",
    seed: Annotated[int, typer.Option(help="dare: what its draws depend on.")] = 42,
    nproc: Nproc = 1,
    json_file: JsonOutput = None,
) -> None:
    """Merge models of one architecture into one: means, slerp, task arithmetic, TIES, DARE, greedy soups."""

    def call() -> int | None:
        options: dict[str, Any] = {
            "method": word(
                "--method",
                method,
                (
                    "mean",
                    "weighted",
                    "slerp",
                    "task_arithmetic",
                    "ties",
                    "dare",
                    "soup",
                ),
            ),
            "weights": floats("--weights", weights) or None,
            "of": word("--of", of, ("auto", "weights", "differences")),
            "sweep_points": floats("--sweep", sweep) or None,
            "dtype": word("--dtype", dtype, ("auto", "float32", "bfloat16", "float16")),
        }
        from vembed.weights.merge_rules import check_merge

        check_merge(
            # With `last` they are checkpoints, which are counted when they are there.
            models if last is None else None,
            method,
            weights=options["weights"],
            points=options["sweep_points"],
            has_data=data is not None,
            interpolate=interpolate,
            density=density,
            scale=scale,
        )
        if (code := share(ctx, nproc)) is not None:
            return code
        from vembed.cli.commands.merge import run_merge

        with json_result(json_file) as on_result:
            merged = run_merge(
                models,
                output,
                base=base,
                density=density,
                scale=scale,
                interpolate=interpolate,
                last=last,
                data=data,
                metric=metric,
                seed=seed,
                **options,
            )
            on_result(merged)
        return 0

    end(call)


def edit(
    ctx: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model folder or a Hub name.")
    ],
    first: Annotated[
        str, typer.Argument(metavar="FIRST", help="Texts of one kind, one per line.")
    ],
    second: Annotated[
        str,
        typer.Argument(
            metavar="SECOND",
            help="Texts of the other kind: what tells them apart is removed.",
        ),
    ],
    output: Annotated[str, typer.Option("--output", "-o", help="A new folder.")],
    direction: Annotated[
        str,
        typer.Option(
            "--remove-direction",
            help="mean_difference, principal, or erase (with --where embedding).",
        ),
    ] = "mean_difference",
    where: Annotated[
        str,
        typer.Option(
            help="layers: the weights that write to it, embedding: a layer behind the model, or both."
        ),
    ] = "layers",
    components: Annotated[
        int, typer.Option(min=1, help="principal: how many directions.")
    ] = 1,
    strength: Annotated[
        float, typer.Option(help="1: all of it, less: a part, more: beyond it.")
    ] = 1.0,
    layers: Annotated[
        str,
        typer.Option(help="Of which layers' weights, as 4,5,6 (0: the embeddings)."),
    ] = "",
    kind: Kind = "document",
    data: Annotated[
        str | None, typer.Option(help="Evaluation data: what must not be lost.")
    ] = None,
    trials: Annotated[
        int,
        typer.Option(min=0, help="Search over strengths and layers by so many trials."),
    ] = 0,
    max_drop: Annotated[
        float, typer.Option(help="--trials: what the score on the data may lose.")
    ] = 0.01,
    seed: Annotated[int, typer.Option(help="--trials: seed of the search.")] = 42,
    torch_dtype: WeightsDtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    strategy: Shards = "ddp",
    nproc: Nproc = 1,
    json_file: JsonOutput = None,
) -> None:
    """Remove from a model what tells two sets of texts apart (a language, a source, a length)."""

    def call() -> int | None:
        options: dict[str, Any] = {
            "direction": word(
                "--remove-direction",
                direction,
                ("mean_difference", "principal", "erase"),
            ),
            "where": word("--where", where, ("layers", "embedding", "both")),
            "layers": numbers("--layers", layers) or None,
            "kind": word("--kind", kind, ("query", "document")),
            **model_options(torch_dtype, strategy),
        }
        if (code := share(ctx, nproc)) is not None:
            return code
        from vembed.cli.commands.edit import run_edit

        with json_result(json_file) as on_result:
            edited = run_edit(
                model,
                output,
                first,
                second,
                components=components,
                strength=strength,
                data=data,
                trials=trials,
                max_drop=max_drop,
                seed=seed,
                trust_remote_code=trust_remote_code,
                **options,
            )
            on_result(edited)
        return 0

    end(call)
