"""First pass: every record of a source is checked once, before training, and the good ones are found again by number.

A large file is read in parts, by as many processes as there are cores.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import json
import logging
import pickle
import sys
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from vembed.data.batching.schedule import ContentKeys, label_key
from vembed.data.child_process import Child, answers, send
from vembed.data.examples import BadRecord, Example, ImageRef
from vembed.data.formats.base import FILE_BITS, Format
from vembed.data.images.files import check_image
from vembed.data.records import RecordFormat
from vembed.errors import UserError
from vembed.files import cache_folder, short_hash, stamp, written_aside
from vembed.parallel.environment import num_cores
from vembed.progress import ProgressReport

log = logging.getLogger("vembed")

NUM_NAMED = 10
"""Number of bad records that a message names; the others are counted."""
IMAGE_THREADS = 8
"""Threads that check images; they hide the latency of network drives."""
BLOCK_ROWS = 256
"""Records that are checked together."""
CACHE_AFTER_SECONDS = 1.0
"""The result of a pass that took longer is stored in the cache folder."""
MAX_PROCESSES = 16
"""More processes than these wait for the disk."""


@dataclass
class Index:
    """Numbers of the good records of a source, and the results of the first pass."""

    numbers: np.ndarray
    lines: np.ndarray
    counts: Counter[str]
    """Statistics of the good records: records, positives, negatives, scored (records with scores), text_queries,
    image_queries, text_documents and image_documents. A query with text and image counts in both. And bad: the bad
    records."""
    fingerprint: str
    """Hash of the contents of the source's files, independent of their paths."""
    problems: list[str]
    """The first bad records, with file and line."""
    unused: list[str]
    missing: list[str]
    """Names in column_mapping that no record has."""
    images: dict[str, list[int] | None]
    """Map from image file to its stamp, None if there is none."""
    labels: np.ndarray | None = None
    """Hash of the class of each record, in labelled data. Negative: a record whose text or image its class has already,
    as a class of its own, since two equal inputs are no pair to learn from."""
    keys: np.ndarray | None = None
    """Content keys of all records, one behind the other, where they are needed to find duplicates."""
    num_keys: np.ndarray | None = None
    """Number of keys of each record."""

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def num_bad(self) -> int:
        """Number of bad records."""
        return self.counts["bad"]

    def content_keys(self) -> ContentKeys:
        """Return the keys of the contents."""
        assert self.keys is not None
        assert self.num_keys is not None
        starts = np.concatenate([[0], np.cumsum(self.num_keys)])
        return ContentKeys(self.keys, starts.astype(np.int64))

    def subset(self, is_kept: np.ndarray) -> Index:
        """Return the index of the first records for which `is_kept` is true, with the statistics of all."""
        chosen = np.flatnonzero(is_kept)
        keys = num_keys = None
        if self.keys is not None:
            keys, num_keys = self.content_keys().of_all(chosen)
        return replace(
            self,
            numbers=self.numbers[chosen],
            lines=self.lines[chosen],
            keys=keys,
            num_keys=num_keys,
            labels=None if self.labels is None else self.labels[chosen],
        )


class PartIndex:
    """Good records of one part, and what else the pass has found there."""

    def __init__(self) -> None:
        self.numbers = array("q")
        self.lines = array("q")
        """Counted from the part's first line."""
        self.keys = array("q")
        """Content keys of all records, one behind the other."""
        self.num_keys = array("q")
        """Number of keys of each record."""
        self.members = array("q")
        """Hash of the class, and key of the item, of each labelled record."""
        self.counts: Counter[str] = Counter()
        self.problems: list[tuple[int, str]] = []
        """Line and reason of the first bad records."""
        self.images: dict[str, str | None] = {}
        """Map from image file to its problem, None if it is valid."""
        self.num_lines = 0
        """Lines of the part, also those without a good record."""
        self.layouts: list[tuple[str, ...]] = []
        """Columns of the records, for the lists of unused and missing ones."""
        self.unused: set[str] = set()

    def count(self, example: Example, times: int = 1) -> None:
        """Count a record, or so many of its form."""
        query = example.query
        documents = example.positives + example.negatives
        for name, count in (
            ("records", 1),
            ("positives", len(example.positives)),
            ("negatives", len(example.negatives)),
            ("scored", example.scores is not None),
            ("text_queries", query.text is not None),
            ("image_queries", bool(query.images)),
            ("text_documents", sum(item.text is not None for item in documents)),
            ("image_documents", sum(bool(item.images) for item in documents)),
        ):
            self.counts[name] += count * times


def build_index(
    reader: Format,
    form: RecordFormat,
    *,
    with_keys: bool,
) -> Index:
    """Check all records of a source. `with_keys`: keep the content keys, for the detection of duplicates."""
    parts = reader.parts()
    num_processes = min(len(parts), num_cores(), MAX_PROCESSES)
    with (
        ThreadPoolExecutor(min(8, num_cores())) as pool,
        ProgressReport(f"{reader.name}: checked", log=log.info) as progress,
    ):
        # Begins beside the first parts, and is faster than they are.
        digests = pool.map(_file_hash, reader.files())
        if num_processes > 1:
            results = in_processes(reader, form, parts, num_processes, with_keys)
        else:
            results = (index_part(reader, form, part, with_keys) for part in parts)
        whole = sum(map(len, parts))
        num_done = 0
        checked = []
        for part, result in zip(parts, results, strict=True):
            checked.append(result)
            form.columns.note(result.layouts, result.unused)
            num_done += len(part)
            progress(num_done, whole)
        fingerprint = xxhash.xxh3_128_hexdigest(b"".join(digests))
    lines = []
    problems: list[str] = []
    counts: Counter[str] = Counter()
    first_lines: dict[int, int] = defaultdict(int)
    images: dict[str, str | None] = {}
    for part, result in zip(parts, checked, strict=True):
        # The parts of a file follow one another. Lines of a part count from its own first line.
        file = part.start >> FILE_BITS
        first_line = first_lines[file]
        first_lines[file] += result.num_lines
        lines.append(np.asarray(result.lines) + first_line)
        for line, reason in result.problems:
            problems.append(f"{reader.where(line + first_line)}: {reason}")
        counts.update(result.counts)
        images.update(result.images)

    def joined(name: str) -> np.ndarray:
        return np.concatenate([np.asarray(getattr(part, name)) for part in checked])

    numbers = joined("numbers")
    members = joined("members").reshape(-1, 2)
    labels = _labels(members) if len(members) else None
    # A batch of labelled data is made by classes, one of pairs by rows.
    if labels is not None and len(labels) < len(numbers):
        raise UserError(
            f"{reader.name}: {len(labels):,d} of its records are a text or image with a label, "
            f"{len(numbers) - len(labels):,d} are pairs: make them two sources of data_path"
        )
    return Index(
        numbers=numbers,
        lines=np.concatenate(lines),
        labels=labels,
        keys=joined("keys") if with_keys else None,
        num_keys=joined("num_keys") if with_keys else None,
        counts=counts,
        fingerprint=fingerprint,
        problems=problems[:NUM_NAMED],
        unused=sorted(form.columns.unused),
        missing=sorted(form.columns.missing),
        images={path: _image_stamp(path) for path in images},
    )


def index_part(
    reader: Format,
    form: RecordFormat,
    part: range,
    with_keys: bool,
) -> PartIndex:
    """Check the records of a part. `with_keys`: keep the content keys."""
    index = PartIndex()
    rows = reader.rows(part)
    with ThreadPoolExecutor(IMAGE_THREADS) as pool:
        while block := list(itertools.islice(rows, BLOCK_ROWS)):
            numbers, lines, records = zip(*block, strict=True)
            # The fast way: a block of plain text pairs is accepted as a whole, without an Example for each.
            plain = None if with_keys else form.plain_example(records)
            if plain is not None:
                index.numbers.extend(numbers)
                index.lines.extend(lines)
                index.count(plain, len(block))
                continue
            outcomes: list[Example | BadRecord] = []
            for record in records:
                try:
                    if isinstance(record, BadRecord):
                        raise record
                    outcomes.append(form.example(record, ""))
                except BadRecord as error:
                    outcomes.append(error)
            _refuse_bad_images(outcomes, index.images, pool)
            for number, line, outcome in zip(numbers, lines, outcomes, strict=True):
                if isinstance(outcome, BadRecord):
                    index.counts["bad"] += 1
                    if len(index.problems) < NUM_NAMED:
                        index.problems.append((line, str(outcome)))
                    continue
                index.numbers.append(number)
                index.lines.append(line)
                index.count(outcome)
                if outcome.label is not None:
                    class_key = label_key(outcome.label)
                    index.members.extend((class_key, outcome.query.key()))
                if with_keys:
                    keys = dict.fromkeys(item.key() for item in outcome.items)
                    index.keys.extend(keys)
                    index.num_keys.append(len(keys))
    index.num_lines = reader.num_lines(part)
    index.layouts = list(form.columns.layouts)
    index.unused = form.columns.unused
    return index


def _labels(members: np.ndarray) -> np.ndarray:
    """Return the class of each labelled record. One that repeats an earlier one of its class has a class of its own,
    a number below zero. `members`: [n, 2] hash of the class, and key of the item."""
    labels: np.ndarray = members[:, 0].copy()
    # `return_index` is the first occurrence of each (class, item).
    first = np.unique(members, axis=0, return_index=True)[1]
    repeats = np.setdiff1d(np.arange(len(members)), first)
    labels[repeats] = -1 - repeats
    return labels


def _refuse_bad_images(
    outcomes: list[Example | BadRecord],
    known: dict[str, str | None],
    pool: ThreadPoolExecutor,
) -> None:
    """Replace each example with an invalid image by a `BadRecord`, in place. A file is checked once for all records."""

    def problem_of(image: ImageRef) -> str | None:
        if image.path is None:
            return image_problem(image)
        if image.path not in known:
            known[image.path] = image_problem(image)
        return known[image.path]

    images: list[ImageRef] = []
    places: list[int] = []
    for place, outcome in enumerate(outcomes):
        if isinstance(outcome, Example):
            for item in outcome.items:
                images += item.images
                places += [place] * len(item.images)
    for place, problem in zip(places, pool.map(problem_of, images), strict=True):
        if problem is not None:
            outcomes[place] = BadRecord(problem)


def image_problem(image: ImageRef) -> str | None:
    """Return why an image cannot be used; None if it can."""
    try:
        check_image(image)
    except BadRecord as error:
        return str(error)
    return None


def _file_hash(path: Path) -> bytes:
    """Hash a file. xxHash takes a twentieth of BLAKE2's time, which is a third of the pass over long records. What it
    tells apart are versions of the user's own files."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).digest()


# ---- several processes -----------------------------------------------------------


def in_processes(
    reader: Format,
    form: RecordFormat,
    parts: Sequence[range],
    num_processes: int,
    with_keys: bool,
) -> Iterator[PartIndex]:
    """Index the parts in several processes, each with every n-th part, and yield them in order."""
    children = []
    with ExitStack() as stack:
        for first in range(num_processes):
            child = Child(
                "from vembed.data.first_pass import index_for_parent as run; run()"
            )
            # After an error or Ctrl-C no process begins another part.
            stack.callback(child.close)
            child.send((reader, form, parts[first::num_processes], with_keys))
            children.append(child)
        for number in range(len(parts)):
            child = children[number % num_processes]
            try:
                answer = child.receive()
            except EOFError as error:
                exit_code = child.process.wait()
                raise RuntimeError(
                    f"a process of the first pass over the data ended with exit code {exit_code}"
                ) from error
            if isinstance(answer, UserError):
                raise answer
            yield answer


def index_for_parent() -> None:
    """Index the parts that standard input names. Runs in a child process, without torch."""
    out = answers()
    gc.disable()  # Python's default looks for cycles several times in each block of records, which have none
    reader, form, parts, with_keys = pickle.load(sys.stdin.buffer)
    for part in parts:
        answer: PartIndex | UserError
        try:
            answer = index_part(reader, form, part, with_keys)
        except UserError as error:
            answer = error
        send(out, answer)


# ---- the index on disk -----------------------------------------------------------


def cached_index(
    reader: Format,
    form: RecordFormat,
    options: Sequence[Any],
    *,
    with_keys: bool,
) -> Index:
    """Return the index of a source: from the cache folder if its files, its images, the options and the code are the
    same, otherwise built anew."""
    files = reader.files()
    name = short_hash(
        _code_hash(), [str(path.absolute()) for path in files], with_keys, *options
    )
    path = cache_folder() / "index" / f"{name}.safetensors"
    stamps = [stamp(file) for file in files]
    with suppress(OSError, SafetensorError):  # missing or damaged: it is built again
        with safe_open(path, "np") as file:
            known_stamps, facts = json.loads(file.metadata()["facts"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        images = facts["images"].items()
        if stamps == known_stamps and all(
            _image_stamp(image) == known for image, known in images
        ):
            facts["counts"] = Counter(facts["counts"])
            return Index(**facts, **arrays)
    began = time.monotonic()
    index = build_index(reader, form, with_keys=with_keys)
    # A short pass is not worth a file in the cache.
    if time.monotonic() - began < CACHE_AFTER_SECONDS:
        return index
    facts = {}
    arrays = {}
    for name, value in vars(index).items():
        if isinstance(value, np.ndarray):
            arrays[name] = value
        else:
            facts[name] = value
    with (
        # Without room on the disk it is built again the next time.
        suppress(OSError, SafetensorError),
        written_aside(path) as partial,
    ):
        save_file(arrays, partial, {"facts": json.dumps([stamps, facts])})
    return index


@functools.cache
def _code_hash() -> str:
    """Return a hash of the code that reads records: an index is good for the code that made it."""
    folder = Path(__file__).parent
    digest = hashlib.blake2b(digest_size=12)
    for path in sorted([*folder.glob("*.py"), *folder.glob("formats/*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _image_stamp(path: str) -> list[int] | None:
    try:
        return stamp(Path(path))
    except (OSError, ValueError):  # missing file or an address
        return None
