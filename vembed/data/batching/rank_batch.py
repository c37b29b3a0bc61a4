"""Rank batch: a rank's part of the global batch, with features of its distinct inputs and rows of indices."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from vembed.data.batching.schedule import BatchSchedule, rank_rows
from vembed.data.distinct import distinct
from vembed.data.examples import Example, Examples, Item
from vembed.data.features import BaseFeaturiser, Features

AHEAD = 2
"""Number of batches that each worker prepares ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """A rank's part of a global batch. Indices point into `features`, which holds each distinct input once."""

    features: list[Features]
    query: np.ndarray
    """[R] index of the query of each row; there is one row per (query, positive) pair."""
    positive: np.ndarray
    example: np.ndarray
    """[R] position of each row's example in the global batch."""
    negative: np.ndarray
    """[H] index of each occurrence of a hard negative."""
    negative_example: np.ndarray
    scores: np.ndarray | None
    """[R] score of each row, where the data have one for all of them."""
    negative_scores: np.ndarray | None
    """[H] score of each hard negative, as `scores`."""
    num_inputs: int
    """Number of inputs before the removal of duplicates."""
    where: list[str]
    """File and line of each example, for messages."""
    row_items: list[tuple[Item, Item]]
    """[R] the query and the positive of each row. Teachers are asked about them."""
    negative_items: list[tuple[Item, Item]]
    """[H] the query and the document of each hard negative."""
    source: int
    """Number of the source that the first example of the global batch comes from."""

    @property
    def useful_tokens(self) -> int:
        """Return the tokens and patches of the distinct inputs, without padding."""
        return sum(feature.length for feature in self.features)


def make_rank_batch(
    examples: Sequence[Example],
    first: int,
    featuriser: BaseFeaturiser[Any],
    source: int = 0,
    *,
    encodes_copies: bool = False,
) -> RankBatch:
    """Build a rank batch from a rank's examples. `first`: position of the first example in the global batch.

    `encodes_copies`: equal inputs stay as many as they are.
    """
    units: list[Any] = []
    row_items: list[tuple[Item, Item]] = []
    negative_items: list[tuple[Item, Item]] = []
    rows: list[tuple[int, int, int]] = []
    negatives: list[tuple[int, int]] = []
    scores: list[float] = []
    negative_scores: list[float] = []
    # Numbered over the global batch, so that all ranks name an example alike.
    for number_in_batch, example in enumerate(examples, start=first):
        query = len(units)
        units += featuriser.units(example)
        negative = len(units) - len(example.negatives)
        positive = negative - len(example.positives)
        for position in range(positive, negative):
            # A pair holds its query: there is no unit of the query, and the row points to the pair twice.
            is_pair = query == positive
            rows.append((position if is_pair else query, position, number_in_batch))
        for position in range(negative, len(units)):
            negatives.append((position, number_in_batch))
        row_items += [(example.query, document) for document in example.positives]
        negative_items += [(example.query, document) for document in example.negatives]
        scores += example.scores or ()
        negative_scores += example.negative_scores or ()
    # By key, not by text: a text as query and as document differs if the model has prompts.
    features = featuriser.features(units)
    where_to = np.arange(len(units))
    if not encodes_copies:
        features, where_to = distinct(features, key=lambda feature: feature.key)
    row_table = np.asarray(rows, dtype=np.int64).reshape(-1, 3)
    negative_table = np.asarray(negatives, dtype=np.int64).reshape(-1, 2)
    return RankBatch(
        features=features,
        query=where_to[row_table[:, 0]],
        positive=where_to[row_table[:, 1]],
        example=row_table[:, 2],
        negative=where_to[negative_table[:, 0]],
        negative_example=negative_table[:, 1],
        scores=_if_complete(scores, len(rows)),
        negative_scores=_if_complete(negative_scores, len(negatives)),
        num_inputs=len(units),
        where=[example.where for example in examples],
        row_items=row_items,
        negative_items=negative_items,
        source=source,
    )


def _if_complete(scores: list[float], count: int) -> np.ndarray | None:
    return np.array(scores) if scores and len(scores) == count else None


def with_in_batch_negatives(
    example: Example, others: Iterable[Example], count: int
) -> Example:
    """Return the example with the first positives of the first `count` others as further negatives.

    Others with the same query are left out, and so are documents that the example has already.
    """
    query = example.query.key()
    known = {item.key() for item in example.items}
    documents: list[Item] = []
    for other in others:
        if len(documents) == count:
            break
        document = other.positives[0]
        if other.query.key() != query and document.key() not in known:
            known.add(document.key())
            documents.append(document)
    return replace(example, negatives=(*example.negatives, *documents))


class RankBatchStream:
    """Rank batches of one rank in order, from any starting point, prepared ahead by threads."""

    def __init__(
        self,
        store: Examples,
        batch_schedule: BatchSchedule,
        featuriser: BaseFeaturiser[Any],
        rank: int,
        world_size: int,
        num_workers: int,
        pair: Callable[[int, int], Example] | None = None,
        in_batch_negatives: int = 0,
        *,
        encodes_copies: bool = False,
    ) -> None:
        """`pair`: the example of a labelled source with another one as its positive. `in_batch_negatives`: positives of
        other examples of the global batch that each example gets as further negatives."""
        self.store = store
        self.batch_schedule = batch_schedule
        self.featuriser = featuriser
        self.rank = rank
        self.world_size = world_size
        self.num_workers = num_workers
        self.pair = pair
        self.in_batch_negatives = in_batch_negatives
        self.encodes_copies = encodes_copies

    def rank_batch(self, batch_number: int) -> RankBatch:
        """Return the rank batch of a global batch of the run. It depends only on the number, so runs can resume."""
        epoch, number = divmod(batch_number, self.batch_schedule.batches_per_epoch)
        indices = self.batch_schedule.batch(epoch, number)
        rows = rank_rows(len(indices), self.rank, self.world_size)
        positives = None
        if self.pair is not None:
            positives = self.batch_schedule.positives(epoch, number)

        @cache
        def example_at(position: int) -> Example:
            index = int(indices[position])
            if self.pair is None or positives is None:
                return self.store[index]
            return self.pair(index, int(positives[position]))

        examples = []
        for position in range(rows.start, rows.stop):
            example = example_at(position)
            if self.in_batch_negatives:
                # The examples behind it in the batch, and behind the last one those from the first on.
                others = map(
                    example_at,
                    (*range(position + 1, len(indices)), *range(position)),
                )
                example = with_in_batch_negatives(
                    example, others, self.in_batch_negatives
                )
            examples.append(example)
        source = self.batch_schedule.source_of(int(indices[0]))
        return make_rank_batch(
            examples,
            rows.start,
            self.featuriser,
            source,
            encodes_copies=self.encodes_copies,
        )

    def sample(self, num_batches: int = 4) -> list[Features]:
        """Return the features of the first batches, for the measurement of memory."""
        features = []
        for number in range(num_batches):
            features += self.rank_batch(number).features
        return features

    def from_batch(self, first: int, end: int) -> Iterator[RankBatch]:
        """Yield the rank batches first .. end-1, in order."""
        if self.num_workers == 0:
            yield from map(self.rank_batch, range(first, end))
            return
        pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix="vembed-data")
        waiting: deque[Future[RankBatch]] = deque()
        next_number = first
        try:
            for _ in range(first, end):
                # Bounded: batches ahead hold token ids and rows in memory.
                while next_number < end and len(waiting) <= AHEAD * self.num_workers:
                    waiting.append(pool.submit(self.rank_batch, next_number))
                    next_number += 1
                batch = waiting.popleft().result()
                # Its images, and those of the next batch, are decoded while the step computes.
                self.featuriser.decode_ahead(batch.features)
                if waiting and waiting[0].done() and not waiting[0].exception():
                    self.featuriser.decode_ahead(waiting[0].result().features)
                yield batch
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
