"""ExampleStore: the examples of one or several sources, validated before training and read on demand.

First pass: every record of a source is checked once, before training, and the good ones are found again by number. A
large file is read in parts, by as many processes as there are cores.
"""

from __future__ import annotations

import bisect
import gc
import hashlib
import itertools
import json
import logging
import pickle
import re
import sys
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from vembed.config.schema import DataSection, DataSource, ObjectiveSection, sources_of
from vembed.config.terms import (
    ResolvedTerm,
    loss_names,
    loss_terms,
    reads_scores,
    run_terms,
)
from vembed.data.batching.schedule import ContentKeys, label_key, next_of_class
from vembed.data.child_process import Child, answers, send
from vembed.data.examples import BadRecord, Example, ImageRef, ImageRoot, Item, ReadAs
from vembed.data.formats.base import FILE_BITS, Format
from vembed.data.formats.saved_datasets import Role
from vembed.data.formats.table import open_reader
from vembed.data.images.files import IMAGE_PATH, image_problem
from vembed.data.records import (
    LABEL,
    Columns,
    Record,
    RecordFormat,
    classes_as_scores,
    negative_columns,
    quoted_column,
    unread_judgement,
)
from vembed.errors import UserError, joined, listed
from vembed.files import cache_folder, short_hash, stamp, written_aside
from vembed.losses.declaration import LABEL_SCORES
from vembed.losses.table import LOSSES
from vembed.parallel.environment import num_cores
from vembed.progress import ProgressReport

log = logging.getLogger("vembed")

NUM_NAMED = 10
"""Number of bad records that a message names; the others are counted."""
IMAGE_THREADS = 8
"""Threads that check images; they hide the latency of network drives."""
BLOCK_RECORDS = 256
"""Records that are checked together."""
CACHE_AFTER_SECONDS = 1.0
"""The result of a pass that took longer is stored in the cache folder."""
MAX_PROCESSES = 16
"""More processes than these wait for the disk."""
NUM_INSPECTED = 20
"""Examples of a source that are looked at for what is probably not meant."""
_LIST_OR_OBJECT = re.compile(
    r"""\[\s*['"{].*['"}]\s*\]|\{\s*['"](text|title|image|images|bytes|path)['"]\s*:.*\}""",
    re.DOTALL,
)


@dataclass(frozen=True)
class Records:
    """The good records of one source, by number."""

    entry: DataSource
    reader: Format
    column_mapping: Mapping[str, str] | None
    """That of the entry, else that of the run."""
    forms: Sequence[RecordFormat]
    """Of each file."""
    index: Index
    terms: Sequence[ResolvedTerm] = ()
    """Terms of the loss of a source to train on."""
    read_as: ReadAs = field(default_factory=ReadAs)

    def __len__(self) -> int:
        return len(self.index.numbers)

    @property
    def name(self) -> str:
        """Name of the source in logs."""
        return self.entry.name or self.entry.path

    def where(self, number: int) -> str:
        """Return the name of a record for messages."""
        return self.reader.where(int(self.index.lines[number]))

    def record(self, number: int) -> Record:
        """Return a record as it stands in its file."""
        record = self.reader.read(int(self.index.numbers[number]))
        if isinstance(record, dict):
            return record
        reason = record if isinstance(record, BadRecord) else "no object"
        raise self._changed(number, reason)

    def row(self, number: int, root: ImageRoot) -> Record:
        """Return a record as it stands in a file whose paths of images start in `root`."""
        return self._form(number).renamed(self.record(number), root)

    @cached_property
    def mates(self) -> np.ndarray:
        """The next example of the class of each, in labelled data."""
        assert self.index.labels is not None
        return next_of_class(self.index.labels)

    def example(self, number: int, mate: int | None = None) -> Example:
        """Return an example. That of labelled data has another one of its class as positive: `mate`, or the next."""
        example = self._read(number)
        # Commands on data, such as `vembed mine`, read a labelled text as its own positive.
        if self.index.labels is not None and self.terms:
            mate = int(self.mates[number]) if mate is None else mate
            example = replace(example, positives=self._read(mate).positives)
        return self.read_as.apply(example)

    @cached_property
    def with_all_negatives(self) -> Records:
        """The same records with the negatives beyond `max_negatives`."""
        forms = [replace(form, max_negatives=None) for form in self.forms]
        return replace(self, forms=forms)

    def _form(self, number: int) -> RecordFormat:
        return self.forms[int(self.index.numbers[number]) >> FILE_BITS]

    def _read(self, number: int) -> Example:
        """Return what a record means. Its images name the record, for messages."""
        where = self.where(number)
        try:
            example = self._form(number).example(self.record(number), where)
        except BadRecord as error:
            raise self._changed(number, error) from error
        if any(item.images for item in example.items):
            example = example.with_items(
                lambda query: query.read_from(where),
                lambda document: document.read_from(where),
            )
        return example

    def _changed(self, number: int, reason: object) -> UserError:
        where = self.where(number)
        return UserError(
            f"{where} has changed since the run began ({reason}): start again"
        )

    def summary(self) -> str:
        """Return a log line: examples, what they have, and how they are read."""
        counts = self.index.counts
        num_records = counts["records"]
        num_examples = f"{len(self):,d}"
        if len(self) < num_records:
            num_examples += f" of {num_records:,d}"
        parts = [f"{self.name}: {num_examples} examples"]
        for side in ("queries", "documents"):
            if counts[f"image_{side}"]:
                parts.append(f"{counts[f'image_{side}']:,d} {side} with images")
        if counts["bad"]:
            parts.append(f"{counts['bad']:,d} bad records left out")
        if counts["positives"] > num_records:
            parts.append(f"{counts['positives'] / num_records:.1f} positives each")
        if counts["negatives"]:
            # Three digits: few in many records are not 0.0 each.
            parts.append(f"{counts['negatives'] / num_records:.3g} negatives each")
        labels = self.index.labels
        if labels is not None:
            num_classes = len(np.unique(labels[labels >= 0]))
            parts.append(f"labelled with {num_classes:,d} classes")
        if counts["scored"]:
            parts.append(f"{counts['scored']:,d} scored")
        for name, value in asdict(self.read_as).items():
            if value is not None:
                parts.append(f"{name} {value!r}")
        return "data: " + ", ".join(parts)

    def weak_points(self) -> list[str]:
        """Return what is probably not meant: columns and scores that are not read, contents that are taken for plain
        texts, and records that were left out."""
        index = self.index
        counts = index.counts
        numbers = range(min(NUM_INSPECTED, len(self)))
        examples = [self.example(number) for number in numbers]
        form = self.forms[0]
        losses = form.losses
        # Pairs without scores are taken for matches: by a loss, or by an evaluation.
        takes_matches = not losses or any(
            LOSSES[loss].records == "matches" for loss in losses
        )
        sentences: list[str | None] = []
        if index.labels is None and losses:
            names = negative_columns(index.unused)
            mapped = ", ".join(f"{quoted_column(name)}: negative" for name in names)
            if names:
                sentences.append(
                    f"not read: {listed(names)}. For negatives, set column_mapping: {{{mapped}}}"
                )
        in_need = [
            term for term in self.terms if term.loss.needed_negatives() == "some"
        ]
        has_negatives = counts["negatives"] or form.gets_negatives
        if losses and in_need and not has_negatives:
            sentences.append(
                f"no record has a hard negative, without which loss: {' and '.join(loss_names(in_need))} stays 0: "
                "`vembed mine` adds some"
            )
        if index.labels is None and takes_matches:
            if not counts["scored"]:
                sentences.append(unread_judgement(index.unused))
            elif losses and not reads_scores(self.terms):
                sentences.append(
                    f"its scores are not read by loss: {' and '.join(losses)}, and every pair is taken for a match: set "
                    "loss: cosent if they say how well a pair matches, loss: kl and teacher: scores if they are a "
                    "teacher's, or leave out the pairs that do not match"
                )
        layouts = form.columns.layouts.values()
        if reads_scores(self.terms) and any(
            layout.score == LABEL for layout in layouts
        ):
            scores: set[float] = set()
            for example in examples:
                scores.update(example.scores or ())
            sentences.append(classes_as_scores(scores))
        if counts["bad"]:
            sentences.append(
                f"{counts['bad']:,d} of {counts['records'] + counts['bad']:,d} records cannot be used and are left out "
                "(on_bad_record: skip); the log names the first"
            )
        sentences += taken_for_texts(examples)
        return [sentence for sentence in sentences if sentence is not None]


def taken_for_texts(examples: Sequence[Example]) -> list[str]:
    """Return sentences on plain texts of these examples that look like paths of images, lists or objects."""
    items_of: dict[str, list[Item]] = {"queries": [], "positives": [], "negatives": []}
    for example in examples:
        items_of["queries"].append(example.query)
        items_of["positives"] += example.positives
        items_of["negatives"] += example.negatives
    sentences = []
    for name, items in items_of.items():
        texts = [item.text or "" for item in items]
        if texts and all(map(_LIST_OR_OBJECT.fullmatch, texts)):
            sentences.append(
                f"its {name} look like lists or objects ({texts[0]!r:.60}), and each is taken for one text: write JSON "
                "Lines or Parquet with fields that are lists or objects, not texts, or a column for each"
            )
        is_main = name != "negatives"
        if is_main and all(map(IMAGE_PATH.fullmatch, texts)):
            sentences.append(
                f"its {name} look like paths of images ({texts[0]!r:.80}), and are taken for texts: if they are paths, "
                "set retrieval_mode: i2i, t2i or i2t (i: images, t: texts)"
            )
    return sentences


class Rows:
    """Examples by number, concatenated over the sources. Thread-safe."""

    def __init__(self, sources: Sequence[Any]) -> None:
        """`sources`: Records, or others that have their `name`, `column_mapping`, `example`, `record` and `row`."""
        self.sources = tuple(sources)
        self.names = tuple(source.name for source in sources)
        self.sizes = tuple(map(len, sources))
        self.ends = list(itertools.accumulate(self.sizes))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> Example:
        source, number = self.locate(index)
        example: Example = source.example(number)
        return example

    def __iter__(self) -> Iterator[Example]:
        return map(self.__getitem__, range(len(self)))

    def row(self, index: int, root: ImageRoot) -> Record:
        """Return the record of an example as it stands in a file whose paths of images start in `root`."""
        source, number = self.locate(index)
        record: Record = source.row(number, root)
        return record

    def source_of(self, index: int) -> int:
        """Return the index of the source that an example comes from."""
        return bisect.bisect_right(self.ends, index)

    def locate(self, index: int) -> tuple[Any, int]:
        """Return the source of an example, and its number there."""
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        place = self.source_of(index)
        return self.sources[place], index - self.ends[place] + self.sizes[place]


class ExampleStore(Rows):
    """The examples of a run."""

    sources: tuple[Records, ...]

    def __init__(self, sources: Sequence[Records], fingerprint: str) -> None:
        super().__init__(sources)
        self.fingerprint = fingerprint
        """Hash of the examples and of the options they are read with. Independent of file paths and image files."""
        self.weights = tuple(source.entry.weight for source in sources)
        self.counts: Counter[str] = Counter()
        """Statistics of the records of all sources, as those of an Index."""
        for source in sources:
            self.counts.update(source.index.counts)
        self.labels = [source.index.labels for source in sources]
        """Hash of the class of each example, by source; None for sources without labels."""

    def pair(self, index: int, mate: int) -> Example:
        """Return an example of a labelled source with another one of the source as its positive."""
        source: Records
        source, number = self.locate(index)
        return source.example(number, number + mate - index)

    def subset(self, is_kept: np.ndarray, note: str) -> ExampleStore:
        """Return a store of the examples that are kept [n, bool]. `note` becomes part of the fingerprint."""
        sources = []
        parts = np.split(is_kept, self.ends[:-1])
        for source, is_kept_there in zip(self.sources, parts, strict=True):
            numbers = np.flatnonzero(is_kept_there)
            if not len(numbers):
                raise UserError(
                    f"{note} takes all examples of {source.name}; lower it, or give val_data_path"
                )
            index = source.index.subset(numbers)
            sources.append(replace(source, index=index))
        return ExampleStore(sources, short_hash(self.fingerprint, note))

    def all_documents(self, index: int) -> tuple[Item, ...]:
        """Return the documents of an example, with the negatives beyond `max_negatives`."""
        source: Records
        source, number = self.locate(index)
        return source.with_all_negatives.example(number).documents

    def all_keys(self) -> ContentKeys:
        """Return the keys of all examples. They are available only with `no_duplicates: true`."""
        values = [source.index.keys for source in self.sources]
        counts = [source.index.num_keys for source in self.sources]
        return ContentKeys(np.concatenate(values), np.concatenate(counts))

    def summary(self) -> list[str]:
        """Return log lines: examples per source, skipped records with the reason, and unused columns."""
        lines = []
        for source in self.sources:
            index = source.index
            lines.append(source.summary())
            lines += [f"left out: {problem}" for problem in joined(index.problems)]
            num_more = index.counts["bad"] - len(index.problems)
            if num_more:
                lines.append(f"left out: {num_more:,d} more of {source.name}")
            if index.unused:
                lines.append(f"{source.name}: not used: {listed(index.unused)}")
        return lines

    def warnings(self) -> list[str]:
        """Return a warning for each source that looks misread."""
        sentences = []
        for source in self.sources:
            sentences += [f"{source.name}: {point}" for point in source.weak_points()]
        return sentences


def open_examples(
    data: DataSection,
    paths: str | Sequence[str | DataSource],
    objective: ObjectiveSection | None = None,
    *,
    model_name: str = "",
    role: Role = "train",
) -> ExampleStore:
    """Check every record of `paths` and return the good ones. Raise UserError with the first ten bad ones.

    `objective` and `model_name` say what the losses need; without them, it is the default loss. For validation data,
    `max_train_examples`, `max_negatives` and the requirements of the loss do not apply.
    """
    entries = sources_of(paths)
    objective = objective or ObjectiveSection()
    is_training = role == "train"
    sources = []
    for entry in entries:
        terms = loss_terms(objective, model_name, entry)
        requirements = {}
        if is_training:
            requirements = _requirements(data, objective, entry, terms)
        records = open_records(
            data,
            entry,
            role,
            num_sources=len(entries),
            **requirements,
        )
        sources.append(replace(records, terms=terms))
    refuse_bad_sources(
        sources,
        on_bad_record=data.on_bad_record,
    )
    terms = run_terms(objective, data, model_name)
    needs_negatives = all(
        term.loss.needed_negatives() in ("some", "each") for term in terms
    )
    has_negatives = any(source.index.counts["negatives"] for source in sources)
    is_given = has_negatives or data.mine is not None or data.in_batch_negatives
    # Without them all terms are 0.
    if is_training and needs_negatives and not is_given:
        raise UserError(
            f"loss: {' and '.join(sorted(loss_names(terms)))} compares a positive with the hard negatives of its "
            "record, and no record has one, so that the loss would be 0 at every step: `vembed mine` adds some; kl "
            "with distill_candidates: batch, embedding and relational need none"
        )
    if is_training:
        _refuse_partly_scored(sources, is_split=data.homogeneous_batches is True)
    if is_training and len(entries) > 1:
        # The run's column mapping serves all sources: one of them has each of its names.
        missing = []
        for source in sources:
            if source.entry.column_mapping is None:
                missing.append(set(source.index.missing))
        unknown = set.intersection(*missing) if missing else None
        if unknown:
            raise UserError(
                f"column_mapping names {listed(sorted(unknown))}, which no record of any source has"
            )
    run_limit = None
    if is_training:
        run_limit = data.max_negatives
        if data.max_train_examples is not None:
            sources = _first_examples(sources, data.max_train_examples)
    identities = []
    for source in sources:
        entry = source.entry
        identities.append(
            [
                entry.column_mapping,
                entry.max_negatives,
                *astuple(source.read_as),
                source.index.fingerprint,
                len(source),
                entry.weight,
            ]
        )
    options = [data.retrieval_mode, data.column_mapping, run_limit]
    return ExampleStore(sources, short_hash(options, identities))


def _refuse_partly_scored(sources: Sequence[Records], *, is_split: bool) -> None:
    """Raise UserError where a loss follows the scores of the data, and some records of a batch may have them and others
    not: a record's label would depend on the others. A loss that takes the scores for those of a teacher needs them all.
    `is_split`: each batch is of one source."""
    groups = defaultdict[tuple[str, bool, bool], Counter[str]](Counter)
    for source in sources:
        for term in source.terms:
            if term.follows_data:
                name = f"loss: {term.loss.name}"
                group = f"{source.name}: {name}" if is_split else name
                needs_all = term.loss.follows == "teacher"
                leaves_out = not term.loss.counts_unscored
                groups[group, needs_all, leaves_out].update(source.index.counts)
    for (group, needs_all, leaves_out), counts in groups.items():
        way_out = "name a model as teacher" if needs_all else "leave them all out"
        for scored, items in (("scored", "records"), ("scored_negatives", "negatives")):
            are_read = needs_all or counts[scored] > 0
            if scored == "scored_negatives" and leaves_out:
                # Negatives without a score are not in the loss, which is 0 for a positive alone.
                are_read = are_read or counts["scored"] > 0
            if are_read and counts[scored] < counts[items]:
                raise UserError(
                    f"{group} follows the scores of all {items}, and {counts[scored]:,d} of {counts[items]:,d} {items} "
                    f"have one: give each its score, or {way_out}"
                )
        if counts["scored_negatives"] and not counts["scored"]:
            raise UserError(
                f"{group} follows the scores of positives and negatives, and the negatives alone have some: give each positive "
                "its score too, or leave the column of scores out"
            )


def _requirements(
    data: DataSection,
    objective: ObjectiveSection,
    entry: DataSource,
    terms: Sequence[ResolvedTerm],
) -> dict[str, Any]:
    """Return what the losses of a source need of its records, as arguments of `open_records`."""
    losses = loss_names(terms)
    source_limit = entry.max_negatives
    if source_limit is None:
        source_limit = data.max_negatives
    score_ranges = []
    for term in terms:
        limits = term.loss.score_range(objective.similarity)
        if limits is not None and term.teacher in (None, LABEL_SCORES):
            score_ranges.append((term.loss.name, *limits))
    # Records that get further negatives need none of their own.
    is_mined = data.mine is not None and data.mine.at_start
    return {
        "texts_alone": all(LOSSES[loss].records == "texts" for loss in losses),
        "losses": losses,
        "max_negatives": source_limit,
        "score_ranges": score_ranges,
        "gets_negatives": is_mined or data.in_batch_negatives > 0,
        "keeps_keys": data.no_duplicates,
    }


def _first_examples(sources: Sequence[Records], limit: int) -> list[Records]:
    """Return the sources with their first examples, each with its share of the limit.

    The ends of the shares are rounded, so that the sizes add up to the limit. Each source keeps one record at least, so
    that many small ones may exceed it.
    """
    total = sum(map(len, sources))
    limit = min(limit, total)
    end = 0
    limited = []
    for source in sources:
        start = end * limit // total
        end += len(source)
        size = max(1, end * limit // total - start)
        index = source.index.subset(np.arange(size))
        limited.append(replace(source, index=index))
    return limited


def open_records(
    options: Any,
    entry: DataSource,
    role: Role,
    *,
    num_sources: int,
    texts_alone: bool = False,
    reads_all: bool = False,
    **requirements: Any,
) -> Records:
    """Check every record of one source. `options`: `image_root`, `allow_image_urls`, `retrieval_mode` and
    `column_mapping` of a run or of a command on data, which reads `num_sources` of them. `requirements`: of the losses, for
    `RecordFormat`."""
    mapping = entry.column_mapping
    may_miss = False
    if mapping is None:
        mapping = options.column_mapping
        # Another source may have the other names, and validation data vembed's own.
        may_miss = role != "train" or num_sources > 1
    columns = Columns(
        mapping, may_miss=may_miss, texts_alone=texts_alone, reads_all=reads_all
    )
    reader = open_reader(entry.path, columns, role)
    forms = [
        RecordFormat(
            columns,
            ImageRoot.of(options, file.folder),
            mode=options.retrieval_mode,
            numbers_in_text=file.numbers_are_text,
            **requirements,
        )
        for file in reader.single_files
    ]
    identity = [
        reader.name,
        mapping,
        options.retrieval_mode,
        [form.images.folder for form in forms],
        options.allow_image_urls,
        texts_alone,
        reads_all,
        requirements,
    ]
    index = cached_index(reader, forms, identity)
    if index.missing and not may_miss:
        # Where no record could be read, the first problem says which columns there are.
        others = next(iter(index.problems), "")
        if index.unused:
            others = f"not read: {listed(index.unused)}"
        raise UserError(
            f"{reader.name}: column_mapping names {listed(index.missing)}, which no record has ({others or 'it is empty'})"
        )
    return Records(entry, reader, mapping, forms, index, read_as=ReadAs.of(entry))


def refuse_bad_sources(
    sources: Sequence[Records],
    *,
    on_bad_record: str,
) -> None:
    """Raise UserError with the first bad records, unless they are left out; and for a source without a good one."""
    problems = []
    for source in sources:
        problems += source.index.problems
    refuse_bad_records(
        problems,
        num_bad=sum(source.index.counts["bad"] for source in sources),
        num_good=sum(map(len, sources)),
        on_bad_record=on_bad_record,
    )
    for source in sources:
        if not len(source):
            reasons = source.index.problems[:1]
            raise UserError(
                ": ".join([f"{source.reader.name} holds no records to use", *reasons])
            )


def refuse_bad_records(
    problems: Sequence[str],
    *,
    num_bad: int,
    num_good: int,
    on_bad_record: str,
) -> None:
    """Raise UserError if there are bad records, unless they are left out and others are good. `problems`: of at least
    the first ones."""
    if not num_bad or (num_good and on_bad_record != "stop"):
        return
    named = problems[:NUM_NAMED]
    lines = joined(named)
    if num_bad > len(named):
        lines.append(f"and {num_bad - len(named):,d} more")
    way_out = "fix them, or set on_bad_record: skip to leave them out"
    if not num_good:
        way_out = "and there is no other"
    raise UserError(
        f"{num_bad:,d} of {num_bad + num_good:,d} records cannot be used, {way_out}:\n  "
        + "\n  ".join(lines)
    )


# ---- the first pass ---------------------------------------------------------------


@dataclass
class Index:
    """Numbers of the good records of a source, and the results of the first pass."""

    numbers: np.ndarray
    lines: np.ndarray
    keys: np.ndarray
    """Content keys of all records, one behind the other, where they are kept to find duplicates."""
    num_keys: np.ndarray
    """Number of keys of each record."""
    counts: Counter[str]
    """Statistics of the good records: records, positives, negatives, scored (records with scores), scored_negatives,
    prompts (records with a prompt), image_queries and image_documents. `bad` counts the bad records."""
    fingerprint: str
    """Hash of the contents of the source's files, independent of their paths."""
    problems: list[str]
    """The first bad records, with file and line."""
    unused: list[str]
    missing: list[str]
    """Names in column_mapping that no record has."""
    image_stamps: dict[str, list[int] | None]
    """Map from image file to its stamp, None if there is none."""
    labels: np.ndarray | None = None
    """Hash of the class of each record, in labelled data. Negative: a record whose text or image its class has already,
    as a class of its own, since two equal inputs are no pair to learn from."""

    def subset(self, chosen: np.ndarray) -> Index:
        """Return the index of some records by their numbers, with the statistics of all."""
        keys = self.keys
        num_keys = self.num_keys
        if len(num_keys):
            keys, num_keys = ContentKeys(keys, num_keys).of(chosen)
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

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        """Knows which columns the records have."""
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
        self.image_problems: dict[str, str | None] = {}
        """Map from image file to its problem, None if it is valid."""
        self.num_lines = 0
        """Lines of the part, also those without a good record."""

    def count(self, example: Example, times: int = 1) -> None:
        """Count a record, or so many of its form."""
        query = example.query
        counts = {
            "records": 1,
            "positives": len(example.positives),
            "negatives": len(example.negatives),
            "scored": example.scores is not None,
            "scored_negatives": len(example.negative_scores or ()),
            "prompts": query.prompt is not None,
            "image_queries": bool(query.images),
            "image_documents": sum(bool(item.images) for item in example.documents),
        }
        for name, count in counts.items():
            self.counts[name] += count * times


def build_index(reader: Format, forms: Sequence[RecordFormat]) -> Index:
    """Check all records of a source. `forms`: of each file, with the same `columns`."""
    columns = forms[0].columns
    parts = reader.parts()
    num_processes = min(len(parts), num_cores(), MAX_PROCESSES)
    num_done = 0
    num_records = sum(map(len, parts))
    checked = []
    lines = []
    problems: list[str] = []
    counts: Counter[str] = Counter()
    first_lines: dict[int, int] = defaultdict(int)
    images: set[str] = set()
    progress = ProgressReport(f"{reader.name}: checked", log=log.info)
    with ThreadPoolExecutor(min(8, num_cores())) as pool:
        # Begins beside the first parts, and is faster than they are.
        digests = pool.map(_file_hash, reader.files())
        if num_processes > 1:
            results = in_processes(reader, forms, parts, num_processes)
        else:
            results = (index_part(reader, forms, part) for part in parts)
        for part, result in zip(parts, results, strict=True):
            checked.append(result)
            columns.merge(result.columns)
            # The parts of a file follow one another. Lines of a part count from its own first line.
            file = part.start >> FILE_BITS
            first_line = first_lines[file]
            first_lines[file] += result.num_lines
            lines.append(np.asarray(result.lines) + first_line)
            for line, reason in result.problems:
                problems.append(f"{reader.where(line + first_line)}: {reason}")
            counts.update(result.counts)
            images.update(result.image_problems)
            num_done += len(part)
            progress(num_done, num_records)
        fingerprint = xxhash.xxh3_128_hexdigest(b"".join(digests))
    numbers = np.concatenate([result.numbers for result in checked])
    members = np.concatenate([result.members for result in checked])
    num_labelled = len(members) // 2
    # A batch of labelled data is made by classes, one of pairs by records.
    if 0 < num_labelled < len(numbers):
        raise UserError(
            f"{reader.name}: {num_labelled:,d} of its records are a text or image with a label, "
            f"{len(numbers) - num_labelled:,d} are pairs: make them two sources of data_path"
        )
    return Index(
        numbers=numbers,
        lines=np.concatenate(lines),
        labels=_labels(members.reshape(-1, 2)) if num_labelled else None,
        keys=np.concatenate([result.keys for result in checked]),
        num_keys=np.concatenate([result.num_keys for result in checked]),
        counts=counts,
        fingerprint=fingerprint,
        problems=problems[:NUM_NAMED],
        unused=sorted(columns.unused),
        missing=sorted(columns.missing),
        image_stamps={path: _image_stamp(path) for path in images},
    )


def _labels(members: np.ndarray) -> np.ndarray:
    """Return the class [n] of each labelled record from the hashes of classes and items [n, 2].

    The first occurrence of each (class, item) keeps its class. Others get a class of their own, below zero.
    """
    labels: np.ndarray = members[:, 0].copy()
    _, first = np.unique(members, axis=0, return_index=True)
    repeats = np.setdiff1d(np.arange(len(members)), first)
    labels[repeats] = -1 - repeats
    return labels


def index_part(
    reader: Format,
    forms: Sequence[RecordFormat],
    part: range,
) -> PartIndex:
    """Check the records of a part."""
    form = forms[part.start >> FILE_BITS]
    index = PartIndex(form.columns)
    numbered_records = reader.rows(part)
    with ThreadPoolExecutor(IMAGE_THREADS) as pool:
        while block := list(itertools.islice(numbered_records, BLOCK_RECORDS)):
            numbers, lines, records = zip(*block, strict=True)
            plain = form.example_of_plain_block(records)
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
            _refuse_bad_images(outcomes, index.image_problems, pool)
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
                if form.keeps_keys:
                    keys = dict.fromkeys(item.key() for item in outcome.items)
                    index.keys.extend(keys)
                    index.num_keys.append(len(keys))
    index.num_lines = reader.num_lines(part)
    return index


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
    places = []
    for place, outcome in enumerate(outcomes):
        if isinstance(outcome, Example):
            for item in outcome.items:
                images += item.images
                places += [place] * len(item.images)
    for place, problem in zip(places, pool.map(problem_of, images), strict=True):
        if problem is not None:
            outcomes[place] = BadRecord(problem)


def _file_hash(path: Path) -> bytes:
    """Hash a file. xxHash takes a twentieth of BLAKE2's time, which is a third of the pass over long records. What it
    tells apart are versions of the user's own files."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).digest()


# ---- several processes -----------------------------------------------------------


def in_processes(
    reader: Format,
    forms: Sequence[RecordFormat],
    parts: Sequence[range],
    num_processes: int,
) -> Iterator[PartIndex]:
    """Index the parts in several processes, each with every n-th part, and yield them in order."""
    children = []
    with ExitStack() as stack:
        for first in range(num_processes):
            child = Child(
                "from vembed.data.example_store import index_for_parent as run; run()"
            )
            # After an error or Ctrl-C no process begins another part.
            stack.callback(child.close)
            child.send((reader, forms, parts[first::num_processes]))
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
    reader, forms, parts = pickle.load(sys.stdin.buffer)
    for part in parts:
        answer: PartIndex | UserError
        try:
            answer = index_part(reader, forms, part)
        except UserError as error:
            answer = error
        send(out, answer)


# ---- the index on disk -----------------------------------------------------------


def cached_index(
    reader: Format,
    forms: Sequence[RecordFormat],
    options: Sequence[Any],
) -> Index:
    """Return the index of a source: from the cache folder if its files, its images, the options and the code are the
    same, otherwise built anew."""
    # The code that reads records. That of the losses is part of it, since they declare which records they can use.
    package = Path(__file__).parents[1]
    code = hashlib.blake2b(digest_size=12)
    for name in ("data", "losses"):
        for path in sorted((package / name).rglob("*.py")):
            code.update(path.read_bytes())
    files = reader.files()
    paths = [str(path.absolute()) for path in files]
    name = short_hash(code.hexdigest(), paths, *options)
    path = cache_folder() / "index" / f"{name}.safetensors"
    stamps = [stamp(file) for file in files]
    with suppress(OSError, SafetensorError):  # missing or damaged: it is built again
        with safe_open(path, "np") as file:
            known_stamps, facts = json.loads(file.metadata()["facts"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        image_stamps = facts["image_stamps"].items()
        if stamps == known_stamps and all(
            _image_stamp(image) == known for image, known in image_stamps
        ):
            facts["counts"] = Counter(facts["counts"])
            return Index(**facts, **arrays)
    began = time.monotonic()
    index = build_index(reader, forms)
    # A short pass is not worth a file in the cache.
    if time.monotonic() - began < CACHE_AFTER_SECONDS:
        return index
    facts = {}
    arrays = {}
    for name, value in vars(index).items():
        kind = arrays if isinstance(value, np.ndarray) else facts
        kind[name] = value
    with (
        # Without room on the disk it is built again the next time.
        suppress(OSError, SafetensorError),
        written_aside(path) as partial,
    ):
        save_file(arrays, partial, {"facts": json.dumps([stamps, facts])})
    return index


def _image_stamp(path: str) -> list[int] | None:
    try:
        return stamp(Path(path))
    except (OSError, ValueError):  # missing file or an address
        return None
