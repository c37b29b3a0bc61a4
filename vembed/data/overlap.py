"""Overlap of validation data with training data: queries, positives and pairs that are in both, after normalisation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from vembed.data.examples import Example, Item
from vembed.data.normal_form import normal_key

NUM_EXAMPLES = 3
MOST_COMPARED = 1_000_000
"""Training examples that are compared; of more, a sample spread over all."""
SHOWN = 70

Pair = tuple[Item, Item]


@dataclass
class Overlap:
    """Contents of one kind that validation and training share."""

    what: str
    """queries, positives or pairs."""
    num_validation: int
    """Different ones in the validation data."""
    examples: dict[int | tuple[int, int], str] = field(default_factory=dict)
    """Key -> shown content of those that are in the training data too."""

    def sentence(self) -> str:
        """Return the warning: count, share and examples."""
        examples = "; ".join(list(self.examples.values())[:NUM_EXAMPLES])
        count = len(self.examples)
        return (
            f"{count:,d} of the {self.num_validation:,d} {self.what} of the validation data "
            f"({_percent(count / max(self.num_validation, 1))}) are in the training data too, for example: {examples}"
        )


class SizedExamples(Protocol):
    """Examples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


def find_overlap(train: SizedExamples, pairs: Iterable[Pair]) -> list[Overlap]:
    """Return the overlaps of training data with the (query, relevant document) pairs of validation data.

    Texts are equal if they differ in case, spaces and punctuation alone; images if their files are equal.
    """
    queries: dict[int, Item] = {}
    positives: dict[int, Item] = {}
    both: dict[tuple[int, int], Pair] = {}
    for pair in pairs:
        keys = normal_key(pair[0]), normal_key(pair[1])
        queries.setdefault(keys[0], pair[0])
        positives.setdefault(keys[1], pair[1])
        both.setdefault(keys, pair)
    results = [
        Overlap("queries", len(queries)),
        Overlap("positives", len(positives)),
        Overlap("pairs", len(both)),
    ]
    for example in _compared(train):
        query = normal_key(example.query)
        if query in queries:
            results[0].examples.setdefault(query, short_item(queries[query]))
        for item in example.positives:
            positive = normal_key(item)
            if positive in positives:
                results[1].examples.setdefault(
                    positive, short_item(positives[positive])
                )
            if (query, positive) in both:
                results[2].examples.setdefault(
                    (query, positive),
                    " -> ".join(short_item(part) for part in both[query, positive]),
                )
    return [part for part in results if part.examples]


def warnings_of(overlaps: Sequence[Overlap]) -> list[str]:
    """Return the sentences to warn with. Positives that are shared alone are no fault: a corpus serves both."""
    kinds = {overlap.what for overlap in overlaps}
    if not kinds - {"positives"}:
        return []
    means = (
        "the pairs were learned, so the score says little about new queries"
        if "pairs" in kinds
        else "the score may be too high"
    )
    sentences = [overlap.sentence() for overlap in overlaps]
    return [
        *sentences[:-1],
        f"{sentences[-1]}; {means} (val_split holds out whole queries instead)",
    ]


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{100 * share:.1g}%"


def short_item(item: Item) -> str:
    """Return a short form of an item for messages."""
    text = " ".join((item.text or "").split())
    names = [
        Path(image.path).name if image.path else "an image" for image in item.images
    ]
    full = " + ".join([*([repr(text)] if text else []), *names])
    return full if len(full) <= SHOWN else full[: SHOWN - 3] + "..."


def _compared(train: SizedExamples) -> Iterator[Example]:
    # Every n-th of a large store, from all of its sources.
    step = -(-len(train) // MOST_COMPARED)
    return (train[index] for index in range(0, len(train), step))
