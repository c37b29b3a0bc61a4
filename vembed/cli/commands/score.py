"""`vembed score`: a file of pairs in, the score of each pair out, in the order of the file."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from vembed.cli.support import (
    AnyModel,
    ColumnMapping,
    ImageRoot,
    Nproc,
    Strategy,
    TrustRemoteCode,
    WeightsDtype,
    open_model,
    option,
    share,
)
from vembed.errors import UserError

CHUNK = 16_384
"""Records that are read, scored and written together; memory does not grow with the file."""


def score(
    model: AnyModel,
    pairs: Annotated[
        str,
        Argument(metavar="PAIRS", help="A file of pairs, as training reads it."),
    ],
    output: Annotated[
        str,
        Option("--output", "-o", help="NAME.npy or NAME.jsonl. - is standard output."),
    ] = "-",
    column_mapping: ColumnMapping = "",
    image_root: ImageRoot = None,
    torch_dtype: WeightsDtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    strategy: Strategy = "ddp",
    nproc: Nproc = 1,
) -> None:
    """Score given pairs: each query with its positives, then its negatives.

    An embedding model gives similarities, a reranker its own scores. The scores are in the order of the file.
    """
    dtype = option("torch_dtype", torch_dtype)
    mapping = option("column_mapping", column_mapping)
    target = Path(output)
    if output != "-" and target.suffix not in (".npy", ".jsonl"):
        raise UserError(
            f"{output}: vembed score writes .npy, .jsonl, or to standard output (-)"
        )
    if output != "-" and not target.absolute().parent.is_dir():
        raise UserError(
            f"{target.absolute().parent} is not a folder, so {target.name} cannot be written"
        )
    share(nproc)
    import numpy as np

    from vembed.config.schema import DataSection
    from vembed.data.example_store import open_examples
    from vembed.inference.embedder import Embedder
    from vembed.inference.reranker import Reranker
    from vembed.models.families.model_files import is_reranker
    from vembed.saving.durability import replaced_file

    options = DataSection(
        data_path=pairs, column_mapping=mapping, image_root=image_root
    )
    # As validation data: no loss is asked whether it could learn from the pairs.
    store = open_examples(options, pairs, role="validation")
    with ExitStack() as stack:
        model_path, session = stack.enter_context(
            open_model(model, strategy, trust_remote_code=trust_remote_code)
        )
        file: Any = sys.stdout
        if output != "-" and session.is_main:
            partial = stack.enter_context(replaced_file(target))
            file = stack.enter_context(partial.open("wb"))
        options_of_use: dict[str, Any] = {
            "torch_dtype": dtype,
            "trust_remote_code": trust_remote_code,
            "session": session,
        }
        if is_reranker(model_path):
            score_pairs = Reranker(model_path, **options_of_use).predict
        else:
            score_pairs = Embedder(model_path, **options_of_use).score
        all_scores = [np.empty(0, np.float32)]
        for start in range(0, len(store), CHUNK):
            query_items = []
            roles = []
            for number in range(start, min(start + CHUNK, len(store))):
                example = store[number]
                for role in ("positive", "negative"):
                    for item in getattr(example, f"{role}s"):
                        query_items.append((example.query, item))
                        roles.append((number, role))
            scores = score_pairs(query_items)
            if not session.is_main:
                continue
            if target.suffix == ".npy":
                all_scores.append(scores)
                continue
            for (number, role), value in zip(roles, scores.tolist(), strict=True):
                if output == "-":
                    file.write(f"{value:.6f}\n")
                    continue
                line = {"record": number, "role": role, "similarity": value}
                file.write(json.dumps(line).encode() + b"\n")
        if session.is_main and target.suffix == ".npy":
            np.save(file, np.concatenate(all_scores))
        sys.stdout.flush()
