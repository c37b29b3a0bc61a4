"""Known positives: the distinct queries of the rows, and every document that is known to be relevant for each."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vembed.data.examples import Item
from vembed.errors import UserError
from vembed.evaluation.beir_folder import is_beir_folder, qrels_files
from vembed.mining.config import DataOptions
from vembed.mining.documents import Documents, content_key
from vembed.mining.record_tables import RowSource, qrels_file, read_qrels

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


@dataclass(frozen=True)
class Pairs:
    """(query, document) pairs without repetition, ordered by query, then document."""

    queries: np.ndarray
    documents: np.ndarray

    def __len__(self) -> int:
        return len(self.queries)

    @classmethod
    def of(cls, queries: np.ndarray, documents: np.ndarray) -> Pairs:
        """Sort pairs and drop those that occur again."""
        both = np.stack(
            [np.asarray(queries, np.int64), np.asarray(documents, np.int64)], axis=1
        )
        unique = np.unique(both, axis=0) if len(both) else both.reshape(0, 2)
        return cls(unique[:, 0].copy(), unique[:, 1].copy())

    @classmethod
    def union(cls, parts: Sequence[Pairs]) -> Pairs:
        """All pairs of several lists."""
        return cls.of(
            np.concatenate([part.queries for part in parts]),
            np.concatenate([part.documents for part in parts]),
        )

    def take(self, chosen: np.ndarray) -> Pairs:
        """Some of them, by a mask or by ascending positions."""
        return Pairs(self.queries[chosen], self.documents[chosen])

    def bounds(self, num_queries: int) -> np.ndarray:
        """[num_queries + 1] where the pairs of each query begin, and the end of the last."""
        return np.searchsorted(self.queries, np.arange(num_queries + 1))

    def among(self, first: int, last: int) -> Pairs:
        """The pairs of queries first .. last - 1."""
        begin, end = np.searchsorted(self.queries, [first, last])
        return Pairs(self.queries[begin:end], self.documents[begin:end])

    def from_query(self, first: int, last: int) -> Pairs:
        """The pairs of queries first .. last - 1, whose queries count from `first`."""
        pairs = self.among(first, last)
        return Pairs(pairs.queries - first, pairs.documents)


class KnownPositives:
    """The distinct queries, which query each row has, and what is known of them."""

    def __init__(
        self, rows: RowSource, documents: Documents, options: DataOptions
    ) -> None:
        self._rows = rows
        queries = array("q")
        first_rows = array("q")
        numbers = dict[int, int]()
        exact = array("q")
        positives = _PairList()
        negatives = _PairList()
        texts = _PairList()
        ids = _Ids(options)
        for row in range(len(rows)):
            example = rows.example(row)
            key = content_key(example.query)
            # Queries are numbered by first occurrence: the same on every rank.
            query = numbers.setdefault(key, len(numbers))
            queries.append(query)
            if query == len(first_rows):
                first_rows.append(row)
                exact.append(example.query.key())
                texts.add(query, key)
            for item in example.positives:
                positives.add(query, content_key(item))
            for item in example.negatives:
                negatives.add(query, content_key(item))
            ids.add(query, rows.record(row))
        self.query_of_row = np.array(queries, np.int64)
        self.first_row = np.array(first_rows, np.int64)
        self.exact = np.array(exact, np.int64)
        """Key of each query as it is encoded: it differs where spaces or case differ."""
        by_id, self.notes = ids.pairs(documents, _qrels(options))
        self.positives = Pairs.union([positives.pairs(documents), by_id])
        """Known positives of each query: of all its rows, by content, and by id."""
        self.negatives = negatives.pairs(documents)
        """Negatives that the rows already have."""
        self.own = texts.pairs(documents)
        """Documents with the content of the query itself."""

    @property
    def num_queries(self) -> int:
        """Number of distinct queries."""
        return len(self.first_row)

    def item(self, query: int) -> Item:
        """A query as it is encoded."""
        return self._rows.example(int(self.first_row[query])).query

    def excluded(self, *, with_negatives: bool) -> Pairs:
        """Return contents that are no candidates: known positives, the query's own text, and its negatives."""
        # Positives of all rows of a query, not of the row alone: a negative of one row would be a positive of another.
        parts = [self.positives, self.own]
        if with_negatives:
            parts.append(self.negatives)
        return Pairs.union(parts)


class _PairList:
    """(query, content) pairs that are being collected."""

    def __init__(self) -> None:
        self.queries = array("q")
        self.keys = array("q")

    def add(self, query: int, key: int) -> None:
        self.queries.append(query)
        self.keys.append(key)

    def pairs(self, documents: Documents) -> Pairs:
        """Those whose content is a document."""
        numbers = documents.find_contents(np.array(self.keys, np.int64))
        is_document = numbers >= 0
        return Pairs.of(
            np.array(self.queries, np.int64)[is_document], numbers[is_document]
        )


class _Ids:
    """Ids that rows carry: of their query, and of their positives."""

    def __init__(self, options: DataOptions) -> None:
        self.query_fields = (
            (options.query_id_field,) if options.query_id_field else QUERY_ID_FIELDS
        )
        self.positive_fields = (
            (options.positive_id_field,)
            if options.positive_id_field
            else POSITIVE_ID_FIELDS
        )
        self.options = options
        self.queries: dict[str, int] = {}
        self.positives: list[tuple[int, str]] = []
        self.has_field = {"query_id_field": False, "positive_id_field": False}

    def add(self, query: int, record: dict[str, Any]) -> None:
        name = _first_present(self.query_fields, record)
        if name is not None:
            self.queries[str(record[name])] = query
            self.has_field["query_id_field"] = True
        name = _first_present(self.positive_fields, record)
        if name is not None:
            values = record[name] if isinstance(record[name], list) else [record[name]]
            self.positives += [(query, str(identity)) for identity in values]
            self.has_field["positive_id_field"] = True

    def pairs(
        self, documents: Documents, qrels: dict[str, list[str]]
    ) -> tuple[Pairs, list[str]]:
        for option, field in (
            ("query_id_field", self.options.query_id_field),
            ("positive_id_field", self.options.positive_id_field),
        ):
            if field and not self.has_field[option]:
                raise UserError(f"{option}: {field} is a field that no row has")
        pairs = list(self.positives)
        has_query = False
        for query_id, document_ids in qrels.items():
            query = self.queries.get(query_id)
            if query is not None:
                has_query = True
                pairs += [(query, identity) for identity in document_ids]
        notes = []
        if qrels and not has_query:
            notes.append(
                "qrels: no row has the id of a query in them, so they add no known positive"
            )
        identities = [identity for _, identity in pairs]
        numbers = documents.find_ids(identities)
        is_document = numbers >= 0
        missing = np.flatnonzero(~is_document)
        if documents.has_ids and len(missing):
            notes.append(
                f"ids: {len(missing):,d} ids of positives are not in the corpus, "
                f"the first: {identities[missing[0]]}"
            )
        queries = np.array([query for query, _ in pairs], np.int64)
        return Pairs.of(queries[is_document], numbers[is_document]), notes


def _first_present(names: Sequence[str], record: dict[str, Any]) -> str | None:
    for name in names:
        if record.get(name) is not None:
            return name
    return None


def _qrels(options: DataOptions) -> dict[str, list[str]]:
    """Return relevant pairs from qrels: the file that is given, or those of the corpus's BEIR-style folders."""
    if options.qrels_path is not None:
        return read_qrels(Path(options.qrels_path))
    corpus_paths = options.corpus_path or []
    if isinstance(corpus_paths, str):
        corpus_paths = [corpus_paths]
    relevant: dict[str, list[str]] = {}
    for path in corpus_paths:
        folder = Path(path).expanduser()
        if is_beir_folder(folder) and qrels_files(folder):
            judged = read_qrels(qrels_file(folder, options.split))
            for identity, documents in judged.items():
                relevant.setdefault(identity, []).extend(documents)
    return relevant
