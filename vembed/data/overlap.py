"""Overlap of validation data with training data: queries, positives and pairs that are in both, after normalisation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vembed.data.examples import Examples, Item
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
    validation: dict[int | tuple[int, int], tuple[Item, ...]] = field(
        default_factory=dict
    )
    """Key -> contents of the validation data, different ones."""
    examples: dict[int | tuple[int, int], str] = field(default_factory=dict)
    """Key -> shown content of those that are in the training data too."""

    def note(self, key: int | tuple[int, int]) -> None:
        """Take in a content of the training data."""
        if key in self.validation and key not in self.examples:
            self.examples[key] = " -> ".join(map(short_item, self.validation[key]))

    def sentence(self) -> str:
        """Return the warning: count, share and examples."""
        examples = "; ".join(list(self.examples.values())[:NUM_EXAMPLES])
        count = len(self.examples)
        return (
            f"{count:,d} of the {len(self.validation):,d} {self.what} of the validation data "
            f"({_percent(count / max(len(self.validation), 1))}) are in the training data too, for example: {examples}"
        )


def find_overlap(train: Examples, pairs: Iterable[Pair]) -> list[Overlap]:
    """Return the overlaps of training data with the (query, relevant document) pairs of validation data.

    Texts are equal if they differ in case, spaces and punctuation alone; images if their files are equal.
    """
    overlaps = [Overlap(what) for what in ("queries", "positives", "pairs")]
    of_queries, of_positives, of_pairs = overlaps
    for query, positive in pairs:
        keys = (normal_key(query), normal_key(positive))
        of_queries.validation.setdefault(keys[0], (query,))
        of_positives.validation.setdefault(keys[1], (positive,))
        of_pairs.validation.setdefault(keys, (query, positive))
    # Every n-th example of a large store, from all of its sources.
    for index in range(0, len(train), -(-len(train) // MOST_COMPARED)):
        example = train[index]
        query_key = normal_key(example.query)
        of_queries.note(query_key)
        for item in example.positives:
            of_positives.note(normal_key(item))
            of_pairs.note((query_key, normal_key(item)))
    return [overlap for overlap in overlaps if overlap.examples]


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
