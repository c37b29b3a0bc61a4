"""ExampleStore: the examples of one or several sources, validated before training and read on demand."""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vembed.config.entries import DataSource
from vembed.config.schema import DataSection, TrainConfig
from vembed.config.terms import (
    lacks_comparisons,
    loss_names,
    loss_terms,
    reads_scores,
    run_terms,
)
from vembed.config.user_folders import cache_folder
from vembed.data.batching.class_batches import next_of_class
from vembed.data.batching.schedule import ContentKeys
from vembed.data.cache import short_hash
from vembed.data.columns import (
    LABEL,
    Columns,
    classes_as_scores,
    unread_judgement,
    unread_negatives,
    unread_prompt,
)
from vembed.data.conversations import is_conversation
from vembed.data.examples import BadRecord, Example, ReadAs
from vembed.data.first_pass import (
    NUM_NAMED,
    Index,
    IndexCache,
    build_index,
    content_keys,
)
from vembed.data.formats.base import Format
from vembed.data.formats.opening import open_reader
from vembed.data.formats.saved_datasets import Role
from vembed.data.images.files import ImageRoot
from vembed.data.messages import joined, listed
from vembed.data.plain_texts import taken_for_texts
from vembed.data.records import RecordFormat
from vembed.data.watched_files import FileStamp
from vembed.errors import UserError
from vembed.losses.table import LOSSES

CACHE_AFTER_SECONDS = 1.0
"""The result of a validation pass that took longer is stored in the cache folder."""

NUM_INSPECTED = 20
"""Examples of a source that are looked at for what is probably not meant."""


@dataclass(frozen=True)
class Records:
    """The good records of one source, by number."""

    name: str
    reader: Format
    form: RecordFormat
    index: Index
    image_folder: str
    """Folder of relative paths of images."""

    def __len__(self) -> int:
        return len(self.index)

    def where(self, number: int) -> str:
        """Return the name of a record for messages."""
        return self.reader.where(int(self.index.lines[number]))

    def record(self, number: int) -> dict[str, Any]:
        """Return a record as it stands in its file."""
        record = self.reader.read(int(self.index.numbers[number]))
        if isinstance(record, dict):
            return record
        reason = record if isinstance(record, BadRecord) else "no object"
        raise self._changed(number, reason)

    def example(self, number: int) -> Example:
        """Return what a record means."""
        try:
            return self.form.example(self.record(number), self.where(number))
        except BadRecord as error:
            raise self._changed(number, error) from error

    def _changed(self, number: int, reason: object) -> UserError:
        where = self.where(number)
        return UserError(
            f"{where} has changed since the run began ({reason}): start again"
        )


@dataclass(frozen=True)
class _Source(Records):
    weight: float
    size: int
    """Number of examples in use, the first ones of the index."""
    read_as: ReadAs
    stamps: tuple[FileStamp, ...]
    """Of its files, before they were read."""
    mates: np.ndarray | None
    """The next example of the class of each, in labelled data."""
    reads_scores: bool
    """True if a loss of the source reads scores of the data."""

    @property
    def labels(self) -> np.ndarray | None:
        """Hash of the class of each example in use, in labelled data."""
        return None if self.index.labels is None else self.index.labels[: self.size]

    def example(self, number: int) -> Example:
        """Return an example. That of labelled data has the next one of its class as positive."""
        if self.mates is not None:
            return self.pair(number, int(self.mates[number]))
        return self.read_as.apply(super().example(number))

    def pair(self, number: int, mate: int) -> Example:
        """Return an example of labelled data with another one as its positive."""
        positive = super().example(mate).query
        example = replace(super().example(number), positives=(positive,))
        return self.read_as.apply(example)

    def summary(self) -> str:
        counts = self.index.counts
        num_records = len(self.index)
        kinds = [
            "+".join(
                name for name, count in (("text", texts), ("image", images)) if count
            )
            for texts, images in (
                (counts.text_queries, counts.image_queries),
                (counts.text_documents, counts.image_documents),
            )
        ]
        parts = [f"{self.name}: {self.size:,d} examples", f"{kinds[0]} to {kinds[1]}"]
        if self.size < num_records:
            parts.append(f"the first of {num_records:,d}")
        if self.index.num_bad:
            parts.append(f"{self.index.num_bad:,d} bad records left out")
        if counts.positives > num_records:
            parts.append(f"{counts.positives / num_records:.1f} positives each")
        if counts.negatives:
            parts.append(f"{counts.negatives / num_records:.1f} negatives each")
        if self.labels is not None:
            parts.append(
                f"labelled with {len(np.unique(self.labels[self.labels >= 0])):,d} classes"
            )
        if counts.scored:
            parts.append(
                "scored"
                if counts.scored == num_records
                else f"{counts.scored:,d} of them scored"
            )
        if self.weight != 1.0:
            parts.append(f"weight {self.weight:g}")
        parts += [
            f"{name} {value!r}"
            for name, value in asdict(self.read_as).items()
            if value is not None
        ]
        return "data: " + ", ".join(parts)

    def weak_points(self) -> list[str]:
        """Return what is probably not meant: columns and scores that are not read, contents that are taken for plain
        texts, and records that were left out."""
        counts = self.index.counts
        unused = self.index.unused
        num_inspected = min(NUM_INSPECTED, self.size)
        examples = [self.example(number) for number in range(num_inspected)]
        takes_matches = self.labels is None and self.form.takes_matches
        is_training = bool(self.form.losses)
        sentences: list[str | None] = []
        if self.labels is None and is_training:
            sentences += [unread_negatives(unused), unread_prompt(unused)]
        if takes_matches and not counts.scored:
            sentences.append(unread_judgement(unused))
        if takes_matches and counts.scored and is_training and not self.reads_scores:
            sentences.append(self._unread_scores())
        if counts.scored and self.reads_scores and self._score_column(0) == LABEL:
            scores = {score for example in examples for score in example.scores or ()}
            sentences.append(classes_as_scores(scores))
        num_bad = self.index.num_bad
        if num_bad:
            sentences.append(
                f"{num_bad:,d} of {len(self.index) + num_bad:,d} records cannot be used and are left out "
                "(on_bad_record: skip); the log names the first"
            )
        said = [sentence for sentence in sentences if sentence is not None]
        return said + taken_for_texts(examples, unused)

    def _unread_scores(self) -> str:
        name = next(
            filter(None, map(self._score_column, range(min(NUM_INSPECTED, self.size)))),
            "score",
        )
        way_out = "set loss: cosent if it says how well a pair matches, or leave out the pairs that do not match"
        if self.index.counts.negatives:
            way_out = "set loss: kl and teacher: scores if it is a teacher's, or leave out the pairs that do not match"
        losses = " and ".join(self.form.losses)
        return f"{name} is not read by loss: {losses}, and every pair is taken for a match: {way_out}"

    def _score_column(self, number: int) -> str | None:
        """Return the column with the score of an example."""
        record = self.record(number)
        name = (
            LABEL
            if is_conversation(record)
            else self.form.columns.layout(tuple(record)).score
        )
        return name if name is not None and record.get(name) is not None else None


class ExampleStore:
    """Examples by number, concatenated over the sources. Thread-safe."""

    def __init__(self, sources: Sequence[_Source], fingerprint: str) -> None:
        self._sources = tuple(sources)
        self._ends = list(itertools.accumulate(source.size for source in sources))
        self.fingerprint = fingerprint
        """Hash of the examples and of the options they are read with. Independent of file paths and image files."""
        self.names = tuple(source.name for source in sources)
        self.sizes = tuple(source.size for source in sources)
        self.weights = tuple(source.weight for source in sources)
        self.num_skipped = sum(source.index.num_bad for source in sources)
        """Number of bad records that were skipped."""

    @property
    def labels(self) -> list[np.ndarray | None]:
        """Hash of the class of each example, by source; None for sources without labels."""
        return [source.labels for source in self._sources]

    def pair(self, index: int, mate: int) -> Example:
        """Return an example of a labelled source with another one of the source as its positive."""
        source, number = self._locate(index)
        return self._sources[source].pair(number, number + mate - index)

    def subset(self, is_kept: np.ndarray, note: str) -> ExampleStore:
        """Return a store of the examples that are kept [n, bool]. `note` becomes part of the fingerprint."""
        kept = [
            _kept(source, is_kept[end - source.size : end])
            for source, end in zip(self._sources, self._ends, strict=True)
        ]
        empty = next((source.name for source in kept if not source.size), None)
        if empty is not None:
            raise UserError(
                f"{note} takes all examples of {empty}; lower it, or give val_data_path"
            )
        return ExampleStore(kept, short_hash(self.fingerprint, note))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Example:
        source, number = self._locate(index)
        return self._sources[source].example(number)

    def record(self, index: int) -> dict[str, Any]:
        """Return the record of an example as it stands in its file."""
        source, number = self._locate(index)
        return self._sources[source].record(number)

    def as_read(self, index: int, example: Example) -> Example:
        """Return an example with the prompts and the maximum length of the source that `index` is from."""
        return self._sources[self._locate(index)[0]].read_as.apply(example)

    def source_of(self, index: int) -> int:
        """Return the number of the source that an example comes from."""
        return self._locate(index)[0]

    def keys(self, index: int) -> list[int]:
        """Return the distinct content keys of an example's items. Equal contents have equal keys."""
        source, number = self._locate(index)
        known = self._sources[source].index.keys
        return content_keys(self[index]) if known is None else known.of(number).tolist()

    def all_keys(self) -> ContentKeys:
        """Return the keys of all examples. They are available only with `no_duplicates: true`."""
        values = []
        counts = []
        for source in self._sources:
            if source.index.keys is None:
                raise RuntimeError(
                    "contents are only remembered with no_duplicates: true"
                )
            # A source limited by max_train_examples has more keys than examples in use.
            starts = source.index.keys.starts[: source.size + 1]
            values.append(source.index.keys.values[: starts[-1]])
            counts.append(np.diff(starts))
        return ContentKeys(
            np.concatenate(values),
            np.concatenate([[0], np.cumsum(np.concatenate(counts))]),
        )

    def changed_files(self) -> list[str]:
        """Return a sentence for each file of the data that was changed, replaced or deleted since it was opened."""
        stamps = {
            stamp.path: stamp for source in self._sources for stamp in source.stamps
        }
        return [
            change
            for stamp in stamps.values()
            if (change := stamp.change()) is not None
        ]

    def summary(self) -> list[str]:
        """Return log lines: examples per source, skipped records with the reason, and unused columns."""
        lines = []
        for source in self._sources:
            lines.append(source.summary())
            lines += [
                f"left out: {problem}" for problem in joined(source.index.problems)
            ]
            if source.index.num_bad > len(source.index.problems):
                lines.append(
                    f"left out: {source.index.num_bad - len(source.index.problems):,d} more of {source.name}"
                )
            if source.index.unused:
                lines.append(f"{source.name}: not used: {listed(source.index.unused)}")
        if len(self._sources) > 1:
            lines.append(
                f"data: {len(self):,d} examples of {len(self._sources):,d} sources"
            )
        return lines

    def warnings(self) -> list[str]:
        """Return a sentence for each source that is probably not meant as it is read."""
        return [
            f"{source.name}: {sentence}"
            for source in self._sources
            for sentence in source.weak_points()
        ]

    def _locate(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        source = bisect.bisect_right(self._ends, index)
        return source, index - (self._ends[source - 1] if source else 0)


def open_examples(
    config: TrainConfig,
    path_spec: str | Sequence[str | DataSource],
    *,
    role: Role = "train",
    cache_dir: Path | None = None,
) -> ExampleStore:
    """Check every record of `path_spec` and return the good ones. Raise UserError with the first ten bad ones.

    For validation data, `max_train_examples`, `max_negatives` and the requirements of the loss do not apply.
    """
    specs = [path_spec] if isinstance(path_spec, str) else path_spec
    entries = [
        DataSource(path=spec) if isinstance(spec, str) else spec for spec in specs
    ]
    if not entries:
        raise UserError(
            "data_path is an empty list: name at least one file, folder or dataset"
        )
    cache = cache_folder() if cache_dir is None else cache_dir
    is_training = role == "train"
    sources = []
    for entry in entries:
        terms = loss_terms(config.objective, config.model.model_name, entry)
        requirements = _Requirements()
        if is_training:
            max_negatives = config.data.max_negatives
            if entry.max_negatives is not None:
                max_negatives = entry.max_negatives
            needs_cosines = any(term.loss.needs_cosine_scores for term in terms)
            requirements = _Requirements(
                loss_names(terms),
                max_negatives,
                needs_cosines and config.objective.similarity == "cosine",
                config.data.no_duplicates,
                config.data.mine is not None and config.data.mine.at_start,
            )
        source = _open_source(
            config.data, entry, requirements, role, cache, alone=len(entries) == 1
        )
        sources.append(replace(source, reads_scores=reads_scores(terms)))
    for source in sources:
        _refuse_missing_negatives(source)
    terms = run_terms(config.objective, config.data, config.model.model_name)
    if is_training and config.data.mine is None and lacks_comparisons(terms):
        _refuse_nothing_to_compare(sources, loss_names(terms))
    refuse_bad_records(
        sources,
        on_bad_record=config.data.on_bad_record,
        purpose="train" if is_training else "evaluate",
    )
    if is_training and len(entries) > 1:
        _refuse_missing_names(
            source
            for entry, source in zip(entries, sources, strict=True)
            if entry.column_mapping is None
        )
    limit = config.data.max_train_examples if is_training else None
    sizes = _sizes([len(source) for source in sources], limit)
    sources = [
        replace(source, size=size, mates=_mates(source.index, size))
        for source, size in zip(sources, sizes, strict=True)
    ]
    options = [
        config.data.retrieval_mode,
        config.data.column_mapping,
        config.data.max_negatives if is_training else None,
    ]
    identities = []
    for entry, source in zip(entries, sources, strict=True):
        identity = [source.index.fingerprint, source.size, source.weight]
        identity += [entry.column_mapping, entry.max_negatives]
        if source.read_as != ReadAs():
            identity.append(astuple(source.read_as))
        identities.append(identity)
    return ExampleStore(sources, short_hash(options, identities))


@dataclass(frozen=True)
class _Requirements:
    """What a run asks of the records of a source, besides a query and a positive."""

    losses: tuple[str, ...] = ()
    max_negatives: int | None = None
    bounded_scores: bool = False
    with_keys: bool = False
    gets_negatives: bool = False
    """Mining adds negatives before the first step."""


def _open_source(
    data: DataSection,
    entry: DataSource,
    requirements: _Requirements,
    role: Role,
    cache: Path,
    *,
    alone: bool,
) -> _Source:
    mapping = entry.column_mapping
    if mapping is None:
        mapping = data.column_mapping
    losses = requirements.losses
    # A mapping for several files need not match each of them; validation data may use vembed's own names.
    may_miss = (not alone or role == "validation") and entry.column_mapping is None
    texts_alone = role == "train" and all(
        LOSSES[loss].records == "texts" for loss in losses
    )
    columns = Columns(mapping, may_miss=may_miss, texts_alone=texts_alone)
    reader = open_reader(entry.path, columns, role, cache)
    # Before reading: a change during the pass is noticed too.
    stamps = tuple(FileStamp.of(path) for path in reader.files())
    images = ImageRoot(
        data.image_root or str(reader.folder), allow_urls=data.allow_image_urls
    )
    form = RecordFormat(
        columns,
        images,
        mode=data.retrieval_mode,
        losses=losses,
        max_negatives=requirements.max_negatives,
        numbers_in_text=reader.numbers_are_text,
        bounded_scores=requirements.bounded_scores,
        gets_negatives=requirements.gets_negatives,
    )
    options = [
        reader.name,
        mapping,
        data.retrieval_mode,
        images.folder,
        images.allow_urls,
        astuple(requirements),
    ]
    index_cache = IndexCache(cache, reader.files(), options)
    index = index_cache.load()
    if index is None:
        began = time.monotonic()
        index = build_index(reader, form, with_keys=requirements.with_keys)
        # A short pass is not worth a file in the cache.
        if time.monotonic() - began >= CACHE_AFTER_SECONDS or len(reader.parts()) > 1:
            index_cache.save(index)
    if index.missing and not may_miss:
        raise UserError(
            f"{reader.name}: column_mapping names {listed(index.missing)}, which no record has{columns.nearest()}"
        )
    return _Source(
        name=entry.name or entry.path,
        reader=reader,
        form=form,
        index=index,
        image_folder=images.folder,
        weight=entry.weight,
        size=len(index),
        read_as=ReadAs(entry.query_prompt, entry.document_prompt, entry.max_length),
        stamps=stamps,
        mates=None,
        reads_scores=False,
    )


def refuse_bad_records(
    sources: Sequence[Records], *, on_bad_record: str, purpose: str
) -> None:
    """Raise UserError with the first bad records, unless they are left out; and for a source without a good one."""
    num_bad = sum(source.index.num_bad for source in sources)
    num_good = sum(map(len, sources))
    problems = [problem for source in sources for problem in source.index.problems]
    problems = problems[:NUM_NAMED]
    if num_bad and (on_bad_record == "stop" or not num_good):
        lines = joined(problems)
        if num_bad > len(problems):
            lines.append(f"and {num_bad - len(problems):,d} more")
        way_out = "fix them, or set on_bad_record: skip to leave them out"
        if not num_good:
            way_out = f"there is nothing to {purpose} on"
        raise UserError(
            f"{num_bad:,d} of {num_bad + num_good:,d} records cannot be used, {way_out}:\n  "
            + "\n  ".join(lines)
        )
    for source in sources:
        if not len(source):
            reason = "no records"
            if source.index.problems:
                reason = f"no record that can be used: {source.index.problems[0]}"
            raise UserError(f"{source.reader.name} holds {reason}")


def _refuse_missing_negatives(source: _Source) -> None:
    """Raise UserError if all records of a source lack the negatives that its loss needs."""
    num_records = source.index.num_without_negatives
    if not num_records or len(source):
        return
    needing = [name for name in source.form.losses if LOSSES[name].negatives == "each"]
    loss = f"loss: {needing[0]}"
    if source.form.max_negatives == 0:
        raise UserError(
            f"{source.reader.name}: max_negatives: 0 leaves none of its {num_records:,d} records a negative, which "
            f"{loss} needs: raise it, or use loss: infonce"
        )
    raise UserError(
        f"{source.reader.name}: none of its {num_records:,d} records has a negative, which {loss} needs: add "
        "negatives, take the source out, or use loss: infonce, which takes the others of the batch"
    )


def _refuse_nothing_to_compare(
    sources: Sequence[_Source], losses: Collection[str]
) -> None:
    if any(source.index.counts.negatives for source in sources):
        return
    if not any(map(len, sources)):
        return
    raise UserError(
        f"loss: {' and '.join(sorted(losses))} compares a positive with the hard negatives of its record, and no "
        "record has one, so that the loss would be 0 at every step: `vembed mine` adds some; kl with "
        "distill_candidates: batch, embedding and relational need none"
    )


def _refuse_missing_names(sources: Iterable[_Source]) -> None:
    """Raise UserError if the run's column_mapping has a name that none of the sources has which it serves."""
    missing: set[str] | None = None
    hint = ""
    for source in sources:
        names = set(source.index.missing)
        missing = names if missing is None else missing & names
        hint = hint or source.form.columns.nearest()
    if missing:
        raise UserError(
            f"column_mapping names {listed(sorted(missing))}, which no record of any source has{hint}"
        )


def _mates(index: Index, size: int) -> np.ndarray | None:
    return None if index.labels is None else next_of_class(index.labels[:size])


def _sizes(sizes: list[int], limit: int | None) -> list[int]:
    """Return the number of examples of each source: all, or a part of the limit proportional to its size (min. 1)."""
    total = sum(sizes)
    if limit is None or limit >= total:
        return sizes
    # Rounded cumulative ends instead of rounded sizes, so that the sizes add up to the limit.
    ends = [end * limit // total for end in itertools.accumulate(sizes)]
    return [max(1, end - begin) for begin, end in itertools.pairwise([0, *ends])]


def _kept(source: _Source, is_kept: np.ndarray) -> _Source:
    index = source.index.subset(is_kept)
    size = int(is_kept.sum())
    return replace(source, index=index, size=size, mates=_mates(index, size))
