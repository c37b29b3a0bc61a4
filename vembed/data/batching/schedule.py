"""Batch schedule: the examples of each global batch, as a pure function of seed, epoch and step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vembed.config.sampling import PROPORTIONAL, Sampling
from vembed.data.batching.arrangement import arrange, find_conflicts
from vembed.data.batching.class_batches import ClassBatches, random_bits
from vembed.errors import UserError

EPOCHS_KEPT = 2
"""Number of epoch orders in memory. Batches are prepared ahead, so two epochs are in use at an epoch's end."""

# Purpose of a random stream, part of its seed, so that no two streams are equal.
_PASS = 1
_MIX = 2
_BATCHES = 3
_ORDER_OF_FIRST = 8


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
        return self.values[
            np.arange(counts.sum()) + np.repeat(begins - (ends - counts), counts)
        ], counts


@dataclass(frozen=True)
class Batches:
    """Batches of one epoch: batch i holds examples[starts[i] : starts[i + 1]]."""

    examples: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, batches: Sequence[np.ndarray]) -> Batches:
        """Join single batches."""
        examples = np.concatenate(batches) if batches else np.empty(0, np.int64)
        return cls(examples, np.cumsum([0, *(len(batch) for batch in batches)]))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> np.ndarray:
        return self.examples[self.starts[number] : self.starts[number + 1]]


class BatchSchedule:
    """Global batches of all epochs over one or several sources. Examples are numbered consecutively over the sources.

    A source of weight w contributes w times its size to each epoch. It is drawn in random passes that continue over
    epochs, so that no example repeats before all others of its source were drawn. With `homogeneous`, all examples of a
    batch come from one source, or with `tasks` from sources of one task, and a source may have a batch size of its own
    (over all ranks). With `keys`, no two examples of a batch share content: examples of the same content go
    to different batches. With `labels`, no two examples of a batch share a class (class_batches.py), and all are of one
    source.

    Examples that do not fill a batch at the end of an epoch are dropped from that epoch. Where there is no other batch,
    they make a smaller one.
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
        tasks: Sequence[int] | None = None,
        batch_sizes: Sequence[int] | None = None,
        sampling: Sampling = PROPORTIONAL,
        keys: ContentKeys | None = None,
        labels: Sequence[np.ndarray | None] = (),
    ) -> None:
        self.sizes = tuple(sizes)
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.homogeneous = homogeneous
        self.keys = keys
        self._first = np.cumsum([0, *self.sizes])
        self.batch_sizes = list(batch_sizes or [global_batch_size] * len(self.sizes))
        self.turns = sampling.kind == "round_robin"
        self._num_drawn = sampling.num_drawn(
            self.sizes, weights or [1.0] * len(self.sizes), self.batch_sizes
        )
        self._names = names or [
            f"source {number}" for number in range(1, len(self.sizes) + 1)
        ]
        if (
            any(source_labels is not None for source_labels in labels)
            and len(self.sizes) > 1
            and not homogeneous
        ):
            raise UserError(
                "data_path: a source with a label needs batches of its own beside others: set homogeneous_batches: true"
            )
        self._classes: dict[int, ClassBatches] = {}
        for source, source_labels in enumerate(labels):
            if source_labels is not None:
                self._classes[source] = ClassBatches(
                    self._names[source],
                    source_labels,
                    self._num_drawn[source],
                    self.batch_sizes[source],
                    seed,
                    source,
                )
        group_of = [0] * len(self.sizes)
        if homogeneous:
            group_of = list(range(len(self.sizes)) if tasks is None else tasks)
        groups: dict[int, list[int]] = {}
        for source in range(len(self.sizes)):
            if homogeneous and source in self._classes:
                group_of[source] = -1 - source  # labelled data are their own group
            groups.setdefault(group_of[source], []).append(source)
        self._members = list(groups.values())
        """The sources of each group: one source, those of a task, or all of them."""
        self._orders: dict[int, Batches] = {}
        self._lock = threading.Lock()
        # Epoch 0 fixes the number of batches of every epoch, so that a step number gives epoch and batch.
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
        # Threads prepare several batches at once, and must not compute one epoch's order twice.
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
        is_split = len(self._members) > 1
        line = f"batches: {self.steps_per_epoch:,d} per epoch of {self.global_batch_size:,d} examples"
        if self.num_left_out:
            reasons = []
            each = " of each source" if is_split else ""
            reasons.append(f"the last incomplete batch{each}")
            if self.keys is not None:
                reasons.append("what could not be placed without duplicates")
            line += (
                f"; {self.num_left_out:,d} of {self.num_drawn:,d} are left out of each epoch "
                f"({', and '.join(reasons)})"
            )
        if self.turns and is_split:
            line += ", of each source in turn"
        for size in sorted({*self.batch_sizes} - {self.global_batch_size}):
            names = []
            for name, batch_size in zip(self._names, self.batch_sizes, strict=True):
                if batch_size == size:
                    names.append(name)
            line += f"; of {size:,d}: {', '.join(names)}"
        if self.smallest_batch < min(self.batch_sizes):
            line += f"; the smallest batch has {self.smallest_batch:,d}"
            small = []
            for sources in self._members:
                num_drawn = sum(self._num_drawn[source] for source in sources)
                names = [self._names[source] for source in sources]
                subject = f"{' and '.join(names)} has" if is_split else "there are"
                if num_drawn < self.batch_sizes[sources[0]]:
                    small.append(f"{subject} {num_drawn:,d}")
            if small:
                line += f", since {' and '.join(small)} in all"
        for source, classes in self._classes.items():
            line += f"; {self._names[source]}: {classes.size:,d} of {classes.num_classes:,d} classes in a batch"
            if classes.num_alone:
                line += f" ({classes.num_alone:,d} examples are alone in their class and left out)"
            if classes.num_repeated:
                line += f" ({classes.num_repeated:,d} examples that repeat another one of their class are left out)"
        return line

    def _order(self, epoch: int) -> Batches:
        """Return the batches of an epoch in their order."""
        groups = self._groups(epoch)
        if len(groups) == 1:
            return groups[0]
        batches = []
        for group in groups:
            batches += [group[number] for number in range(len(group))]
        if self.turns:
            # Stable by place in the group: the first batch of every group, then the second, and so on.
            turn = np.concatenate([np.arange(len(group)) for group in groups])
            order = np.argsort(turn, kind="stable")
        else:
            order = self._shuffled(len(batches), _BATCHES, epoch)
        return Batches.of([batches[number] for number in order])

    def _groups(self, epoch: int) -> list[Batches]:
        """Return the batches of each group of sources."""
        groups = []
        for number, sources in enumerate(self._members):
            size = self.batch_sizes[sources[0]]
            if sources[0] in self._classes:
                batches = self._classes[sources[0]].batches(epoch)
                groups.append(Batches.of(list(batches + int(self._first[sources[0]]))))
                continue
            drawn = [self._draw(source, epoch) for source in sources]
            stream = self._mix(drawn, number, epoch)
            if self.keys is None:
                groups.append(self._blocks(stream, size))
            else:
                groups.append(
                    self._without_duplicates(number, stream, self.keys, epoch)
                )
        return groups

    def _blocks(self, stream: np.ndarray, size: int) -> Batches:
        """Cut a stream into batches, in order."""
        starts = np.arange(0, len(stream) + 1, size)
        if starts[-1] < len(stream) < size:
            starts = np.append(starts, len(stream))
        return Batches(stream[: starts[-1]], starts)

    def _draw(self, source: int, epoch: int) -> np.ndarray:
        """Return the examples of a source in an epoch: the next ones of its random passes."""
        size = self.sizes[source]
        num_drawn = self._num_drawn[source]
        begin = epoch * num_drawn
        end = (epoch + 1) * num_drawn
        parts = []
        # Pass n of a source covers its draws n * size to (n + 1) * size - 1, counted over all epochs.
        for number in range(begin // size, (end - 1) // size + 1):
            order = self._shuffled(size, _PASS, source, number)
            parts.append(order[max(0, begin - number * size) : end - number * size])
        return np.concatenate(parts) + int(self._first[source])

    def _mix(self, drawn: list[np.ndarray], group: int, epoch: int) -> np.ndarray:
        """Interleave the streams at random. Each keeps its order, so that a second pass does not precede the first."""
        if len(drawn) == 1:
            return drawn[0]
        source_of = np.repeat(np.arange(len(drawn)), [len(stream) for stream in drawn])
        # Group 0 leaves its number out: the order of a single group does not depend on grouping.
        purpose = (_MIX, epoch) if group == 0 else (_MIX, epoch, group)
        source_of = source_of[self._shuffled(len(source_of), *purpose)]
        mixed = np.empty(len(source_of), dtype=np.int64)
        for source, stream in enumerate(drawn):
            mixed[source_of == source] = stream
        return mixed

    def _without_duplicates(
        self, group: int, stream: np.ndarray, keys: ContentKeys, epoch: int
    ) -> Batches:
        """Return the batches of one group, without common content inside a batch."""
        conflicts = find_conflicts(*keys.of_all(stream))
        size = self.batch_sizes[self._members[group][0]]
        if not conflicts.keys:
            return self._blocks(stream, size)
        # Later epochs have at most as many batches as epoch 0.
        most = len(stream) if epoch == 0 else self._num_batches[group]
        arranged = []
        for rows in arrange(conflicts, size, most, drop_last=len(stream) >= size):
            arranged.append(stream[rows])
        if epoch == 0 and not arranged:
            raise UserError(
                f"no_duplicates: {len(stream):,d} examples do not fill one global batch of {size:,d} without content "
                f"that occurs twice (one is in {conflicts.group_sizes.max():,d} of {len(stream):,d}): lower "
                "batch_size, or turn it off"
            )
        # Every epoch must have as many batches as the first one, or step numbers would not map to epochs. If fewer
        # come out, the epoch has the batches of the first one in another order: no example is in two of them.
        if epoch and len(arranged) < most:
            first = self._groups(0)[group]
            order = self._shuffled(len(first), _ORDER_OF_FIRST, epoch, group)
            arranged = [first[int(number)] for number in order]
        return Batches.of(arranged)

    def _shuffled(self, size: int, *stream: int) -> np.ndarray:
        """Return a permutation from raw bits and a stable sort: numpy guarantees only these across versions."""
        return np.argsort(random_bits(self.seed, size, *stream), kind="stable")


def rank_rows(num_rows: int, rank: int, world_size: int) -> slice:
    """Return the rows of a global batch for a rank. The sizes of the parts differ by at most one row."""
    return slice(rank * num_rows // world_size, (rank + 1) * num_rows // world_size)
