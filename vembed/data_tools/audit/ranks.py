"""Checks with a model: where positives rank, how many negatives would be false, what each source adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vembed.data_tools.audit.checks import (
    AuditedRows,
    Finding,
    cleaning_command,
    preview,
)
from vembed.errors import UserError
from vembed.mining.candidates import Candidates, CandidateSearch
from vembed.mining.choice import calibrate
from vembed.mining.config import MineConfig
from vembed.mining.mine import Inputs

LOW_RANK = 10
"""A positive below so many other documents is looked at."""


@dataclass(frozen=True)
class QueryRanks:
    """Ranks of the known positives of each query, and the documents above them."""

    best: np.ndarray
    """[Q] how many candidates are above the best known positive; the number of candidates where all are."""
    best_score: np.ndarray
    """[Q] of the best known positive; -inf where none is known."""
    deepest: np.ndarray
    """[Q] the score of the last candidate."""
    first: np.ndarray
    """[Q] the candidate with the highest score."""
    first_score: np.ndarray

    @classmethod
    def of(cls, chunks: Sequence[Candidates]) -> QueryRanks:
        """From the candidates of all queries."""
        columns: list[tuple[np.ndarray, ...]] = []
        for candidates in chunks:
            best_score = np.full(len(candidates), -np.inf)
            # ufunc.at, not fancy indexing: a query with several positives occurs several times.
            np.maximum.at(
                best_score, candidates.positives.queries, candidates.positive_scores
            )
            scores = candidates.scores
            finite = np.where(np.isfinite(scores), scores, np.inf)
            # Known positives are no candidates, so that all above are others.
            columns.append(
                (
                    (scores > best_score[:, None]).sum(axis=1),
                    best_score,
                    finite.min(axis=1, initial=np.inf),
                    candidates.documents[:, 0],
                    scores[:, 0],
                )
            )
        return cls(*map(np.concatenate, zip(*columns, strict=True)))


class RankChecks:
    """Findings of a model about the data, its metrics by source, and rows that may be dropped."""

    def __init__(
        self,
        inputs: Inputs,
        store: CandidateSearch,
        data: AuditedRows,
        config: MineConfig,
        num_examples: int,
        arguments: str,
    ) -> None:
        self._inputs = inputs
        self._data = data
        self._config = config
        self._num_examples = num_examples
        self._arguments = arguments
        self._chunks = list(store.chunks())
        self._ranks = QueryRanks.of(self._chunks)
        # [rows] documents above the best known positive of the row's query.
        self._above = self._ranks.best[inputs.known.query_of_row]
        is_weak = self._ranks.best_score < self._ranks.deepest
        low = np.flatnonzero(self._above >= LOW_RANK)
        weak = np.flatnonzero(is_weak[inputs.known.query_of_row])
        self.rows_to_drop = {
            "low_positives": set(low.tolist()),
            "weak_queries": set(weak.tolist()),
        }
        findings = [
            self._row_finding(
                "low_positives",
                f"Positives that rank below {LOW_RANK} or more other documents",
                "The model finds other documents more similar to the query than each of its known positives. These "
                "rows are hard, or wrong.",
                low[np.argsort(-self._above[low], kind="stable")],
            ),
            self._row_finding(
                "weak_queries",
                "Queries without any positive that looks relevant",
                f"None of the known positives is among the {config.top_k} documents that are most similar to the "
                "query.",
                weak,
            ),
            self._false_negatives(),
        ]
        self.findings = [finding for finding in findings if finding is not None]

    def by_source(self) -> dict[str, object]:
        """Per source: rows, the share whose positive the model ranks first, among the first ten, and the median
        number of documents above it."""
        metrics: dict[str, object] = {}
        sources = np.array(self._data.sources)
        for number, name in enumerate(self._data.names):
            above = self._above[sources == number]
            metrics[name] = {
                "rows": len(above),
                "found_first": float((above == 0).mean()),
                "found_in_10": float((above < 10).mean()),
                "median_above": float(np.median(above)),
            }
        return metrics

    def _row_finding(
        self, kind: str, title: str, text: str, rows: np.ndarray
    ) -> Finding | None:
        if not len(rows):
            return None
        return Finding(
            kind,
            "warning",
            title,
            text,
            len(rows),
            len(rows) / max(len(self._data), 1),
            cleaning_command(self._arguments, kind),
            [self._row_preview(int(row)) for row in rows[: self._num_examples]],
        )

    def _false_negatives(self) -> Finding | None:
        """Estimated share of relevant documents among the best candidates, and those nearest above a positive."""
        ranks = self._ranks
        text = "Too few queries with known positives for an estimate of the rate."
        try:
            estimate = calibrate(self._chunks, self._config, self._config.seed)
        except UserError:  # too few queries
            estimate = None
        if estimate is not None:
            text = (
                f"An estimated {estimate.rate_without:.1%} of the best {self._config.num_negatives} candidates of "
                f"each query are in truth relevant ({estimate.num_hidden:,d} known positives were hidden for the "
                f"estimate). {estimate.threshold} brings the rate to {estimate.rate:.1%}."
            )
        above = np.flatnonzero((ranks.best > 0) & np.isfinite(ranks.best_score))
        if estimate is None and not len(above):
            return None
        lead = (ranks.first_score - ranks.best_score)[above]
        examples = []
        for query in above[np.argsort(-lead, kind="stable")][: self._num_examples]:
            document = self._inputs.documents.item(int(ranks.first[query]))
            examples.append(
                {
                    "query": preview(self._inputs.known.item(int(query))),
                    "known positive scores": f"{ranks.best_score[query]:.3f}",
                    "candidate scores": f"{ranks.first_score[query]:.3f}",
                    "candidate": preview(document),
                }
            )
        data_path = self._config.data_path
        if isinstance(data_path, list):
            data_path = (
                data_path[0] if isinstance(data_path[0], str) else data_path[0].path
            )
        return Finding(
            "false_negatives",
            "warning",
            "Documents above the known positive: candidates for false negatives",
            text,
            len(above),
            len(above) / max(self._inputs.known.num_queries, 1),
            f"vembed mine model_name={self._config.model_name} data_path={data_path} output_path=mined.jsonl "
            "threshold=auto",
            examples,
        )

    def _row_preview(self, row: int) -> dict[str, str]:
        query = self._inputs.known.query_of_row[row]
        first = int(self._ranks.first[query])
        return self._data.preview(row) | {
            "documents above it": f"{self._above[row]:,d}",
            "the first of them": preview(self._inputs.documents.item(first))
            if first >= 0
            else "",
        }
