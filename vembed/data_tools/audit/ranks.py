"""Checks with a model: where positives rank, how many negatives would be false, what each source adds."""

from __future__ import annotations

import numpy as np

from vembed.data_tools.audit.checks import AuditedRows, Finding, Findings, preview
from vembed.errors import UserError
from vembed.mining.candidates import CandidateSearch
from vembed.mining.choice import calibrate
from vembed.mining.config import MineConfig
from vembed.mining.known_positives import Inputs

LOW_RANK = 10
"""A positive below so many other documents is looked at."""


def check_ranks(
    inputs: Inputs,
    search: CandidateSearch,
    data: AuditedRows,
    config: MineConfig,
    findings: Findings,
) -> dict[str, object]:
    """Look for what a model says about the data.

    Return per source: rows, the share whose positive the model ranks first, among the first ten, and the median number
    of documents above it.
    """
    known = inputs.known
    chunks = list(search.chunks())
    documents_QK = np.concatenate([chunk.documents for chunk in chunks])
    scores_QK = np.concatenate([chunk.scores for chunk in chunks])
    first_Q = documents_QK[:, 0]
    best = []
    for chunk in chunks:
        best_of_chunk = np.full(len(chunk), -np.inf)
        # ufunc.at, not fancy indexing: a query with several positives occurs several times.
        np.maximum.at(best_of_chunk, chunk.positives.queries, chunk.positive_scores)
        best.append(best_of_chunk)
    # The score of the best known positive of each query, -inf where none is known. Known positives are no candidates,
    # so that all above it are others.
    best_Q = np.concatenate(best)
    above_Q = (scores_QK > best_Q[:, None]).sum(axis=1)
    finite_QK = np.where(np.isfinite(scores_QK), scores_QK, np.inf)
    is_weak_Q = best_Q < finite_QK.min(axis=1, initial=np.inf)
    above = above_Q[known.query_of_row]

    def row_preview(row: int) -> dict[str, str]:
        first = int(first_Q[known.query_of_row[row]])
        text = preview(inputs.documents.item(first)) if first >= 0 else ""
        return data.preview(row) | {
            "documents above it": f"{above[row]:,d}",
            "the first of them": text,
        }

    low = np.flatnonzero(above >= LOW_RANK)
    low = low[np.argsort(-above[low], kind="stable")]
    findings.add(
        "low_positives",
        "warning",
        f"Positives that rank below {LOW_RANK} or more other documents",
        "The model finds other documents more similar to the query than each of its known positives. These rows are "
        "hard, or wrong.",
        map(row_preview, low.tolist()),
        rows=low.tolist(),
    )
    weak = np.flatnonzero(is_weak_Q[known.query_of_row]).tolist()
    findings.add(
        "weak_queries",
        "warning",
        "Queries without any positive that looks relevant",
        f"None of the known positives is among the {config.top_k} documents that are most similar to the query.",
        map(row_preview, weak),
        rows=weak,
    )

    # Estimated share of relevant documents among the best candidates, and those nearest above a positive.
    text = "Too few queries with known positives for an estimate of the rate."
    is_estimated = True
    try:
        estimate = calibrate(chunks, config, config.seed)
        text = (
            f"An estimated {estimate.rate_without:.1%} of the best {config.num_negatives} candidates of each query are "
            f"in truth relevant ({estimate.num_hidden:,d} known positives were hidden for the estimate). "
            f"{estimate.threshold} brings the rate to {estimate.rate:.1%}."
        )
    except UserError:  # too few queries
        is_estimated = False
    passed = np.flatnonzero((above_Q > 0) & np.isfinite(best_Q))
    lead = scores_QK[passed, 0] - best_Q[passed]
    examples = []
    worst = passed[np.argsort(-lead, kind="stable")][: findings.num_examples]
    for query in worst.tolist():
        examples.append(
            {
                "query": preview(known.item(query)),
                "known positive scores": f"{best_Q[query]:.3f}",
                "candidate scores": f"{scores_QK[query, 0]:.3f}",
                "candidate": preview(inputs.documents.item(int(first_Q[query]))),
            }
        )
    data_path = config.data_path
    if isinstance(data_path, list):
        data_path = data_path[0] if isinstance(data_path[0], str) else data_path[0].path
    if is_estimated or len(passed):
        finding = Finding(
            "false_negatives",
            "warning",
            "Documents above the known positive: candidates for false negatives",
            text,
            len(passed),
            len(passed) / max(known.num_queries, 1),
            f"vembed mine model_name={config.model_name} data_path={data_path} output_path=mined.jsonl threshold=auto",
            examples,
        )
        findings.found.append(finding)

    by_source: dict[str, object] = {}
    for number, name in enumerate(data.names):
        of_source = above[data.sources == number]
        by_source[name] = {
            "rows": len(of_source),
            "found_first": float((of_source == 0).mean()),
            "found_in_10": float((of_source < 10).mean()),
            "median_above": float(np.median(of_source)),
        }
    return by_source
