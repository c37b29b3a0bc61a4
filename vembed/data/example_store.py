"""ExampleStore: the examples of one or several sources, validated before training and read on demand."""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vembed.config.entries import DataSource
from vembed.config.schema import TrainConfig
from vembed.config.terms import (
    TEXTS_ALONE,
    compares_listed_alone,
    losses_of,
    reads_scores,
    run_terms,
    source_config,
)
from vembed.config.user_folders import cache_folder
from vembed.data.batching.class_batches import next_of_class
from vembed.data.batching.schedule import ContentKeys
from vembed.data.cache import IndexCache, short_hash
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
from vembed.data.first_pass import Index, build_index
from vembed.data.formats.json_files import Reader
from vembed.data.formats.opening import open_reader
from vembed.data.formats.saved_datasets import Role
from vembed.data.images.files import ImageRoot
from vembed.data.index_parts import NUM_SHOWN, content_keys
from vembed.data.messages import joined, listed
from vembed.data.plain_texts import taken_for_texts
from vembed.data.records import NO_NEGATIVE, RecordFormat
from vembed.data.watched_files import FileStamp
from vembed.errors import UserError

CACHE_AFTER_SECONDS = 1.0
"""The result of a validation pass that took longer is stored in the cache folder."""

NUM_LOOKED_AT = 20
_Opened = tuple[Reader, RecordFormat, Index, tuple[FileStamp, ...]]


@dataclass(frozen=True)
class _Source:
    name: str
    weight: float
    reader: Reader
    form: RecordFormat
    index: Index
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
        return self.read_as.apply(self._read(number))

    def pair(self, number: int, mate: int) -> Example:
        """Return an example of labelled data with another one as its positive."""
        return self.read_as.apply(
            replace(self._read(number), positives=(self._read(mate).query,))
        )

    def _read(self, number: int) -> Example:
        start, size, line = (
            self.index.starts[number],
            self.index.sizes[number],
            self.index.lines[number],
        )
        where = self.reader.where(int(line))
        try:
            record = self.reader.read(int(start), int(size))
            if isinstance(record, BadRecord):
                raise record
            return self.form.example(record, where)
        except BadRecord as error:
            raise UserError(
                f"{where} has changed since the run began ({error}): start again"
            ) from error

    def record(self, number: int) -> dict[str, Any]:
        """Return the record of an example as it stands in its file."""
        record = self.reader.read(
            int(self.index.starts[number]), int(self.index.sizes[number])
        )
        return record if isinstance(record, dict) else {}

    def summary(self) -> str:
        counts, num_records = self.index.counts, len(self.index)
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

    def doubts(self) -> list[str]:
        """Return what is probably not meant: columns and scores that are not read, contents that are taken for plain
        texts, and records that were left out."""
        counts, unused = self.index.counts, self.index.unused
        first = [
            self.example(number) for number in range(min(NUM_LOOKED_AT, self.size))
        ]
        takes_matches, is_training = (
            self.labels is None and self.form.takes_matches,
            bool(self.form.losses),
        )
        found = (
            [unread_negatives(unused), unread_prompt(unused)]
            if self.labels is None and is_training
            else []
        )
        if takes_matches and not counts.scored:
            found.append(unread_judgement(unused))
        if takes_matches and counts.scored and is_training and not self.reads_scores:
            found.append(self._unread_scores())
        if counts.scored and self.reads_scores and self._score_column(0) == LABEL:
            found.append(
                classes_as_scores(
                    {score for one in first for score in one.scores or ()}
                )
            )
        num_bad, num_records = self.index.num_bad, len(self.index) + self.index.num_bad
        if num_bad:
            found.append(
                f"{num_bad:,d} of {num_records:,d} records cannot be used and are left out (on_bad_record: skip); the "
                "log names the first"
            )
        return [one for one in found if one is not None] + taken_for_texts(
            first, unused
        )

    def _unread_scores(self) -> str:
        name = next(
            filter(None, map(self._score_column, range(min(NUM_LOOKED_AT, self.size)))),
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
            _kept(one, is_kept[end - one.size : end])
            for one, end in zip(self._sources, self._ends, strict=True)
        ]
        empty = next((one.name for one in kept if not one.size), None)
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
        values, counts = [], []
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
            f"{one.name}: {doubt}" for one in self._sources for doubt in one.doubts()
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
    """Validate every record of `path_spec` and return the good ones. Raise UserError with the first ten bad ones.

    For validation data, `max_train_examples`, `max_negatives` and the requirements of the loss do not apply.
    """
    entries = [path_spec] if isinstance(path_spec, str) else path_spec
    given = [
        DataSource(path=entry) if isinstance(entry, str) else entry for entry in entries
    ]
    if not given:
        raise UserError(
            "data_path is an empty list: name at least one file, folder or dataset"
        )
    cache = cache_folder() if cache_dir is None else cache_dir
    opened = [
        _open_source(config, source, role, cache, alone=len(given) == 1)
        for source in given
    ]
    _refuse_bad_records(config, opened, role)
    if role == "train" and len(given) > 1:
        _refuse_names_nowhere(given, opened)
    limit = config.data.max_train_examples if role == "train" else None
    sources = [
        _Source(
            source.name or source.path,
            source.weight,
            reader,
            form,
            index,
            size,
            _read_as(source),
            stamps,
            _mates(index, size),
            reads_scores(source_config(config, source)),
        )
        for source, (reader, form, index, stamps), size in zip(
            given,
            opened,
            _sizes([len(index) for _, _, index, _ in opened], limit),
            strict=True,
        )
    ]
    return ExampleStore(sources, _fingerprint(config, given, sources, role))


def _open_source(
    config: TrainConfig, source: DataSource, role: Role, cache: Path, *, alone: bool
) -> _Opened:
    mapping = (
        config.data.column_mapping
        if source.column_mapping is None
        else source.column_mapping
    )
    # A mapping for several files need not match each of them; validation data may use vembed's own names.
    may_miss = (not alone or role == "validation") and source.column_mapping is None
    own = source_config(config, source)
    texts_alone = role == "train" and all(
        loss in TEXTS_ALONE for loss in losses_of(own)
    )
    columns = Columns(mapping, may_miss=may_miss, texts_alone=texts_alone)
    reader = open_reader(source.path, columns, role, cache)
    # Before reading: a change during the pass is noticed too.
    stamps = tuple(FileStamp.of(path) for path in reader.files())
    images = ImageRoot(
        config.data.image_root or str(reader.folder),
        allow_urls=config.data.allow_image_urls,
    )
    losses, max_negatives = (
        (losses_of(own), own.data.max_negatives) if role == "train" else ((), None)
    )
    bounded = "cosine" in losses and own.objective.similarity == "cosine"
    form = RecordFormat(
        columns,
        images,
        mode=config.data.retrieval_mode,
        losses=losses,
        max_negatives=max_negatives,
        numbers_in_text=reader.numbers_in_text,
        bounded_scores=bounded,
    )
    with_keys = config.data.no_duplicates and role == "train"
    options = [
        reader.name,
        mapping,
        config.data.retrieval_mode,
        images.folder,
        images.allow_urls,
        losses,
        max_negatives,
        with_keys,
        bounded,
    ]
    kept = IndexCache(cache, reader.files(), options)
    # Without the unpacked rows, to which an index points, the pass is made again.
    index = None if reader.unpacks() else kept.load()
    if index is None:
        began = time.monotonic()
        index = build_index(reader, form, with_keys=with_keys)
        # A short pass is not worth a file in the cache.
        if time.monotonic() - began >= CACHE_AFTER_SECONDS or len(reader.parts()) > 1:
            kept.save(index)
    if index.missing and not may_miss:
        raise UserError(
            f"{reader.name}: column_mapping names {listed(index.missing)}, which no record has{columns.nearest()}"
        )
    return reader, form, index, stamps


def _mates(index: Index, size: int) -> np.ndarray | None:
    return None if index.labels is None else next_of_class(index.labels[:size])


def _read_as(source: DataSource) -> ReadAs:
    return ReadAs(source.query_prompt, source.document_prompt, source.max_length)


def _refuse_nothing_to_compare(
    config: TrainConfig, indices: Sequence[Index], role: Role
) -> None:
    has_negatives = config.data.mine is not None or any(
        index.counts.negatives for index in indices
    )
    if (
        role != "train"
        or has_negatives
        or not any(map(len, indices))
        or not compares_listed_alone(config)
    ):
        return
    names = " and ".join(sorted({term.objective.loss for _, term in run_terms(config)}))
    raise UserError(
        f"loss: {names} compares a positive with the hard negatives of its record, and no record has one, so that the "
        "loss would be 0 at every step: `vembed mine` adds some; kl with distill_candidates: batch, embedding and "
        "relational need none"
    )


def _refuse_bad_records(
    config: TrainConfig, opened: Sequence[_Opened], role: Role
) -> None:
    for reader, _, index, _ in opened:
        if index.num_bad and not len(index) and NO_NEGATIVE in index.problems[0]:
            raise UserError(
                f"{reader.name}: none of its {index.num_bad:,d} records has a negative, which loss: triplet needs: add "
                "negatives, take the source out, or use loss: infonce, which takes the others of the batch"
            )
    indices = [index for _, _, index, _ in opened]
    _refuse_nothing_to_compare(config, indices, role)
    num_bad, num_good = sum(index.num_bad for index in indices), sum(map(len, indices))
    problems = [problem for index in indices for problem in index.problems][:NUM_SHOWN]
    if num_bad and (config.data.on_bad_record == "stop" or not num_good):
        more = (
            [f"and {num_bad - len(problems):,d} more"]
            if num_bad > len(problems)
            else []
        )
        nothing = f"there is nothing to {'train' if role == 'train' else 'evaluate'} on"
        way_out = (
            "mend them, or set on_bad_record: skip to leave them out"
            if num_good
            else nothing
        )
        raise UserError(
            f"{num_bad:,d} of {num_bad + num_good:,d} records cannot be used, {way_out}:\n  "
            + "\n  ".join(joined(problems) + more)
        )
    for reader, _, index, _ in opened:
        if not len(index):
            reason = (
                f"no record that can be used: {index.problems[0]}"
                if index.problems
                else "no records"
            )
            raise UserError(f"{reader.name} holds {reason}")


def _refuse_names_nowhere(
    given: Sequence[DataSource], opened: Sequence[_Opened]
) -> None:
    """Raise UserError if the run's column_mapping has a name that none of the sources has which it serves."""
    served = [
        one
        for source, one in zip(given, opened, strict=True)
        if source.column_mapping is None
    ]
    nowhere = (
        set.intersection(*(set(index.missing) for _, _, index, _ in served))
        if served
        else set()
    )
    if nowhere:
        near = next(
            (hint for _, form, _, _ in served if (hint := form.columns.nearest())), ""
        )
        raise UserError(
            f"column_mapping names {listed(sorted(nowhere))}, which no record of any source has{near}"
        )


def _sizes(sizes: list[int], limit: int | None) -> list[int]:
    """Return the number of examples of each source: all, or a part of the limit proportional to its size (min. 1)."""
    total = sum(sizes)
    if limit is None or limit >= total:
        return sizes
    # Rounded cumulative ends instead of rounded sizes, so that the sizes add up to the limit.
    ends = [end * limit // total for end in itertools.accumulate(sizes)]
    return [max(1, end - begin) for begin, end in itertools.pairwise([0, *ends])]


def _fingerprint(
    config: TrainConfig,
    given: Sequence[DataSource],
    sources: Sequence[_Source],
    role: Role,
) -> str:
    options = [
        config.data.retrieval_mode,
        config.data.column_mapping,
        config.data.max_negatives if role == "train" else None,
    ]
    return short_hash(
        options,
        [
            [
                one.index.fingerprint,
                one.size,
                one.weight,
                entry.column_mapping,
                entry.max_negatives,
                *_own(one.read_as),
            ]
            for one, entry in zip(sources, given, strict=True)
        ],
    )


def _own(read_as: ReadAs) -> list[tuple[object, ...]]:
    return [] if read_as == ReadAs() else [astuple(read_as)]


def _kept(source: _Source, is_kept: np.ndarray) -> _Source:
    index, size = source.index.subset(is_kept), int(is_kept.sum())
    return replace(source, index=index, size=size, mates=_mates(index, size))
