"""Evaluation of rerankers: the first documents of a first stage, in the order of the reranker's scores."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vembed.config.schema import EvaluationSection
from vembed.data.features import Pair, PairFeaturiser
from vembed.errors import UserError
from vembed.evaluation.bm25 import best_keys, build_bm25_index, scores_of_query
from vembed.evaluation.dataset import EvalData, RetrievalData
from vembed.evaluation.query_results import NUM_FOUND, QueryResults
from vembed.evaluation.report.record import FIRST_STAGE
from vembed.evaluation.retrieval import (
    correlations,
    excluded_pairs,
    from_all_ranks,
    score_rankings,
)
from vembed.evaluation.top_k import as_keys, documents_of, top_k
from vembed.inference.embedder import Embedder
from vembed.inference.encoding import InterruptCheck, encode_features, encode_items
from vembed.parallel import collectives
from vembed.parallel.session import Session
from vembed.progress import ProgressReport

BM25 = "bm25"
RUN_FILES = (".trec", ".jsonl")
"""Endings of a first stage that is a file."""
QUERIES_AT_ONCE = 64
"""Queries per process whose pairs are tokenised and scored together."""


def evaluate_reranker(
    model: nn.Module,
    featuriser: PairFeaturiser,
    data: EvalData,
    evaluation: EvaluationSection,
    session: Session | None,
    *,
    ks: Sequence[int],
    active: bool = False,
    log: Callable[[str], object] | None = None,
    check_interrupt: InterruptCheck | None = None,
    query_results: QueryResults | None = None,
) -> dict[str, float]:
    """Return the scores of a reranker. Collective: every rank calls it and gets the same scores.

    Of retrieval data: those of the first stage's documents in the reranker's order, and `first_stage/...` of those in
    the first stage's own. Of scored pairs: the correlations with the scores of the data.
    """

    def score(pairs: Sequence[Pair]) -> np.ndarray:
        """Return the scores [n] of this rank's pairs. Collective."""
        longest = len(pairs)
        if world_size > 1:
            longest = collectives.max_ints([longest])[0]
        if not longest:
            return np.empty(0, np.float32)
        scores = encode_features(
            model,
            featuriser,
            featuriser.features(pairs),
            device,
            world_size=world_size,
            check_interrupt=check_interrupt,
        )[:, 0]
        if not np.isfinite(scores).all():
            raise UserError(
                f"{featuriser.role} gives scores that are not finite: its weights are broken, or overflow in their dtype "
                "(try torch_dtype: float32)"
            )
        return scores

    rank = session.rank if session else 0
    world_size = session.world_size if session else 1
    device = session.device if session else next(model.parameters()).device
    if not isinstance(data, RetrievalData):
        dealt = range(rank, len(data.scores), world_size)
        pair_scores = score([(data.first[pair], data.second[pair]) for pair in dealt])
        gathered = from_all_ranks(pair_scores[:, None], len(data.scores), session)
        return correlations(gathered[:, 0], data.scores)

    # ---- the first stage, once for all evaluations of these data
    stage = f"{evaluation.first_stage} {evaluation.rerank_top_k}"
    if stage not in data.first_stages:
        data.first_stages[stage] = _first_stage(data, evaluation, session)
    candidates = data.first_stages[stage]

    # ---- queries are dealt to the ranks in turn
    began = time.monotonic()
    dealt = range(rank, len(candidates), world_size)
    # The same number on every rank, because `score` is collective. A rank may have no queries in the last round.
    num_rounds = math.ceil(len(candidates) / (world_size * QUERIES_AT_ONCE))
    rankings = np.full((len(dealt), candidates.shape[1]), -1, np.int64)
    with ProgressReport("scoring pairs", active=active, log=log) as progress:
        for number in range(num_rounds):
            first = number * QUERIES_AT_ONCE
            rows = range(len(dealt))[first : first + QUERIES_AT_ONCE]
            pairs = []
            for row in rows:
                query = data.queries[dealt[row]]
                for document in candidates[dealt[row]].tolist():
                    if document >= 0:
                        pairs.append((query, data.documents[document]))
            scores = torch.from_numpy(score(pairs))
            start = 0
            for row in rows:
                documents = torch.from_numpy(candidates[dealt[row]])
                documents = documents[documents >= 0]
                query_scores = scores[start : start + len(documents)].float()
                start += len(documents)
                # Of equal scores the earlier document comes first, as in a search of vectors.
                keys = as_keys(query_scores, documents).sort(descending=True).values
                rankings[row, : len(documents)] = documents_of(keys).numpy()
            num_done = (number + 1) * world_size * QUERIES_AT_ONCE
            progress(min(num_done, len(candidates)), len(candidates))
    if log is not None and active:
        seconds = (time.monotonic() - began) / max(1, len(candidates))
        log(f"{1000 * seconds:,.1f} ms per query for {candidates.shape[1]} documents")
    rankings = from_all_ranks(rankings, len(candidates), session)
    names, values = score_rankings(rankings, data.relevance, ks)
    _, first_values = score_rankings(candidates, data.relevance, ks)
    if query_results is not None:
        query_results.names = names
        query_results.values = values
        query_results.found = rankings[:, :NUM_FOUND]
    result = dict(zip(names, values.mean(axis=0).tolist(), strict=True))
    before = dict(zip(names, first_values.mean(axis=0).tolist(), strict=True))
    return result | {FIRST_STAGE + name: value for name, value in before.items()}


def _first_stage(
    data: RetrievalData,
    evaluation: EvaluationSection,
    session: Session | None,
) -> np.ndarray:
    """Return [Q, k] documents of the first stage, best first, -1 where it has fewer. The same on every rank."""
    k = min(evaluation.rerank_top_k, len(data.documents))
    if evaluation.first_stage == BM25:
        return bm25_rankings(data, k)
    if evaluation.first_stage.endswith(RUN_FILES):
        return run_file_rankings(data, Path(evaluation.first_stage), k)
    embedder = Embedder(evaluation.first_stage, session=session)
    model = embedder.model
    featuriser = embedder.featuriser
    normalize = embedder.description.similarity == "cosine"
    options: dict[str, Any] = {"session": session, "normalize": normalize}
    queries = encode_items(model, featuriser, data.queries, "query", **options)
    documents = encode_items(model, featuriser, data.documents, "document", **options)
    excluded = excluded_pairs(data, range(len(data.queries)))
    return top_k(queries, documents, k, excluded)


def run_file_rankings(
    data: RetrievalData,
    path: Path,
    k: int,
) -> np.ndarray:
    """Return [Q, k] documents of a run file, best first, -1 where it has fewer.

    .trec: lines `query-id Q0 corpus-id rank score name` with the ids of a BEIR-style folder, by score. .jsonl: lines
    {"query": ..., "documents": [...]} with texts, as `vembed rerank` reads them, the best first.
    """
    is_trec = path.suffix == ".trec"
    if not is_trec:
        query_texts = {item.text: index for index, item in enumerate(data.queries)}
        find_query: Callable[[Any], int | None] = query_texts.get
        texts = {item.text: index for index, item in enumerate(data.documents)}
        find_document: Callable[[Any], int | None] = texts.get
    elif data.find_document is not None:
        find_query = data.query_ids.get
        find_document = data.find_document
    else:
        raise UserError(
            f"first_stage: {path} names queries and documents by id, and {data.name} has none: give a BEIR-style folder "
            "as val_data_path, or a run file of texts (.jsonl)"
        )
    scored: dict[int, list[tuple[float, int]]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"first_stage: {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        where = f"first_stage: {path}, line {number:,d}"
        try:
            if is_trec:
                query, _, name, _, value, *_ = line.split()
                names = [name]
                score = float(value)
            else:
                record = json.loads(line)
                query = record["query"]
                names = record["documents"]
                score = 0.0
            row = find_query(query)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{where} is no line of a run file: {error}") from error
        if row is None:  # of another split
            continue
        for name in names:
            document = find_document(name)
            if document is None:
                raise UserError(
                    f"{where}: {name!r} is not in the corpus of {data.name}"
                )
            scored.setdefault(row, []).append((score, document))
    if not scored:
        raise UserError(f"first_stage: {path} has no query of {data.name}")
    rankings = np.full((len(data.queries), k), -1, np.int64)
    for row, entries in scored.items():
        # Stable: of equal scores the earlier line comes first. A document that is named twice counts once.
        entries.sort(key=lambda entry: -entry[0])
        documents = dict.fromkeys(document for _, document in entries)
        best = list(documents)[:k]
        rankings[row, : len(best)] = best
    return rankings


def bm25_rankings(data: RetrievalData, k: int) -> np.ndarray:
    """Return [Q, k] documents by BM25, best first, -1 where no word is in common."""
    num_documents = len(data.documents)
    index = build_bm25_index(item.text for item in data.documents)
    excluded = excluded_pairs(data, range(len(data.queries)))
    bounds = excluded.bounds(len(data.queries))
    rankings = np.full((len(data.queries), k), -1, np.int64)
    for row, query in enumerate(data.queries):
        scores = scores_of_query(index, query.text, num_documents)
        of_query = excluded.documents[bounds[row] : bounds[row + 1]]
        rankings[row] = documents_of(best_keys(scores, k, of_query)).numpy()
    return rankings
