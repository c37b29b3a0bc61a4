"""The global batch: which examples a step trains on, as a pure function of seed, epoch and step. No files, no ranks."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vembed.errors import UserError

EPOCHS_KEPT = 2
"""Orders that are held in memory: steps are prepared ahead, so that two epochs meet at their border."""
CHUNK = 65_536

# What a stream of random numbers is for; one number each, so that no two streams are the same.
_PASS, _MIX, _BATCHES = 1, 2, 3


@dataclass(frozen=True)
class ContentKeys:
    """The contents of each example as numbers: those of example i are values[starts[i] : starts[i + 1]]."""

    values: np.ndarray
    starts: np.ndarray

    def of(self, index: int) -> np.ndarray:
        """The keys of one example."""
        return self.values[self.starts[index] : self.starts[index + 1]]

    def rows(self, indices: np.ndarray) -> Iterator[tuple[int, list[int]]]:
        """Each of the examples with its keys, in the order of `indices`."""
        for first in range(0, len(indices), CHUNK):
            chunk = indices[first : first + CHUNK]
            begins = self.starts[chunk]
            counts = self.starts[chunk + 1] - begins
            ends = np.cumsum(counts)
            flat = self.values[np.arange(ends[-1]) + np.repeat(begins - (ends - counts), counts)].tolist()
            start = 0
            for index, end in zip(chunk.tolist(), ends.tolist(), strict=True):
                yield index, flat[start:end]
                start = end


class BatchPlan:
    """The batches of all epochs over one or several sources, whose examples are numbered one source after the other.

    A source of weight w gives w times its size to each epoch. It goes through its examples in random passes, one after
    the other over the epochs, so that none comes again before all others of its source have come. With `homogeneous`
    a batch comes from one source. With `keys` no two examples of a batch have content in common: one that would bring
    a duplicate waits for a later batch. What does not fill a batch at the end of an epoch is left out of that epoch.
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
    ) -> None:
        self.sizes = tuple(sizes)
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.homogeneous = homogeneous
        self.keys = keys
        self._first = np.cumsum([0, *self.sizes])
        self._num_drawn = [
            max(1, round(size * weight)) for size, weight in zip(sizes, weights or [1.0] * len(self.sizes), strict=True)
        ]
        self._orders: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()
        self._check(names or [f"source {number}" for number in range(1, len(self.sizes) + 1)])
        # Per group of sources; a group is one source, or all of them mixed.
        drawn = self._num_drawn if homogeneous else [sum(self._num_drawn)]
        self._num_batches = [num // global_batch_size for num in drawn]
        if keys is not None:
            self._num_batches = [len(batches) for batches in self._groups(0)]
        self.steps_per_epoch = sum(self._num_batches)
        self.num_drawn = sum(self._num_drawn)
        """Examples that an epoch draws."""
        self.num_left_out = self.num_drawn - self.steps_per_epoch * global_batch_size
        """Of those, how many do not fill a batch and are left out of the epoch."""

    def batch(self, epoch: int, step: int) -> np.ndarray:
        """Indices of the examples of one global batch, int64, in order."""
        if not 0 <= step < self.steps_per_epoch:
            raise IndexError(f"step {step} of an epoch of {self.steps_per_epoch} steps")
        with self._lock:
            order = self._orders.get(epoch)
            if order is None:
                order = self._order(epoch)
                while len(self._orders) >= EPOCHS_KEPT:
                    self._orders.pop(next(iter(self._orders)))
                self._orders[epoch] = order
        batch: np.ndarray = order[step].copy()
        return batch

    def summary(self) -> str:
        """One line for the log."""
        line = f"batches: {self.steps_per_epoch:,d} per epoch of {self.global_batch_size:,d} examples"
        if self.num_left_out:
            why = "the last incomplete batch of each source" if self.homogeneous else "the last incomplete batch"
            if self.keys is not None:
                why += ", and what could not be placed without duplicates"
            line += f"; {self.num_left_out:,d} of {self.num_drawn:,d} are left out of each epoch ({why})"
        return line

    def _check(self, names: Sequence[str]) -> None:
        batch = self.global_batch_size
        way_out = "lower batch_size (or global_batch_size), or add data"
        if sum(self._num_drawn) < batch:
            raise UserError(
                f"an epoch draws {sum(self._num_drawn):,d} examples, which do not fill one global batch of {batch:,d}: "
                + way_out
            )
        for name, num_drawn in zip(names, self._num_drawn, strict=True):
            if self.homogeneous and num_drawn < batch:
                raise UserError(
                    f"with homogeneous_batches, {name} gives {num_drawn:,d} examples to an epoch, which do not fill "
                    f"one global batch of {batch:,d}: {way_out}, or set homogeneous_batches: false"
                )

    def _order(self, epoch: int) -> np.ndarray:
        """[steps_per_epoch, global_batch_size] the examples of an epoch."""
        batches = np.concatenate(self._groups(epoch))
        if len(self._num_batches) > 1:
            return np.take(batches, self._shuffled(len(batches), _BATCHES, epoch), axis=0)
        return batches

    def _groups(self, epoch: int) -> list[np.ndarray]:
        """For each group of sources [steps, global_batch_size]."""
        drawn = [self._draw(source, epoch) for source in range(len(self.sizes))]
        streams = drawn if self.homogeneous else [self._mix(drawn, epoch)]
        if self.keys is None:
            return [_blocks(stream, self.global_batch_size) for stream in streams]
        return [self._without_duplicates(group, stream, self.keys, epoch) for group, stream in enumerate(streams)]

    def _draw(self, source: int, epoch: int) -> np.ndarray:
        """The examples that a source gives to an epoch: the next ones of its passes."""
        size, num_drawn = self.sizes[source], self._num_drawn[source]
        begin, end = epoch * num_drawn, (epoch + 1) * num_drawn
        parts = []
        for number in range(begin // size, (end - 1) // size + 1):
            order = self._shuffled(size, _PASS, source, number)
            parts.append(order[max(0, begin - number * size) : end - number * size])
        return np.concatenate(parts) + int(self._first[source])

    def _mix(self, drawn: list[np.ndarray], epoch: int) -> np.ndarray:
        """One stream of several. Each keeps its own order, so that a second pass does not come before the first."""
        if len(drawn) == 1:
            return drawn[0]
        source_of = np.repeat(np.arange(len(drawn)), [len(one) for one in drawn])
        source_of = source_of[self._shuffled(len(source_of), _MIX, epoch)]
        mixed = np.empty(len(source_of), dtype=np.int64)
        for source, stream in enumerate(drawn):
            mixed[source_of == source] = stream
        return mixed

    def _without_duplicates(self, group: int, stream: np.ndarray, keys: ContentKeys, epoch: int) -> np.ndarray:
        """[steps, global_batch_size] of one group."""
        size = self.global_batch_size
        packed = np.array(list(pack(keys.rows(stream), size)), dtype=np.int64).reshape(-1, size)
        if epoch == 0:
            if not len(packed):
                raise UserError(_no_batch(stream, keys, size))
            return packed
        # Every epoch has as many batches as the first one: where fewer come out, batches of the first fill up.
        num_missing = self._num_batches[group] - len(packed)
        if num_missing > 0:
            return np.concatenate([packed, self._groups(0)[group][-num_missing:]])
        return packed[: self._num_batches[group]]

    def _shuffled(self, size: int, *stream: int) -> np.ndarray:
        """A permutation. Raw bits and a stable sort, because numpy promises only these to stay as they are."""
        bits = np.random.Philox(np.random.SeedSequence([self.seed, *stream]))
        return np.argsort(bits.random_raw(size), kind="stable")


def pack(rows: Iterator[tuple[int, list[int]]], size: int) -> Iterator[list[int]]:
    """Full batches of examples that have no key in common; an example in conflict waits, before those after it."""
    waiting: dict[int, deque[tuple[int, list[int]]]] = {}  # by the key that was in the way
    more = True
    while more or waiting:
        batch: list[int] = []
        used: set[int] = set()

        def place(index: int, keys: list[int], batch: list[int] = batch, used: set[int] = used) -> bool:
            if used.isdisjoint(keys):
                used.update(keys)
                batch.append(index)
                return True
            in_the_way = next(key for key in keys if key in used)
            waiting.setdefault(in_the_way, deque()).append((index, keys))
            return False

        for key in list(waiting):
            if len(batch) == size:
                break
            while key not in used and waiting[key]:
                place(*waiting[key].popleft())
            if not waiting[key]:
                del waiting[key]
        while len(batch) < size:
            row = next(rows, None)
            if row is None:
                more = False
                break
            place(*row)
        if len(batch) < size:
            return
        yield batch


def rank_rows(num_rows: int, rank: int, world_size: int) -> slice:
    """The rows of a global batch that a rank takes: equal shares, or ones that differ by one row."""
    return slice(rank * num_rows // world_size, (rank + 1) * num_rows // world_size)


def _blocks(stream: np.ndarray, size: int) -> np.ndarray:
    num_batches = len(stream) // size
    return stream[: num_batches * size].reshape(num_batches, size)


def _no_batch(stream: np.ndarray, keys: ContentKeys, size: int) -> str:
    counts: Counter[int] = Counter()
    for _, contents in keys.rows(stream):
        counts.update(set(contents))
    return (
        f"no_duplicates: {len(stream):,d} examples do not fill one global batch of {size:,d} without content that "
        f"occurs twice (one is in {max(counts.values()):,d} of {len(stream):,d}): lower batch_size, or turn it off"
    )
