"""`vembed edit`: a model and two sets of texts in, a model without what tells them apart out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from typer import Argument, Option

from vembed.cli.support import (
    Kind,
    NewFolder,
    Nproc,
    Strategy,
    TrustRemoteCode,
    WeightsDtype,
    number_table,
    numbers,
    option,
    plain_console,
    share,
)

METRICS = {
    "probe": "probe's accuracy",
    "across": "nDCG@10 across the sets",
    "ndcg@10": "nDCG@10",
    "spearman": "Spearman",
}


def edit(
    model: Annotated[
        str, Argument(metavar="MODEL", help="A model folder or a Hub name.")
    ],
    first: Annotated[
        str, Argument(metavar="FIRST", help="Texts of one kind, one per line.")
    ],
    second: Annotated[
        str,
        Argument(
            metavar="SECOND",
            help="Texts of the other kind: what tells them apart is removed.",
        ),
    ],
    output: NewFolder,
    direction: Annotated[
        Literal["mean_difference", "principal", "erase"],
        Option(
            "--remove-direction",
            help="mean_difference, principal, or erase (with --where embedding).",
        ),
    ] = "mean_difference",
    where: Annotated[
        Literal["layers", "embedding", "both"],
        Option(
            help="layers: the weights that write to it, embedding: a layer behind the model, or both."
        ),
    ] = "layers",
    components: Annotated[
        int, Option(min=1, help="principal: how many directions.")
    ] = 1,
    strength: Annotated[
        float, Option(help="1: all of it, less: a part, more: beyond it.")
    ] = 1.0,
    layers: Annotated[
        str,
        Option(help="Of which layers' weights, as 4,5,6 (0: the embeddings)."),
    ] = "",
    kind: Kind = "document",
    data: Annotated[
        str | None, Option(help="Evaluation data: what must not be lost.")
    ] = None,
    trials: Annotated[
        int,
        Option(min=0, help="Search over strengths and layers by so many trials."),
    ] = 0,
    max_drop: Annotated[
        float, Option(help="--trials: what the score on the data may lose.")
    ] = 0.01,
    seed: Annotated[int, Option(help="--trials: seed of the search.")] = 42,
    torch_dtype: WeightsDtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    strategy: Strategy = "ddp",
    nproc: Nproc = 1,
) -> Any:
    """Remove from a model what tells two sets of texts apart (a language, a source, a length)."""
    chosen_layers = numbers("--layers", layers) or None
    dtype = option("torch_dtype", torch_dtype)
    share(nproc)
    from vembed.parallel.session import start_command_session
    from vembed.weights.edit import edit as edit_model

    with start_command_session(
        model, strategy, trust_remote_code=trust_remote_code
    ) as session:
        result = edit_model(
            model,
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
            torch_dtype=dtype,
            trust_remote_code=trust_remote_code,
            session=session,
        )
        if session.is_main:
            table = number_table("", ["before", "after"])
            for key, name in METRICS.items():
                if key in result.before:
                    before = f"{result.before[key]:.4f}"
                    table.add_row(name, before, f"{result.after[key]:.4f}")
            console = plain_console()
            console.print(table)
            console.print(f"wrote {result.model_dir}")
    return result
