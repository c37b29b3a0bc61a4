"""Checks with a model: where positives rank, how many negatives would be false, what each source adds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from vembed.errors import UserError
from vembed.mining.calibration import Calibration, calibrate
from vembed.mining.candidate_store import Candidates, CandidateStore
from vembed.mining.config import MineConfig
from vembed.mining.findings import Finding, Texts, shown
from vembed.mining.mining_run import Inputs

LOW_RANK = 10
"""A positive below so many other documents is looked at."""


@dataclass(frozen=True)
class Ranks:
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
    def of(cls, chunks: Sequence[Candidates]) -> Ranks:
        """From what was found."""
        best, best_score, deepest, first, first_score = [], [], [], [], []
        for one in chunks:
            own = np.full(len(one), -np.inf)
            # ufunc.at, not fancy indexing: a query with several positives occurs several times.
            np.maximum.at(own, one.positives.queries, one.positive_scores)
            there = np.isfinite(one.scores)
            # Known positives are no candidates, so that all above are others.
            best.append((one.scores > own[:, None]).sum(axis=1))
            best_score.append(own)
            deepest.append(
                np.where(there, one.scores, np.inf).min(axis=1, initial=np.inf)
            )
            first.append(one.documents[:, 0])
            first_score.append(one.scores[:, 0])
        return cls(
            *(
                np.concatenate(parts)
                for parts in (best, best_score, deepest, first, first_score)
            )
        )


def rank_findings(
    inputs: Inputs,
    store: CandidateStore,
    data: Texts,
    config: MineConfig,
    num_examples: int,
    words: str,
) -> tuple[list[Finding], dict[str, object], dict[str, set[int]]]:
    """Statements of a model about the data: findings, figures by source, and rows that may be dropped."""
    chunks = list(store.chunks())
    ranks = Ranks.of(chunks)
    query_of_row = inputs.known.query_of_row
    low = np.flatnonzero(ranks.best[query_of_row] >= LOW_RANK)
    weak = np.flatnonzero((ranks.best_score < ranks.deepest)[query_of_row])
    findings = [
        _low_finding(inputs, ranks, data, low, num_examples, words),
        _weak_finding(inputs, ranks, data, weak, num_examples, words, config.top_k),
        _false_negatives(inputs, ranks, chunks, config, num_examples),
    ]
    dropped = {"low_positives": set(low.tolist()), "weak_queries": set(weak.tolist())}
    return (
        [one for one in findings if one is not None],
        _by_source(inputs, ranks, data),
        dropped,
    )


def _low_finding(
    inputs: Inputs,
    ranks: Ranks,
    data: Texts,
    rows: np.ndarray,
    num_examples: int,
    words: str,
) -> Finding | None:
    if not len(rows):
        return None
    worst = rows[
        np.argsort(-ranks.best[inputs.known.query_of_row[rows]], kind="stable")
    ]
    return Finding(
        "low_positives",
        "warning",
        f"Positives that rank below {LOW_RANK} or more other documents",
        "The model finds other documents more similar to the query than each of its known positives: these rows are "
        "hard, or wrong.",
        len(rows),
        len(rows) / max(len(data), 1),
        f"vembed audit {words} cleaned_path=cleaned.jsonl drop=[low_positives]",
        [_row(inputs, ranks, data, int(row)) for row in worst[:num_examples]],
    )


def _weak_finding(
    inputs: Inputs,
    ranks: Ranks,
    data: Texts,
    rows: np.ndarray,
    num_examples: int,
    words: str,
    top_k: int,
) -> Finding | None:
    if not len(rows):
        return None
    return Finding(
        "weak_queries",
        "warning",
        "Queries without any positive that looks relevant",
        f"None of the known positives is among the {top_k} documents that are most similar to the query.",
        len(rows),
        len(rows) / max(len(data), 1),
        f"vembed audit {words} cleaned_path=cleaned.jsonl drop=[weak_queries]",
        [_row(inputs, ranks, data, int(row)) for row in rows[:num_examples]],
    )


def _false_negatives(
    inputs: Inputs,
    ranks: Ranks,
    chunks: Sequence[Candidates],
    config: MineConfig,
    num_examples: int,
) -> Finding | None:
    """Estimated number of relevant documents among the best candidates, with those nearest above a positive."""
    estimate: Calibration | None = None
    text = "Too few queries with known positives for an estimate of the rate."
    with suppress(UserError):  # too few queries
        estimate = calibrate(chunks, config)
    if estimate is not None:
        margin = estimate.limits.relative_margin
        threshold = (
            f"relative_margin={margin:.3f}"
            if margin is not None
            else f"max_score={estimate.limits.max_score:.3f}"
        )
        text = (
            f"An estimated {estimate.rate_without:.1%} of the best {config.num_negatives} candidates of each query are "
            f"in truth relevant ({estimate.num_hidden:,d} known positives were hidden for the estimate); {threshold} "
            f"brings the rate to {estimate.rate:.1%}."
        )
    above = np.flatnonzero((ranks.best > 0) & np.isfinite(ranks.best_score))
    if estimate is None and not len(above):
        return None
    order = above[
        np.argsort(-(ranks.first_score - ranks.best_score)[above], kind="stable")
    ]
    examples = [
        {
            "query": shown(inputs.known.item(int(query))),
            "known positive scores": f"{ranks.best_score[query]:.3f}",
            "candidate scores": f"{ranks.first_score[query]:.3f}",
            "candidate": shown(inputs.documents.item(int(ranks.first[query]))),
        }
        for query in order[:num_examples]
    ]
    return Finding(
        "false_negatives",
        "warning",
        "Documents above the known positive: candidates for false negatives",
        text,
        len(above),
        len(above) / max(inputs.known.num_queries, 1),
        f"vembed mine model_name={config.model_name} data_path={_first_path(config)} output_path=mined.jsonl "
        f"threshold=auto",
        examples,
    )


def _by_source(inputs: Inputs, ranks: Ranks, data: Texts) -> dict[str, object]:
    """Per source: rows, the share whose positive the model ranks first, among the first ten, and the median
    number of documents above it."""
    found: dict[str, object] = {}
    sources, above = np.array(data.sources), ranks.best[inputs.known.query_of_row]
    for number, name in enumerate(data.names):
        own = above[sources == number]
        found[name] = {
            "rows": len(own),
            "found_first": float((own == 0).mean()),
            "found_in_10": float((own < 10).mean()),
            "median_above": float(np.median(own)),
        }
    return found


def _row(inputs: Inputs, ranks: Ranks, data: Texts, row: int) -> dict[str, str]:
    query, one = int(inputs.known.query_of_row[row]), data.examples[row]
    return {
        "row": str(row + 1),
        "query": shown(one.query),
        "positive": shown(one.positives[0]),
        "documents above it": f"{ranks.best[query]:,d}",
        "the first of them": shown(inputs.documents.item(int(ranks.first[query])))
        if ranks.first[query] >= 0
        else "",
    }


def _first_path(config: MineConfig) -> str:
    first = (
        config.data_path[0] if isinstance(config.data_path, list) else config.data_path
    )
    return first if isinstance(first, str) else first.path
