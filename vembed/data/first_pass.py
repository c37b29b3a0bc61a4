"""Index: the validation pass over a source, and the positions of its good records."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np
import xxhash

from vembed.cores import num_cores
from vembed.data.batching.schedule import ContentKeys
from vembed.data.formats.json_files import Part, Reader
from vembed.data.index_parts import NUM_SHOWN, Counts, PartIndex, index_part
from vembed.data.index_worker import in_processes, num_workers
from vembed.data.records import RecordFormat
from vembed.errors import UserError
from vembed.progress import duration

log = logging.getLogger("vembed")

SECONDS_BETWEEN_LINES = 10.0
HASHED_AT_ONCE = 64 * 2**20
"""Bytes of a file that one thread hashes."""


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
        # A count that every record has stays that; the others are estimates, for the log.
        scaled = {
            name: len(chosen) if value == len(self) else round(value * share)
            for name, value in asdict(self.counts).items()
        }
        keys = None
        if self.keys is not None:
            values, counts = self.keys.of_all(chosen)
            keys = ContentKeys(values, np.concatenate([[0], np.cumsum(counts)]))
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
    """Validate all records of a source. `with_keys`: keep the content keys, for the detection of duplicates.

    A source of several parts is read by as many processes as there are cores.
    """
    parts = reader.parts()
    with _Hash(reader.files()) as hashed:
        say = _progress(
            reader.name, sum(part.stop - part.start for part in parts), hashed
        )
        # Where to check does not change what is found: the parts and their order are the same.
        if num_workers(len(parts)) > 1:
            found = in_processes(reader, form, parts, with_keys=with_keys, say=say)
            for one in found:
                form.columns.note(one.layouts, one.unused)
        else:
            found = _in_this_process(reader, form, parts, with_keys=with_keys, say=say)
        fingerprint = hashed.result()
    lines, problems, first, file = [], list[str](), 0, -1
    for part, one in zip(parts, found, strict=True):
        # Lines of a part count from its own first line. The parts of a file follow one another, so `first` adds up.
        if part.file != file:
            first, file = part.first_line, part.file
        lines.append(one.lines + first)
        problems += [
            f"{reader.where(first + line)}: {reason}" for line, reason in one.problems
        ]
        first += one.num_lines
    labels, starts = (
        _labels(_joined(found, lambda one: one.members)),
        _joined(found, lambda one: one.starts),
    )
    # A batch of labelled data is made by classes, one of pairs by rows.
    if len(labels) and len(labels) < len(starts):
        raise UserError(
            f"{reader.name}: {len(labels):,d} of its records are a text or image with a label, "
            f"{len(starts) - len(labels):,d} are pairs: make them two sources of data_path"
        )
    keys = None
    if with_keys:
        ends = np.concatenate(
            [[0], np.cumsum(_joined(found, lambda one: one.num_keys))]
        )
        keys = ContentKeys(_joined(found, lambda one: one.keys), ends.astype(np.int64))
    all_lines = np.concatenate(lines)
    counts = Counts()
    for one in found:
        counts = counts.plus(one.counts)
    return Index(
        starts=starts,
        sizes=_joined(found, lambda one: one.sizes),
        # Of several files the lines count on, by their bytes; half the memory is enough for one.
        lines=all_lines.astype(np.uint32)
        if not len(all_lines) or all_lines[-1] < 2**32
        else all_lines,
        keys=keys,
        counts=counts,
        fingerprint=fingerprint,
        num_bad=sum(one.num_bad for one in found),
        problems=problems[:NUM_SHOWN],
        unused=form.columns.unused,
        missing=form.columns.mapped_but_missing,
        labels=labels if len(labels) else None,
        images={path: problem for one in found for path, problem in one.images.items()},
    )


def _joined(
    parts: list[PartIndex], of: Callable[[PartIndex], np.ndarray]
) -> np.ndarray:
    return np.concatenate([of(one) for one in parts])


def _labels(members: np.ndarray) -> np.ndarray:
    """Return the class of each labelled record. One that repeats an earlier one of its class has a class of its own,
    a number below zero."""
    labels: np.ndarray = members[:, 0].copy()
    # `return_index` is the first occurrence of each (class, item).
    first = np.unique(members, axis=0, return_index=True)[1]
    repeats = np.setdiff1d(np.arange(len(members)), first)
    labels[repeats] = -1 - repeats
    return labels


def _in_this_process(
    reader: Reader,
    form: RecordFormat,
    parts: Sequence[Part],
    *,
    with_keys: bool,
    say: Callable[[int, int], None],
) -> list[PartIndex]:
    done, far, results = 0, 0, list[PartIndex]()
    for part in parts:

        def say_more(some: int, further: int, done: int = done, far: int = far) -> None:
            say(done + some, far + further)

        results.append(
            index_part(reader, form, part, with_keys=with_keys, say=say_more)
        )
        done, far = (
            done + len(results[-1].starts) + results[-1].num_bad,
            far + part.stop - part.start,
        )
    return results


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
            for start in range(0, max(1, path.stat().st_size), HASHED_AT_ONCE)
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
        digests = [one.result() for one in self._digests]
        whole = (
            digests[0]
            if len(digests) == 1
            else xxhash.xxh3_128_digest(b"".join(digests))
        )
        return whole.hex()


def _piece_hash(piece: tuple[Path, int]) -> bytes:
    path, start = piece
    digest = xxhash.xxh3_128()
    left = HASHED_AT_ONCE
    with path.open("rb") as file:
        file.seek(start)
        while left and (data := file.read(min(2**20, left))):
            digest.update(data)
            left -= len(data)
    return digest.digest()


def _progress(name: str, whole: int, hashed: _Hash) -> Callable[[int, int], None]:
    """Return a function that logs the progress of a long pass, from the records done and how far it has come."""
    began = time.monotonic()
    due = began + SECONDS_BETWEEN_LINES

    def say(done: int, far: int) -> None:
        nonlocal due
        share, now = min(far / max(whole, 1), 1.0), time.monotonic()
        hashed.goes_to(share)
        if now > due:
            took = now - began
            left = f", {duration(took / share - took)} left" if share else ""
            log.info(
                "%s: %s records checked (%.0f%%), %s/s%s",
                name,
                f"{done:,d}",
                100 * share,
                f"{done / took:,.0f}",
                left,
            )
            due = now + SECONDS_BETWEEN_LINES

    return say
