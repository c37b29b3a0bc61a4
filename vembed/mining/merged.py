"""Rows with their negatives: every field of the input, and what the mining adds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vembed.data.columns import is_negative_name
from vembed.data.conversations import as_fields, is_conversation
from vembed.data.examples import Example, Item
from vembed.mining.choice import of_turn
from vembed.mining.config import MineConfig
from vembed.mining.documents import Documents, content_key, row_value
from vembed.mining.judges import UNDECIDED, Judged
from vembed.mining.known_positives import KnownPositives, Pairs
from vembed.mining.record_tables import Rows

SCORE_NAMES = ("negative_score", "negative_scores", "neg_scores")
POSITIVE_NAME = "positive"
QUERY_NAME = "query"
NEGATIVES_NAME = "negatives"


class PairScores:
    """Scores of (query, document) pairs, looked up by content."""

    def __init__(self, documents: Documents, pairs: Pairs, scores: np.ndarray) -> None:
        self._documents = documents
        # One sorted number per pair, for a binary search. Both have less than 32 bits.
        codes = pairs.queries << 32 | pairs.documents
        order = np.argsort(codes, kind="stable")
        self._codes = codes[order]
        self._scores = scores[order]

    def of(self, query: int, items: Sequence[Item]) -> list[float]:
        """The score of each item for a query. All of them are known."""
        codes = query << 32 | self._documents.find_contents(
            [content_key(item) for item in items]
        )
        places = np.searchsorted(self._codes, codes)
        assert (self._codes[places] == codes).all(), (
            "positives and negatives of the rows are documents"
        )
        return [round(float(score), 6) for score in self._scores[places]]


class RowMaker:
    """Joins the rows with what was chosen for their queries."""

    def __init__(
        self,
        rows: Rows,
        documents: Documents,
        known: KnownPositives,
        config: MineConfig,
        judged: Judged,
        scores: PairScores,
    ) -> None:
        """`judged`: of all queries. `scores`: of what the rows have already."""
        self._rows = rows
        self._documents = documents
        self._known = known
        self._config = config
        self._judged = judged
        self._chosen = judged.chosen
        self._scores = scores
        self.num_relabelled = 0
        self.num_negatives = self.num_short = self.num_dropped = self.num_rows = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows to write, in the order of the input."""
        turns = np.zeros(self._known.num_queries, np.int64)
        for row in range(len(self._rows)):
            query = int(self._known.query_of_row[row])
            columns = self._of_turn(query, int(turns[query]))
            turns[query] += 1
            made = self._row(row, query, columns)
            self.num_short += len(columns) < self._config.num_negatives
            if not made[NEGATIVES_NAME] and self._config.on_missing == "drop":
                self.num_dropped += 1
                continue
            self.num_rows += 1
            self.num_negatives += len(columns)
            yield made

    def _of_turn(self, query: int, turn: int) -> list[int]:
        """Columns of the negatives for a query's row number `turn`."""
        columns = np.flatnonzero(self._chosen.documents[query] >= 0)
        return [
            int(column) for column in of_turn(columns, turn, self._config.num_negatives)
        ]

    def _row(self, row: int, query: int, columns: Sequence[int]) -> dict[str, Any]:
        table, number = self._rows.locate(row)
        record = table.record(number)
        example = table.example(number)
        folder = table.image_folder
        if is_conversation(record):  # written as the fields that it is read as
            record = {**as_fields(record), QUERY_NAME: None, POSITIVE_NAME: None}
            if example.negatives:
                record[NEGATIVES_NAME] = [
                    row_value(item, folder) for item in example.negatives
                ]
        # Scores of the negatives that were there would not fit those that come.
        made = {}
        for name, value in record.items():
            is_dropped = not self._config.keep_negatives and self._is_negative(name)
            if name not in SCORE_NAMES and not is_dropped:
                made[name] = value
        if made.get(QUERY_NAME) is None:
            made[QUERY_NAME] = row_value(example.query, folder)
        if made.get(POSITIVE_NAME) is None:
            values = [row_value(item, folder) for item in example.positives]
            made[POSITIVE_NAME] = values if len(values) > 1 else values[0]
        added = self._added_positives(query, example)
        if added:
            positives = made[POSITIVE_NAME]
            if not isinstance(positives, list):
                positives = [positives]
            new_positives = [row_value(item, folder) for item in added]
            made[POSITIVE_NAME] = positives + new_positives
            self.num_relabelled += len(added)
        kept_values = self._kept_negatives(made, example, folder)
        numbers = [int(self._chosen.documents[query, column]) for column in columns]
        made[NEGATIVES_NAME] = kept_values + [
            row_value(self._documents.item(document), folder) for document in numbers
        ]
        if self._documents.has_ids:
            made["negative_ids"] = [None] * len(kept_values) + [
                self._documents.identity(document) for document in numbers
            ]
        if self._config.scores:
            self._add_scores(made, query, example, added, columns)
        return made

    def _is_negative(self, name: str) -> bool:
        return is_negative_name((self._config.column_mapping or {}).get(name, name))

    def _kept_negatives(
        self, made: dict[str, Any], example: Example, folder: str
    ) -> list[Any]:
        """Return negatives that stay in front of the mined ones. With scores these are all of the row's: the scores
        have the order in which the negatives are read."""
        if not self._config.keep_negatives:
            return []
        if self._config.scores and example.negatives:
            for name in [name for name in made if self._is_negative(name)]:
                del made[name]
            return [row_value(item, folder) for item in example.negatives]
        before = made.get(NEGATIVES_NAME)
        if before is None:
            return []
        return before if isinstance(before, list) else [before]

    def _add_scores(
        self,
        made: dict[str, Any],
        query: int,
        example: Example,
        added: Sequence[Item],
        columns: Sequence[int],
    ) -> None:
        if example.scores is None:
            made["positive_scores"] = self._scores.of(
                query, [*example.positives, *added]
            )
        kept_scores = (
            self._scores.of(query, example.negatives)
            if self._config.keep_negatives
            else []
        )
        made["negative_scores"] = kept_scores + [
            round(float(self._chosen.scores[query, column]), 6) for column in columns
        ]
        if self._config.judges:
            judge_scores: list[float | None] = [None] * len(kept_scores)
            for column in columns:
                judgement = float(self._judged.judgements[query, column])
                judge_scores.append(
                    None if judgement == UNDECIDED else round(judgement, 6)
                )
            made["negative_judge_scores"] = judge_scores

    def _added_positives(self, query: int, example: Example) -> list[Item]:
        """Return documents that judges made positives of this query; none for a row with scores of its own."""
        if example.scores is not None:
            return []
        return [
            self._documents.item(number)
            for number in self._judged.relabelled.get(query, ())
        ]
