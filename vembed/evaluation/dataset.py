"""EvalData: evaluation data read from pairs or a BEIR-style folder. Items are identified by content."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from vembed.config.options import join_words
from vembed.config.schema import DataSection, ObjectiveSection
from vembed.data.example_store import open_examples
from vembed.data.examples import Example, Item, ReadAs
from vembed.data.formats.base import Format
from vembed.data.messages import listed
from vembed.errors import UserError
from vembed.evaluation.beir_folder import (
    QRELS_ENDINGS,
    folder_of_qrels,
    is_beir_folder,
    open_texts,
    qrels_files,
)
from vembed.evaluation.corpus import Corpus, Identities, identified_text, read_corpus
from vembed.evaluation.qrels import read_judgements

log = logging.getLogger("vembed")

Task = Literal["auto", "retrieval", "similarity"]

MAX_GRADE = 1000
"""Largest grade. Fractional relevance scores are scaled to integer grades up to this, as trec_eval expects."""
LARGEST_GRADE = 1_000_000
"""Largest whole score that is a grade as it stands: trec_eval takes 8 bytes for each grade up to the largest one."""
NUM_PROBLEMS_SHOWN = 10
MOST_OF_CLASS = 100
"""Members of a class that are in the evaluation, the first ones: each is relevant to all others."""


@dataclass(frozen=True)
class RetrievalData:
    """Queries, the whole corpus, and the relevant documents of each query. Documents with equal content are one
    document; equal queries are one query whose relevant documents are joined."""

    name: str
    queries: tuple[Item, ...]
    documents: Sequence[Item]
    """A Corpus, whose texts stay in their file, if the data are a BEIR-style folder."""
    relevance: tuple[dict[int, int], ...]
    """Per query: document index -> grade, 1 or more. Unlisted documents are not relevant."""
    notes: tuple[str, ...] = field(default=())
    """Notes for the log on records left out or joined while reading."""
    first_stages: dict[str, np.ndarray] = field(default_factory=dict, compare=False)
    """First stage -> [Q, k] its documents of each query. Filled when rerankers are evaluated, and kept for the next
    evaluation."""

    @property
    def num_inputs(self) -> int:
        """Number of inputs that an evaluation encodes."""
        return len(self.queries) + len(self.documents)

    @property
    def metric(self) -> str:
        """The main metric."""
        return "ndcg@10"

    def read_as(self, settings: ReadAs) -> RetrievalData:
        """Return the data with the prompts and the length of a source on their items."""
        if settings == ReadAs():
            return self
        if isinstance(self.documents, Corpus):
            documents: Sequence[Item] = self.documents.read_as(settings)
        else:
            documents = tuple(map(settings.document, self.documents))
        return replace(
            self, queries=tuple(map(settings.query, self.queries)), documents=documents
        )

    def summary(self) -> str:
        """Return one line for logs and the report."""
        num_relevant = sum(map(len, self.relevance))
        return (
            f"{len(self.queries):,d} queries over {len(self.documents):,d} documents, {num_relevant:,d} relevant "
            f"pairs, from {self.name}" + "".join(f"; {note}" for note in self.notes)
        )


@dataclass(frozen=True)
class ScoredPairs:
    """Pairs with similarity scores given by the data."""

    name: str
    first: tuple[Item, ...]
    second: tuple[Item, ...]
    scores: tuple[float, ...]

    @property
    def num_inputs(self) -> int:
        """Number of inputs that an evaluation encodes."""
        return len(self.first) + len(self.second)

    @property
    def metric(self) -> str:
        """The main metric."""
        return "spearman"

    def read_as(self, settings: ReadAs) -> ScoredPairs:
        """Return the data with the prompts and the length of a source on their items."""
        first = map(settings.query, self.first)
        second = map(settings.document, self.second)
        return (
            self
            if settings == ReadAs()
            else replace(self, first=tuple(first), second=tuple(second))
        )

    def summary(self) -> str:
        """Return one line for logs and the report."""
        return f"{len(self.scores):,d} scored pairs from {self.name}"


EvalData = RetrievalData | ScoredPairs
TEST_FIRST = ("test", "dev", "validation", "val")
"""Order of preference of the qrels of a folder for a finished model. During training `test` comes last."""


def open_eval_data(
    options: DataSection,
    path: str,
    objective: ObjectiveSection | None = None,
    *,
    splits: Sequence[str] = ("dev", "validation", "val", "test"),
    task: Task = "auto",
) -> EvalData:
    """Return the evaluation data at `path` : a BEIR-style folder, one of its
    `qrels/*.tsv` files, or any training data. `splits` orders the qrels of a folder by preference; a single one
    has to be there. `task: auto` means scored pairs if every example has one positive and a score, and nothing else.
    """
    place = Path(path)
    skip_bad = options.on_bad_record == "skip"
    if (folder := folder_of_qrels(place)) is not None:
        return read_beir(folder, place, skip_bad=skip_bad)
    if is_beir_folder(place):
        return read_beir(place, _choose_qrels(place, splits), skip_bad=skip_bad)
    if len(splits) == 1:
        raise UserError(
            f"{path} is no BEIR-style folder, so it has no qrels of a split {splits[0]}"
        )
    store = open_examples(options, path, objective, role="validation")
    for line in store.warnings():
        log.warning(line)
    return from_examples([store[index] for index in range(len(store))], path, task)


def from_examples(
    examples: Sequence[Example],
    name: str,
    task: Task = "auto",
    *,
    documents: Iterable[Item] = (),
    notes: Sequence[str] = (),
) -> EvalData:
    """Return evaluation data from pairs. The corpus is all positives, without the hard negatives of the file, and
    `documents`, which are searched beside them. `notes`: for the log and the report.

    Of labelled data each text or image is a query and a document, and the others of its class are relevant.
    """
    if task == "auto":
        scored = all(
            example.scores is not None
            and len(example.positives) == 1
            and not example.negatives
            for example in examples
        )
        task = "similarity" if examples and scored else "retrieval"
    if task == "similarity":
        return _scored_pairs(examples, name)
    # Whole scores are grades already; fractions, and scores that are no grades, are spread over grades up to MAX_GRADE.
    top = max(
        (score for example in examples for score in example.scores or ()), default=1.0
    )
    whole = top <= LARGEST_GRADE and all(
        float(score).is_integer()
        for example in examples
        for score in example.scores or ()
    )
    table = _RetrievalTable()
    labelled = [example for example in examples if example.label is not None]
    all_notes = [*_add_classes(table, labelled), *notes]
    num_irrelevant = sum(
        score <= 0 for example in examples for score in example.scores or ()
    )
    if num_irrelevant:
        all_notes.append(
            f"{num_irrelevant:,d} positives with a score of 0 or below are not relevant"
        )
    for example in examples:
        if example.label is not None:
            continue
        scores = example.scores or (1.0,) * len(example.positives)
        for positive, score in zip(example.positives, scores, strict=True):
            table.add(example.query, positive, _grade(score, top, whole))
    for item in documents:
        table.document(item)
    return table.finish(
        name,
        tuple(item for _, item in table.documents.values()),
        tuple(all_notes),
    )


def _add_classes(
    table: _RetrievalTable, examples: Sequence[Example]
) -> tuple[str, ...]:
    """Add labelled data; return notes on what is left out."""
    classes: dict[str, dict[int, Item]] = {}
    num_left_out = 0
    for example in examples:
        members = classes.setdefault(str(example.label), {})
        num_left_out += len(members) >= MOST_OF_CLASS
        if len(members) < MOST_OF_CLASS:
            members.setdefault(example.query.key(), example.query)
    for members in classes.values():
        for item in members.values():
            for other in members.values():
                if other is not item:
                    table.add(item, other, 1)
            if (
                item.key() not in table.documents
            ):  # the only one of its class is a document without a query
                table.document(item)
    more = f"at most {MOST_OF_CLASS:,d} of a class, {num_left_out:,d} left out"
    return (more,) if num_left_out else ()


def read_beir(folder: Path, qrels: Path, *, skip_bad: bool = False) -> RetrievalData:
    """Read a BEIR-style folder: every document of the corpus, and the queries with a relevant document in `qrels`."""
    problems: list[str] = []
    corpus = read_corpus(open_texts(folder, "corpus"), problems)
    queries = _read_texts(open_texts(folder, "queries"), problems)
    judgements = list(_read_qrels(qrels, queries, corpus.identities, problems))
    if problems and not skip_bad:
        more = (
            f" and {len(problems) - NUM_PROBLEMS_SHOWN:,d} more"
            if len(problems) > NUM_PROBLEMS_SHOWN
            else ""
        )
        raise UserError(
            f"{len(problems):,d} bad records in {folder}; fix them, or set on_bad_record: skip to leave them out:\n  "
            + "\n  ".join(problems[:NUM_PROBLEMS_SHOWN])
            + more
        )
    table = _RetrievalTable()
    table.num_joined = corpus.num_joined
    for query_id, document, grade in judgements:
        table.judge(queries[query_id], document, grade)
    notes = (
        (f"left out {len(problems):,d} bad records, the first: {problems[0]}",)
        if problems
        else ()
    )
    return table.finish(f"{folder} ({qrels.name})", corpus.documents, notes)


class _RetrievalTable:
    """Collector of queries and documents, keyed by content."""

    def __init__(self) -> None:
        self.queries: dict[int, Item] = {}
        self.documents: dict[int, tuple[int, Item]] = {}
        self.grades: dict[int, dict[int, int]] = {}
        self.num_joined = 0

    def document(self, item: Item) -> int:
        return self.documents.setdefault(item.key(), (len(self.documents), item))[0]

    def add(self, query: Item, document: Item, grade: int) -> None:
        # A document that nobody calls relevant is part of the corpus all the same.
        self.judge(query, self.document(document), grade)

    def judge(self, query: Item, document: int, grade: int) -> None:
        if grade > 0:
            key = query.key()
            self.queries.setdefault(key, query)
            grades = self.grades.setdefault(key, {})
            # Equal queries or documents were joined: the higher grade holds.
            grades[document] = max(grade, grades.get(document, 0))

    def finish(
        self, name: str, documents: Sequence[Item], notes: tuple[str, ...] = ()
    ) -> RetrievalData:
        if not self.queries:
            raise UserError(
                f"{name} has no query with a relevant document, so there is nothing to evaluate on"
            )
        if self.num_joined:
            notes = (
                *notes,
                f"joined {self.num_joined:,d} documents with equal content",
            )
        return RetrievalData(
            name=name,
            queries=tuple(self.queries.values()),
            documents=documents,
            relevance=tuple(self.grades.values()),
            notes=notes,
        )


def _scored_pairs(examples: Sequence[Example], name: str) -> ScoredPairs:
    pairs = [
        (example.query, positive, score)
        for example in examples
        for positive, score in zip(
            example.positives, example.scores or (), strict=bool(example.scores)
        )
    ]
    num_different = len({score for _, _, score in pairs})
    if num_different < 2:
        raise UserError(
            f"{name} has {len(pairs):,d} scored pairs with {num_different} different scores, and a correlation "
            "needs at least two"
        )
    first, second, scores = zip(*pairs, strict=True)
    return ScoredPairs(name, first, second, tuple(float(score) for score in scores))


def _grade(score: float, top: float, whole: bool) -> int:
    if score <= 0:
        return 0
    if whole:
        return int(score)
    # At least 1: a score above 0 means relevant, however small it is beside the highest.
    return max(1, round(MAX_GRADE * score / top))


def _choose_qrels(folder: Path, splits: Sequence[str]) -> Path:
    qrels = qrels_files(folder)
    if (
        len(qrels) == 1 and len(splits) > 1
    ):  # a split that was asked for is never replaced by another
        return next(iter(qrels.values()))
    for split in splits:
        if split in qrels:
            return qrels[split]
    place = folder / "qrels"
    if not qrels:
        others = listed(sorted(path.name for path in place.glob("*")))
        raise UserError(
            f"{place} holds {others or 'nothing'}, and no file that ends in {join_words(QRELS_ENDINGS)}"
        )
    raise UserError(
        f"{place} holds {', '.join(sorted(qrels))}, and none of {', '.join(splits)}: give the path of the qrels file "
        "that is meant"
    )


def _read_texts(reader: Format, problems: list[str]) -> dict[str, Item]:
    items: dict[str, Item] = {}
    for _, number, record in reader.rows():
        where = reader.where(number)
        identified = identified_text(record)
        if isinstance(identified, str):
            problems.append(f"{where}: {identified}")
        elif identified[0] in items:
            problems.append(f"{where}: _id {identified[0]} occurs twice")
        else:
            items[identified[0]] = Item(text=identified[1])
    return items


def _read_qrels(
    path: Path, queries: dict[str, Item], documents: Identities, problems: list[str]
) -> Iterator[tuple[str, int, int]]:
    """Yield queries, the numbers of documents, and grades."""
    for where, judgement in read_judgements(path):
        if isinstance(judgement, str):
            problems.append(f"{where}: {judgement}")
            continue
        query, identity, grade = judgement
        if query not in queries:
            problems.append(f"{where}: query {query} is not in the queries")
        elif (document := documents.find(identity)) is None:
            problems.append(f"{where}: document {identity} is not in the corpus")
        elif grade > LARGEST_GRADE:
            problems.append(
                f"{where}: the score {grade:,d} is no grade, which is at most {LARGEST_GRADE:,d}"
            )
        else:
            yield query, document, grade
