"""The data of a run: training examples, and validation data that are given or held out, compared with each other."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from vembed.config.schema import TrainConfig
from vembed.data.examples import Item
from vembed.data.held_out import hold_out, named
from vembed.data.overlap import find_overlap, warnings_of
from vembed.data.sources import ExampleStore, open_examples
from vembed.evaluation.dataset import EvalData, RetrievalData, from_examples, open_eval_data

log = logging.getLogger("vembed")


@dataclass(frozen=True)
class Sets:
    """Training and validation data of a run."""

    examples: ExampleStore
    evaluation: EvalData | None
    warnings: tuple[str, ...] = ()
    """Problems between the two, for the log and the report. Empty on ranks that do not compare."""


def open_sets(config: TrainConfig, *, compares: bool) -> Sets:
    """Open and log the data of a run. `compares`: look for validation data in the training data, on one rank."""
    store = open_examples(config, config.data_path)
    for line in store.summary():
        log.info(line)
    evaluation: EvalData | None = None
    if config.val_split is not None:
        names = store.names
        store, held = hold_out(store, config.val_split, config.seed)
        evaluation = from_examples(held, named(names, config.val_split))
        log.info("val_split: %s examples to train on, %s held out", f"{len(store):,d}", f"{len(held):,d}")
    elif config.val_data_path:
        evaluation = open_eval_data(config, config.val_data_path)
    if evaluation is None:
        return Sets(store, None)
    log.info(evaluation.summary())
    found = warnings_of(find_overlap(store, eval_pairs(evaluation))) if compares else []
    for line in found:
        log.warning(line)
    return Sets(store, evaluation, tuple(found))


def eval_pairs(data: EvalData) -> list[tuple[Item, Item]]:
    """Return each query with each of its relevant documents; of scored pairs both sides."""
    if isinstance(data, RetrievalData):
        return [
            (query, data.documents[document])
            for query, relevant in zip(data.queries, data.relevance, strict=True)
            for document in relevant
        ]
    return list(zip(data.first, data.second, strict=True))
