"""What is mined: the rows of the data, the documents that are searched, and the known positives of each query."""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vembed.config.schema import sources_of
from vembed.data.example_store import (
    NUM_NAMED,
    Records,
    Rows,
    open_records,
    refuse_bad_records,
    refuse_bad_sources,
)
from vembed.data.examples import BadRecord, Example, ImageRoot, Item, KeyIndex, ReadAs
from vembed.data.formats.base import FILE_BITS, Format
from vembed.data.formats.saved_datasets import Role
from vembed.data.formats.table import SeveralFiles, open_document_reader
from vembed.data.near_duplicates import casefolded
from vembed.data.records import Record, document_id, document_item, document_text
from vembed.errors import UserError
from vembed.evaluation.dataset import (
    DEV_FIRST,
    Corpus,
    beir_qrels,
    choose_qrels,
    id_key,
    is_beir_folder,
    qrels_files,
    read_beir,
    read_judgements,
    texts_path,
)
from vembed.evaluation.top_k import Pairs
from vembed.mining.options import DataOptions, RecordOptions, RowOptions, paths_of
from vembed.parallel.session import Session, start_command_session
from vembed.progress import Log

log = logging.getLogger("vembed")

SPLITS = ("train", *DEV_FIRST)


@contextmanager
def open_command_session(log_line: Log | None) -> Iterator[tuple[Session, Log]]:
    """Yield the session of a command, and what prints a line on the first process."""
    with start_command_session() as session:
        log_line = log_line or log.info
        yield session, log_line if session.is_main else lambda _: None


class BeirTable:
    """A BEIR-style folder as rows: a query with its relevant documents and the ids of all."""

    def __init__(
        self,
        folder: Path,
        qrels: Path,
        options: RowOptions,
        settings: ReadAs,
    ) -> None:
        self.name = str(folder)
        self.column_mapping = options.column_mapping
        self.settings = settings
        data = read_beir(folder, qrels, options.on_bad_record)
        self._data = data.read_as(settings)
        self._query_ids = {
            number: identity for identity, number in self._data.query_ids.items()
        }

    def __len__(self) -> int:
        return len(self._data.queries)

    def record(self, number: int) -> Record:
        """The query, the texts of its relevant documents, and the ids."""
        corpus = self._data.documents
        assert isinstance(corpus, Corpus)
        ids = []
        texts = []
        for document in self._data.relevance[number]:
            record = corpus.record(document)
            ids.append(document_id(record))
            texts.append(document_text(record))
        return {
            "query_id": self._query_ids[number],
            "query": self._data.queries[number].text,
            "positive": texts,
            "positive_ids": ids,
        }

    def row(self, number: int, _: ImageRoot) -> Record:
        """The same: it holds no images."""
        return self.record(number)

    def example(self, number: int) -> Example:
        """Meaning of a row."""
        documents = self._data.documents
        relevant = self._data.relevance[number]
        positives = tuple(documents[document] for document in relevant)
        where = f"{self.name}, query {self._query_ids[number]}"
        return Example(self._data.queries[number], positives, where=where)


def open_rows(options: RowOptions, role: Role = "train") -> Rows:
    """Check every record of `data_path`; a `UserError` names the first ten that cannot be used."""
    entries = sources_of(options.data_path)
    sources: list[Records | BeirTable] = []
    splits = SPLITS if role == "train" else DEV_FIRST
    for entry in entries:
        beir = beir_qrels(entry.path, [options.split] if options.split else splits)
        if beir is not None:
            sources.append(BeirTable(*beir, options, ReadAs.of(entry)))
            continue
        sources.append(
            open_records(
                options,
                entry,
                role,
                num_sources=len(entries),
                reads_all=True,
            )
        )
    refuse_bad_sources(
        [source for source in sources if isinstance(source, Records)],
        on_bad_record=options.on_bad_record,
    )
    return Rows(sources)


NUM_COLUMNS = 5
NUMBER, SLOT, KEY, EXACT, ID = range(NUM_COLUMNS)
"""Columns of a table of documents, which has a row for each: number of the record in the corpus, or of the row of the
training data; place among the positives and negatives of that row, or IN_CORPUS; content apart from case and spaces;
what the vector depends on; key of the id, or 0."""
IN_CORPUS = -1
"""In place of a place in a row: a document of the corpus."""


def content_key(item: Item) -> int:
    """A 63-bit number that is the same for items with the same text apart from case, width and spaces, and the same images."""
    return item.key(casefolded)


def vector_key(item: Item) -> int:
    """A 63-bit number for all that an item's vector depends on besides the model."""
    if item.prompt is None and item.max_length is None:
        return item.key()
    return Item(f"{item.key()} {item.max_length} {item.prompt}").key()


def array_identity(values: np.ndarray) -> str:
    """Return a hash of an array's numbers in their order."""
    return hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest()


class CorpusFiles:
    """The documents of some files."""

    def __init__(self, paths: Mapping[str, ReadAs], options: RecordOptions) -> None:
        """Check and read all of them. `paths`: with the prompt and the length of their documents."""
        readers: list[Format] = []
        self._settings: list[ReadAs] = []
        for path, settings in paths.items():
            file = texts_path(Path(path).expanduser(), "corpus") or path
            for reader in open_document_reader(file).single_files:
                readers.append(reader)
                self._settings.append(settings)
        self.reader = SeveralFiles(", ".join(paths), readers)
        self._images = [ImageRoot.of(options, reader.folder) for reader in readers]
        table = array("q")
        problems: list[str] = []
        num_bad = 0
        for number, line, record in self.reader.rows():
            try:
                item = self.item(record, number)
            except BadRecord as error:
                num_bad += 1
                if len(problems) < NUM_NAMED:
                    problems.append(f"{self.reader.where(line)}: {error}")
                continue
            identity = document_id(record)
            key = 0 if identity is None else id_key(identity)
            table.extend((number, IN_CORPUS, content_key(item), vector_key(item), key))
        refuse_bad_records(
            problems,
            num_bad=num_bad,
            num_good=len(table) // NUM_COLUMNS,
            on_bad_record=options.on_bad_record,
        )
        if not table:
            raise UserError(f"{self.reader.name} holds no documents")
        self.table = _as_table(table)
        self.notes = []
        """Lines for the log."""
        if num_bad:
            self.notes.append(
                f"documents: left out {num_bad:,d} that cannot be used, the first: {problems[0]}"
            )

    def images(self, number: int) -> ImageRoot:
        """Where relative paths of images of a record start."""
        return self._images[number >> FILE_BITS]

    def item(self, record: Any, number: int) -> Item:
        """The document that a record means; `BadRecord` says why it means none."""
        item = document_item(record, self.images(number))
        return self._settings[number >> FILE_BITS].document(item)

    def read(self, number: int) -> Item:
        """The document of a record."""
        return self.item(self.reader.read(number), number)


def distinct_by(table: np.ndarray, column: int) -> np.ndarray:
    """The rows of a table with distinct values in a column, where each came first."""
    # return_index gives the first place of each value; sorted, the documents keep the order of the files.
    _, first = np.unique(table[:, column], return_index=True)
    return table[np.sort(first)]


class Documents:
    """Distinct documents by number: first the candidates, then documents of the rows that the corpus does not hold."""

    def __init__(
        self,
        options: DataOptions,
        rows: Rows,
    ) -> None:
        """The documents of `corpus_path`, of the BEIR-style folders in `data_path`, or else of the rows themselves."""
        paths = dict.fromkeys(paths_of(options.corpus_path), ReadAs())
        if not paths:
            for source in rows.sources:
                if isinstance(source, BeirTable):
                    paths[source.name] = source.settings
        self._rows = rows
        self._corpus = CorpusFiles(paths, options) if paths else None
        of_rows = array("q")
        for row, example in enumerate(rows):
            for slot, item in enumerate(example.documents):
                key = content_key(item)
                of_rows.extend((row, slot, key, vector_key(item), 0))
        # With a corpus, documents of the rows that it lacks are scored as positives and negatives, and never mined.
        # Without one the documents of all rows are the candidates.
        row_documents = _as_table(of_rows)
        corpus = row_documents
        notes: list[str] = []
        if self._corpus is not None:
            corpus = self._corpus.table
            notes = self._corpus.notes
        candidates = distinct_by(corpus, KEY)
        self.notes = [f"documents: {len(candidates):,d} to search", *notes]
        """Lines for the log."""
        self.num_candidates = len(candidates)
        self._table = distinct_by(np.concatenate([candidates, row_documents]), KEY)
        num_copies = len(corpus) - len(candidates)
        if num_copies:
            self.notes.append(f"documents: joined {num_copies:,d} with equal content")
        num_extra = len(self) - len(candidates)
        if num_extra:
            self.notes.append(
                f"documents: {num_extra:,d} of the rows are not among them, and are no candidates"
            )
        self.exact = self._table[:, EXACT].copy()
        """What the vector of each document depends on, as a number."""
        # An id leads to the document that stands for its content, also where that one came first under another id.
        with_id = corpus[corpus[:, ID] != 0]
        self._by_content = KeyIndex(self._table[:, KEY])
        self._by_id = KeyIndex(with_id[:, ID])
        # The last one, number -1, is for ids that are not there.
        self._number_of_id = np.append(self.find_contents(with_id[:, KEY]), -1)
        self.has_ids = len(with_id) > 0
        ids, counts = np.unique(
            np.unique(with_id[:, [ID, KEY]], axis=0)[:, 0], return_counts=True
        )
        self._ambiguous_ids = ids[counts > 1]

    def __len__(self) -> int:
        return len(self._table)

    def item(self, number: int) -> Item:
        """A document as it is encoded."""
        place, slot = map(int, self._table[number, : SLOT + 1])
        if self._corpus is None or slot != IN_CORPUS:
            return self._rows[place].documents[slot]
        return self._corpus.read(place)

    def identity(self, number: int) -> str | None:
        """A document's id in its file, if it has one."""
        place, slot = map(int, self._table[number, : SLOT + 1])
        if self._corpus is None or slot != IN_CORPUS:
            return None
        return document_id(self._corpus.reader.read(place))

    def find_contents(self, keys: Sequence[int] | np.ndarray) -> np.ndarray:
        """The numbers of documents with these contents, -1 where there is none."""
        return self._by_content.find(np.asarray(keys, np.int64))

    def find_ids(self, identities: Sequence[str]) -> np.ndarray:
        """The numbers of documents with these ids, -1 where there is none."""
        keys = np.array(list(map(id_key, identities)), np.int64)
        is_ambiguous = np.isin(keys, self._ambiguous_ids)
        if is_ambiguous.any():
            raise UserError(
                f"the id {identities[int(is_ambiguous.argmax())]} of a positive stands for different documents: give them "
                "different ids, or mine each corpus alone"
            )
        numbers: np.ndarray = self._number_of_id[self._by_id.find(keys)]
        return numbers


def _as_table(values: array[int]) -> np.ndarray:
    return np.array(values, np.int64).reshape(-1, NUM_COLUMNS)


def row_values(items: Iterable[Item], root: ImageRoot) -> list[Any]:
    """Return items as a row of training data holds them whose paths of images start in `root`."""
    values: list[Any] = []
    for item in items:
        images = list(map(root.name_of, item.images))
        if not images:
            values.append(item.text)
            continue
        value: dict[str, Any] = {} if item.text is None else {"text": item.text}
        value["image"] = images[0] if len(images) == 1 else images
        values.append(value)
    return values


QUERY_ID_FIELDS = ("query_id", "qid", "query-id", "_id")
POSITIVE_ID_FIELDS = (
    "positive_id",
    "positive_ids",
    "pos_id",
    "pos_ids",
    "document_id",
    "doc_id",
    "corpus_id",
    "corpus-id",
)


class KnownPositives:
    """The distinct queries, which query each row has, and what is known of them."""

    def __init__(
        self,
        rows: Rows,
        documents: Documents,
        options: DataOptions,
    ) -> None:
        for option in ("qrels_path", "positive_id_field"):
            value = getattr(options, option)
            if value is not None and not documents.has_ids:
                raise UserError(
                    f"{option}: {value} names documents by their ids, and the corpus has none: give each document an "
                    f"_id in corpus_path, or leave {option} out"
                )
        # Without ids of documents, those of a row lead nowhere: its other fields need not be read.
        reads_ids = documents.has_ids or options.query_id_field is not None
        self._rows = rows
        number_of = dict[int, int]()
        query_of_row = array("q")
        first_row = array("q")
        exact = array("q")
        # (query, content) after each other.
        positives = array("q")
        negatives = array("q")
        texts = array("q")
        query_of_id: dict[str, int] = {}
        ambiguous_ids = set()
        by_id = []
        for row, example in enumerate(rows):
            key = content_key(example.query)
            # Queries are numbered by first occurrence: the same on every rank.
            query = number_of.setdefault(key, len(number_of))
            query_of_row.append(query)
            if query == len(first_row):
                first_row.append(row)
                exact.append(vector_key(example.query))
                texts.extend((query, key))
            for item in example.positives:
                positives.extend((query, content_key(item)))
            for item in example.negatives:
                negatives.extend((query, content_key(item)))
            source, number = rows.locate(row)
            record = source.record(number) if reads_ids else {}
            identity = _first_value(record, options.query_id_field, QUERY_ID_FIELDS)
            if identity is not None:
                earlier = query_of_id.setdefault(str(identity), query)
                if earlier != query:
                    ambiguous_ids.add(str(identity))
            ids = _first_value(record, options.positive_id_field, POSITIVE_ID_FIELDS)
            # The positives of a BEIR-style folder are known by their content, and another folder may have the same ids.
            if ids is not None and not isinstance(source, BeirTable):
                for identity in ids if isinstance(ids, list) else [ids]:
                    by_id.append((query, str(identity)))
        for option, field, values in (
            ("query_id_field", options.query_id_field, query_of_id),
            ("positive_id_field", options.positive_id_field, by_id),
        ):
            if field and not values:
                raise UserError(f"{option}: {field} is a field that no row has")
        self.query_of_row = np.array(query_of_row, np.int64)
        self.num_queries = len(first_row)
        self.exact = np.array(exact, np.int64)
        """What the vector of each query depends on, as a number."""
        self._first_row = first_row
        self.notes: list[str] = []
        """Lines for the log."""
        judged = set()
        for path in _qrels_of(options):
            for where, judgement in read_judgements(path):
                if isinstance(judgement, str):
                    raise UserError(f"{where}: {judgement}")
                identity, document, grade = judgement
                if identity in ambiguous_ids:
                    raise UserError(
                        f"{where}: the id {identity} stands for different queries: give them different ids, or mine "
                        "each file alone"
                    )
                judged.add(identity)
                if grade > 0 and identity in query_of_id:
                    by_id.append((query_of_id[identity], document))
        if judged and judged.isdisjoint(query_of_id):
            self.notes.append(
                "qrels: no row has the id of a query in them, so they add no known positive"
            )
        known = [_pairs(positives, documents), self._pairs_by_id(by_id, documents)]
        self.positives = Pairs.union(known)
        """Known positives of each query: of all its rows, by content, and by id."""
        self.negatives = _pairs(negatives, documents)
        """Negatives that the rows already have."""
        self._texts = _pairs(texts, documents)

    def item(self, query: int) -> Item:
        """A query as it is encoded."""
        return self._rows[self._first_row[query]].query

    def excluded(self, *, with_negatives: bool) -> Pairs:
        """Return contents that are no candidates: known positives, the query's own text, and its negatives."""
        # Positives of all rows of a query, not of the row alone: a negative of one row would be a positive of another.
        parts = [self.positives, self._texts]
        if with_negatives:
            parts.append(self.negatives)
        return Pairs.union(parts)

    def _pairs_by_id(
        self,
        by_id: list[tuple[int, str]],
        documents: Documents,
    ) -> Pairs:
        queries = np.array([query for query, _ in by_id], np.int64)
        identities = [identity for _, identity in by_id]
        numbers = documents.find_ids(identities)
        missing = np.flatnonzero(numbers < 0)
        if documents.has_ids and len(missing):
            self.notes.append(
                f"ids: {len(missing):,d} ids of positives are not in the corpus, "
                f"the first: {identities[missing[0]]}"
            )
        return Pairs.of(queries[numbers >= 0], numbers[numbers >= 0])


@dataclass(frozen=True)
class MiningInputs:
    """Inputs that are read before any model is loaded."""

    rows: Rows
    documents: Documents
    known: KnownPositives

    def summary(self) -> list[str]:
        """Lines for the log."""
        known = self.known
        return [
            f"data: {len(self.rows):,d} rows, {known.num_queries:,d} distinct queries, "
            f"{len(known.positives):,d} known positives, {len(known.negatives):,d} negatives that are there already",
            *self.documents.notes,
            *known.notes,
        ]


def read_mining_inputs(config: DataOptions) -> MiningInputs:
    """Check and read the data, the corpus and what is known."""
    rows = open_rows(config)
    documents = Documents(config, rows)
    return MiningInputs(rows, documents, KnownPositives(rows, documents, config))


def _pairs(values: array[int], documents: Documents) -> Pairs:
    """The (query, content) pairs whose content is a document."""
    table = np.array(values, np.int64).reshape(-1, 2)
    numbers = documents.find_contents(table[:, 1])
    return Pairs.of(table[numbers >= 0, 0], numbers[numbers >= 0])


def _first_value(
    record: Record,
    field: str | None,
    usual: tuple[str, ...],
) -> Any:
    for name in (field,) if field else usual:
        if record.get(name) is not None:
            return record[name]
    return None


def _qrels_of(options: DataOptions) -> list[Path]:
    """Return the qrels file that is given, or those of the corpus's BEIR-style folders."""
    if options.qrels_path is not None:
        return [Path(options.qrels_path)]
    paths = []
    for path in paths_of(options.corpus_path):
        folder = Path(path).expanduser()
        if is_beir_folder(folder) and qrels_files(folder):
            splits = [options.split] if options.split else SPLITS
            paths.append(choose_qrels(folder, splits))
    return paths
