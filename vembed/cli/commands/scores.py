"""`vembed eval`, `score` and `rerank`: scores of a model on evaluation data, of pairs, and of lists of documents."""

from __future__ import annotations

import json
import re
import sys
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

from typer import Option

from vembed.cli.support import (
    ALONE,
    AnyModel,
    BatchTokens,
    ColumnMapping,
    ImageRootOption,
    ModelUse,
    OutputFile,
    PositiveNumber,
    is_first_rank,
    number_table,
    option,
    parts_of,
    print_progress,
    require_folder,
)
from vembed.config.values import EvaluationTask, OnBadRecord, RetrievalMode
from vembed.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from vembed.data.records import RecordFormat
    from vembed.inference.embedder import Input

RetrievalModeOption = Annotated[
    RetrievalMode | None,
    Option(
        help="What plain strings of the data are, as the option of that name. Default: as in the model's run."
    ),
]
LIST_FORM = 'write one list per line, as {"query": "...", "documents": ["...", "..."]}'
SCORE_CHUNK = 16_384
"""Records that are read, scored and written together; memory does not grow with the file."""
RERANK_CHUNK = 256
"""Lists that are read, scored and written together."""


def eval(
    model: AnyModel,
    data: str,
    dims: str = "",
    ks: str = "1,5,10,100",
    task: EvaluationTask = "auto",
    split: str | None = None,
    compressed: str | None = None,
    column_mapping: ColumnMapping = "",
    on_bad_record: OnBadRecord = "stop",
    retrieval_mode: RetrievalModeOption = None,
    batch_tokens: BatchTokens = None,
    use: ModelUse = ALONE,
) -> dict[str, float]:
    """Score a model: nDCG, MRR, Recall and MAP over the whole corpus, or correlations for scored pairs.

    A reranker sorts the first 50 documents of BM25.

    Args:
        data: A BEIR-style folder, or a file of pairs or scored pairs.
        dims: Also score at these sizes, as 256,128. Default: the model's own.
        ks: Cut-offs of the metrics.
        task: auto, retrieval or similarity.
        split: Split of the qrels of a BEIR-style folder. Default: test.
        compressed: Also score int8 and binary documents, and write a page of quality against bytes (.html).
        on_bad_record: stop or skip.
    """
    sizes = parts_of("--dims", dims) or None
    cuts = parts_of("--ks", ks)
    mapping = option("column_mapping", column_mapping)
    if compressed is not None and Path(compressed).suffix != ".html":
        raise UserError(f"--compressed {compressed}: the page is written as .html")
    if compressed is not None:
        require_folder(Path(compressed))
    use.share()
    from rich.console import Console

    from vembed.evaluation.report.page import render_page
    from vembed.evaluation.report.report import stored_values
    from vembed.evaluation.scores import evaluate
    from vembed.files import replace_text

    with use.open(model) as (model_path, options):
        scores = evaluate(
            model_path,
            data,
            dims=sizes,
            ks=cuts,
            task=task,
            split=split,
            batch_tokens=batch_tokens,
            column_mapping=mapping,
            on_bad_record=on_bad_record,
            retrieval_mode=retrieval_mode,
            compressed=compressed is not None,
            show_progress=True,
            **options,
        )
        if is_first_rank():
            console = Console()
            console.print(metrics_table(scores))
            if compressed is not None:
                stored = stored_values(scores)
                table = stored["table"]
                console.print(" ", number_table(table.header, table.rows), sep="\n")
                page = render_page(
                    "stored.html.j2",
                    title=f"{model} - vembed eval",
                    stored=stored,
                )
                replace_text(Path(compressed), page)
    return scores


def metrics_table(scores: dict[str, float]) -> Table:
    """Return a table of all metrics, with a column for each size of the embedding, and for a reranker's first stage."""
    from vembed.evaluation.report.record import metric_name

    columns = {"": "whole"}
    for key in scores:
        match = re.match(r"(?:dim(\d+)|first_stage)/", key)
        if match:
            columns[match[0]] = match[1] or "first stage"
    rows = []
    for key in scores:
        if "/" not in key:
            values = [f"{scores[prefix + key]:.4f}" for prefix in columns]
            rows.append([metric_name(key), *values])
    return number_table(["metric", *columns.values()], rows)


def score(
    model: AnyModel,
    pairs: str,
    output: OutputFile = "-",
    column_mapping: ColumnMapping = "",
    image_root: ImageRootOption = None,
    retrieval_mode: RetrievalModeOption = None,
    use: ModelUse = ALONE,
) -> None:
    """Score given pairs: each query with its positives, then its negatives.

    An embedding model gives similarities, a reranker its own scores. The scores are in the order of the file.

    Args:
        pairs: A file of pairs, as training reads it.
        output: NAME.npy or NAME.jsonl. - is standard output.
    """
    mapping = option("column_mapping", column_mapping)
    target = checked_target("score", output, ".npy", ".jsonl")
    use.share()
    import numpy as np

    from vembed.config.schema import DataSection
    from vembed.data.example_store import open_examples
    from vembed.data.features import refuse_prompts
    from vembed.evaluation.report.record import run_options
    from vembed.inference.embedder import Embedder
    from vembed.inference.reranker import Reranker
    from vembed.models.families.model_files import is_reranker
    from vembed.progress import counted

    run = run_options(model, ("retrieval_mode",))
    data = DataSection(
        data_path=pairs,
        column_mapping=mapping,
        image_root=image_root,
        retrieval_mode=retrieval_mode or run.get("retrieval_mode", "auto"),
    )
    # As validation data: no loss is asked whether it could learn from the pairs.
    store = open_examples(data, pairs, role="validation")
    with ExitStack() as stack:
        model_path, options = stack.enter_context(use.open(model))
        is_main = is_first_rank()
        file = _open_output(stack, output, is_main=is_main)
        if is_reranker(model_path):
            refuse_prompts(store.counts["prompts"], pairs)
            score_pairs = Reranker(model_path, **options).predict
        else:
            score_pairs = Embedder(model_path, **options).score
        all_scores = [np.empty(0, np.float32)]
        for start in range(0, len(store), SCORE_CHUNK):
            query_items = []
            roles = []
            for number in range(start, min(start + SCORE_CHUNK, len(store))):
                example = store[number]
                for role in ("positive", "negative"):
                    for item in getattr(example, f"{role}s"):
                        query_items.append((example.query, item))
                        roles.append((number, role))
            scores = score_pairs(query_items)
            if not is_main:
                continue
            if target.suffix == ".npy":
                all_scores.append(scores)
                continue
            for (number, role), value in zip(roles, scores.tolist(), strict=True):
                if output == "-":
                    file.write(f"{value:.6f}\n".encode())
                    continue
                line = {"record": number, "role": role, "score": value}
                file.write(json.dumps(line).encode() + b"\n")
        if is_main and target.suffix == ".npy":
            np.save(file, np.concatenate(all_scores))
        file.flush()
    if is_main and output != "-":
        print_progress(f"{output}: scores of {counted(len(store), 'record')}")


def rerank(
    model: AnyModel,
    lists: str,
    output: OutputFile = "-",
    top_k: PositiveNumber = None,
    image_root: ImageRootOption = None,
    use: ModelUse = ALONE,
) -> None:
    """Sort the documents of each query by a reranker, the best first, with their scores.

    Args:
        lists: JSON Lines: {"query": "...", "documents": ["...", {"image": "a.jpg"}]}. - is standard input.
        output: NAME.jsonl. - is standard output.
        top_k: Documents to write for each query.
    """
    checked_target("rerank", output, ".jsonl")
    if lists != "-" and not Path(lists).is_file():
        raise UserError(f"{lists} is no file: give JSON Lines, and {LIST_FORM}")
    use.share(lists)
    from vembed.data.examples import ImageRoot
    from vembed.data.records import Columns, RecordFormat
    from vembed.inference.reranker import Reranker, sorted_documents
    from vembed.progress import counted

    folder = Path() if lists == "-" else Path(lists).parent
    images = ImageRoot(image_root or str(folder), allow_urls=False)
    form = RecordFormat(Columns({"documents": "positive"}), images)
    with ExitStack() as stack:
        source = sys.stdin.buffer
        if lists != "-":
            source = stack.enter_context(Path(lists).open("rb"))
        model_path, options = stack.enter_context(use.open(model))
        reranker = Reranker(model_path, **options)
        is_main = is_first_rank()
        file = _open_output(stack, output, is_main=is_main)
        lines = enumerate(source, start=1)
        num_lists = 0
        while chunk := list(islice(lines, RERANK_CHUNK)):
            records = []
            pairs = []
            for number, line in chunk:
                if not line.strip():
                    continue
                record, listed = read_list(line, f"{lists}:{number}", form)
                records.append(record)
                pairs += listed
            scores = reranker.predict(pairs)
            if not is_main:
                continue
            start = 0
            for record in records:
                documents = record["documents"]
                stop = start + len(documents)
                ranking = sorted_documents(documents, scores[start:stop], top_k)
                row = {"query": record["query"], "results": ranking}
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                start = stop
            num_lists += len(records)
        file.flush()
    if is_main and output != "-":
        print_progress(f"{output}: {counted(num_lists, 'list')} sorted")


def checked_target(command: str, output: str, *endings: str) -> Path:
    """Return where a command writes. Raise UserError if it cannot."""
    target = Path(output)
    if output == "-":
        return target
    if target.suffix not in endings:
        raise UserError(
            f"{output}: vembed {command} writes {', '.join(endings)}, or to standard output (-)"
        )
    require_folder(target)
    return target


def _open_output(
    stack: ExitStack,
    output: str,
    *,
    is_main: bool,
) -> BinaryIO:
    """Return the file of the results: standard output, or a new one that gets its name at the end."""
    from vembed.files import replaced_file

    if output == "-" or not is_main:
        return sys.stdout.buffer
    partial = stack.enter_context(replaced_file(Path(output)))
    return stack.enter_context(partial.open("wb"))


def read_list(
    line: bytes,
    where: str,
    form: RecordFormat,
) -> tuple[dict[str, Any], list[tuple[Input, Input]]]:
    """Return the query and the documents of a line, as they are and as pairs."""
    from vembed.data.examples import BadRecord

    try:
        # Of bytes: UTF-8 with or without a byte order mark.
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}): {LIST_FORM}") from error
    if not isinstance(record, dict):
        record = {}
    query = record.get("query")
    documents = record.get("documents")
    if query is None or not isinstance(documents, list):
        raise UserError(f"{where} is no list to rerank: {LIST_FORM}")
    # Other fields of the line have no meaning here.
    fields = {"query": query, "documents": documents}
    if all(isinstance(value, str) for value in (query, *documents)):
        return fields, [(query, document) for document in documents]
    try:
        example = form.example(fields, where)
    except BadRecord as error:
        raise UserError(f"{where}: {error}") from error
    return fields, [(example.query, document) for document in example.positives]
