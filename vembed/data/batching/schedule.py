"""Batch schedule: the examples of each global batch, as a pure function of seed, epoch and place in the epoch.

With `no_duplicates` the examples of an epoch are arranged into batches in which no content occurs twice. Batches of
labelled examples hold no class twice, and come with a positive of the same class for each example.
"""

import hashlib
import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vembed.config.schema import PROPORTIONAL, Sampling
from vembed.errors import UserError

EPOCHS_KEPT = 2
"""Number of epoch orders in memory. Batches are prepared ahead, so two epochs are in use at an epoch's end."""

_LOCK = threading.Lock()

# Purpose of a random stream, part of its seed, so that no two streams are equal.
_PASS = 1
_MIX = 2
_BATCHES = 3
_MEMBERS = 4
_CLASSES = 5
_OFFSET = 6
_POSITIVES = 7
_ORDER_OF_FIRST = 8
_UNIT = 2**20
"""Shares of a class are integers in this unit: rounding must not put a class twice into a batch."""


def random_bits(
    seed: int,
    size: int,
    *stream: int,
) -> np.ndarray:
    """Return uint64 values [size] of a stream. numpy guarantees raw bits across its versions."""
    sequence = np.random.SeedSequence([seed, *stream])
    return np.random.Philox(sequence).random_raw(size)


def shuffled(
    seed: int,
    size: int,
    *stream: int,
) -> np.ndarray:
    """Return a permutation from raw bits and a stable sort: numpy guarantees only these across versions."""
    return np.argsort(random_bits(seed, size, *stream), kind="stable")


def rank_examples(
    num_examples: int,
    rank: int,
    world_size: int,
) -> slice:
    """Return a rank's examples of a global batch. The sizes of the parts differ by at most one example."""
    start = rank * num_examples // world_size
    stop = (rank + 1) * num_examples // world_size
    return slice(start, stop)


class ContentKeys(NamedTuple):
    """Content keys of examples, those of one example behind those of the one before."""

    values: np.ndarray
    counts: np.ndarray
    """Number of keys of each example."""

    def of(self, indices: np.ndarray) -> "ContentKeys":
        """Return the keys of some examples."""
        begins = np.cumsum(self.counts) - self.counts
        counts = self.counts[indices]
        # One gather: the position in the result, shifted to where the example begins in `values`.
        shifts = np.repeat(begins[indices] - (np.cumsum(counts) - counts), counts)
        return ContentKeys(self.values[np.arange(counts.sum()) + shifts], counts)


Batches = list[np.ndarray]
"""Batches of one epoch: the numbers of their examples."""


class BatchSchedule:
    """Global batches of all epochs over one or several sources. Examples are numbered consecutively over the sources.

    A source of weight w contributes w times its size to each epoch. It is drawn in random passes that continue over
    epochs, so that no example repeats before all others of its source were drawn. With `source_groups`, the number of
    each source's group, all examples of a batch come from sources of one group, and a source may have a batch size of
    its own (over all ranks). With `keys`, no two examples of a batch share content: examples of the same content go
    to different batches. With `labels`, no two examples of a batch share a class (ClassBatches), and all are of one
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
        source_groups: Sequence[int] | None = None,
        batch_sizes: Sequence[int] | None = None,
        sampling: Sampling = PROPORTIONAL,
        keys: ContentKeys | None = None,
        labels: Sequence[np.ndarray | None] = (),
    ) -> None:
        num_sources = len(sizes)
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.keys = keys
        self._sizes = sizes
        self._first = np.cumsum([0, *sizes])
        self._batch_sizes = batch_sizes or [global_batch_size] * num_sources
        self._turns = sampling.kind == "round_robin"
        self._num_drawn = examples_per_epoch(
            sampling, sizes, weights or [1.0] * num_sources, self._batch_sizes
        )
        self._names = names or [f"source {number + 1}" for number in range(num_sources)]
        self._classes: dict[int, ClassBatches] = {}
        for source, source_labels in enumerate(labels):
            if source_labels is None:
                continue
            if num_sources > 1 and source_groups is None:
                raise UserError(
                    "data_path: one of several sources has labels, and its examples cannot share a batch with those of the others: "
                    "set homogeneous_batches: true"
                )
            self._classes[source] = ClassBatches(
                self._names[source],
                source_labels,
                self._num_drawn[source],
                self._batch_sizes[source],
                seed,
                source,
            )
        groups: dict[int, list[int]] = {}
        for source in range(num_sources):
            group = 0 if source_groups is None else source_groups[source]
            if source in self._classes:
                group = -1 - source  # labelled data are their own group
            groups.setdefault(group, []).append(source)
        self._groups = list(groups.values())
        """The sources of each group: one source, several of the same losses, or all of them."""
        self._orders: dict[int, Batches] = {}
        # Epoch 0 fixes the number of batches of every epoch, so that the number of a batch in the run gives both.
        self._num_batches: list[int] = []
        """Of each group."""
        batch_lengths: list[int] = []
        for number in range(len(self._groups)):
            batches = self._group_batches(number, 0)
            self._num_batches.append(len(batches))
            batch_lengths += map(len, batches)
        self.batches_per_epoch = len(batch_lengths)
        self.smallest_batch = min(batch_lengths)
        """Number of examples of the smallest batch."""
        self.is_short = (
            batch_lengths[0] < self._batch_sizes[0] and len(batch_lengths) == 1
        )
        """True if an epoch is one batch, which the data do not fill."""
        self.num_drawn = sum(self._num_drawn)
        """Number of examples drawn per epoch."""
        self.num_left_out = self.num_drawn - sum(batch_lengths)
        """Number of drawn examples that are in no batch."""

    def __getstate__(self) -> dict[str, Any]:
        """Another process computes its orders."""
        return {**vars(self), "_orders": {}}

    def batch(self, epoch: int, batch_index: int) -> np.ndarray:
        """Return the int64 indices of the examples of one global batch, in order."""
        # Threads prepare several batches at once, and must not compute one epoch's order twice.
        with _LOCK:
            order = self._orders.get(epoch)
            if order is None:
                order = self._order(epoch)
                while len(self._orders) >= EPOCHS_KEPT:
                    self._orders.pop(next(iter(self._orders)))
                self._orders[epoch] = order
        return order[batch_index].copy()

    def positives(self, epoch: int, batch_index: int) -> np.ndarray | None:
        """Return another example of the same class for each example of a batch of a labelled source, else None."""
        examples = self.batch(epoch, batch_index)
        source = self.source_of(int(examples[0]))
        if source not in self._classes:
            return None
        first = int(self._first[source])
        classes = self._classes[source]
        return classes.positives(examples - first, epoch, batch_index) + first

    def source_of(self, index: int) -> int:
        """Return the index of the source that an example comes from."""
        return int(np.searchsorted(self._first, index, side="right")) - 1

    def summary(self) -> str:
        """Return one line for the log."""
        batch = f"{self.global_batch_size:,d} examples"
        if self.is_short:
            batch = f"{self.smallest_batch:,d} examples, since the data do not fill a global batch of {self.global_batch_size:,d}"
        parts = [f"batches: {self.batches_per_epoch:,d} per epoch of {batch}"]
        if self.num_left_out:
            parts.append(
                f"{self.num_left_out:,d} of {self.num_drawn:,d} fill no batch and are left out of each epoch"
            )
        for name, size in zip(self._names, self._batch_sizes, strict=True):
            if size != self.global_batch_size:
                parts.append(f"of {size:,d}: {name}")
        if self.smallest_batch < min(self._batch_sizes) and not self.is_short:
            parts.append(f"the smallest batch has {self.smallest_batch:,d}")
        for source, classes in self._classes.items():
            parts.append(
                f"{self._names[source]}: {classes.size:,d} of {classes.num_classes:,d} classes in a batch "
                f"({classes.num_left_out:,d} examples that are alone in their class or repeat another one of it are left "
                "out)"
            )
        return "; ".join(parts)

    def _order(self, epoch: int) -> Batches:
        """Return the batches of an epoch in their order."""
        numbers = range(len(self._groups))
        groups = [self._group_batches(number, epoch) for number in numbers]
        if len(groups) == 1:
            return groups[0]
        batches = list(itertools.chain.from_iterable(groups))
        if self._turns:
            # Stable by place in the group: the first batch of every group, then the second, and so on.
            turn = np.concatenate([np.arange(len(group)) for group in groups])
            order = np.argsort(turn, kind="stable")
        else:
            order = shuffled(self.seed, len(batches), _BATCHES, epoch)
        return [batches[number] for number in order.tolist()]

    def _group_batches(self, group: int, epoch: int) -> Batches:
        """Return the batches of one group of sources, with `keys` without common content inside a batch."""
        sources = self._groups[group]
        size = self._batch_sizes[sources[0]]
        if sources[0] in self._classes:
            batches = self._classes[sources[0]].batches(epoch)
            return list(batches + self._first[sources[0]])
        drawn = [self._draw(source, epoch) for source in sources]
        stream = drawn[0]
        if len(drawn) > 1:
            stream = self._mix(drawn, group, epoch)
        if self.keys is None:
            # An incomplete batch is trained on where there is no other.
            num_full = max(len(stream) // size, 1)
            starts = range(0, num_full * size, size)
            return [stream[start : start + size] for start in starts]
        contents = repeated_contents(*self.keys.of(stream))
        positions_of = arrange(contents, len(stream), size)
        if not positions_of and epoch == 0:
            raise UserError(
                f"no_duplicates: {len(stream):,d} examples do not fill one global batch of {size:,d} without content "
                "that occurs twice: lower batch_size, or turn it off"
            )
        # Every epoch must have as many batches as the first one, or their numbers would not map to epochs. If fewer
        # come out, the epoch has the batches of the first one in another order: no example is in two of them.
        if epoch > 0:
            num_batches = self._num_batches[group]
            if len(positions_of) < num_batches:
                first = self._group_batches(group, 0)
                order = shuffled(self.seed, len(first), _ORDER_OF_FIRST, epoch, group)
                return [first[number] for number in order.tolist()]
            del positions_of[num_batches:]
        return [stream[positions] for positions in positions_of]

    def _draw(self, source: int, epoch: int) -> np.ndarray:
        """Return the examples of a source in an epoch: the next ones of its random passes."""
        size = self._sizes[source]
        num_drawn = self._num_drawn[source]
        begin = epoch * num_drawn
        end = (epoch + 1) * num_drawn
        parts = []
        # Pass n of a source covers its draws n * size to (n + 1) * size - 1, counted over all epochs.
        for number in range(begin // size, (end - 1) // size + 1):
            order = shuffled(self.seed, size, _PASS, source, number)
            first_draw = number * size
            parts.append(order[max(0, begin - first_draw) : end - first_draw])
        return np.concatenate(parts) + int(self._first[source])

    def _mix(
        self,
        drawn: list[np.ndarray],
        group: int,
        epoch: int,
    ) -> np.ndarray:
        """Interleave the streams at random. Each keeps its order, so that a second pass does not precede the first."""
        lengths = [len(stream) for stream in drawn]
        source_of = np.repeat(np.arange(len(drawn)), lengths)
        # Group 0 draws from a stream without its number, as runs without groups do.
        purpose = (_MIX, epoch) if group == 0 else (_MIX, epoch, group)
        source_of = source_of[shuffled(self.seed, len(source_of), *purpose)]
        mixed = np.empty(len(source_of), dtype=np.int64)
        for source, stream in enumerate(drawn):
            mixed[source_of == source] = stream
        return mixed


def examples_per_epoch(
    sampling: Sampling,
    sizes: Sequence[int],
    weights: Sequence[float],
    batch_sizes: Sequence[int],
) -> list[int]:
    """Return how many examples of each source an epoch draws: about as many in all as with `proportional`."""
    counts = [size * weight for size, weight in zip(sizes, weights, strict=True)]
    if sampling.kind == "round_robin":
        num_batches = max(1, round(sum(counts) / sum(batch_sizes)))
        return [num_batches * size for size in batch_sizes]
    if sampling.alpha != 1.0:
        shares = [
            weight * size**sampling.alpha
            for size, weight in zip(sizes, weights, strict=True)
        ]
        factor = sum(counts) / sum(shares)
        counts = [share * factor for share in shares]
    return [max(1, round(count)) for count in counts]


# ---- batches without duplicates ------------------------------------------------------------------------------------


def repeated_contents(values: np.ndarray, counts: np.ndarray) -> dict[int, set[int]]:
    """Return the contents that another example has too, of each example that has any. `values`: contents of all
    examples, of which example i has the next counts[i]."""
    owners = np.repeat(np.arange(len(counts)), counts)
    _, numbers, frequencies = np.unique(values, return_inverse=True, return_counts=True)
    is_repeated = frequencies[numbers] > 1
    contents = defaultdict(set)
    for owner, number in zip(
        owners[is_repeated].tolist(), numbers[is_repeated].tolist(), strict=True
    ):
        contents[owner].add(number)
    return contents


def arrange(
    contents: Mapping[int, set[int]],
    num_examples: int,
    size: int,
) -> list[list[int]]:
    """Return full batches of `size` examples that share none of their `contents`. Of fewer than `size` examples it
    returns one batch, of those that can be together.

    An example that does not fit into a batch waits for a later one. Each batch takes one waiting example of each content
    first, the content for which most wait before others, and is then filled in the epoch's order.
    """
    waiting: dict[int, deque[int]] = defaultdict(deque)
    coming = iter(range(num_examples))
    batches: list[list[int]] = []
    while True:
        batch = []
        held: set[int] = set()
        for example in itertools.chain(_first_waiting(waiting), coming):
            example_contents = contents.get(example, set())
            shared = held & example_contents
            if shared:
                waiting[min(shared)].append(example)
                continue
            batch.append(example)
            held |= example_contents
            if len(batch) == size:
                break
        else:
            return batches if num_examples >= size else [batch]
        batches.append(batch)


def _first_waiting(waiting: dict[int, deque[int]]) -> Iterator[int]:
    """Take one example of each content, and yield it."""
    for content in sorted(waiting, key=lambda key: -len(waiting[key])):
        examples = waiting[content]
        example = examples.popleft()
        if not examples:
            del waiting[content]
        yield example


# ---- labelled examples -------------------------------------------------------------------------------------------


def label_key(label: str) -> int:
    """Return a 63-bit hash of a label, equal on every process and in every run."""
    content = label.encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def next_of_class(labels: np.ndarray) -> np.ndarray:
    """Return for each example the next one of its class, in a circle; itself if there is no other."""
    order = np.argsort(labels, kind="stable")
    changes = np.diff(labels[order]) != 0
    is_first = np.concatenate([[True], changes])
    is_last = np.concatenate([changes, [True]])
    following = np.roll(order, -1)
    following[is_last] = order[is_first]
    result = np.empty(len(labels), dtype=np.int64)
    result[order] = following
    return result


class ClassBatches:
    """Batches of one labelled source, a pure function of seed and epoch.

    A batch holds at most one example of each class, so that no negative is of the class of its query. It has as many
    examples as the global batch, or as there are classes. Classes are drawn by their size, at most once per batch;
    examples of a class in random passes. A class of one example has no positive and is not drawn; a negative label is
    such a class, of an example that repeats another one of its class.
    """

    def __init__(
        self,
        name: str,
        labels: np.ndarray,
        num_drawn: int,
        batch_size: int,
        seed: int,
        source: int,
    ) -> None:
        self._seed = seed
        self._source = source
        _, class_of, sizes = np.unique(labels, return_inverse=True, return_counts=True)
        self._class_of = class_of
        """[n] class of each example."""
        self._sizes = sizes
        self._order = np.argsort(class_of, kind="stable")
        """All examples, those of a class one after the other."""
        self._starts = np.cumsum(sizes) - sizes
        """Of each class, where it begins in `_order`."""
        self._position = np.empty(len(labels), dtype=np.int64)
        """[n] position of each example in `_order`."""
        self._position[self._order] = np.arange(len(labels))
        self._classes = np.flatnonzero(sizes > 1)
        self.num_classes = len(self._classes)
        """Number of classes that are drawn."""
        self.num_left_out = int((sizes == 1).sum())
        """Number of examples that are the only one of their class, or repeat another one of it."""
        if self.num_classes < 2:
            raise UserError(
                f"{name}: {self.num_classes} of its classes have two different examples or more, and labelled data need at "
                "least two such classes: check its column label"
            )
        self.size = min(batch_size, self.num_classes)
        drawn_sizes = sizes[self._classes]
        # Examples that are alone in their class are not drawn, and do not count for the length of an epoch.
        num_examples = round(num_drawn * int(drawn_sizes.sum()) / len(labels))
        self.num_batches = max(1, num_examples // self.size)
        self._shares = _shares(drawn_sizes, self.num_batches, self.size)

    def batches(self, epoch: int) -> np.ndarray:
        """Return the batches of an epoch, int64 [num_batches, size]."""
        seed = self._seed
        source = self._source
        order = shuffled(seed, self.num_classes, _CLASSES, source, epoch)
        # Systematic sampling: with one random offset for all, each class gets its share of the slots, rounded up or
        # down.
        bits = random_bits(seed, 1, _OFFSET, source, epoch)
        offset = int(bits[0] % np.uint64(_UNIT))
        stops = (np.cumsum(self._shares[order]) + offset) // _UNIT
        counts = np.diff(stops, prepend=0)
        drawn = []
        for number, count in zip(order.tolist(), counts.tolist(), strict=True):
            if count == 0:
                continue
            # The next examples of the class in its random passes, counted over all epochs.
            drawn_class = int(self._classes[number])
            size = int(self._sizes[drawn_class])
            begin = epoch * int(self._shares[number]) // _UNIT
            for turn in range(begin // size, (begin + count - 1) // size + 1):
                members = shuffled(seed, size, _MEMBERS, source, drawn_class, turn)
                first = max(0, begin - turn * size)
                stop = begin + count - turn * size
                start = self._starts[drawn_class]
                drawn.append(self._order[start + members[first:stop]])
        # A class takes consecutive slots, no more than there are batches, and slot s is in batch s % num_batches: so it
        # is never twice in a batch.
        table = np.concatenate(drawn).reshape(self.size, self.num_batches).T
        # Another stream than that of the offset.
        order = shuffled(seed, self.num_batches, _OFFSET, source, epoch, 1)
        return np.asarray(table[order])

    def positives(
        self,
        examples: np.ndarray,
        epoch: int,
        batch_index: int,
    ) -> np.ndarray:
        """Return another example of the same class for each example of a batch."""
        classes = self._class_of[examples]
        start = self._starts[classes]
        size = self._sizes[classes]
        stream = (_POSITIVES, self._source, epoch, batch_index)
        bits = random_bits(self._seed, len(examples), *stream)
        # Further by 1 to size - 1 places, in a circle: any other member, never the example itself.
        others_of_class = (size - 1).astype(np.uint64)
        shift = 1 + (bits % others_of_class).astype(np.int64)
        position = start + (self._position[examples] - start + shift) % size
        return np.asarray(self._order[position])


def _shares(
    sizes: np.ndarray,
    num_batches: int,
    size: int,
) -> np.ndarray:
    """Return in how many batches each class is, in units: in proportion to its size, at most all of them. The sum is
    num_batches * size."""
    most = num_batches * _UNIT
    total = num_batches * size * _UNIT
    shares = np.zeros(len(sizes), dtype=np.int64)
    is_full = np.zeros(len(sizes), dtype=bool)
    while True:
        remaining = total - most * int(is_full.sum())
        free = sizes[~is_full]
        shares[is_full] = most
        shares[~is_full] = np.floor(
            free * (remaining / max(int(free.sum()), 1))
        ).astype(np.int64)
        over = (shares > most) & ~is_full
        if not over.any():
            break
        is_full |= over
    room = most - shares  # what rounding down has left
    missing = total - int(shares.sum())
    # The first classes fill their room, until nothing is missing. What classes before each take: the sum of their room.
    taken_before = np.cumsum(room) - room
    return np.asarray(shares + np.clip(missing - taken_before, 0, room))
