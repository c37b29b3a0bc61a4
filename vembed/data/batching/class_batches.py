"""Batches of labelled examples: no class twice in a batch, and a positive of the same class for each example."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from vembed.errors import UserError

# Purpose of a random stream, part of its seed; 1 to 3 are those of batches.py.
_MEMBERS = 4
_CLASSES = 5
_OFFSET = 6
_POSITIVES = 7
_UNIT = 2**20
"""Shares of a class are integers in this unit: rounding must not put a class twice into a batch."""


def label_key(label: str) -> int:
    """Return a 63-bit hash of a label, equal on every process and in every run."""
    return (
        int.from_bytes(
            hashlib.blake2b(
                label.encode("utf-8", "surrogatepass"), digest_size=8
            ).digest(),
            "little",
        )
        >> 1
    )


def random_bits(seed: int, size: int, *stream: int) -> np.ndarray:
    """Return uint64 values [size] of a stream. numpy guarantees raw bits across its versions."""
    return np.random.Philox(np.random.SeedSequence([seed, *stream])).random_raw(size)


def next_of_class(labels: np.ndarray) -> np.ndarray:
    """Return for each example the next one of its class, in a circle; itself if there is no other."""
    members = _Members.of(labels)
    result = np.empty(len(labels), dtype=np.int64)
    result[members.order] = members.shifted(
        members.order, np.ones(len(labels), dtype=np.int64)
    )
    return result


@dataclass(frozen=True)
class _Members:
    """The examples of each class."""

    order: np.ndarray
    """All examples, those of a class one after the other."""
    starts: np.ndarray
    sizes: np.ndarray
    number: np.ndarray
    """[n] number of the class of each example."""
    place: np.ndarray
    """[n] place of each example in `order`."""

    @classmethod
    def of(cls, labels: np.ndarray) -> _Members:
        """Group the examples."""
        _, number, sizes = np.unique(labels, return_inverse=True, return_counts=True)
        order = np.argsort(number, kind="stable")
        place = np.empty(len(labels), dtype=np.int64)
        place[order] = np.arange(len(labels))
        return cls(order, np.cumsum(sizes) - sizes, sizes, number, place)

    def shifted(self, examples: np.ndarray, by: np.ndarray) -> np.ndarray:
        """Return the examples that stand `by` places further in their classes, in a circle."""
        number = self.number[examples]
        start = self.starts[number]
        size = self.sizes[number]
        examples_after: np.ndarray = self.order[
            start + (self.place[examples] - start + by) % size
        ]
        return examples_after


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
        self._members = members = _Members.of(labels)
        self._seed = seed
        self._source = source
        self._classes = np.flatnonzero(members.sizes > 1)
        self.num_classes = len(self._classes)
        """Number of classes that are drawn."""
        self.num_repeated = int((labels < 0).sum())
        """Number of examples that repeat another one of their class."""
        self.num_alone = int((members.sizes == 1).sum()) - self.num_repeated
        """Number of examples that are the only one of their class."""
        if self.num_classes < 2:
            raise UserError(
                f"{name}: {len(members.sizes) - self.num_repeated:,d} classes, of which {self.num_classes} have two "
                "different examples or more; "
                "labelled data need at least two such classes: check its column label"
            )
        self.size = min(batch_size, self.num_classes)
        sizes = members.sizes[self._classes]
        # Examples that are alone in their class are not drawn, and do not count for the length of an epoch.
        drawn = round(num_drawn * int(sizes.sum()) / len(labels))
        self.num_batches = max(1, drawn // self.size)
        self._shares = _shares(sizes, self.num_batches, self.size)

    def batches(self, epoch: int) -> np.ndarray:
        """Return the batches of an epoch, int64 [num_batches, size]."""
        num = self.num_batches
        order = np.argsort(self._bits(self.num_classes, _CLASSES, epoch), kind="stable")
        # Systematic sampling: with one random offset for all, each class gets its share of the slots, rounded up or
        # down.
        offset = int(self._bits(1, _OFFSET, epoch)[0] % np.uint64(_UNIT))
        ends = (np.cumsum(self._shares[order]) + offset) // _UNIT
        counts = np.diff(ends, prepend=0)
        drawn = [
            self._draw(int(class_number), int(count), epoch)
            for class_number, count in zip(order, counts, strict=True)
            if count
        ]
        # A class takes consecutive slots, no more than there are batches, and slot s is in batch s % num: so it is
        # never twice in a batch.
        table = np.concatenate(drawn).reshape(self.size, num).T
        shuffled: np.ndarray = table[
            np.argsort(self._bits(num, _OFFSET, epoch, 1), kind="stable")
        ]
        return shuffled

    def positives(self, examples: np.ndarray, epoch: int, step: int) -> np.ndarray:
        """Return another example of the same class for each example of a batch."""
        # A shift by 1 to size - 1 places: any other member, never the example itself.
        others = self._members.sizes[self._members.number[examples]] - 1
        bits = self._bits(len(examples), _POSITIVES, epoch, step)
        return self._members.shifted(
            examples, 1 + (bits % others.astype(np.uint64)).astype(np.int64)
        )

    def _draw(self, number: int, count: int, epoch: int) -> np.ndarray:
        """Return the examples of a class in an epoch: the next ones of its random passes."""
        chosen = int(self._classes[number])
        start = int(self._members.starts[chosen])
        size = int(self._members.sizes[chosen])
        begin = epoch * int(self._shares[number]) // _UNIT
        parts = []
        for turn in range(begin // size, (begin + count - 1) // size + 1):
            order = np.argsort(self._bits(size, _MEMBERS, chosen, turn), kind="stable")
            parts.append(
                order[max(0, begin - turn * size) : begin + count - turn * size]
            )
        return self._members.order[start + np.concatenate(parts)]

    def _bits(self, size: int, purpose: int, *stream: int) -> np.ndarray:
        return random_bits(self._seed, size, purpose, self._source, *stream)


def _shares(sizes: np.ndarray, num_batches: int, size: int) -> np.ndarray:
    """Return in how many batches each class is, in units: in proportion to its size, at most all of them. The sum is
    num_batches * size."""
    most = num_batches * _UNIT
    total = num_batches * size * _UNIT
    shares = np.zeros(len(sizes), dtype=np.int64)
    is_full = np.zeros(len(sizes), dtype=bool)
    while True:
        rest = total - most * int(is_full.sum())
        free = sizes[~is_full]
        shares[is_full] = most
        shares[~is_full] = np.floor(free * (rest / max(int(free.sum()), 1))).astype(
            np.int64
        )
        over = (shares > most) & ~is_full
        if not over.any():
            break
        is_full |= over
    room = most - shares  # what rounding down has left
    missing = total - int(shares.sum())
    added: np.ndarray = shares + np.clip(missing - (np.cumsum(room) - room), 0, room)
    return added
