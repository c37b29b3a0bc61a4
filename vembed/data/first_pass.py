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
import shutil
import sys
import tempfile
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Self

import numpy as np
import xxhash

from vembed.cores import num_cores
from vembed.data.batching.class_batches import label_key
from vembed.data.batching.schedule import ContentKeys
from vembed.data.cache import short_hash, stamp
from vembed.data.child_process import answers, send, start_child
from vembed.data.examples import BadRecord, Example, ImageRef, MissingNegative
from vembed.data.formats.base import Block, Format, Part
from vembed.data.images.files import check_image
from vembed.data.records import RecordFormat
from vembed.errors import UserError
from vembed.progress import duration

log = logging.getLogger("vembed")

NUM_NAMED = 10
"""Number of bad records that a message names; the others are counted."""
IMAGE_THREADS = 8
"""Threads that check images; they hide the latency of network drives."""
SECONDS_BETWEEN_LINES = 10.0
HASHED_BYTES = 64 * 2**20
"""Bytes of a file that one thread hashes."""
MAX_PROCESSES = 16
"""More processes than these wait for the disk."""
OBJECTS_BETWEEN_COLLECTIONS = 100_000
"""Python's default of 700 looks for cycles several times in each block of records, which have none."""

Progress = Callable[[int, int], None]
"""Called with the number of records done, and how far the pass has come in the numbers of its parts."""


@dataclass
class RecordCounts:
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

    def plus(self, other: RecordCounts) -> RecordCounts:
        """Return the sum of both."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return RecordCounts(*(first + second for first, second in pairs))

    @classmethod
    def of_texts(cls, num_records: int, num_negatives: int) -> RecordCounts:
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
        query = example.query
        positives = example.positives
        negatives = example.negatives
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
    """Numbers of the good records of a source, and the results of the first pass."""

    numbers: np.ndarray
    lines: np.ndarray
    keys: ContentKeys | None
    counts: RecordCounts
    fingerprint: str
    """Hash of the contents of the source's files, independent of their paths."""
    num_bad: int = 0
    num_without_negatives: int = 0
    """Number of bad records that lack only a negative, which the loss needs."""
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
        return len(self.numbers)

    def subset(self, is_kept: np.ndarray) -> Index:
        """Return the index of the first records for which `is_kept` is true. Counts are scaled, not counted anew."""
        chosen = np.flatnonzero(is_kept)
        share = len(chosen) / max(len(self), 1)
        scaled = {}
        for name, count in asdict(self.counts).items():
            # A count that every record has stays that; the others are estimates, for the log.
            scaled[name] = len(chosen) if count == len(self) else round(count * share)
        keys = None
        if self.keys is not None:
            values, counts = self.keys.of_all(chosen)
            keys = ContentKeys(values, np.concatenate([[0], np.cumsum(counts)]))
        return replace(
            self,
            numbers=self.numbers[chosen],
            lines=self.lines[chosen],
            keys=keys,
            counts=RecordCounts(**scaled),
            labels=None if self.labels is None else self.labels[chosen],
        )


@dataclass
class PartIndex:
    """Good records of one part, and what else the pass has found there."""

    numbers: np.ndarray
    lines: np.ndarray
    """Counted from the part's first line."""
    keys: np.ndarray
    """Content keys of all records, one behind the other."""
    num_keys: np.ndarray
    """Number of keys of each record."""
    members: np.ndarray
    """[n, 2] hash of the class, and key of the item, of each labelled record."""
    counts: RecordCounts
    num_bad: int
    num_without_negatives: int
    problems: list[tuple[int, str]]
    """Line and reason of the first bad records."""
    images: dict[str, str | None]
    num_lines: int
    """Lines of the part, also those without a good record."""
    layouts: list[tuple[str, ...]]
    """Columns of the records, for the lists of unused and missing ones."""
    unused: list[str]


def build_index(reader: Format, form: RecordFormat, *, with_keys: bool) -> Index:
    """Check all records of a source. `with_keys`: keep the content keys, for the detection of duplicates."""
    parts = reader.parts()
    whole = sum(part.stop - part.start for part in parts)
    with _Hash(reader.files()) as file_hash:
        progress = _progress(reader.name, whole, file_hash)
        # Where to check does not change the result: the parts and their order are the same.
        num_processes = min(len(parts), num_cores(), MAX_PROCESSES)
        if num_processes > 1:
            results = in_processes(
                reader, form, parts, num_processes, with_keys=with_keys, log_to=progress
            )
            for result in results:
                form.columns.note(result.layouts, result.unused)
        else:
            results = []
            num_done = 0
            far = 0
            for part in parts:
                result = index_part(reader, form, part, with_keys=with_keys)
                results.append(result)
                num_done += len(result.numbers) + result.num_bad
                far += part.stop - part.start
                progress(num_done, far)
        fingerprint = file_hash.result()
    lines = []
    problems: list[str] = []
    first_line = 0
    file_line = -1
    for part, result in zip(parts, results, strict=True):
        # Lines of a part count from its own first line. The parts of a file follow one another.
        if reader.first_line(part) != file_line:
            file_line = reader.first_line(part)
            first_line = file_line
        lines.append(result.lines + first_line)
        for line, reason in result.problems:
            problems.append(f"{reader.where(first_line + line)}: {reason}")
        first_line += result.num_lines
    numbers = np.concatenate([result.numbers for result in results])
    labels = _labels(np.concatenate([result.members for result in results]))
    # A batch of labelled data is made by classes, one of pairs by rows.
    if len(labels) and len(labels) < len(numbers):
        raise UserError(
            f"{reader.name}: {len(labels):,d} of its records are a text or image with a label, "
            f"{len(numbers) - len(labels):,d} are pairs: make them two sources of data_path"
        )
    keys = None
    if with_keys:
        num_keys = np.concatenate([result.num_keys for result in results])
        starts = np.concatenate([[0], np.cumsum(num_keys)]).astype(np.int64)
        values = np.concatenate([result.keys for result in results])
        keys = ContentKeys(values, starts)
    all_lines = np.concatenate(lines)
    if not len(all_lines) or all_lines[-1] < 2**32:
        all_lines = all_lines.astype(np.uint32)
    counts = RecordCounts()
    images: dict[str, str | None] = {}
    for result in results:
        counts = counts.plus(result.counts)
        images.update(result.images)
    return Index(
        numbers=numbers,
        lines=all_lines,
        keys=keys,
        counts=counts,
        fingerprint=fingerprint,
        num_bad=sum(result.num_bad for result in results),
        num_without_negatives=sum(result.num_without_negatives for result in results),
        problems=problems[:NUM_NAMED],
        unused=form.columns.unused,
        missing=form.columns.mapped_but_missing,
        labels=labels if len(labels) else None,
        images=images,
    )


def index_part(
    reader: Format, form: RecordFormat, part: Part, *, with_keys: bool
) -> PartIndex:
    """Check the records of a part. `with_keys`: keep the content keys."""
    numbers = array("q")
    lines = array("q")
    keys = array("q")
    num_keys = array("q")
    members = array("q")
    counts = RecordCounts()
    num_plain: Counter[int] = Counter()  # pairs of texts, by their number of negatives
    num_bad = 0
    num_without_negatives = 0
    problems: list[tuple[int, str]] = []
    with closing(_ImageChecker()) as images:
        for block in reader.blocks(part.start, part.stop):
            # The fast way: a block of plain text pairs is accepted column by column, without an Example for each.
            num_negatives = None if with_keys else form.num_plain_negatives(block)
            if num_negatives is not None:
                numbers.frombytes(block.numbers.astype(np.int64, copy=False).tobytes())
                lines.frombytes(block.lines.astype(np.int64, copy=False).tobytes())
                num_plain[num_negatives] += len(block.numbers)
                continue
            for number, line, outcome in _outcomes(block, form, images):
                if isinstance(outcome, BadRecord):
                    num_bad += 1
                    num_without_negatives += isinstance(outcome, MissingNegative)
                    if len(problems) < NUM_NAMED:
                        problems.append((line, str(outcome)))
                    continue
                numbers.append(number)
                lines.append(line)
                counts.add(outcome)
                if outcome.label is not None:
                    members.extend((label_key(outcome.label), outcome.query.key()))
                if with_keys:
                    contents = content_keys(outcome)
                    keys.extend(contents)
                    num_keys.append(len(contents))
    for num_negatives, num_records in num_plain.items():
        counts = counts.plus(RecordCounts.of_texts(num_records, num_negatives))
    return PartIndex(
        numbers=np.array(numbers),
        lines=np.array(lines),
        keys=np.array(keys),
        num_keys=np.array(num_keys),
        members=np.array(members, dtype=np.int64).reshape(-1, 2),
        counts=counts,
        num_bad=num_bad,
        num_without_negatives=num_without_negatives,
        problems=problems,
        images=images.known,
        num_lines=reader.num_lines(part),
        layouts=form.columns.layouts,
        unused=form.columns.unused,
    )


def content_keys(example: Example) -> list[int]:
    """Return the distinct content keys of an example's items."""
    items = (example.query, *example.positives, *example.negatives)
    return list(dict.fromkeys(item.key() for item in items))


def _outcomes(
    block: Block, form: RecordFormat, images: _ImageChecker
) -> Iterator[tuple[int, int, Example | BadRecord]]:
    """Yield number, line and Example or BadRecord of each record."""
    rows = block.rows()
    # Some at a time, so that the threads get many images to check at once.
    while chunk := list(itertools.islice(rows, 256)):
        outcomes = [_outcome(form, record) for _, _, record in chunk]
        images.check(outcomes)
        for (number, line, _), outcome in zip(chunk, outcomes, strict=True):
            yield number, line, outcome


def _outcome(form: RecordFormat, record: object) -> Example | BadRecord:
    if isinstance(record, BadRecord):
        return record
    try:
        return form.example(record, "")
    except BadRecord as error:
        return error


def _labels(members: np.ndarray) -> np.ndarray:
    """Return the class of each labelled record. One that repeats an earlier one of its class has a class of its own,
    a number below zero."""
    labels: np.ndarray = members[:, 0].copy()
    # `return_index` is the first occurrence of each (class, item).
    first = np.unique(members, axis=0, return_index=True)[1]
    repeats = np.setdiff1d(np.arange(len(members)), first)
    labels[repeats] = -1 - repeats
    return labels


# ---- images ----------------------------------------------------------------------


class _ImageChecker:
    """Checks the images of examples; each file is checked once."""

    def __init__(self) -> None:
        self.known: dict[str, str | None] = {}
        self._pool: ThreadPoolExecutor | None = None

    def check(self, outcomes: list[Example | BadRecord]) -> None:
        """Replace each example with an invalid image by a `BadRecord`, in place."""
        images = []
        for number, outcome in enumerate(outcomes):
            images += [(number, image) for image in _images_of(outcome)]
        if not images:
            return
        self._pool = self._pool or ThreadPoolExecutor(
            IMAGE_THREADS, thread_name_prefix="vembed-check"
        )
        # Files are checked once for all records; images inside of records one by one, in order.
        files: dict[str, ImageRef] = {}
        inside: list[ImageRef] = []
        for _, image in images:
            if image.path is None:
                inside.append(image)
            elif image.path not in self.known:
                files[image.path] = image
        problems = self._pool.map(image_problem, files.values())
        self.known.update(zip(files, problems, strict=True))
        problems_inside = self._pool.map(image_problem, inside)
        for number, image in images:
            problem = (
                next(problems_inside) if image.path is None else self.known[image.path]
            )
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


def _images_of(outcome: Example | BadRecord) -> list[ImageRef]:
    if isinstance(outcome, BadRecord):
        return []
    images = list(outcome.query.images)
    for item in outcome.positives + outcome.negatives:
        images += item.images
    return images


# ---- several processes -----------------------------------------------------------


def in_processes(
    reader: Format,
    form: RecordFormat,
    parts: Sequence[Part],
    num_processes: int,
    *,
    with_keys: bool,
    log_to: Progress,
) -> list[PartIndex]:
    """Index the parts in several processes, and return them in order."""
    todo: SimpleQueue[tuple[int, Part]] = SimpleQueue()
    for numbered_part in enumerate(parts):
        todo.put(numbered_part)
    job = pickle.dumps((reader, form, with_keys))
    results: dict[int, PartIndex] = {}
    lock = threading.Lock()
    num_done = 0
    far = 0

    def serve_one_process() -> None:
        nonlocal num_done, far
        # Leaving the block closes the pipes, which ends the process, and waits for its end.
        with start_child(
            "from vembed.data.first_pass import index_for_parent as run; run()"
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(job)
            while True:
                try:
                    number, part = todo.get_nowait()
                except Empty:
                    return
                try:
                    send(process.stdin, part)
                    answer = pickle.load(
                        process.stdout
                    )  # from this process's own child
                except (EOFError, BrokenPipeError) as error:
                    raise RuntimeError(
                        f"a process of the first pass over the data ended with exit code {process.wait()}"
                    ) from error
                if isinstance(answer, UserError):
                    raise answer
                with lock:
                    results[number] = answer
                    num_done += len(answer.numbers) + answer.num_bad
                    far += part.stop - part.start
                    log_to(num_done, far)

    with ThreadPoolExecutor(num_processes, "vembed-index") as pool:
        futures = [pool.submit(serve_one_process) for _ in range(num_processes)]
        try:
            for future in futures:
                future.result()
        finally:
            # After an error or Ctrl-C no process begins another part.
            while not todo.empty():
                todo.get()
    return [results[number] for number in range(len(parts))]


def index_for_parent() -> None:
    """Index the parts that standard input names, until it ends. Runs in a child process, without torch."""
    out = answers()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    jobs = sys.stdin.buffer
    reader, form, with_keys = pickle.load(jobs)
    while True:
        try:
            part = pickle.load(jobs)
        except EOFError:
            return
        answer: object
        try:
            answer = index_part(reader, form, part, with_keys=with_keys)
        except UserError as error:
            answer = error
        send(out, answer)


# ---- hash of the files, and progress ---------------------------------------------


class _Hash:
    """Hash of the contents of files. Large ones are hashed in pieces by several threads, and the pieces' hashes again.

    xxHash takes a twentieth of BLAKE2's time, which is a third of the pass over long records. What it tells apart are
    versions of the user's own files.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        # The size of a piece is part of the fingerprint: another one would make every checkpoint's data look changed.
        self._pieces = [
            (path, start)
            for path in files
            for start in range(0, max(1, path.stat().st_size), HASHED_BYTES)
        ]
        self._pool = ThreadPoolExecutor(
            min(8, num_cores()), thread_name_prefix="vembed-hash"
        )
        self._digests: list[Future[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def goes_to(self, share: float) -> None:
        """Hash so much of the files. What the pass has just read need not come from the disk again."""
        while len(self._digests) < int(share * len(self._pieces)):
            self._digests.append(
                self._pool.submit(_piece_hash, self._pieces[len(self._digests)])
            )

    def result(self) -> str:
        """Return the hash of the whole files."""
        self.goes_to(1.0)
        digests = [digest.result() for digest in self._digests]
        whole = (
            digests[0]
            if len(digests) == 1
            else xxhash.xxh3_128_digest(b"".join(digests))
        )
        return whole.hex()


def _piece_hash(piece: tuple[Path, int]) -> bytes:
    path, start = piece
    digest = xxhash.xxh3_128()
    left = HASHED_BYTES
    with path.open("rb") as file:
        file.seek(start)
        while left and (data := file.read(min(2**20, left))):
            digest.update(data)
            left -= len(data)
    return digest.digest()


def _progress(name: str, whole: int, file_hash: _Hash) -> Progress:
    """Return a function that logs the progress of a long pass."""
    began = time.monotonic()
    due = began + SECONDS_BETWEEN_LINES

    def progress(num_done: int, far: int) -> None:
        nonlocal due
        share = min(far / max(whole, 1), 1.0)
        file_hash.goes_to(share)
        now = time.monotonic()
        if now <= due:
            return
        seconds = now - began
        left = f", {duration(seconds / share - seconds)} left" if share else ""
        log.info(
            "%s: %s records checked (%.0f%%), %s/s%s",
            name,
            f"{num_done:,d}",
            100 * share,
            f"{num_done / seconds:,.0f}",
            left,
        )
        due = now + SECONDS_BETWEEN_LINES

    return progress


# ---- the index on disk -----------------------------------------------------------


class IndexCache:
    """Cache entry for the index of one source with one set of options."""

    def __init__(
        self, folder: Path, files: Sequence[Path], options: Sequence[Any]
    ) -> None:
        self._folder = folder / "index"
        self._entry = self._folder / short_hash(
            _code_hash(), [str(path.absolute()) for path in files], *options
        )
        self._stamps = [stamp(path) for path in files]

    def load(self) -> Index | None:
        """Return the stored index; None if there is none, or if the data or images have changed."""
        try:
            facts = json.loads((self._entry / "facts.json").read_text(encoding="utf-8"))
            if facts["stamps"] != self._stamps or not self._same_images(
                facts["images"]
            ):
                return None
            arrays = {
                name: np.load(self._entry / f"{name}.npy", mmap_mode="r")
                for name in facts["arrays"]
            }
        except (
            OSError,
            ValueError,
            KeyError,
        ):  # missing or damaged: the index is built again
            return None
        if {name: len(array) for name, array in arrays.items()} != facts["arrays"]:
            return None
        return Index(
            numbers=arrays["numbers"],
            lines=arrays["lines"],
            keys=ContentKeys(arrays["key_values"], arrays["key_starts"])
            if "key_values" in arrays
            else None,
            counts=RecordCounts(**facts["counts"]),
            labels=arrays.get("labels"),
            **facts["others"],
        )

    def save(self, index: Index) -> None:
        """Store an index. Errors of the disk are ignored: the index is built again the next time."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(dir=self._folder, prefix="partial-"))
        except OSError:
            return
        try:
            self._write(partial, index)
            # An entry is replaced and not changed: another process may have mapped its arrays.
            shutil.rmtree(self._entry, ignore_errors=True)
            partial.rename(self._entry)
        except OSError:  # the disk is full, or another process was faster
            shutil.rmtree(partial, ignore_errors=True)

    def _write(self, folder: Path, index: Index) -> None:
        arrays = {"numbers": index.numbers, "lines": index.lines}
        if index.keys is not None:
            arrays |= {"key_values": index.keys.values, "key_starts": index.keys.starts}
        if index.labels is not None:
            arrays["labels"] = index.labels
        for name, values in arrays.items():
            np.save(folder / f"{name}.npy", values)
        facts = {
            "stamps": self._stamps,
            "arrays": {name: len(array) for name, array in arrays.items()},
            "counts": asdict(index.counts),
            "images": {path: _image_stamp(path) for path in index.images},
            "others": {
                "fingerprint": index.fingerprint,
                "num_bad": index.num_bad,
                "num_without_negatives": index.num_without_negatives,
                "problems": index.problems,
                "unused": index.unused,
                "missing": index.missing,
            },
        }
        (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")

    def _same_images(self, images: dict[str, list[int] | None]) -> bool:
        return all(_image_stamp(path) == known for path, known in images.items())


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
