"""Validation data held out of the training data by groups that belong together: a pure function of seed and contents.

A group is what equal and nearly equal queries, and equal and nearly equal documents, connect. Where most examples are
connected, for example by answers that many queries share, groups are those of queries alone.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vembed.data.example_store import ExampleStore
from vembed.data.examples import Example, Item
from vembed.data.near_duplicates import feature_arrays, near_groups, ngrams, words
from vembed.data.normal_form import normal_key
from vembed.errors import UserError

MIN_SHARED_WORDS = 0.85
"""Queries are near-duplicates if this share of the shorter one's different words is in the other."""
MIN_QUERY_WORDS = 5
MIN_QUERY_SIZE_RATIO = 0.5
"""The shorter one has at least half as many different words: long texts hold most words of a short one by chance."""
MIN_SHARED_NGRAMS = 0.9
"""Documents are near-duplicates if this share of the shorter one's word 3-grams is in the other."""
MAX_COMPARED_TEXTS = 300_000
"""With more different queries, or documents, only equal ones are kept together."""
MAX_SEARCHED_DOCUMENTS = 20_000
"""Documents of the training examples that an evaluation searches beside those that are held out."""
MIN_CHOICE = 2
"""Groups of queries and documents are used if those that can be held out have so many times the examples wanted."""


@dataclass(frozen=True)
class HeldOut:
    """The two parts of the data."""

    train: ExampleStore
    examples: Sequence[tuple[int, Example]]
    """Examples that are held out, each with the number of its source."""
    by_documents: bool
    """True: no document is on both sides. False: queries alone are held out."""
    num_documents: int
    """Different positives of the examples that are held out; 0 for texts with labels."""
    num_trained_documents: int
    """Those of them that are positives of training examples too."""

    @cached_property
    def documents(self) -> Sequence[tuple[int, Item]]:
        """Documents of the training examples, each with the number of its source: all, or of large data a sample that
        is spread evenly."""
        documents: dict[tuple[int, int], Item] = {}
        step = max(1, -(-len(self.train) // MAX_SEARCHED_DOCUMENTS))
        for index in range(0, len(self.train), step):
            example = self.train[index]
            # The texts of a class are relevant to each other: those of training would count as wrong.
            if example.label is None:
                source = self.train.source_of(index)
                for item in (*example.positives, *example.negatives):
                    documents.setdefault((source, item.key()), item)
        step = max(1, -(-len(documents) // MAX_SEARCHED_DOCUMENTS))
        return [(key[0], item) for key, item in list(documents.items())[::step]]

    def notes(self) -> list[str]:
        """Return what the score on these data has to be read with."""
        if not self.num_documents:
            return []
        notes = [
            f"{self.num_trained_documents:,d} of the {self.num_documents:,d} documents that should be found are "
            "trained on too"
        ]
        if not self.by_documents:
            notes.append(
                "queries alone are held out, because most examples are connected by documents that they share"
            )
        return notes


def hold_out(store: ExampleStore, share: float, seed: int) -> HeldOut:
    """Hold out this share of the examples."""
    groups = example_groups(store)
    wanted = max(1, round(share * len(store)))
    sizes = _sizes(groups.connected)
    num_in_reach = sum(size for size in sizes.values() if size <= wanted)
    by_documents = num_in_reach >= MIN_CHOICE * wanted
    if not by_documents:
        sizes = _sizes(groups.by_query)
    # Texts from one template are one group through chains of near-duplicates, which may be most of the data.
    largest = max(wanted, min(sizes.values()))
    chosen: set[int] = set()
    count = 0
    # By a hash of seed and content: what is held out does not depend on the order of the records.
    for group in sorted(sizes, key=lambda group: _draw(seed, group)):
        if count >= wanted:
            break
        if sizes[group] <= largest:
            chosen.add(group)
            count += sizes[group]
    group_of = groups.connected if by_documents else groups.by_query
    is_held = np.isin(group_of, list(chosen))
    if is_held.all():
        raise UserError(
            f"val_split: {share:g} of {len(store):,d} examples with {len(sizes):,d} different queries leaves nothing "
            "to train on (equal and nearly equal queries are held out together); give val_data_path, or more data"
        )
    held = []
    for index in np.flatnonzero(is_held).tolist():
        held.append((store.source_of(index), store[index]))
    train = store.subset(~is_held, note=f"val_split {share:g}")
    is_held_pair = is_held[groups.pair_examples]
    documents = set(groups.pair_documents[is_held_pair].tolist())
    trained = documents & set(groups.pair_documents[~is_held_pair].tolist())
    return HeldOut(train, held, by_documents, len(documents), len(trained))


@dataclass(frozen=True)
class ExampleGroups:
    """Groups of examples. Their numbers depend on the contents alone."""

    by_query: np.ndarray
    """[n] the same for equal and nearly equal queries."""
    connected: np.ndarray
    """[n] the same where documents connect examples as well."""
    pair_examples: np.ndarray
    """[p] number of the example of each (example, positive)."""
    pair_documents: np.ndarray
    """[p] key of the positive."""


def example_groups(store: ExampleStore) -> ExampleGroups:
    """Return the groups of all examples."""
    query_keys = np.empty(len(store), np.int64)
    query_texts: dict[int, str] = {}
    document_texts: dict[int, str] = {}
    pair_examples = array("q")
    pair_documents = array("q")
    for index in range(len(store)):
        example = store[index]
        query = example.query
        key = normal_key(query)
        query_keys[index] = key
        query_texts[key] = "" if query.images else query.text or ""
        # The positive of a text with a label is any other one of its class.
        if example.label is None:
            for item in example.positives:
                document = normal_key(item)
                document_texts[document] = "" if item.images else item.text or ""
                pair_examples.append(index)
                pair_documents.append(document)
    query_links = _near_links(
        query_texts,
        words,
        threshold=MIN_SHARED_WORDS,
        min_features=MIN_QUERY_WORDS,
        min_size_ratio=MIN_QUERY_SIZE_RATIO,
    )
    document_links = _near_links(document_texts, ngrams, threshold=MIN_SHARED_NGRAMS)
    examples = np.array(pair_examples, np.int64)
    documents = np.array(pair_documents, np.int64)
    # A query and a document may be the same text: as documents they have negative numbers.
    links = [
        *query_links,
        *((-first, -second) for first, second in document_links),
        *zip(query_keys[examples].tolist(), (-documents).tolist(), strict=True),
    ]
    by_query = _components(query_texts, query_links)
    connected = _components(query_texts, links)
    return ExampleGroups(
        np.array([by_query[key] for key in query_keys.tolist()], np.int64),
        np.array([connected[key] for key in query_keys.tolist()], np.int64),
        examples,
        documents,
    )


def _near_links(
    texts: dict[int, str],
    features: Callable[[str], Iterable[Hashable]],
    **options: float,
) -> list[tuple[int, int]]:
    """Return pairs of keys that connect near-duplicates."""
    if len(texts) > MAX_COMPARED_TEXTS:
        return []
    # In the order of the keys, so that the groups do not depend on that of the records.
    keys = sorted(texts)
    groups = near_groups(
        feature_arrays(features(texts[key]) for key in keys), **options
    )
    links = []
    for key, group in zip(keys, groups.tolist(), strict=True):
        if keys[group] != key:
            links.append((keys[group], key))
    return links


def _components(
    keys: Iterable[int], links: Sequence[tuple[int, int]]
) -> dict[int, int]:
    """Return for each key the smallest of the keys that links connect it with."""
    parents: dict[int, int] = {}

    def root(key: int) -> int:
        while (above := parents.get(key, key)) != key:
            parents[key] = parents.get(above, above)
            key = above
        return key

    for first, second in links:
        parents[root(second)] = root(first)
    smallest: dict[int, int] = {}
    for key in keys:
        group = root(key)
        smallest[group] = min(smallest.get(group, key), key)
    return {key: smallest[root(key)] for key in keys}


def _sizes(groups: np.ndarray) -> dict[int, int]:
    names, counts = np.unique(groups, return_counts=True)
    return dict(zip(names.tolist(), counts.tolist(), strict=True))


def _draw(seed: int, group: int) -> bytes:
    return hashlib.blake2b(f"{seed}:{group}".encode(), digest_size=8).digest()


def named(store_names: Sequence[str], share: float) -> str:
    """Return the name of the held-out data, for logs and the report."""
    return f"{share:.0%} of the queries of {', '.join(store_names)}"
