"""Batch schedule: the examples of each global batch, as a pure function of seed, epoch and step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vembed.data.arrangement import arrange, find_conflicts
from vembed.data.class_batches import ClassBatches, random_bits
from vembed.errors import UserError

EPOCHS_KEPT = 2
"""Number of epoch orders in memory. Batches are prepared ahead, so two epochs are in use at an epoch's end."""

# Purpose of a random stream, part of its seed, so that no two streams are equal.
_PASS, _MIX, _BATCHES = 1, 2, 3


@dataclass(frozen=True)
class ContentKeys:
    """Content keys of all examples; those of example i are values[starts[i] : starts[i + 1]]."""

    values: np.ndarray
    starts: np.ndarray

    def of(self, index: int) -> np.ndarray:
        """Return the keys of one example."""
        return self.values[self.starts[index] : self.starts[index + 1]]

    def of_all(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys of several examples, one after the other, and how many each has."""
        begins = self.starts[indices]
        counts = self.starts[indices + 1] - begins
        ends = np.cumsum(counts)
        # One gather: the position in the result, shifted to where the example begins in `values`.
        return self.values[np.arange(ends[-1]) + np.repeat(begins - (ends - counts), counts)], counts


@dataclass(frozen=True)
class Batches:
    """Batches of one epoch: batch i holds examples[starts[i] : starts[i + 1]]."""

    examples: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, batches: Sequence[np.ndarray]) -> Batches:
        """Join single batches."""
        examples = np.concatenate(batches) if batches else np.empty(0, dtype=np.int64)
        return cls(examples, np.cumsum([0, *(len(one) for one in batches)]))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> np.ndarray:
        return self.examples[self.starts[number] : self.starts[number + 1]]

    def rows(self, numbers: np.ndarray | range) -> list[np.ndarray]:
        """Return several batches."""
        return [self[int(number)] for number in numbers]


class BatchSchedule:
    """Global batches of all epochs over one or several sources. Examples are numbered consecutively over the sources.

    A source of weight w contributes w times its size to each epoch. It is drawn in random passes that continue over
    epochs, so that no example repeats before all others of its source were drawn. With `homogeneous`, all examples of a
    batch come from one source. With `keys`, no two examples of a batch share content: examples of the same content go
    to different batches. With `labels`, no two examples of a batch share a class (class_batches.py).

    Examples that do not fill a batch at the end of an epoch are dropped from that epoch; with `drop_last=False`, or
    where there is no other batch, they make a smaller one.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        global_batch_size: int,
        seed: int,
        *,
        weights: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
        homogeneous: bool = False,
        keys: ContentKeys | None = None,
        drop_last: bool = True,
        labels: Sequence[np.ndarray | None] = (),
    ) -> None:
        self.sizes = tuple(sizes)
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.homogeneous = homogeneous
        self.keys = keys
        self.drop_last = drop_last
        self._first = np.cumsum([0, *self.sizes])
        self._num_drawn = [
            max(1, round(size * weight)) for size, weight in zip(sizes, weights or [1.0] * len(self.sizes), strict=True)
        ]
        self._names = names or [f"source {number}" for number in range(1, len(self.sizes) + 1)]
        if any(one is not None for one in labels) and len(self.sizes) > 1 and not homogeneous:
            raise UserError(
                "data_path: a source with a label needs batches of its own beside others: set homogeneous_batches: true"
            )
        self._classes = {
            source: ClassBatches(self._names[source], one, self._num_drawn[source], global_batch_size, seed, source)
            for source, one in enumerate(labels)
            if one is not None
        }
        self._orders: dict[int, Batches] = {}
        self._lock = threading.Lock()
        # Per group of sources; a group is one source, or all of them mixed.
        first = self._groups(0)
        self._num_batches = [len(group) for group in first]
        self.steps_per_epoch = sum(self._num_batches)
        self.smallest_batch = min(int(np.diff(group.starts).min()) for group in first)
        """Number of examples of the smallest batch."""
        self.num_drawn = sum(self._num_drawn)
        """Number of examples drawn per epoch."""
        self.num_left_out = self.num_drawn - sum(len(group.examples) for group in first)
        """Number of drawn examples that are in no batch."""

    def batch(self, epoch: int, step: int) -> np.ndarray:
        """Return the int64 indices of the examples of one global batch, in order."""
        if not 0 <= step < self.steps_per_epoch:
            raise IndexError(f"step {step} of an epoch of {self.steps_per_epoch} steps")
        with self._lock:
            order = self._orders.get(epoch)
            if order is None:
                order = self._order(epoch)
                while len(self._orders) >= EPOCHS_KEPT:
                    self._orders.pop(next(iter(self._orders)))
                self._orders[epoch] = order
        return order[step].copy()

    def positives(self, epoch: int, step: int) -> np.ndarray | None:
        """Return another example of the same class for each example of a batch of a labelled source, else None."""
        examples = self.batch(epoch, step)
        source = self.source_of(int(examples[0]))
        if source not in self._classes:
            return None
        first = int(self._first[source])
        return self._classes[source].positives(examples - first, epoch, step) + first

    def source_of(self, index: int) -> int:
        """Return the number of the source that an example comes from."""
        return int(np.searchsorted(self._first, index, side="right")) - 1

    def summary(self) -> str:
        """Return one line for the log."""
        line = f"batches: {self.steps_per_epoch:,d} per epoch of {self.global_batch_size:,d} examples"
        if self.num_left_out:
            reasons = ["the last incomplete batch of each source" if self.homogeneous else "the last incomplete batch"]
            if self.keys is not None:
                reasons.append("what could not be placed without duplicates")
            why = ", and ".join(reasons if self.drop_last else reasons[1:])
            line += f"; {self.num_left_out:,d} of {self.num_drawn:,d} are left out of each epoch ({why})"
        if self.smallest_batch < self.global_batch_size:
            line += f"; the smallest batch has {self.smallest_batch:,d}"
            small = [
                f"{name} has {num:,d}" if self.homogeneous else f"there are {num:,d}"
                for name, num in self._group_sizes()
                if num < self.global_batch_size
            ]
            if small:
                line += f", since {' and '.join(small)} in all"
        for source, one in self._classes.items():
            line += f"; {self._names[source]}: {one.size:,d} of {one.num_classes:,d} classes in a batch"
            if one.num_alone:
                line += f" ({one.num_alone:,d} examples are alone in their class and left out)"
        return line

    def _group_sizes(self) -> list[tuple[str, int]]:
        """Return the name of each group of sources and how many examples an epoch draws from it."""
        if self.homogeneous:
            return list(zip(self._names, self._num_drawn, strict=True))
        return [("all sources", sum(self._num_drawn))]

    def _order(self, epoch: int) -> Batches:
        """Return the batches of an epoch in their order."""
        groups = self._groups(epoch)
        if len(groups) == 1:
            return groups[0]
        batches = [batch for group in groups for batch in group.rows(range(len(group)))]
        return Batches.of([batches[number] for number in self._shuffled(len(batches), _BATCHES, epoch)])

    def _groups(self, epoch: int) -> list[Batches]:
        """Return the batches of each group of sources."""
        drawn = [self._draw(source, epoch) for source in range(len(self.sizes))]
        streams = drawn if self.homogeneous else [self._mix(drawn, epoch)]
        return [self._group(number, stream, epoch) for number, stream in enumerate(streams)]

    def _group(self, number: int, stream: np.ndarray, epoch: int) -> Batches:
        """Return the batches of one group, of the examples drawn for it."""
        if number in self._classes:
            return Batches.of(list(self._classes[number].batches(epoch) + int(self._first[number])))
        if self.keys is None:
            return self._blocks(stream)
        return self._without_duplicates(number, stream, self.keys, epoch)

    def _blocks(self, stream: np.ndarray) -> Batches:
        """Cut a stream into batches, in order."""
        size = self.global_batch_size
        starts = np.arange(0, len(stream) + 1, size)
        if starts[-1] < len(stream) and self._keeps_incomplete(len(stream)):
            starts = np.append(starts, len(stream))
        return Batches(stream[: starts[-1]], starts)

    def _keeps_incomplete(self, num_examples: int) -> bool:
        """Return whether an incomplete batch is trained on: by choice, or where there is no other."""
        return not self.drop_last or num_examples < self.global_batch_size

    def _draw(self, source: int, epoch: int) -> np.ndarray:
        """Return the examples of a source in an epoch: the next ones of its random passes."""
        size, num_drawn = self.sizes[source], self._num_drawn[source]
        begin, end = epoch * num_drawn, (epoch + 1) * num_drawn
        parts = []
        for number in range(begin // size, (end - 1) // size + 1):
            order = self._shuffled(size, _PASS, source, number)
            parts.append(order[max(0, begin - number * size) : end - number * size])
        return np.concatenate(parts) + int(self._first[source])

    def _mix(self, drawn: list[np.ndarray], epoch: int) -> np.ndarray:
        """Interleave the streams at random. Each keeps its order, so that a second pass does not precede the first."""
        if len(drawn) == 1:
            return drawn[0]
        source_of = np.repeat(np.arange(len(drawn)), [len(one) for one in drawn])
        source_of = source_of[self._shuffled(len(source_of), _MIX, epoch)]
        mixed = np.empty(len(source_of), dtype=np.int64)
        for source, stream in enumerate(drawn):
            mixed[source_of == source] = stream
        return mixed

    def _without_duplicates(self, group: int, stream: np.ndarray, keys: ContentKeys, epoch: int) -> Batches:
        """Return the batches of one group, without common content inside a batch."""
        conflicts = find_conflicts(*keys.of_all(stream))
        if not conflicts.keys:
            return self._blocks(stream)
        size, incomplete = self.global_batch_size, self._keeps_incomplete(len(stream))
        most = len(stream) if epoch == 0 else self._num_batches[group]
        arranged = [stream[rows] for rows in arrange(conflicts, size, most, drop_last=not incomplete)]
        if epoch == 0:
            if not arranged:
                raise UserError(_no_batch(stream, keys, size))
            return Batches.of(arranged)
        # Every epoch must have as many batches as the first one, or step numbers would not map to epochs. If fewer
        # come out, batches of the first epoch are added.
        num_missing = most - len(arranged)
        if num_missing > 0:
            arranged += self._groups(0)[group].rows(range(most - num_missing, most))
        return Batches.of(arranged)

    def _shuffled(self, size: int, *stream: int) -> np.ndarray:
        """Return a permutation from raw bits and a stable sort: numpy guarantees only these across versions."""
        return np.argsort(random_bits(self.seed, size, *stream), kind="stable")


def rank_rows(num_rows: int, rank: int, world_size: int) -> slice:
    """Return the rows of a global batch for a rank. The sizes of the parts differ by at most one row."""
    return slice(rank * num_rows // world_size, (rank + 1) * num_rows // world_size)


def _no_batch(stream: np.ndarray, keys: ContentKeys, size: int) -> str:
    conflicts = find_conflicts(*keys.of_all(stream))
    return (
        f"no_duplicates: {len(stream):,d} examples do not fill one global batch of {size:,d} without content that "
        f"occurs twice (one is in {conflicts.group_sizes.max():,d} of {len(stream):,d}): lower batch_size, or turn it "
        "off"
    )
