"""EvalData: evaluation data read from pairs or a BEIR-style folder. Items are identified by content."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from vembed.config.schema import DataSection, ObjectiveSection
from vembed.data.example_store import open_examples
from vembed.data.examples import Example, Item, ReadAs
from vembed.errors import UserError
from vembed.evaluation.beir import (
    Corpus,
    choose_qrels,
    folder_of_qrels,
    identified_texts,
    is_beir_folder,
    open_texts,
    read_beir_corpus,
    read_judgements,
)

log = logging.getLogger("vembed")

Task = Literal["auto", "retrieval", "similarity"]

MAX_GRADE = 1000
"""Largest grade. Fractional relevance scores are scaled to integer grades up to this, as trec_eval expects."""
LARGEST_GRADE = 1_000_000
"""Largest whole score that is a grade as it stands: trec_eval takes 8 bytes for each grade up to the largest one."""
MAX_PROBLEMS = 10
MAX_OF_CLASS = 100
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
    query_ids: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Of a BEIR-style folder: id -> index of the query."""
    find_document: Callable[[str], int | None] | None = field(
        default=None, compare=False
    )
    """Of a BEIR-style folder: the index of the document of an id."""
    first_stages: dict[str, np.ndarray] = field(default_factory=dict, compare=False)
    """First stage -> [Q, k] its documents of each query. Filled when rerankers are evaluated, and kept for the next
    evaluation."""

    metric: ClassVar[str] = "ndcg@10"
    """The main metric."""

    @property
    def collections(self) -> tuple[Sequence[Item], Sequence[Item]]:
        """All items that an evaluation encodes."""
        return self.queries, self.documents

    def read_as(self, settings: ReadAs) -> RetrievalData:
        """Return the data with the prompts and the length of a source on their items."""
        queries = tuple(map(settings.query, self.queries))
        documents: Sequence[Item]
        if isinstance(self.documents, Corpus):
            documents = self.documents.read_as(settings)
        else:
            documents = tuple(map(settings.document, self.documents))
        return replace(self, queries=queries, documents=documents)

    def summary(self) -> str:
        """Return one line for logs and the report."""
        num_relevant = sum(map(len, self.relevance))
        line = (
            f"{len(self.queries):,d} queries over {len(self.documents):,d} documents, {num_relevant:,d} relevant "
            f"pairs, from {self.name}"
        )
        return "; ".join([line, *self.notes])


@dataclass(frozen=True)
class ScoredPairs:
    """Pairs with similarity scores given by the data."""

    name: str
    first: tuple[Item, ...]
    second: tuple[Item, ...]
    scores: tuple[float, ...]

    metric: ClassVar[str] = "spearman"
    """The main metric."""

    @property
    def collections(self) -> tuple[Sequence[Item], Sequence[Item]]:
        """All items that an evaluation encodes."""
        return self.first, self.second

    def read_as(self, settings: ReadAs) -> ScoredPairs:
        """Return the data with the prompts and the length of a source on their items."""
        first = tuple(map(settings.query, self.first))
        second = tuple(map(settings.document, self.second))
        return replace(self, first=first, second=second)

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
    """Return the evaluation data at `path`: a BEIR-style folder, one of its `qrels/*.tsv` files, or any training data.

    `splits`: the qrels of a folder in the order of preference. A single split must exist. `task: auto`: scored pairs if
    every example has one positive with a score and no negatives, otherwise retrieval.
    """
    place = Path(path)
    skip_bad = options.on_bad_record == "skip"
    folder = folder_of_qrels(place)
    if folder is not None:
        return read_beir(folder, place, skip_bad=skip_bad)
    if is_beir_folder(place):
        return read_beir(place, choose_qrels(place, splits), skip_bad=skip_bad)
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
        task = "similarity" if examples else "retrieval"
        for example in examples:
            has_one_document = len(example.positives) == 1 and not example.negatives
            if example.scores is None or not has_one_document:
                task = "retrieval"
                break
    if task == "similarity":
        return _scored_pairs(examples, name)
    judgements = _Judgements()
    all_notes = []
    classes: dict[str, dict[int, Item]] = {}
    num_left_out = 0
    all_scores: list[float] = []
    for example in examples:
        all_scores += example.scores or ()
        if example.label is not None:
            members = classes.setdefault(str(example.label), {})
            if len(members) < MAX_OF_CLASS:
                members.setdefault(example.query.key(), example.query)
            else:
                num_left_out += 1
    for members in classes.values():
        for item in members.values():
            # Part of the corpus even if it is the only one of its class, and so has no relevant document.
            judgements.index_of(item)
            for other in members.values():
                if other is not item:
                    judgements.add(item, judgements.index_of(other), 1)
    if num_left_out:
        all_notes.append(
            f"at most {MAX_OF_CLASS:,d} of a class, {num_left_out:,d} left out"
        )
    all_notes += notes
    num_irrelevant = sum(score <= 0 for score in all_scores)
    if num_irrelevant:
        all_notes.append(
            f"{num_irrelevant:,d} positives with a score of 0 or below are not relevant"
        )
    # Whole scores are grades already; fractions, and scores that are no grades, are spread over grades up to MAX_GRADE.
    top = max(all_scores, default=1.0)
    is_whole = all(float(score).is_integer() for score in all_scores)
    are_grades = top <= LARGEST_GRADE and is_whole
    for example in examples:
        if example.label is not None:
            continue
        scores = example.scores or (1.0,) * len(example.positives)
        for positive, score in zip(example.positives, scores, strict=True):
            grade = 0
            if score > 0 and are_grades:
                grade = int(score)
            elif score > 0:
                # At least 1: a score above 0 means relevant, however small it is compared with the highest.
                grade = max(1, round(MAX_GRADE * score / top))
            # A document without a relevant query is part of the corpus too.
            document = judgements.index_of(positive)
            judgements.add(example.query, document, grade)
    for item in documents:
        judgements.index_of(item)
    corpus = tuple(judgements.documents.values())
    return judgements.retrieval_data(name, corpus, all_notes)


def read_beir(
    folder: Path,
    qrels: Path,
    *,
    skip_bad: bool = False,
) -> RetrievalData:
    """Read a BEIR-style folder: every document of the corpus, and the queries with a relevant document in `qrels`."""
    problems: list[str] = []
    corpus = read_beir_corpus(open_texts(folder, "corpus"), problems)
    queries = {}
    reader = open_texts(folder, "queries")
    problem_lines: list[tuple[int, str]] = []
    for _, line, identity, text in identified_texts(reader, problem_lines):
        if identity in queries:
            problem_lines.append((line, f"_id {identity} occurs twice"))
        else:
            queries[identity] = Item(text=text)
    for line, reason in problem_lines:
        problems.append(f"{reader.where(line)}: {reason}")
    judgements = _Judgements()
    for where, judgement in read_judgements(qrels):
        if isinstance(judgement, str):
            problems.append(f"{where}: {judgement}")
            continue
        query, identity, grade = judgement
        document = corpus.find(identity)
        if query not in queries:
            problems.append(f"{where}: query {query} is not in the queries")
        elif document is None:
            problems.append(f"{where}: document {identity} is not in the corpus")
        elif grade > LARGEST_GRADE:
            problems.append(
                f"{where}: the score {grade:,d} is no grade, which is at most {LARGEST_GRADE:,d}"
            )
        else:
            judgements.add(queries[query], document, grade)
    if problems and not skip_bad:
        lines = problems[:MAX_PROBLEMS]
        if len(problems) > MAX_PROBLEMS:
            lines[-1] += f" and {len(problems) - MAX_PROBLEMS:,d} more"
        raise UserError(
            f"{len(problems):,d} bad records in {folder}; fix them, or set on_bad_record: skip to leave them out:\n  "
            + "\n  ".join(lines)
        )
    notes = []
    if problems:
        first = problems[0]
        notes.append(f"left out {len(problems):,d} bad records, the first: {first}")
    if corpus.num_joined:
        notes.append(f"joined {corpus.num_joined:,d} documents with equal content")
    name = f"{folder} ({qrels.name})"
    data = judgements.retrieval_data(name, corpus.documents, notes)
    index_of = {item.key(): index for index, item in enumerate(data.queries)}
    query_ids = {}
    for identity, item in queries.items():
        if item.key() in index_of:
            query_ids[identity] = index_of[item.key()]
    return replace(data, query_ids=query_ids, find_document=corpus.find)


class _Judgements:
    """Collector of queries, documents and grades, keyed by content."""

    def __init__(self) -> None:
        self.queries: dict[int, Item] = {}
        self.grades: dict[int, dict[int, int]] = {}
        """Per query: document index -> grade."""
        self.documents: dict[int, Item] = {}
        self.indices: dict[int, int] = {}

    def index_of(self, document: Item) -> int:
        """Return the index of a document, which is added if it is new."""
        key = document.key()
        self.documents.setdefault(key, document)
        return self.indices.setdefault(key, len(self.indices))

    def add(
        self,
        query: Item,
        document: int,
        grade: int,
    ) -> None:
        if grade > 0:
            key = query.key()
            self.queries.setdefault(key, query)
            grades = self.grades.setdefault(key, {})
            # Equal queries or documents were joined: the higher grade holds.
            grades[document] = max(grade, grades.get(document, 0))

    def retrieval_data(
        self,
        name: str,
        documents: Sequence[Item],
        notes: Sequence[str],
    ) -> RetrievalData:
        if not self.queries:
            raise UserError(
                f"{name} has no query with a relevant document, so there is nothing to evaluate on"
            )
        queries = tuple(self.queries.values())
        relevance = tuple(self.grades.values())
        return RetrievalData(name, queries, documents, relevance, tuple(notes))


def _scored_pairs(examples: Sequence[Example], name: str) -> ScoredPairs:
    first = []
    second = []
    scores = []
    for example in examples:
        # Without scores there are no pairs.
        for positive, score in zip(
            example.positives, example.scores or (), strict=False
        ):
            first.append(example.query)
            second.append(positive)
            scores.append(float(score))
    num_different = len(set(scores))
    if num_different < 2:
        raise UserError(
            f"{name} has {len(scores):,d} scored pairs with {num_different} different scores, and a correlation "
            "needs at least two"
        )
    return ScoredPairs(name, tuple(first), tuple(second), tuple(scores))
