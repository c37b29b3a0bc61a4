"""Validation data held out of the training data: by query, near-duplicates together, a pure function of the seed."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence

import numpy as np

from vembed.data.example_store import ExampleStore
from vembed.data.examples import Example
from vembed.data.normal_form import normal_key, normal_text
from vembed.errors import UserError

SHINGLE = 4
"""Characters per shingle."""
NUM_HASHES, ROWS = 32, 8
"""MinHash values per text, and how many of them must agree: texts that share nine tenths of their shingles do."""
SHORTEST = 24
"""Characters that a text needs for a near-duplicate: shorter ones must be equal."""
MOST_COMPARED = 500_000
"""With more queries only equal ones are kept together."""
_MIX = np.random.default_rng(0).integers(
    1, 2**31 - 1, size=(2, NUM_HASHES), dtype=np.int64
)


def hold_out(
    store: ExampleStore, share: float, seed: int
) -> tuple[ExampleStore, list[tuple[int, Example]]]:
    """Return the training part of the store and the examples held out, each with the number of its source."""
    groups = query_groups(store)
    # By a hash of seed and content: what is held out does not depend on the order of the records.
    order = sorted(set(groups.tolist()), key=lambda group: _draw(seed, group))
    wanted = max(1, round(share * len(store)))
    sizes = dict(zip(*np.unique(groups, return_counts=True), strict=True))
    # Texts from one template are one group through chains of near-duplicates, which may be most of the data.
    largest = max(wanted, min(sizes.values()))
    chosen: set[int] = set()
    count = 0
    for group in order:
        if count >= wanted:
            break
        if sizes[group] > largest:
            continue
        chosen.add(group)
        count += int(sizes[group])
    is_held = np.isin(groups, list(chosen))
    if is_held.all():
        raise UserError(
            f"val_split: {share:g} of {len(store):,d} examples with {len(sizes):,d} different queries leaves nothing "
            "to train on (equal and nearly equal queries are held out together); give val_data_path, or more data"
        )
    held = [
        (store.source_of(int(index)), store[int(index)])
        for index in np.flatnonzero(is_held)
    ]
    return store.subset(~is_held, note=f"val_split {share:g}"), held


def query_groups(store: ExampleStore) -> np.ndarray:
    """Return a number per example, the same for equal and nearly equal queries. It depends on the contents alone."""
    keys = np.empty(len(store), dtype=np.int64)
    texts: dict[int, str] = {}
    for index in range(len(store)):
        query = store[index].query
        keys[index] = key = normal_key(query)
        if query.text is not None and not query.images and len(query.text) >= SHORTEST:
            texts.setdefault(int(key), query.text)
    if len(texts) > MOST_COMPARED:
        return keys
    joined = _joined(texts)
    return np.asarray([joined.get(int(key), int(key)) for key in keys], dtype=np.int64)


def _joined(texts: dict[int, str]) -> dict[int, int]:
    """Return key -> smallest key of its near-duplicates, for texts that have any."""
    buckets: dict[tuple[int, bytes], int] = {}
    parent: dict[int, int] = {}

    def root(key: int) -> int:
        while (above := parent.get(key, key)) != key:
            key = above
        return key

    for key, text in sorted(texts.items()):
        signature = _signature(normal_text(text))
        for band in range(NUM_HASHES // ROWS):
            bucket = band, signature[band * ROWS : (band + 1) * ROWS].tobytes()
            other = buckets.setdefault(bucket, key)
            # Union-find: the smallest key names the group, so that the order of the texts does not matter.
            first, second = sorted((root(other), root(key)))
            if first != second:
                parent[second] = first
    return {key: root(key) for key in parent}


def _signature(text: str) -> np.ndarray:
    shingles = {
        text[start : start + SHINGLE]
        for start in range(max(len(text) - SHINGLE + 1, 1))
    }
    hashes = np.asarray(
        [zlib.crc32(one.encode("utf-8", "surrogatepass")) >> 1 for one in shingles],
        dtype=np.int64,
    )
    mixed = (hashes[:, None] * (_MIX[0] | 1) + _MIX[1]) % (2**31 - 1)
    lowest: np.ndarray = mixed.min(axis=0)
    return lowest


def _draw(seed: int, group: int) -> bytes:
    return hashlib.blake2b(f"{seed}:{group}".encode(), digest_size=8).digest()


def named(store_names: Sequence[str], share: float) -> str:
    """Return the name of the held-out data, for logs and the report."""
    return f"{share:.0%} of the queries of {', '.join(store_names)}"
