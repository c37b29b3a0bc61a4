"""MinHash: pairs of texts that share most of their word n-grams, found without comparing all with all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from vembed.mining.duplicates import SHORTEST, containment, ngrams

NUM_HASHES = 64
ROWS_PER_BAND = 4
"""16 bands of 4: texts that share 80 % of their n-grams meet in one of them 999 times of 1,000."""
LARGEST_BUCKET = 50
"""Of more texts in one bucket each is compared with the first ones only."""
_PRIME = np.uint64(2**31 - 1)


def signatures(texts: Sequence[str]) -> np.ndarray:
    """[n, NUM_HASHES] for each text the smallest of its n-grams' hashes, under each of the hash functions."""
    random = np.random.default_rng(7)
    factors = random.integers(1, 2**31 - 1, NUM_HASHES, np.uint64)[:, None]
    offsets = random.integers(0, 2**31 - 1, NUM_HASHES, np.uint64)[:, None]
    found = np.full((len(texts), NUM_HASHES), np.iinfo(np.uint64).max, np.uint64)
    for number, text in enumerate(texts):
        grams = ngrams(text)
        if len(grams) >= SHORTEST:
            # 31 bits, as the factors: a product stays below 2**62.
            values = np.fromiter(
                (one & 0x7FFFFFFF for one in grams), np.uint64, len(grams)
            )
            found[number] = ((factors * values + offsets) % _PRIME).min(axis=1)
    return found


def near_pairs(texts: Sequence[str], threshold: float) -> list[tuple[int, int]]:
    """Pairs (first, later) of different texts of which one holds at least this share of the other's n-grams."""
    found = signatures(texts)
    is_long = found[:, 0] != np.iinfo(np.uint64).max
    pairs: set[tuple[int, int]] = set()
    for band in range(0, NUM_HASHES, ROWS_PER_BAND):
        buckets: dict[bytes, list[int]] = {}
        for number in np.flatnonzero(is_long):
            buckets.setdefault(
                found[number, band : band + ROWS_PER_BAND].tobytes(), []
            ).append(int(number))
        for members in buckets.values():
            for place, later in enumerate(members[1:], 1):
                # With the first ones only: a bucket of n copies would have n^2 / 2 pairs.
                pairs.update(
                    (first, later) for first in members[: min(place, LARGEST_BUCKET)]
                )

    @cache
    def grams(number: int) -> frozenset[int]:
        return ngrams(texts[number])

    # The bands propose, the n-grams decide: a chance meeting in one band does not count.
    return sorted(
        pair
        for pair in pairs
        if containment(grams(pair[0]), grams(pair[1])) >= threshold
    )
