"""Index: the validation pass over a source, and the positions of its good records."""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from vembed.data.batches import ContentKeys
from vembed.data.class_batches import label_key
from vembed.data.examples import BadRecord, Example, ImageRef, Item
from vembed.data.images import check_image
from vembed.data.readers import Found, Reader
from vembed.data.records import RecordFormat
from vembed.errors import UserError

log = logging.getLogger("vembed")

NUM_SHOWN = 10
"""Number of bad records that a message names; the others are counted."""
BLOCK = 256
IMAGE_THREADS = 8
"""Threads that check images; they hide the latency of network drives."""
SECONDS_BETWEEN_LINES = 10.0


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

    def add(self, example: Example) -> None:
        """Count one more record."""
        query, positives, negatives = example.query, example.positives, example.negatives
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
class Index:
    """Positions of the good records of a source, and the results of the validation pass."""

    starts: np.ndarray
    sizes: np.ndarray
    lines: np.ndarray
    keys: ContentKeys | None
    counts: Counts
    fingerprint: str
    """Hash of the contents of the source's files, independent of their paths."""
    num_bad: int = 0
    problems: list[str] = field(default_factory=list)
    """The first bad records, with file and line."""
    unused: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Names in column_mapping that no record has."""
    labels: np.ndarray | None = None
    """Hash of the class of each record, in labelled data. Negative: a record whose text or image its class has already,
    as a class of its own, since two equal inputs are no pair to learn from."""
    images: dict[str, str | None] = field(default_factory=dict)
    """Map from image file to its problem, None if it is valid."""

    def __len__(self) -> int:
        return len(self.starts)

    def subset(self, is_kept: np.ndarray) -> Index:
        """Return the index of the first records for which `is_kept` is true. Counts are scaled, not counted anew."""
        chosen = np.flatnonzero(is_kept)
        share = len(chosen) / max(len(self), 1)
        scaled = {
            name: len(chosen) if value == len(self) else round(value * share)
            for name, value in asdict(self.counts).items()
        }
        keys = None
        if self.keys is not None:
            parts = [self.keys.of(int(one)) for one in chosen]
            starts = np.cumsum([0, *map(len, parts)])
            keys = ContentKeys(np.concatenate(parts) if parts else self.keys.values[:0], starts)
        return replace(
            self,
            starts=self.starts[chosen],
            sizes=self.sizes[chosen],
            lines=self.lines[chosen],
            keys=keys,
            counts=Counts(**scaled),
            labels=None if self.labels is None else self.labels[chosen],
        )


def build_index(reader: Reader, form: RecordFormat, *, with_keys: bool) -> Index:
    """Validate all records of a source. `with_keys`: keep the content keys, for the detection of duplicates."""
    starts, sizes, lines = array("q"), array("q"), array("q")
    values, ends, labels = array("q"), array("q", [0]), array("q")
    counts = Counts()
    num_bad = 0
    problems: list[str] = []
    members: set[tuple[int, int]] = set()
    with closing(_Images()) as images:
        for line, start, size, outcome in _logged(_outcomes(reader, form, images), reader.name):
            if isinstance(outcome, BadRecord):
                num_bad += 1
                if len(problems) < NUM_SHOWN:
                    problems.append(f"{reader.where(line)}: {outcome}")
                continue
            starts.append(start)
            sizes.append(size)
            lines.append(line)
            counts.add(outcome)
            if outcome.label is not None:
                member = label_key(outcome.label), outcome.query.key()
                labels.append(-1 - len(labels) if member in members else member[0])
                members.add(member)
            if with_keys:
                values.extend(content_keys(outcome))
                ends.append(len(values))
    if labels and len(labels) < len(starts):
        raise UserError(
            f"{reader.name}: {len(labels):,d} of its records are a text or image with a label, "
            f"{len(starts) - len(labels):,d} are pairs: make them two sources of data_path"
        )
    return Index(
        starts=np.array(starts),
        sizes=np.array(sizes, dtype=np.uint32),
        # Of several files the lines count on, by their bytes; half the memory is enough for one.
        lines=np.array(lines, dtype=np.uint32 if not lines or lines[-1] < 2**32 else np.int64),
        keys=ContentKeys(np.array(values), np.array(ends)) if with_keys else None,
        counts=counts,
        fingerprint=_hash_of(reader.files()),
        num_bad=num_bad,
        problems=problems,
        unused=form.columns.unused,
        missing=form.columns.mapped_but_missing,
        labels=np.array(labels) if labels else None,
        images=images.known,
    )


def content_keys(example: Example) -> list[int]:
    """Return the distinct content keys of an example's items."""
    return list(dict.fromkeys(item.key() for item in _items(example)))


def _outcomes(
    reader: Reader, form: RecordFormat, images: _Images
) -> Iterator[tuple[int, int, int, Example | BadRecord]]:
    """Yield (line, position, size, Example or BadRecord) of each record."""
    scan = reader.scan()
    while block := list(itertools.islice(scan, BLOCK)):
        outcomes = [_outcome(form, found) for found in block]
        images.check(outcomes)
        for (start, size, line, _), outcome in zip(block, outcomes, strict=True):
            yield line, start, size, outcome


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
        images = [(number, image) for number, outcome in enumerate(outcomes) for image in _images(outcome)]
        if not images:
            return
        self._pool = self._pool or ThreadPoolExecutor(IMAGE_THREADS, thread_name_prefix="vembed-check")
        named = {image.path: image for _, image in images if image.path is not None and image.path not in self.known}
        self.known.update(zip(named, self._pool.map(_problem, named.values()), strict=True))
        held = self._pool.map(_problem, [image for _, image in images if image.path is None])
        for number, image in images:
            problem = next(held) if image.path is None else self.known[image.path]
            if problem is not None:
                outcomes[number] = BadRecord(problem)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _problem(image: ImageRef) -> str | None:
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


def _hash_of(files: Iterable[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        with path.open("rb") as file:
            while piece := file.read(2**20):
                digest.update(piece)
    return digest.hexdigest()


def _logged(
    outcomes: Iterator[tuple[int, int, int, Example | BadRecord]], name: str
) -> Iterator[tuple[int, int, int, Example | BadRecord]]:
    """Yield the outcomes and log the progress of a long pass."""
    due = time.monotonic() + SECONDS_BETWEEN_LINES
    for number, outcome in enumerate(outcomes):
        yield outcome
        if number % BLOCK == 0 and time.monotonic() > due:
            log.info("%s: %s records checked so far", name, f"{number:,d}")
            due = time.monotonic() + SECONDS_BETWEEN_LINES
