"""Parts of the first pass over a source: the records of one part, checked and counted, here or in another process."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import astuple, dataclass

import numpy as np

from vembed.data.batching.class_batches import label_key
from vembed.data.examples import BadRecord, Example, ImageRef, Item
from vembed.data.formats.base import BLOCK, Block, Found
from vembed.data.formats.json_files import Part, Reader
from vembed.data.images.files import check_image
from vembed.data.records import RecordFormat

NUM_SHOWN = 10
"""Number of bad records that a message names; the others are counted."""
IMAGE_THREADS = 8
"""Threads that check images; they hide the latency of network drives."""


@dataclass
class Counts:
    """Statistics of the good records of a source."""

    positives: int = 0
    negatives: int = 0
    scored: int = 0
    """Number of records with scores."""
    with_negatives: int = 0
    text_queries: int = 0
    """Number of queries with a text. A query with text and image is counted in both fields."""
    image_queries: int = 0
    text_documents: int = 0
    image_documents: int = 0

    def plus(self, other: Counts) -> Counts:
        """Return the sum of both."""
        return Counts(
            *(
                one + another
                for one, another in zip(astuple(self), astuple(other), strict=True)
            )
        )

    @classmethod
    def of_texts(cls, num_records: int, num_negatives: int) -> Counts:
        """Return the statistics of pairs of texts with so many negatives each."""
        return cls(
            positives=num_records,
            negatives=num_records * num_negatives,
            with_negatives=num_records if num_negatives else 0,
            text_queries=num_records,
            text_documents=num_records * (1 + num_negatives),
        )

    def add(self, example: Example) -> None:
        """Count one more record."""
        query, positives, negatives = (
            example.query,
            example.positives,
            example.negatives,
        )
        self.positives += len(positives)
        if negatives:
            self.negatives += len(negatives)
            self.with_negatives += 1
        if example.scores is not None:
            self.scored += 1
        if query.text is not None:
            self.text_queries += 1
        if query.images:
            self.image_queries += 1
        for item in positives + negatives:
            if item.text is not None:
                self.text_documents += 1
            if item.images:
                self.image_documents += 1


@dataclass
class PartIndex:
    """Positions of the good records of one part, and what else the pass has found there."""

    starts: np.ndarray
    sizes: np.ndarray
    lines: np.ndarray
    """Counted from the part's first line."""
    keys: np.ndarray
    """Content keys of all records, one behind the other."""
    num_keys: np.ndarray
    """Number of keys of each record."""
    members: np.ndarray
    """[n, 2] hash of the class, and key of the item, of each labelled record."""
    counts: Counts
    num_bad: int
    problems: list[tuple[int, str]]
    """Line and reason of the first bad records."""
    images: dict[str, str | None]
    num_lines: int
    """Lines of the part, also those without a good record."""
    layouts: list[tuple[str, ...]]
    """Columns of the records, for the lists of unused and missing ones."""
    unused: list[str]


def index_part(
    reader: Reader,
    form: RecordFormat,
    part: Part,
    *,
    with_keys: bool,
    say: Callable[[int, int], None] = lambda _, __: None,
) -> PartIndex:
    """Validate the records of a part. `with_keys`: keep the content keys. `say` is called with the records done, and
    with how far the pass has come in the part."""
    starts, sizes, lines = array("q"), array("q"), array("q")
    values, num_keys, members = array("q"), array("q"), array("q")
    counts = Counts()
    num_plain: Counter[int] = Counter()  # pairs of texts, by their number of negatives
    num_bad = 0
    first: int | None = None
    problems: list[tuple[int, str]] = []
    with closing(_Images()) as images:
        for block in reader.blocks(part):
            # Positions of a file among several count on from the one before, so from the first record of the part.
            first = int(block.starts[0]) if first is None else first
            say(len(starts) + num_bad, int(block.starts[0]) - first)
            # The fast way: a block of plain text pairs is accepted column by column, without an Example for each.
            num_negatives = None if with_keys else form.num_plain_negatives(block)
            if num_negatives is not None:
                for column, found in (
                    (starts, block.starts),
                    (sizes, block.sizes),
                    (lines, block.lines),
                ):
                    column.frombytes(found.astype(np.int64, copy=False).tobytes())
                num_plain[num_negatives] += len(block.starts)
                continue
            for start, size, line, outcome in _outcomes(block, form, images):
                if isinstance(outcome, BadRecord):
                    num_bad += 1
                    if len(problems) < NUM_SHOWN:
                        problems.append((line, str(outcome)))
                    continue
                starts.append(start)
                sizes.append(size)
                lines.append(line)
                counts.add(outcome)
                if outcome.label is not None:
                    members.extend((label_key(outcome.label), outcome.query.key()))
                if with_keys:
                    keys = content_keys(outcome)
                    values.extend(keys)
                    num_keys.append(len(keys))
    for num_negatives, num_records in num_plain.items():
        counts = counts.plus(Counts.of_texts(num_records, num_negatives))
    return PartIndex(
        starts=np.array(starts),
        sizes=np.array(sizes, dtype=np.uint32),
        lines=np.array(lines),
        keys=np.array(values),
        num_keys=np.array(num_keys),
        members=np.array(members, dtype=np.int64).reshape(-1, 2),
        counts=counts,
        num_bad=num_bad,
        problems=problems,
        images=images.known,
        num_lines=reader.num_lines(part),
        layouts=form.columns.layouts,
        unused=form.columns.unused,
    )


def content_keys(example: Example) -> list[int]:
    """Return the distinct content keys of an example's items."""
    return list(dict.fromkeys(item.key() for item in _items(example)))


def _outcomes(
    block: Block, form: RecordFormat, images: _Images
) -> Iterator[tuple[int, int, int, Example | BadRecord]]:
    """Yield (position, size, line, Example or BadRecord) of each record."""
    found = block.found()
    # Some at a time, so that the threads get many images to check at once.
    while some := list(itertools.islice(found, BLOCK)):
        outcomes = [_outcome(form, one) for one in some]
        images.check(outcomes)
        for (start, size, line, _), outcome in zip(some, outcomes, strict=True):
            yield start, size, line, outcome


def _outcome(form: RecordFormat, found: Found) -> Example | BadRecord:
    record = found[3]
    if isinstance(record, BadRecord):
        return record
    try:
        return form.example(record, "")
    except BadRecord as error:
        return error


class _Images:
    """Checker of the images of examples; each file is checked once."""

    def __init__(self) -> None:
        self.known: dict[str, str | None] = {}
        self._pool: ThreadPoolExecutor | None = None

    def check(self, outcomes: list[Example | BadRecord]) -> None:
        """Replace each example with an invalid image by a `BadRecord`, in place."""
        images = [
            (number, image)
            for number, outcome in enumerate(outcomes)
            for image in _images(outcome)
        ]
        if not images:
            return
        self._pool = self._pool or ThreadPoolExecutor(
            IMAGE_THREADS, thread_name_prefix="vembed-check"
        )
        # Files are checked once for all records; images inside of records one by one, in order.
        named = {
            image.path: image
            for _, image in images
            if image.path is not None and image.path not in self.known
        }
        self.known.update(
            zip(named, self._pool.map(image_problem, named.values()), strict=True)
        )
        held = self._pool.map(
            image_problem, [image for _, image in images if image.path is None]
        )
        for number, image in images:
            problem = next(held) if image.path is None else self.known[image.path]
            if problem is not None:
                outcomes[number] = BadRecord(problem)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def image_problem(image: ImageRef) -> str | None:
    """Return why an image cannot be used; None if it can."""
    try:
        check_image(image)
    except BadRecord as error:
        return str(error)
    return None


def _images(outcome: Example | BadRecord) -> list[ImageRef]:
    if isinstance(outcome, BadRecord):
        return []
    found = list(outcome.query.images)
    for item in outcome.positives + outcome.negatives:
        if item.images:
            found += item.images
    return found


def _items(example: Example) -> tuple[Item, ...]:
    return (example.query, *example.positives, *example.negatives)
