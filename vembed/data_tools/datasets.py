"""The data of a run: training examples, and validation data that are given or held out, compared with each other."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from vembed.config.schema import DataSection, ObjectiveSection
from vembed.config.terms import task_names
from vembed.data.example_store import ExampleStore, open_examples
from vembed.data.examples import ReadAs
from vembed.data.held_out import HeldOut, hold_out, overlap_warnings
from vembed.errors import UserError
from vembed.evaluation.dataset import (
    EvalData,
    RetrievalData,
    from_examples,
    open_eval_data,
)

log = logging.getLogger("vembed")


@dataclass(frozen=True)
class Sets:
    """Training and validation data of a run."""

    examples: ExampleStore
    evaluation: EvalData | None
    warnings: tuple[str, ...] = ()
    """Problems in the data, for the log and the report. Those between training and validation data are looked for on
    ranks that compare."""
    by_task: Mapping[str, EvalData] = field(default_factory=dict)
    """Validation data of single tasks, by the task's name."""


def open_sets(
    options: DataSection,
    objective: ObjectiveSection,
    *,
    model_name: str,
    seed: int,
    compares: bool,
) -> Sets:
    """Open and log the data of a run. `seed`: of `val_split`. `compares`: look for validation data in the training
    data, on one rank."""
    store = open_examples(
        options,
        options.data_path,
        objective,
        model_name=model_name,
    )
    for line in store.summary():
        log.info(line)
    doubts = store.warnings()
    for line in doubts:
        log.warning(line)
    evaluation: EvalData | None = None
    # Of sources that name validation data, with the prompts of the source.
    by_task: dict[str, EvalData] = {}
    tasks = task_names(options, store.names)
    for name, source in zip(tasks, options.sources(), strict=True):
        if source.val_data_path is not None:
            data = open_eval_data(options, source.val_data_path, objective)
            free_name = f"{name} {len(by_task) + 1}" if name in by_task else name
            by_task[free_name] = data.read_as(
                ReadAs(source.query_prompt, source.document_prompt, source.max_length)
            )
    if options.val_split is not None:
        names = store.names
        parts = hold_out(store, options.val_split, seed)
        store = parts.train
        evaluation = from_examples(
            [example for _, example in parts.examples],
            f"{options.val_split:.0%} of the queries of {', '.join(names)}",
            documents=[item for _, item in parts.documents],
            notes=parts.notes(),
        )
        by_task = {**held_by_task(options, parts), **by_task}
        log.info(
            "val_split: %s examples to train on, %s held out",
            f"{len(store):,d}",
            f"{len(parts.examples):,d}",
        )
    elif options.val_data_path:
        evaluation = open_eval_data(options, options.val_data_path, objective)
    if evaluation is None:
        return Sets(store, None, tuple(doubts))
    log.info(evaluation.summary())
    for name, data in by_task.items():
        log.info("task %s: %s", name, data.summary())
    # On one rank: all would find the same, and it reads all data.
    overlaps = []
    if compares:
        pairs = []
        if isinstance(evaluation, RetrievalData):
            # Each query with each of its relevant documents.
            for query, relevant in zip(
                evaluation.queries, evaluation.relevance, strict=True
            ):
                pairs += [(query, evaluation.documents[number]) for number in relevant]
        else:
            pairs = list(zip(evaluation.first, evaluation.second, strict=True))
        overlaps = overlap_warnings(store, pairs)
    for line in overlaps:
        log.warning(line)
    return Sets(store, evaluation, (*doubts, *overlaps), by_task)


def held_by_task(data: DataSection, parts: HeldOut) -> dict[str, EvalData]:
    """Return the examples held out of each task, where batches are of one task and there are several."""
    names = task_names(data, parts.train.names)
    if not data.homogeneous_batches or len(set(names)) < 2:
        return {}
    by_task: dict[str, EvalData] = {}
    for name in dict.fromkeys(names):
        examples = [each for source, each in parts.examples if names[source] == name]
        documents = [item for source, item in parts.documents if names[source] == name]
        title = f"those held out of {name}"
        try:
            by_task[name] = from_examples(examples, title, documents=documents)
        except UserError as error:  # too few for a score
            log.info("task %s is not scored by itself: %s", name, error)
    return by_task
