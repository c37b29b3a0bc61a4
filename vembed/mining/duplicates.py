"""Near-duplicates: texts most of whose word n-grams are in another text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from vembed.mining.documents import words

NGRAM = 3
SHORTEST = 5
"""N-grams that the shorter of two texts needs: a phrase of a few words stands in many texts."""
TEXTS_KEPT = 16_384


def ngrams(text: str) -> frozenset[int]:
    """The word n-grams of a text, as numbers that are the same within one process."""
    found = words(text)
    if len(found) < NGRAM:
        return frozenset({hash(tuple(found))} if found else ())
    return frozenset(
        map(hash, zip(*(found[place:] for place in range(NGRAM)), strict=False))
    )


def containment(a: frozenset[int], b: frozenset[int]) -> float:
    """The share of the smaller set that is in the larger one; of small sets only equal ones count."""
    smaller, larger = (a, b) if len(a) <= len(b) else (b, a)
    # A phrase of a few words stands in many long texts without making them copies.
    if len(smaller) < SHORTEST:
        return float(smaller == larger and bool(smaller))
    return len(smaller & larger) / len(smaller)


class DuplicateFinder:
    """Compares documents by their numbers, and remembers the n-grams of those that come again."""

    def __init__(
        self, text: Callable[[int], str | None], threshold: float | None
    ) -> None:
        """`text`: of a document, None where it has none. `threshold: None`: nothing is a near-duplicate."""
        self._threshold = threshold
        self._ngrams = lru_cache(maxsize=TEXTS_KEPT)(
            lambda number: ngrams(text(number) or "")
        )

    def is_near(self, document: int, others: Sequence[int]) -> bool:
        """Return whether a document is a near-duplicate of one of the others."""
        if self._threshold is None:
            return False
        own = self._ngrams(document)
        return any(
            containment(own, self._ngrams(int(other))) >= self._threshold
            for other in others
        )
