"""Batch schedule: the examples of each global batch, as a pure function of seed, epoch and step."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vembed.errors import UserError

EPOCHS_KEPT = 2
"""Number of epoch orders in memory. Batches are prepared ahead, so two epochs are in use at an epoch's end."""
CHUNK = 65_536

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

    def rows(self, indices: np.ndarray) -> Iterator[tuple[int, list[int]]]:
        """Yield each example with its keys, in the order of `indices`."""
        for first in range(0, len(indices), CHUNK):
            chunk = indices[first : first + CHUNK]
            begins = self.starts[chunk]
            counts = self.starts[chunk + 1] - begins
            ends = np.cumsum(counts)
            # One gather for the whole chunk: position in the output, shifted to where its example begins in `values`.
            flat = self.values[np.arange(ends[-1]) + np.repeat(begins - (ends - counts), counts)].tolist()
            start = 0
            for index, end in zip(chunk.tolist(), ends.tolist(), strict=True):
                yield index, flat[start:end]
                start = end


class BatchSchedule:
    """Global batches of all epochs over one or several sources. Examples are numbered consecutively over the sources.

    A source of weight w contributes w times its size to each epoch. It is drawn in random passes that continue over
    epochs, so that no example repeats before all others of its source were drawn. With `homogeneous`, all examples of a
    batch come from one source. With `keys`, no two examples of a batch share content: an example with a duplicate is
    moved to a later batch. Examples that do not fill a batch at the end of an epoch are dropped from that epoch.
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
        """Number of examples drawn per epoch."""
        self.num_left_out = self.num_drawn - self.steps_per_epoch * global_batch_size
        """Number of drawn examples that do not fill a batch and are dropped."""

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
        batch: np.ndarray = order[step].copy()
        return batch

    def source_of(self, index: int) -> int:
        """Return the number of the source that an example comes from."""
        return int(np.searchsorted(self._first, index, side="right")) - 1

    def summary(self) -> str:
        """Return one line for the log."""
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
        """Return the examples of an epoch: [steps_per_epoch, global_batch_size]."""
        batches = np.concatenate(self._groups(epoch))
        if len(self._num_batches) > 1:
            return np.take(batches, self._shuffled(len(batches), _BATCHES, epoch), axis=0)
        return batches

    def _groups(self, epoch: int) -> list[np.ndarray]:
        """Return [steps, global_batch_size] for each group of sources."""
        drawn = [self._draw(source, epoch) for source in range(len(self.sizes))]
        streams = drawn if self.homogeneous else [self._mix(drawn, epoch)]
        if self.keys is None:
            return [_blocks(stream, self.global_batch_size) for stream in streams]
        return [self._without_duplicates(group, stream, self.keys, epoch) for group, stream in enumerate(streams)]

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

    def _without_duplicates(self, group: int, stream: np.ndarray, keys: ContentKeys, epoch: int) -> np.ndarray:
        """Return [steps, global_batch_size] of one group, without common content inside a batch."""
        size = self.global_batch_size
        packed = np.array(list(pack(keys.rows(stream), size)), dtype=np.int64).reshape(-1, size)
        if epoch == 0:
            if not len(packed):
                raise UserError(_no_batch(stream, keys, size))
            return packed
        # Every epoch must have as many batches as the first one, or step numbers would not map to epochs. If fewer
        # come out, batches of the first epoch are added.
        num_missing = self._num_batches[group] - len(packed)
        if num_missing > 0:
            return np.concatenate([packed, self._groups(0)[group][-num_missing:]])
        return packed[: self._num_batches[group]]

    def _shuffled(self, size: int, *stream: int) -> np.ndarray:
        """Return a permutation from raw bits and a stable sort: numpy guarantees only these across versions."""
        bits = np.random.Philox(np.random.SeedSequence([self.seed, *stream]))
        return np.argsort(bits.random_raw(size), kind="stable")


def pack(rows: Iterator[tuple[int, list[int]]], size: int) -> Iterator[list[int]]:
    """Yield full batches of examples without a common key. Deferred examples come before new ones."""
    waiting: dict[int, deque[tuple[int, list[int]]]] = {}  # deferred examples by the key in conflict
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
    """Return the rows of a global batch for a rank. The sizes of the parts differ by at most one row."""
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
