"""`vembed rerank`: queries with lists of documents in, the same lists sorted by a reranker out."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from vembed.cli.support import (
    AnyModel,
    Nproc,
    Strategy,
    TrustRemoteCode,
    WeightsDtype,
    open_model,
    option,
    share,
)
from vembed.errors import UserError

CHUNK = 256
"""Lists that are read, scored and written together."""


def rerank(
    model: AnyModel,
    lists: Annotated[
        str,
        Argument(
            metavar="LISTS",
            help='JSON Lines: {"query": "...", "documents": ["...", "..."]}. - is standard input.',
        ),
    ],
    output: Annotated[
        str,
        Option("--output", "-o", help="NAME.jsonl. - is standard output."),
    ] = "-",
    top_k: Annotated[
        int | None, Option(min=1, help="Documents to write for each query.")
    ] = None,
    torch_dtype: WeightsDtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    strategy: Strategy = "ddp",
    nproc: Nproc = 1,
) -> None:
    """Sort the documents of each query by a reranker, the best first, with their scores."""
    if output != "-" and Path(output).suffix != ".jsonl":
        raise UserError(
            f"{output}: vembed rerank writes .jsonl, or to standard output (-)"
        )
    if lists != "-" and not Path(lists).is_file():
        raise UserError(f"{lists} is no file: give JSON Lines of queries and documents")
    if lists == "-" and nproc > 1:
        raise UserError(
            "--nproc: several processes cannot share standard input; give a file"
        )
    dtype = option("torch_dtype", torch_dtype)
    share(nproc)
    from vembed.inference.reranker import Reranker, sorted_documents
    from vembed.saving.durability import replaced_file

    with ExitStack() as stack:
        source: Any = sys.stdin
        if lists != "-":
            source = stack.enter_context(Path(lists).open(encoding="utf-8"))
        model_path, session = stack.enter_context(
            open_model(model, strategy, trust_remote_code=trust_remote_code)
        )
        reranker = Reranker(
            model_path,
            torch_dtype=dtype,
            trust_remote_code=trust_remote_code,
            session=session,
        )
        target: Any = sys.stdout
        if output != "-" and session.is_main:
            partial = stack.enter_context(replaced_file(Path(output)))
            target = stack.enter_context(partial.open("w", encoding="utf-8"))
        lines = enumerate(source, start=1)
        while chunk := list(islice(lines, CHUNK)):
            read = [
                read_list(line, f"{lists}, line {number}") for number, line in chunk
            ]
            pairs = []
            for query, documents in read:
                pairs += [(query, document) for document in documents]
            scores = reranker.predict(pairs)
            if not session.is_main:
                continue
            start = 0
            for query, documents in read:
                stop = start + len(documents)
                ranking = sorted_documents(documents, scores[start:stop], top_k)
                row = {"query": query, "results": ranking}
                target.write(json.dumps(row, ensure_ascii=False) + "\n")
                start = stop
        target.flush()


def read_list(line: str, where: str) -> tuple[str, list[str]]:
    """Return the query and the documents of a line."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}") from error
    query = record.get("query") if isinstance(record, dict) else None
    documents = record.get("documents") if isinstance(record, dict) else None
    are_texts = isinstance(documents, list) and all(
        isinstance(document, str) for document in documents
    )
    if not isinstance(query, str) or not are_texts or not documents:
        raise UserError(
            f'{where} is no list to rerank: write {{"query": "...", "documents": ["...", "..."]}}'
        )
    return query, documents
