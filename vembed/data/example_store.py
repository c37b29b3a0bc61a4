"""ExampleStore: the examples of one or several sources, validated before training and read on demand."""

from __future__ import annotations

import bisect
import itertools
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vembed.config.schema import (
    DataSection,
    DataSource,
    ObjectiveSection,
    sources_of,
)
from vembed.config.terms import (
    loss_names,
    loss_terms,
    reads_scores,
    run_terms,
)
from vembed.data.batching.schedule import ContentKeys, next_of_class
from vembed.data.examples import BadRecord, Example, Item, ReadAs
from vembed.data.first_pass import NUM_NAMED, Index, cached_index
from vembed.data.formats.base import Format
from vembed.data.formats.saved_datasets import Role
from vembed.data.formats.table import open_reader
from vembed.data.images.files import IMAGE_PATH, ImageRoot
from vembed.data.records import (
    LABEL,
    Columns,
    RecordFormat,
    classes_as_scores,
    is_conversation,
    unread_judgement,
    unread_parts,
)
from vembed.errors import UserError, joined, listed
from vembed.files import change_since, short_hash
from vembed.losses.table import LOSSES

NUM_INSPECTED = 20
"""Examples of a source that are looked at for what is probably not meant."""
_LIST = re.compile(r"""\[\s*['"{].*['"}]\s*\]""", re.DOTALL)
_OBJECT = re.compile(
    r"""\{\s*['"](text|title|image|images|bytes|path)['"]\s*:.*\}""", re.DOTALL
)
_PLACE = "<image>"
"""Place of an image in the texts of other programs."""


@dataclass(frozen=True)
class Records:
    """The good records of one source, by number."""

    name: str
    reader: Format
    form: RecordFormat
    index: Index
    image_folder: str
    """Folder of relative paths of images."""
    files: dict[Path, os.stat_result]
    """Its files, as they were before they were read."""

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
    entry: DataSource
    size: int
    """Number of examples in use, the first ones of the index."""
    read_as: ReadAs
    reads_scores: bool
    """True if a loss of the source reads scores of the data."""

    @cached_property
    def labels(self) -> np.ndarray | None:
        """Hash of the class of each example in use, in labelled data."""
        return None if self.index.labels is None else self.index.labels[: self.size]

    @cached_property
    def mates(self) -> np.ndarray | None:
        """The next example of the class of each, in labelled data."""
        return None if self.labels is None else next_of_class(self.labels)

    def example(self, number: int, mate: int | None = None) -> Example:
        """Return an example. That of labelled data has another one of its class as positive: `mate`, or the next."""
        example = super().example(number)
        if self.mates is not None:
            mate = int(self.mates[number]) if mate is None else mate
            example = replace(example, positives=(super().example(mate).query,))
        return self.read_as.apply(example)

    def summary(self) -> str:
        counts = self.index.counts
        num_counted = counts["records"]
        kinds = []
        for side in ("queries", "documents"):
            side_kinds = []
            for kind in ("text", "image"):
                if counts[f"{kind}_{side}"] > 0:
                    side_kinds.append(kind)
            kinds.append("+".join(side_kinds))
        parts = [f"{self.name}: {self.size:,d} examples", " to ".join(kinds)]
        if self.size < len(self):
            parts.append(f"the first of {len(self):,d}")
        if self.index.num_bad:
            parts.append(f"{self.index.num_bad:,d} bad records left out")
        if counts["positives"] > num_counted:
            parts.append(f"{counts['positives'] / num_counted:.1f} positives each")
        if counts["negatives"]:
            parts.append(f"{counts['negatives'] / num_counted:.1f} negatives each")
        if self.labels is not None:
            num_classes = len(np.unique(self.labels[self.labels >= 0]))
            parts.append(f"labelled with {num_classes:,d} classes")
        if counts["scored"] == num_counted:
            parts.append("scored")
        elif counts["scored"]:
            parts.append(f"{counts['scored']:,d} of them scored")
        if self.entry.weight != 1.0:
            parts.append(f"weight {self.entry.weight:g}")
        for name, value in asdict(self.read_as).items():
            if value is not None:
                parts.append(f"{name} {value!r}")
        return "data: " + ", ".join(parts)

    def weak_points(self) -> list[str]:
        """Return what is probably not meant: columns and scores that are not read, contents that are taken for plain
        texts, and records that were left out."""
        index = self.index
        numbers = range(min(NUM_INSPECTED, self.size))
        examples = [self.example(number) for number in numbers]
        score_columns = [self._score_column(number) for number in numbers]
        score_column = next(filter(None, score_columns), "score")
        is_training = bool(self.form.losses)
        is_scored = index.counts["scored"] > 0
        sentences: list[str | None] = []
        if self.labels is None and is_training:
            sentences += unread_parts(index.unused)
        if self.labels is None and self.form.takes_matches:
            if not is_scored:
                sentences.append(unread_judgement(index.unused))
            elif is_training and not self.reads_scores:
                way_out = "loss: cosent if it says how well a pair matches"
                if index.counts["negatives"]:
                    way_out = "loss: kl and teacher: scores if it is a teacher's"
                sentences.append(
                    f"{score_column} is not read by loss: {' and '.join(self.form.losses)}, and every pair is taken "
                    f"for a match: set {way_out}, or leave out the pairs that do not match"
                )
        if is_scored and self.reads_scores and score_column == LABEL:
            scores: set[float] = set()
            for example in examples:
                scores.update(example.scores or ())
            sentences.append(classes_as_scores(scores))
        if index.num_bad:
            sentences.append(
                f"{index.num_bad:,d} of {len(index) + index.num_bad:,d} records cannot be used and are left out "
                "(on_bad_record: skip); the log names the first"
            )
        sentences += taken_for_texts(examples, index.unused)
        return [sentence for sentence in sentences if sentence is not None]

    def _score_column(self, number: int) -> str | None:
        """Return the column with the score of an example."""
        record = self.record(number)
        name: str | None = LABEL
        if not is_conversation(record):
            name = self.form.columns.layout(tuple(record)).score
        if name is None or record.get(name) is None:
            return None
        return name


def taken_for_texts(examples: Sequence[Example], unused: Collection[str]) -> list[str]:
    """Return sentences on plain texts of these examples that look like paths of images, lists, objects, or have places
    of images. `unused`: columns that are not read."""
    items_of: dict[str, list[Item]] = {"queries": [], "positives": [], "negatives": []}
    for example in examples:
        items_of["queries"].append(example.query)
        items_of["positives"] += example.positives
        items_of["negatives"] += example.negatives
    sentences = []
    with_paths = []
    for name, items in items_of.items():
        texts = [item.text or "" for item in items]
        if texts and all(map(IMAGE_PATH.fullmatch, texts)):
            with_paths.append(name)
        for kind, form in (("lists", _LIST), ("objects", _OBJECT)):
            if texts and all(map(form.fullmatch, texts)):
                sentences.append(
                    f"its {name} look like {kind} ({texts[0]!r:.60}), and each is taken for one text: write JSON Lines "
                    f"or Parquet with fields that are {kind}, not texts, or a column for each"
                )
        for item in items:
            if item.text and _PLACE in item.text and not item.images:
                column = ""
                if "images" in unused:
                    column = "; the column images is not read"
                sentences.append(
                    f"its {name} have {_PLACE} in them and no image ({item.text!r:.60}){column}: write text and images "
                    'into one object, {"text": ..., "images": [...]}'
                )
                break
    sides = [name for name in ("queries", "positives") if name in with_paths]
    if sides:
        query = "i" if "queries" in sides else "t"
        document = "i" if "positives" in sides else "t"
        sentences.append(
            f"its {' and '.join(sides)} look like paths of images ({items_of[sides[-1]][0].text!r:.80}), and are taken "
            f"for texts: if they are paths, set retrieval_mode: {query}2{document}"
        )
    return sentences


class ExampleStore:
    """Examples by number, concatenated over the sources. Thread-safe."""

    def __init__(self, sources: Sequence[_Source], fingerprint: str) -> None:
        self._sources = tuple(sources)
        self._ends = list(itertools.accumulate(source.size for source in sources))
        self.fingerprint = fingerprint
        """Hash of the examples and of the options they are read with. Independent of file paths and image files."""
        self.names = tuple(source.name for source in sources)
        self.sizes = tuple(source.size for source in sources)
        self.weights = tuple(source.entry.weight for source in sources)
        self.num_skipped = sum(source.index.num_bad for source in sources)
        """Number of bad records that were skipped."""
        self.labels = [source.labels for source in sources]
        """Hash of the class of each example, by source; None for sources without labels."""

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Example:
        source, number = self._locate(index)
        return source.example(number)

    def has_comparisons(self) -> bool:
        """Return whether any record has hard negatives or scores."""
        for source in self._sources:
            counts = source.index.counts
            if counts["negatives"] or counts["scored"]:
                return True
        return False

    def pair(self, index: int, mate: int) -> Example:
        """Return an example of a labelled source with another one of the source as its positive."""
        source, number = self._locate(index)
        return source.example(number, number + mate - index)

    def record(self, index: int) -> dict[str, Any]:
        """Return the record of an example as it stands in its file."""
        source, number = self._locate(index)
        return source.record(number)

    def as_read(self, index: int, example: Example) -> Example:
        """Return an example with the prompts and the maximum length of the source that `index` is from."""
        return self._locate(index)[0].read_as.apply(example)

    def source_of(self, index: int) -> int:
        """Return the number of the source that an example comes from."""
        return bisect.bisect_right(self._ends, index)

    def subset(self, is_kept: np.ndarray, note: str) -> ExampleStore:
        """Return a store of the examples that are kept [n, bool]. `note` becomes part of the fingerprint."""
        sources = []
        for source, end in zip(self._sources, self._ends, strict=True):
            is_kept_here = is_kept[end - source.size : end]
            size = int(is_kept_here.sum())
            if not size:
                raise UserError(
                    f"{note} takes all examples of {source.name}; lower it, or give val_data_path"
                )
            index = source.index.subset(is_kept_here)
            sources.append(replace(source, index=index, size=size))
        return ExampleStore(sources, short_hash(self.fingerprint, note))

    def all_keys(self) -> ContentKeys:
        """Return the keys of all examples. They are available only with `no_duplicates: true`."""
        values = []
        counts = []
        for source in self._sources:
            # A source limited by max_train_examples has more keys than examples in use.
            in_use = np.arange(source.size)
            source_values, source_counts = source.index.content_keys().of_all(in_use)
            values.append(source_values)
            counts.append(source_counts)
        starts = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
        return ContentKeys(np.concatenate(values), starts)

    def changed_files(self) -> list[str]:
        """Return a sentence for each file of the data that was changed, replaced or deleted since it was opened."""
        files: dict[Path, os.stat_result] = {}
        for source in self._sources:
            files |= source.files
        changes = []
        for path, before in files.items():
            change = change_since(path, before)
            if change is not None:
                changes.append(change)
        return changes

    def summary(self) -> list[str]:
        """Return log lines: examples per source, skipped records with the reason, and unused columns."""
        lines = []
        for source in self._sources:
            index = source.index
            lines.append(source.summary())
            lines += [f"left out: {problem}" for problem in joined(index.problems)]
            num_more = index.num_bad - len(index.problems)
            if num_more:
                lines.append(f"left out: {num_more:,d} more of {source.name}")
            if index.unused:
                lines.append(f"{source.name}: not used: {listed(index.unused)}")
        if len(self._sources) > 1:
            lines.append(
                f"data: {len(self):,d} examples of {len(self._sources):,d} sources"
            )
        return lines

    def warnings(self) -> list[str]:
        """Return a sentence for each source that is probably not meant as it is read."""
        sentences = []
        for source in self._sources:
            sentences += [f"{source.name}: {point}" for point in source.weak_points()]
        return sentences

    def _locate(self, index: int) -> tuple[_Source, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        source = self._sources[self.source_of(index)]
        return source, index - self._ends[self.source_of(index)] + source.size


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
        losses = loss_names(terms)
        requirements: dict[str, Any] = {}
        takes_texts = False
        if is_training:
            max_negatives = entry.max_negatives
            if max_negatives is None:
                max_negatives = data.max_negatives
            needs_cosines = any(term.loss.needs_cosine_scores for term in terms)
            takes_texts = all(LOSSES[loss].records == "texts" for loss in losses)
            requirements = {
                "losses": losses,
                "max_negatives": max_negatives,
                "bounded_scores": needs_cosines and objective.similarity == "cosine",
                "gets_negatives": data.adds_negatives(),
            }
        # Validation data may use vembed's own names.
        records = open_records(
            data,
            entry,
            role,
            may_miss=not is_training or len(entries) > 1,
            texts_alone=takes_texts,
            with_keys=is_training and data.no_duplicates,
            **requirements,
        )
        read_as = ReadAs(entry.query_prompt, entry.document_prompt, entry.max_length)
        source = _Source(
            **vars(records),
            entry=entry,
            size=len(records),
            read_as=read_as,
            reads_scores=reads_scores(terms),
        )
        sources.append(source)
    refuse_bad_sources(
        sources,
        on_bad_record=data.on_bad_record,
        purpose="train" if is_training else "evaluate",
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
    # Each source may lack names of the run's mapping, which serves all of them.
    missing = []
    for source in sources:
        if source.entry.column_mapping is None:
            missing.append(set(source.index.missing))
    names = sorted(set.intersection(*missing)) if missing else []
    if is_training and len(entries) > 1 and names:
        hints = [source.form.columns.nearest() for source in sources]
        raise UserError(
            f"column_mapping names {listed(names)}, which no record of any source has{max(hints)}"
        )
    # Rounded cumulative ends of each source's share, so that the sizes add up to the limit.
    limit = data.max_train_examples if is_training else None
    total = sum(map(len, sources))
    limit = total if limit is None else min(limit, total)
    end = 0
    identities = []
    for number, source in enumerate(sources):
        first = end * limit // total
        end += len(source)
        size = max(1, end * limit // total - first)
        sources[number] = replace(source, size=size)
        entry = source.entry
        identity: list[Any] = [entry.column_mapping, entry.max_negatives]
        identity += [*astuple(source.read_as), source.index.fingerprint]
        identities.append([*identity, size, entry.weight])
    max_negatives = data.max_negatives if is_training else None
    options = [data.retrieval_mode, data.column_mapping, max_negatives]
    return ExampleStore(sources, short_hash(options, identities))


def open_records(
    options: Any,
    entry: DataSource,
    role: Role,
    *,
    may_miss: bool,
    texts_alone: bool = False,
    reads_all: bool = False,
    with_keys: bool = False,
    **requirements: Any,
) -> Records:
    """Check every record of one source. `options`: `image_root`, `allow_image_urls`, `retrieval_mode` and
    `column_mapping` of a run or of a command on data. `may_miss`: their column mapping may have names that the source
    lacks. `requirements`: of the losses, for `RecordFormat`."""
    mapping = entry.column_mapping
    if mapping is None:
        mapping = options.column_mapping
    else:
        may_miss = False
    columns = Columns(
        mapping, may_miss=may_miss, texts_alone=texts_alone, reads_all=reads_all
    )
    reader = open_reader(entry.path, columns, role)
    # Before reading: a change during the pass is noticed too.
    files = {path: path.stat() for path in reader.files()}
    images = ImageRoot(
        options.image_root or str(reader.folder), allow_urls=options.allow_image_urls
    )
    form = RecordFormat(
        columns,
        images,
        mode=options.retrieval_mode,
        numbers_in_text=reader.numbers_are_text,
        **requirements,
    )
    identity = [reader.name, mapping, options.retrieval_mode, images.folder]
    identity += [images.allow_urls, texts_alone, reads_all, requirements]
    index = cached_index(reader, form, identity, with_keys=with_keys)
    if index.missing and not may_miss:
        raise UserError(
            f"{reader.name}: column_mapping names {listed(index.missing)}, which no record has{columns.nearest()}"
        )
    return Records(entry.name or entry.path, reader, form, index, images.folder, files)


def refuse_bad_sources(
    sources: Sequence[Records],
    *,
    on_bad_record: str,
    purpose: str,
) -> None:
    """Raise UserError with the first bad records, unless they are left out; and for a source without a good one."""
    problems: list[str] = []
    for source in sources:
        problems += source.index.problems
    refuse_bad_records(
        problems,
        num_bad=sum(source.index.num_bad for source in sources),
        num_good=sum(map(len, sources)),
        on_bad_record=on_bad_record,
        purpose=purpose,
    )
    for source in sources:
        if not len(source):
            reason = "no records"
            if source.index.problems:
                reason = f"no record that can be used: {source.index.problems[0]}"
            raise UserError(f"{source.reader.name} holds {reason}")


def refuse_bad_records(
    problems: Sequence[str],
    *,
    num_bad: int,
    num_good: int,
    on_bad_record: str,
    purpose: str,
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
        way_out = f"there is nothing to {purpose} on"
    raise UserError(
        f"{num_bad:,d} of {num_bad + num_good:,d} records cannot be used, {way_out}:\n  "
        + "\n  ".join(lines)
    )
