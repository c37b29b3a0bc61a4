"""Arrangement of examples into batches in which no content occurs twice, with as few examples left out as possible."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

ATTEMPTS = 8
"""Numbers of batches that are tried before batches that are not full are given up."""
SWAPS = 256
"""Batches looked at for an exchange, per example that found no place."""


@dataclass(frozen=True)
class Conflicts:
    """The contents that several examples have. Examples are numbered by their position in the epoch's order."""

    keys: dict[int, list[int]]
    """Repeated contents of each example that has any, in the order of placing: those of the most frequent content
    first, the examples of one content one after the other."""
    group_sizes: np.ndarray
    """Examples by their most frequent content: the size of each such group."""
    free: np.ndarray
    """Examples without repeated content, in order."""


def find_conflicts(values: np.ndarray, counts: np.ndarray) -> Conflicts:
    """Return the conflicts of examples whose contents are `values`, of which example i has the next counts[i]."""
    owners = np.repeat(np.arange(len(counts)), counts)
    order = np.lexsort((owners, values))
    values = values[order]
    owners = owners[order]
    once = np.ones(
        len(values), dtype=bool
    )  # a content that an example holds twice counts once
    once[1:] = (values[1:] != values[:-1]) | (owners[1:] != owners[:-1])
    values = values[once]
    owners = owners[once]
    _, number, frequency = np.unique(values, return_inverse=True, return_counts=True)
    repeated = frequency[number] > 1
    number = number[repeated]
    owners = owners[repeated]
    # Each example belongs to the group of its most frequent content. Groups are placed by size, equal ones in the
    # order in which they begin, so that the result depends on the epoch's order alone.
    by_owner = np.lexsort((number, -frequency[number], owners))
    number = number[by_owner]
    owners = owners[by_owner]
    bound, first = np.unique(owners, return_index=True)
    group = number[first]
    begins = np.full(len(frequency), len(counts))
    np.minimum.at(begins, group, bound)
    placing = np.lexsort((bound, group, begins[group], -frequency[group]))
    ends = np.append(first[1:], len(owners))
    keys = {
        int(bound[place]): number[first[place] : ends[place]].tolist()
        for place in placing
    }
    is_free = np.ones(len(counts), dtype=bool)
    is_free[bound] = False
    return Conflicts(
        keys, np.unique(group, return_counts=True)[1], np.flatnonzero(is_free)
    )


def arrange(
    conflicts: Conflicts, size: int, max_batches: int, *, drop_last: bool
) -> list[np.ndarray]:
    """Return batches of at most `size` examples, at most `max_batches` of them, each in the epoch's order.

    With `drop_last` all batches are full, and there are as many as can be filled.
    """
    num_examples = len(conflicts.keys) + len(conflicts.free)
    num_batches = min(
        max_batches, _upper_bound(conflicts, size, num_examples, drop_last)
    )
    batches: list[list[int]] = []
    for _ in range(ATTEMPTS):
        if num_batches == 0:
            return []
        room = _Room.of(num_batches, size)
        room.fill(conflicts)
        batches = room.members
        if not drop_last or room.num_open == 0:
            break
        # At least so many batches cannot be filled with what is left.
        num_batches -= -(-room.num_open // size)
    wanted = size if drop_last else 1
    return [
        np.sort(np.array(members, dtype=np.int64))
        for members in batches
        if len(members) >= wanted
    ]


def _upper_bound(
    conflicts: Conflicts, size: int, num_examples: int, drop_last: bool
) -> int:
    """Return a number of batches that no arrangement exceeds: a group gives each batch one example at most."""
    if not drop_last:
        return -(-num_examples // size)
    low = 0
    high = num_examples // size
    while low < high:
        middle = (low + high + 1) // 2
        # Binary search: with more batches a group can place more, but more places are to be filled.
        placeable = int(np.minimum(conflicts.group_sizes, middle).sum()) + len(
            conflicts.free
        )
        low, high = (middle, high) if placeable >= middle * size else (low, middle - 1)
    return low


@dataclass
class _Room:
    """Batches that are being filled."""

    capacity: int
    num_open: int
    """Places that are not taken."""
    members: list[list[int]]
    holders: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """The batches that hold a content."""
    next_batch: int = 0

    @classmethod
    def of(cls, num_batches: int, size: int) -> _Room:
        """Return empty batches."""
        return cls(size, num_batches * size, [[] for _ in range(num_batches)])

    def fill(self, conflicts: Conflicts) -> None:
        """Place as many examples as possible. What comes last in the epoch's order is left out first."""
        num_places = self.num_open
        keys = conflicts.keys
        free = conflicts.free
        # Examples with conflicts first, while there is choice. Those late in the order wait: they are left out first.
        waiting = [
            example
            for example in keys
            if example >= num_places or not self._place(example, keys[example])
        ]
        head = free[free < num_places]
        self._place_free(head)
        # Then those that waited, before the free examples that come even later.
        waiting = [
            example for example in waiting if not self._place(example, keys[example])
        ]
        self._place_free(free[len(head) :])
        if self.num_open and waiting:
            self._exchange(waiting, keys)

    def _place(self, example: int, keys: list[int]) -> bool:
        """Put an example into the next batch in turn that has room and none of its contents."""
        num_batches = len(self.members)
        holders = [self.holders[key] for key in keys]
        if not self.num_open or any(
            len(batches_with_key) == num_batches for batches_with_key in holders
        ):
            return False
        for step in range(num_batches):
            batch = (self.next_batch + step) % num_batches
            if len(self.members[batch]) < self.capacity and not any(
                batch in batches_with_key for batches_with_key in holders
            ):
                self._put(example, keys, batch)
                self.next_batch = (batch + 1) % num_batches
                return True
        return False

    def _place_free(self, examples: np.ndarray) -> None:
        """Fill places with examples that fit everywhere."""
        remaining = iter(examples.tolist())
        for batch, members in enumerate(self.members):
            for _ in range(self.capacity - len(members)):
                example = next(remaining, None)
                if example is None:
                    return
                self._put(example, [], batch)

    def _exchange(self, waiting: list[int], keys: dict[int, list[int]]) -> None:
        """Fill places that suit no waiting example: move a member of another batch there, and take its place."""
        for batch, members in enumerate(self.members):
            while len(members) < self.capacity:
                done = next(
                    (
                        example
                        for example in waiting
                        if self._exchange_one(example, batch, keys)
                    ),
                    None,
                )
                if done is None:
                    break
                waiting.remove(done)

    def _exchange_one(
        self, example: int, batch: int, keys: dict[int, list[int]]
    ) -> bool:
        num_batches = len(self.members)
        if any(len(self.holders[key]) == num_batches for key in keys[example]):
            return False
        for other in range(batch + 1, batch + 1 + min(SWAPS, num_batches - 1)):
            source = other % num_batches
            if any(source in self.holders[key] for key in keys[example]):
                continue
            for member in self.members[source]:
                moved = keys.get(member, [])
                if not any(batch in self.holders[key] for key in moved):
                    self.members[source].remove(member)
                    self.num_open += 1
                    for key in moved:
                        self.holders[key].discard(source)
                    self._put(member, moved, batch)
                    self._put(example, keys[example], source)
                    return True
        return False

    def _put(self, example: int, keys: list[int], batch: int) -> None:
        self.members[batch].append(example)
        self.num_open -= 1
        for key in keys:
            self.holders[key].add(batch)
