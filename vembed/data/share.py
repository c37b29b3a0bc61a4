"""Share: one rank's part of a global batch, its distinct inputs featurised, its rows as indices. No communication."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vembed.data.batches import BatchPlan, rank_rows
from vembed.data.examples import Example, Item, Kind
from vembed.data.features import Features, Featuriser

AHEAD = 2
"""Steps that are prepared ahead of the one that runs, for each worker."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank brings to one global batch. Indices point into `features`, each distinct input once."""

    epoch: int
    batch_in_epoch: int
    features: list[Features]
    query: np.ndarray
    """[R] one entry per row, and there is a row for each (query, positive) pair."""
    positive: np.ndarray
    example: np.ndarray
    """[R] position of the row's example in the global batch."""
    negative: np.ndarray
    """[H] one entry per occurrence of a hard negative."""
    negative_example: np.ndarray
    scores: np.ndarray | None
    num_inputs: int
    """Inputs before equal ones were joined."""
    num_examples: int
    where: list[str]
    """File and line of each example, for messages."""

    @property
    def useful_tokens(self) -> int:
        """Tokens and patches of the distinct inputs, without padding."""
        return sum(feature.length for feature in self.features)


def make_share(examples: Sequence[Example], first: int, epoch: int, number: int, featuriser: Featuriser) -> Share:
    """Turn a rank's examples into distinct featurised inputs and rows; `first` is its position in the global batch."""
    items: list[tuple[Item, Kind]] = []
    rows: list[tuple[int, int, int]] = []
    negatives: list[tuple[int, int]] = []
    scores: list[float] = []
    for number_in_batch, example in enumerate(examples, start=first):
        query = len(items)
        items.append((example.query, "query"))
        for positive in example.positives:
            rows.append((query, len(items), number_in_batch))
            items.append((positive, "document"))
        for negative in example.negatives:
            negatives.append((len(items), number_in_batch))
            items.append((negative, "document"))
        scores.extend(example.scores or ())
    all_features = featuriser.features(items)
    place: dict[int, int] = {}
    distinct: list[Features] = []
    where_to = np.empty(len(items), dtype=np.int64)
    for position, feature in enumerate(all_features):
        found = place.get(feature.key)
        if found is None:
            found = place[feature.key] = len(distinct)
            distinct.append(feature)
        where_to[position] = found
    row_table = np.asarray(rows, dtype=np.int64).reshape(-1, 3)
    negative_table = np.asarray(negatives, dtype=np.int64).reshape(-1, 2)
    return Share(
        epoch=epoch,
        batch_in_epoch=number,
        features=distinct,
        query=where_to[row_table[:, 0]],
        positive=where_to[row_table[:, 1]],
        example=row_table[:, 2],
        negative=where_to[negative_table[:, 0]],
        negative_example=negative_table[:, 1],
        scores=np.asarray(scores, dtype=np.float64) if scores and len(scores) == len(rows) else None,
        num_inputs=len(items),
        num_examples=len(examples),
        where=[example.where for example in examples],
    )


class Examples(Protocol):
    """Examples by number."""

    def __getitem__(self, index: int, /) -> Example: ...


class ShareStream:
    """The shares of one rank, step after step from any starting point, prepared ahead by threads."""

    def __init__(
        self, store: Examples, plan: BatchPlan, featuriser: Featuriser, rank: int, world_size: int, num_workers: int
    ) -> None:
        self.store = store
        self.plan = plan
        self.featuriser = featuriser
        self.rank = rank
        self.world_size = world_size
        self.num_workers = num_workers

    def share(self, batch_number: int) -> Share:
        """The share of the `batch_number`-th global batch of the run: a pure function of that number."""
        epoch, number = divmod(batch_number, self.plan.steps_per_epoch)
        indices = self.plan.batch(epoch, number)
        own = rank_rows(len(indices), self.rank, self.world_size)
        examples = [self.store[int(index)] for index in indices[own]]
        return make_share(examples, own.start, epoch, number, self.featuriser)

    def sample(self, num_batches: int = 4) -> list[Features]:
        """Features of the first batches, to measure memory with."""
        return [feature for number in range(num_batches) for feature in self.share(number).features]

    def from_batch(self, first: int, end: int) -> Iterator[Share]:
        """The shares of the batches first .. end-1, in order."""
        if self.num_workers == 0:
            yield from map(self.share, range(first, end))
            return
        pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix="vembed-data")
        waiting: deque[Future[Share]] = deque()
        try:
            for number in range(first, end):
                waiting.append(pool.submit(self.share, number))
                if len(waiting) > AHEAD * self.num_workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
