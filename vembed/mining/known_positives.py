"""Known positives: the distinct queries of the rows, and every document that is known to be relevant for each."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vembed.data.examples import Item
from vembed.errors import UserError
from vembed.evaluation.beir_folder import choose_qrels, is_beir_folder, qrels_files
from vembed.evaluation.top_k import Pairs
from vembed.mining.config import DataOptions, paths_of
from vembed.mining.documents import Documents, content_key
from vembed.mining.record_tables import SPLITS, Rows, open_rows, read_qrels

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

    def __init__(self, rows: Rows, documents: Documents, options: DataOptions) -> None:
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
        by_id: list[tuple[int, str]] = []
        for row in range(len(rows)):
            example = rows.example(row)
            key = content_key(example.query)
            # Queries are numbered by first occurrence: the same on every rank.
            query = number_of.setdefault(key, len(number_of))
            query_of_row.append(query)
            if query == len(first_row):
                first_row.append(row)
                exact.append(example.query.key())
                texts.extend((query, key))
            for item in example.positives:
                positives.extend((query, content_key(item)))
            for item in example.negatives:
                negatives.extend((query, content_key(item)))
            record = rows.record(row)
            identity = _first_value(record, options.query_id_field, QUERY_ID_FIELDS)
            if identity is not None:
                query_of_id[str(identity)] = query
            ids = _first_value(record, options.positive_id_field, POSITIVE_ID_FIELDS)
            if ids is not None:
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
        """Key of each query as it is encoded: it differs where spaces or case differ."""
        self._first_row = first_row
        self.notes: list[str] = []
        """Lines for the log."""
        qrels = _qrels(options)
        if qrels and query_of_id.keys().isdisjoint(qrels):
            self.notes.append(
                "qrels: no row has the id of a query in them, so they add no known positive"
            )
        for identity, relevant in qrels.items():
            if identity in query_of_id:
                query = query_of_id[identity]
                by_id += [(query, document) for document in relevant]
        known = [_pairs(positives, documents), self._pairs_by_id(by_id, documents)]
        self.positives = Pairs.union(known)
        """Known positives of each query: of all its rows, by content, and by id."""
        self.negatives = _pairs(negatives, documents)
        """Negatives that the rows already have."""
        self._texts = _pairs(texts, documents)

    def item(self, query: int) -> Item:
        """A query as it is encoded."""
        return self._rows.example(self._first_row[query]).query

    def excluded(self, *, with_negatives: bool) -> Pairs:
        """Return contents that are no candidates: known positives, the query's own text, and its negatives."""
        # Positives of all rows of a query, not of the row alone: a negative of one row would be a positive of another.
        parts = [self.positives, self._texts]
        if with_negatives:
            parts.append(self.negatives)
        return Pairs.union(parts)

    def _pairs_by_id(self, by_id: list[tuple[int, str]], documents: Documents) -> Pairs:
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
class Inputs:
    """Inputs that are read before any model is loaded."""

    rows: Rows
    documents: Documents
    known: KnownPositives

    def summary(self) -> list[str]:
        """Lines for the log."""
        known = self.known
        lines = [
            f"data: {len(self.rows):,d} rows, {known.num_queries:,d} distinct queries, "
            f"{len(known.positives):,d} known positives, {len(known.negatives):,d} negatives that are there already"
        ]
        return [*lines, self.documents.summary(), *known.notes]


def read_inputs(config: DataOptions) -> Inputs:
    """Check and read the data, the corpus and what is known."""
    rows = open_rows(config)
    documents = Documents(config, rows)
    return Inputs(rows, documents, KnownPositives(rows, documents, config))


def _pairs(values: array[int], documents: Documents) -> Pairs:
    """The (query, content) pairs whose content is a document."""
    table = np.array(values, np.int64).reshape(-1, 2)
    numbers = documents.find_contents(table[:, 1])
    return Pairs.of(table[numbers >= 0, 0], numbers[numbers >= 0])


def _first_value(
    record: dict[str, Any], field: str | None, usual: tuple[str, ...]
) -> Any:
    for name in (field,) if field else usual:
        if record.get(name) is not None:
            return record[name]
    return None


def _qrels(options: DataOptions) -> dict[str, list[str]]:
    """Return relevant pairs from qrels: the file that is given, or those of the corpus's BEIR-style folders."""
    if options.qrels_path is not None:
        return read_qrels(Path(options.qrels_path))
    relevant: dict[str, list[str]] = {}
    for path in paths_of(options.corpus_path):
        folder = Path(path).expanduser()
        if is_beir_folder(folder) and qrels_files(folder):
            splits = [options.split] if options.split else SPLITS
            judged = read_qrels(choose_qrels(folder, splits))
            for identity, documents in judged.items():
                relevant.setdefault(identity, []).extend(documents)
    return relevant
