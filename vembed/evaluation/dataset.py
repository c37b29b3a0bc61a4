"""EvalData: evaluation data read from pairs or a BEIR-style folder. Items are identified by content."""

import logging
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np

from vembed.config.schema import DataSection, ObjectiveSection
from vembed.config.values import EvaluationTask
from vembed.data.example_store import open_examples
from vembed.data.examples import (
    LONE_SURROGATE,
    BadRecord,
    Example,
    Item,
    KeyIndex,
    ReadAs,
    has_lone_surrogate,
)
from vembed.data.formats.base import Format
from vembed.data.formats.table import data_files, open_document_reader
from vembed.data.records import (
    DOCUMENT_FIELDS,
    ID_FIELDS,
    NUMBER,
    document_id,
    document_text,
    judgement_column,
)
from vembed.errors import UserError
from vembed.files import read_state_text
from vembed.progress import counted

log = logging.getLogger("vembed")

Grades = dict[int, int]
"""Document -> its grade for a query."""
Judgement = tuple[str, str, int]
"""The ids of a query and a document, and the grade."""
FindIndex = Callable[[Any], int | None]
"""Returns the index of a query or a document by its id or text; None without it."""
MAX_GRADE = 1000
"""Largest grade. Fractional relevance scores are scaled to integer grades up to this, as trec_eval expects."""
LARGEST_GRADE = 1_000_000
"""Largest whole score that is a grade as it stands: trec_eval takes 8 bytes for each grade up to the largest one."""
MAX_PROBLEMS = 10
MAX_OF_CLASS = 100
"""Members of a class that are in the evaluation, the first ones: each is relevant to all others."""


@dataclass(frozen=True)
class _QueriesAndDocuments:
    """What an evaluation encodes."""

    name: str
    queries: tuple[Item, ...]
    documents: Sequence[Item]
    """A Corpus, whose texts stay in their file, if the data are a BEIR-style folder."""

    @property
    def collections(self) -> tuple[Sequence[Item], Sequence[Item]]:
        """All items that an evaluation encodes."""
        return self.queries, self.documents

    def read_as(self, settings: ReadAs) -> Self:
        """Return the data with the prompts and the length of a source on their items."""
        queries = tuple(map(settings.query, self.queries))
        documents: Sequence[Item]
        if isinstance(self.documents, Corpus):
            documents = replace(self.documents, settings=settings)
        else:
            documents = tuple(map(settings.document, self.documents))
        return replace(self, queries=queries, documents=documents)


@dataclass(frozen=True)
class RetrievalData(_QueriesAndDocuments):
    """Queries, the whole corpus, and the relevant documents of each query. Documents with equal content are one
    document; equal queries are one query whose relevant documents are joined."""

    relevance: tuple[Grades, ...]
    """Per query: document index -> grade, 1 or more. Unlisted documents are not relevant."""
    notes: tuple[str, ...] = ()
    """Notes for the log on records left out or joined while reading."""
    query_ids: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Of a BEIR-style folder: id -> index of the query."""
    find_document: FindIndex | None = field(default=None, compare=False)
    """Of a BEIR-style folder: the index of the document of an id."""
    first_stages: dict[str, np.ndarray] = field(default_factory=dict, compare=False)
    """First stage -> [Q, k] its documents of each query. Filled when rerankers are evaluated, and kept for the next
    evaluation."""

    metric: ClassVar[str] = "ndcg@10"
    """The main metric."""

    def summary(self) -> str:
        """Return one line for logs and the report."""
        num_relevant = sum(map(len, self.relevance))
        queries = counted(len(self.queries), "query", "queries")
        documents = counted(len(self.documents), "document")
        pairs = counted(num_relevant, "relevant pair")
        line = f"{queries} over {documents}, {pairs}, from {self.name}"
        return "; ".join([line, *self.notes])


@dataclass(frozen=True)
class ScoredPairs(_QueriesAndDocuments):
    """Pairs with similarity scores given by the data: a query and the document in its place."""

    scores: tuple[float, ...]

    metric: ClassVar[str] = "spearman"
    """The main metric."""

    def summary(self) -> str:
        """Return one line for logs and the report."""
        return f"{len(self.scores):,d} scored pairs from {self.name}"


EvalData = RetrievalData | ScoredPairs


def num_prompts(data: EvalData) -> int:
    """Return the number of queries with a prompt for themselves."""
    return sum(query.prompt is not None for query in data.queries)


TEST_FIRST = ("test", "dev", "validation", "val")
DEV_FIRST = ("dev", "validation", "val", "test")
"""Order of preference of the qrels of a folder for a finished model, and during training."""


def open_eval_data(
    options: DataSection,
    path: str,
    objective: ObjectiveSection | None = None,
    *,
    splits: Sequence[str] = DEV_FIRST,
    task: EvaluationTask = "auto",
) -> EvalData:
    """Return the evaluation data at `path`: a BEIR-style folder, one of its `qrels/*.tsv` files, or any training data.

    `splits`: the qrels of a folder in the order of preference. A single split must exist. `task: auto`: scored pairs if
    every example has one positive with a score and no negatives, otherwise retrieval.
    """
    beir = beir_qrels(path, splits)
    if task == "similarity" and beir is not None:
        raise UserError(
            f"task similarity: {path} is a BEIR-style folder, which has no scored pairs: give a file of scored pairs, or "
            "task retrieval"
        )
    if beir is not None:
        return read_beir(*beir, options.on_bad_record)
    if len(splits) == 1:
        raise UserError(
            f"{path} is no BEIR-style folder, so it has no qrels of a split {splits[0]}"
        )
    store = open_examples(
        options,
        path,
        objective,
        role="validation",
    )
    for line in store.warnings():
        log.warning(line)
    return from_examples(list(store), path, task)


def open_test_data(path: str | Path) -> EvalData:
    """Return evaluation data for a finished model: the test split of a BEIR-style folder, where it has one."""
    options = DataSection(data_path=str(path))
    return open_eval_data(options, str(path), splits=TEST_FIRST)


def are_scored_pairs(examples: Sequence[Example]) -> bool:
    """Return whether every example has a score and one document."""
    for example in examples:
        num_documents = len(example.positives) + len(example.negatives)
        if example.scores is None or num_documents != 1:
            return False
    return len(examples) > 0


def from_examples(
    examples: Sequence[Example],
    name: str,
    task: EvaluationTask = "auto",
    *,
    documents: Iterable[Item] = (),
    notes: Sequence[str] = (),
) -> EvalData:
    """Return evaluation data from pairs. The corpus is all positives, without the hard negatives of the file, and
    `documents`, which are searched beside them. `notes`: for the log and the report.

    Of labelled data each text or image is a query and a document, and the others of its class are relevant.
    """
    if task == "similarity" or (task == "auto" and are_scored_pairs(examples)):
        return _scored_pairs(examples, name)
    judgements = _Judgements()
    all_notes = []
    classes: dict[str, dict[int, Item]] = {}
    class_documents: dict[int, Item] = {}
    """By key: the members of classes as documents, whose prompt is another one."""
    num_left_out = 0
    all_scores: list[float] = []
    negative_scores: list[float] = []
    for example in examples:
        all_scores += example.scores or ()
        negative_scores += example.negative_scores or ()
        if example.label is not None:
            members = classes.setdefault(str(example.label), {})
            class_documents |= {item.key(): item for item in example.positives}
            if len(members) < MAX_OF_CLASS:
                members.setdefault(example.query.key(), example.query)
            else:
                num_left_out += 1
    for members in classes.values():
        for key, item in members.items():
            # Part of the corpus even if it is the only one of its class, and so has no relevant document.
            judgements.key_of(class_documents.get(key, item))
            for other in members:
                if other != key:
                    judgements.add(item, other, 1)
    if num_left_out:
        all_notes.append(
            f"at most {MAX_OF_CLASS:,d} of a class, {num_left_out:,d} left out"
        )
    all_notes += notes
    # Whole scores are grades already; fractions, and scores that are no grades, are spread over grades up to MAX_GRADE.
    top = max(all_scores, default=1.0)
    is_whole = all(float(score).is_integer() for score in all_scores)
    are_grades = top <= LARGEST_GRADE and is_whole
    # Others of which some are below 0 are logits of a teacher, and say nothing about the relevance of a positive.
    are_logits = not are_grades and min(*all_scores, *negative_scores, 0.0) < 0
    num_irrelevant = sum(score <= 0 for score in all_scores)
    if num_irrelevant and not are_logits:
        all_notes.append(
            f"{num_irrelevant:,d} positives with a score of 0 or below are not relevant"
        )
    num_equal = 0
    for example in examples:
        if example.label is not None:
            continue
        scores = example.scores or (1.0,) * len(example.positives)
        for positive, score in zip(example.positives, scores, strict=True):
            grade = 0
            if positive.key() == example.query.key():
                num_equal += 1
            elif are_logits:
                grade = 1
            elif score > 0 and are_grades:
                grade = int(score)
            elif score > 0:
                # At least 1: a score above 0 means relevant, however small it is compared with the highest.
                grade = max(1, round(MAX_GRADE * score / top))
            # A document without a relevant query is part of the corpus too.
            document = judgements.key_of(positive)
            judgements.add(example.query, document, grade)
    if num_equal:
        all_notes.append(
            f"{num_equal:,d} positives equal their query, which anything would find, and do not count"
        )
    for item in documents:
        judgements.key_of(item)
    index_of = {key: index for index, key in enumerate(judgements.documents)}
    corpus = tuple(judgements.documents.values())
    data = judgements.retrieval_data(name, corpus, all_notes)
    relevance = [
        {index_of[key]: grade for key, grade in grades.items()}
        for grades in data.relevance
    ]
    return replace(data, relevance=tuple(relevance))


def read_beir(
    folder: Path,
    qrels: Path,
    on_bad_record: str,
) -> RetrievalData:
    """Read a BEIR-style folder: every document of the corpus, and the queries with a relevant document in `qrels`."""
    problems: list[str] = []
    notes: list[str] = []
    reader = open_texts(folder, "corpus")
    documents, find_document = read_beir_corpus(reader, problems, notes)
    queries = {}
    reader = open_texts(folder, "queries")
    for _, line, identity, text in identified_texts(reader, problems):
        if identity in queries:
            problems.append(f"{reader.where(line)}: _id {identity} occurs twice")
        else:
            queries[identity] = Item(text=text)
    judgements = _Judgements()
    for where, judgement in read_judgements(qrels):
        if isinstance(judgement, str):
            problems.append(f"{where}: {judgement}")
            continue
        query, identity, grade = judgement
        document = find_document(identity)
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
    if problems and on_bad_record != "skip":
        lines = problems[:MAX_PROBLEMS]
        if len(problems) > MAX_PROBLEMS:
            lines[-1] += f" and {len(problems) - MAX_PROBLEMS:,d} more"
        raise UserError(
            f"{len(problems):,d} bad records in {folder}; fix them, or set on_bad_record: skip to leave them out:\n  "
            + "\n  ".join(lines)
        )
    if problems:
        first = problems[0]
        notes.append(f"left out {len(problems):,d} bad records, the first: {first}")
    name = f"{folder} ({qrels.name})"
    data = judgements.retrieval_data(name, documents, notes)
    index_of = {key: index for index, key in enumerate(judgements.queries)}
    query_ids = {}
    for identity, item in queries.items():
        if item.key() in index_of:
            query_ids[identity] = index_of[item.key()]
    return replace(data, query_ids=query_ids, find_document=find_document)


class _Judgements:
    """Collector of queries, documents and grades, keyed by content."""

    def __init__(self) -> None:
        self.queries: dict[int, Item] = {}
        self.grades: dict[int, Grades] = {}
        """Per query: document -> grade. A document is an index in a corpus, or the key of one that was collected."""
        self.documents: dict[int, Item] = {}

    def key_of(self, document: Item) -> int:
        """Return the key of a document, which is added if it is new."""
        key = document.key()
        self.documents.setdefault(key, document)
        return key

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
        return RetrievalData(
            name,
            tuple(self.queries.values()),
            documents,
            tuple(self.grades.values()),
            tuple(notes),
        )


def _scored_pairs(examples: Sequence[Example], name: str) -> ScoredPairs:
    queries = []
    documents = []
    scores = []
    for example in examples:
        # Without scores there are no pairs.
        for positive, score in zip(
            example.positives, example.scores or (), strict=False
        ):
            queries.append(example.query)
            documents.append(positive)
            scores.append(float(score))
    num_different = len(set(scores))
    if num_different < 2:
        raise UserError(
            f"{name} has {len(scores):,d} scored pairs with {num_different} different scores, and a correlation "
            "needs at least two"
        )
    return ScoredPairs(
        name,
        tuple(queries),
        tuple(documents),
        tuple(scores),
    )


# ---- BEIR-style folders: corpus, queries and qrels, as JSON Lines and TSV or, as on the Hub, as Parquet ------------


TextPart = Literal["corpus", "queries"]
QRELS_ENDINGS = (".tsv", ".jsonl", ".parquet")
_FIELDS = (*DOCUMENT_FIELDS, "query-id", "corpus-id", "score")
_SHARD = "-00000-of-"
# At most 100 digits: Python refuses to read a number of thousands.
_WHOLE = re.compile(r"\s*[+-]?\d{1,100}(\.0{0,100})?\s*")


def is_beir_folder(folder: Path) -> bool:
    """Return whether a folder has a corpus."""
    return texts_path(folder, "corpus") is not None


def texts_path(folder: Path, part: TextPart) -> Path | None:
    """Return the file of the documents or queries, or the folder of such files; None if there is none."""
    for path in (folder / f"{part}.jsonl", folder / f"{part}.parquet"):
        if path.is_file():
            return path
    path = folder / part
    return path if path.is_dir() and data_files(path) else None


def open_texts(folder: Path, part: TextPart) -> Format:
    """Return the reader of the documents or queries."""
    path = texts_path(folder, part)
    if path is None:
        raise UserError(
            f"{folder} has neither {part}.jsonl nor {part}.parquet, and no folder {part} with such files"
        )
    return open_beir_file(path)


def open_beir_file(path: Path) -> Format:
    """Return the reader of a file with documents, queries or judgements."""
    reader = open_document_reader(path)
    columns = reader.columns or ()
    # A table may have other columns too, such as vectors. They are not read.
    read = [name for name in columns if name in _FIELDS or judgement_column([name])]
    if read:
        reader.select(read)
    return reader


def qrels_files(folder: Path) -> dict[str, Path]:
    """Return the files of judgements by split. A shard such as test-00000-of-00001.parquet is that of its split."""
    files = {}
    for path in sorted((folder / "qrels").glob("*")):
        if path.suffix in QRELS_ENDINGS:
            files[path.stem.partition(_SHARD)[0]] = path
    return files


def choose_qrels(folder: Path, splits: Sequence[str]) -> Path:
    """Return the qrels of the first of some splits; the only ones of a folder, unless one split was asked for."""
    files = qrels_files(folder)
    for split in splits:
        if split in files:
            return files[split]
    # A split that was asked for is never replaced by another.
    if len(files) == 1 and len(splits) > 1:
        return next(iter(files.values()))
    splits_there = ", ".join(sorted(files)) or "no qrels"
    raise UserError(
        f"{folder / 'qrels'} holds {splits_there}, and none of {', '.join(splits)}: give the split, or the path of the "
        "qrels file, that is meant"
    )


def beir_qrels(name: str, splits: Sequence[str]) -> tuple[Path, Path] | None:
    """Return the BEIR-style folder and the file of judgements of a path, which names one of them; None for other data."""
    path = Path(name)
    if is_beir_folder(path):
        return path, choose_qrels(path, splits)
    folder = path.parent.parent
    is_in_qrels = path.suffix in QRELS_ENDINGS and path.parent.name == "qrels"
    if path.suffix != ".tsv" and not is_in_qrels:
        return None
    return (folder, path) if is_beir_folder(folder) else None


def read_judgements(path: Path) -> Iterator[tuple[str, Judgement | str]]:
    """Yield where each line is, and its query, document and grade; or what is wrong with the line.

    Lines are BEIR's (query, document, grade) or trec_eval's (query, 0, document, grade).
    """
    if path.suffix in (".jsonl", ".parquet"):
        reader = open_beir_file(path)
        for _, number, record in reader.rows():
            yield reader.where(number), _judgement_of_record(record)
        return
    lines = read_state_text(path).removeprefix("\ufeff").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        # Not strip: a field may be empty or end in blanks.
        fields = line.rstrip("\r").split("\t")
        if len(fields) == 1 and len(line.split()) == 4:
            fields = line.split()  # only trec_eval's may have blanks
        if number == 1 and not NUMBER.fullmatch(fields[-1]):
            continue  # header line
        if len(fields) == 4:
            del fields[1]
        where = f"{path}:{number}"
        if len(fields) == 3 and _WHOLE.fullmatch(fields[2]):
            grade = int(fields[2].partition(".")[0])
            yield where, (fields[0], fields[1], grade)
        else:
            reason = "not query-id, corpus-id and a whole score, separated by tabs"
            yield where, reason


def _judgement_of_record(record: object) -> Judgement | str:
    judgement = record if isinstance(record, dict) else {}
    if "score" not in judgement:
        grade = judgement_column(judgement)
        if grade is not None:
            return f"no score, and {grade} is not read: call it score"
    query = judgement.get("query-id")
    document = judgement.get("corpus-id")
    score = judgement.get("score", 1)
    is_whole = isinstance(score, int) or (
        isinstance(score, float) and score.is_integer()
    )
    if query is None or document is None or not is_whole:
        return "not query-id, corpus-id and a whole score"
    return str(query), str(document), int(score)


@dataclass(frozen=True, eq=False)
class Corpus(Sequence[Item]):
    """Documents that are read when they are asked for, by number; 20 bytes are held for each."""

    reader: Format
    numbers: np.ndarray
    """Numbers of the records, int64 [n]."""
    lengths: np.ndarray
    """Lengths of the texts in characters, int32 [n]."""
    keys: np.ndarray
    """Keys of the contents, int64 [n]."""
    settings: ReadAs
    """Prompt and length of a source."""

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Item:  # type: ignore[override]
        record = self.record(index)
        item = Item(text=document_text(record))
        # The text was checked at opening and is read again only now; its key tells whether it is still the same.
        if item.key() != self.keys[index]:
            raise UserError(
                f"{self.reader.name} has changed since it was opened: start again"
            )
        return self.settings.document(item)

    def record(self, index: int) -> object:
        """Return a document's record with all its fields."""
        return self.reader.read(int(self.numbers[index]))


def read_beir_corpus(
    reader: Format,
    problems: list[str],
    notes: list[str],
) -> tuple[Corpus, FindIndex]:
    """Read a corpus once, without holding its texts. Return it, and what finds the index of a document by its `_id`.

    What is wrong with records is added to `problems`, and how many were joined to `notes`."""
    # A plain array grows in place. A list of Python numbers would take 30 to 40 bytes for each number.
    # Number of the record, its line, length of its text, key of its content, hash of its `_id`.
    values = array("q")
    for number, line, identity, text in identified_texts(reader, problems):
        key = Item(text=text).key()
        values.extend((number, line, len(text), key, id_key(identity)))
    table = np.array(values, np.int64).reshape(-1, 5)
    numbers, _, lengths, keys, hashes = table.T
    is_first = _first_occurrences(hashes)
    # Records with the `_id` of an earlier one are left out.
    for number, line in table[~is_first, :2].tolist():
        identity = str(document_id(reader.read(number)))
        problems.append(f"{reader.where(line)}: _id {identity} occurs twice")
    numbers = numbers[is_first]
    lengths = lengths[is_first]
    keys = keys[is_first]
    hashes = hashes[is_first]
    # Records with the content of an earlier one are joined with it.
    is_first = _first_occurrences(keys)
    num_joined = len(keys) - int(is_first.sum())
    if num_joined:
        notes.append(f"joined {counted(num_joined, 'document')} with equal content")
    document_of = KeyIndex(keys[is_first]).find(keys).astype(np.int32)
    documents = Corpus(
        reader,
        numbers[is_first],
        lengths[is_first].astype(np.int32),
        keys[is_first],
        ReadAs(),
    )
    identities = KeyIndex(hashes)

    def find(identity: str) -> int | None:
        record = int(identities.find(np.array([id_key(identity)]))[0])
        return None if record < 0 else int(document_of[record])

    return documents, find


def identified_texts(
    reader: Format,
    problems: list[str],
) -> Iterator[tuple[int, int, str, str]]:
    """Yield number, line, `_id` and text of the records. What is wrong with another one is added to `problems`."""
    for number, line, record in reader.rows():
        identity = document_id(record)
        text = document_text(record)
        if isinstance(record, BadRecord):
            reason = str(record)
        elif identity is None:
            reason = f"no id ({', '.join(ID_FIELDS)} are read)"
        elif has_lone_surrogate(text):
            reason = f"{identity} {LONE_SURROGATE}"
        elif not text:
            reason = f"{identity} has no text"
        else:
            yield number, line, identity, text
            continue
        problems.append(f"{reader.where(line)}: {reason}")


def id_key(identity: str) -> int:
    """Return a 63-bit number for the id of a document."""
    return Item(text=identity).key()


def _first_occurrences(keys: np.ndarray) -> Any:
    """Return, per key, whether none before it is equal (bool [n])."""
    is_first = np.zeros(len(keys), bool)
    is_first[np.unique(keys, return_index=True)[1]] = True
    return is_first
