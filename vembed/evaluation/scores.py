"""evaluate(): scores of one model on one set of evaluation data as a flat dict, inside or outside a training run."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from vembed.config.schema import DataSection, EvaluationSection
from vembed.config.values import (
    Auto,
    EvaluationTask,
    ModelDtype,
    OnBadRecord,
    RetrievalMode,
)
from vembed.data.examples import Item, KeyIndex, Kind
from vembed.data.features import BaseFeaturiser, Pair, PairFeaturiser, refuse_prompts
from vembed.errors import UserError, did_you_mean
from vembed.evaluation.bm25 import best_keys, build_bm25_index
from vembed.evaluation.dataset import (
    TEST_FIRST,
    Corpus,
    EvalData,
    FindIndex,
    Grades,
    RetrievalData,
    ScoredPairs,
    num_prompts,
    open_eval_data,
)
from vembed.evaluation.query_results import NUM_FIRST_DOCUMENTS, QueryResults
from vembed.evaluation.report.record import FIRST_STAGE, Scores, run_options
from vembed.evaluation.top_k import NOTHING, Pairs, TopK, as_keys, documents_of, top_k
from vembed.inference.embedder import Embedder
from vembed.inference.encoding import (
    InterruptCheck,
    check_finite,
    encode_chunks,
    encode_features,
    encode_items,
    first_dims,
    from_all_ranks,
    quantized,
    ranges_of,
)
from vembed.inference.reranker import Reranker
from vembed.models.families.description import ModelDescription
from vembed.models.families.model_files import kind_of, model_folder
from vembed.parallel.session import Session
from vembed.progress import Log, ProgressReport

if TYPE_CHECKING:
    from vembed.training.frozen import InputBuilder

log = logging.getLogger("vembed")

REPORTED_K = 10
"""Cut-off of tables, reports and `eval_metric: auto`. Always computed, whatever `ks` says."""


def evaluate(
    model: str | Path | Embedder | Reranker,
    data: str | Path | EvalData,
    *,
    dims: Sequence[int] | None = None,
    ks: Sequence[int] = (1, 5, 10, 100),
    task: EvaluationTask = "auto",
    split: str | None = None,
    batch_tokens: int | None = None,
    column_mapping: dict[str, str] | None = None,
    on_bad_record: OnBadRecord = "stop",
    retrieval_mode: RetrievalMode | None = None,
    device: str | None = None,
    torch_dtype: ModelDtype = "auto",
    trust_remote_code: bool = False,
    session: Session | None = None,
    compressed: bool = False,
    show_progress: bool = False,
) -> Scores:
    """Return the scores of a model, with keys such as `ndcg@10`, `dim256/ndcg@10` or `spearman`.

    Args:
        model: a folder, a run, a Hub name, an `Embedder` or a `Reranker`. Any model that Sentence Transformers loads is
            possible. A reranker scores the first 50 documents of BM25.
        data: a BEIR-style folder, or a file of pairs.
        dims: additional embedding sizes. Default: the model's Matryoshka sizes.
        ks: cut-offs of the metrics.
        split: which qrels of a BEIR folder. Default: test.
        retrieval_mode: what plain strings of the data are. Default: as in the run that made the model.
        session: the process group, if several processes call this together.
    """
    if any(k < 1 for k in ks):
        raise UserError(f"ks: {list(ks)}: cut-offs are whole numbers from 1 on")
    if not isinstance(data, str | Path | RetrievalData | ScoredPairs):
        raise UserError(
            f"data is a {type(data).__name__}; give the path of a file of pairs or of a BEIR-style folder, or what "
            "vembed.evaluation.dataset.from_examples returns"
        )
    if isinstance(data, str | Path):
        if retrieval_mode is None and isinstance(model, str | Path):
            run = run_options(str(model), ("retrieval_mode",))
            retrieval_mode = run.get("retrieval_mode")
        options = DataSection(
            data_path=str(data),
            column_mapping=column_mapping,
            on_bad_record=on_bad_record,
            retrieval_mode=retrieval_mode or "auto",
        )
        splits = (split,) if split else TEST_FIRST
        data = open_eval_data(
            options,
            str(data),
            splits=splits,
            task=task,
        )
    # One rank prints for all.
    if show_progress and (session is None or session.is_main):
        sys.stderr.write(data.summary() + "\n")
    if isinstance(model, str | Path):
        kind = kind_of(model_folder(str(model)))
        if kind == "yes_no":
            log.warning(
                f"{model}: the files of this causal language model do not say what it gives, so it is scored as an embedding "
                "model; for a reranker that answers yes or no, pass vembed.Reranker(...) to vembed.evaluate"
            )
        load = Reranker if kind == "reranker" else Embedder
        model = load(
            model,
            device=device,
            torch_dtype=torch_dtype,
            trust_remote_code=trust_remote_code,
            session=session,
        )
    return evaluate_model(
        model.model,
        model.featuriser,
        data,
        EvaluationSection(),
        session,
        ks=ks,
        micro_batch_tokens=batch_tokens or "auto",
        dims=dims,
        compressed=compressed,
        show_progress=show_progress,
    )


def evaluate_model(
    model: nn.Module,
    featuriser: BaseFeaturiser,
    data: EvalData,
    evaluation: EvaluationSection,
    session: Session | None,
    *,
    ks: Sequence[int] | None = None,
    micro_batch_tokens: int | Auto = "auto",
    dims: Sequence[int] | None = None,
    compressed: bool = False,
    show_progress: bool = False,
    log: Log | None = None,
    check_interrupt: InterruptCheck | None = None,
    input_builder: InputBuilder | None = None,
    query_results: QueryResults | None = None,
) -> Scores:
    """Score a model in memory, sharded or not. Collective: every rank calls it and gets the same scores.

    `log` gets occasional lines in a long evaluation, instead of the bar of `show_progress`. `check_interrupt` is called after
    each micro-batch and each score tile on all ranks, and may raise to end it. `input_builder`: reads the
    outputs of frozen towers from its stores, so that these towers need not run. `ks`: other cut-offs than those of
    `evaluation`. `query_results` gets the results of each query of retrieval data. `compressed`: also score int8 and binary
    documents.
    """
    is_main = session is None or session.is_main
    is_shown = is_main and (show_progress or log is not None)
    cutoffs = sorted({*(ks or evaluation.cutoffs()), REPORTED_K})
    if isinstance(featuriser, PairFeaturiser):
        if dims or compressed:
            raise UserError(
                "--dims and --compressed are of embeddings, and this model is a reranker: leave them out"
            )
        return _evaluate_reranker(
            model,
            featuriser,
            data,
            evaluation,
            session,
            cutoffs,
            is_shown,
            log,
            check_interrupt,
            query_results,
        )
    description = featuriser.description
    full = description.output_dim
    if dims is None:
        dims = [dim for dim in description.mrl_dims if dim <= full]
    for dim in dims:
        if not 1 <= dim <= full:
            raise UserError(
                f"dimension {dim} is asked for, and this model's embeddings have 1 to {full} dimensions"
            )
    sizes = sorted(set(dims), reverse=True)
    normalize = description.compares_unit_vectors
    options: dict[str, Any] = {
        "budget_tokens": None if micro_batch_tokens == "auto" else micro_batch_tokens,
        "session": session,
        "check_interrupt": check_interrupt,
        "input_builder": input_builder,
    }

    def encode(items: Sequence[Item], kind: Kind) -> np.ndarray:
        title = "encoding queries" if kind == "query" else "encoding documents"
        with ProgressReport(title, active=is_shown, log=log) as progress:
            embeddings = encode_items(
                model,
                featuriser,
                items,
                kind,
                progress=progress,
                **options,
            )
        check_finite(embeddings, f"embeddings ({kind})")
        # Cut without normalising: scores normalise after the cut themselves (`first_dims`).
        return embeddings[:, :full]

    if compressed and isinstance(data, ScoredPairs):
        raise UserError(
            f"compressed scores are of retrieval, and {data.name} holds scored pairs"
        )
    # [Q, full] on every rank.
    queries = encode(data.queries, "query")
    if isinstance(data, ScoredPairs):
        documents = encode(data.documents, "document")
        return similarity_metrics(
            queries,
            documents,
            data.scores,
            sizes,
            normalize,
        )
    # Documents come in chunks and are searched as they come, so the corpus may be large.
    search = RetrievalSearch(
        queries,
        data,
        cutoffs,
        sizes,
        normalize=normalize,
        session=session,
        check_interrupt=check_interrupt,
    )
    if compressed:
        # The ranges of int8 are those of all documents, so all embeddings are held at once.
        all_documents = np.empty((len(data.documents), full), np.float32)

    def take(numbers: np.ndarray, embeddings: np.ndarray) -> None:
        check_finite(embeddings, "embeddings (document)")
        search.add(embeddings[:, :full], numbers)
        if compressed:
            all_documents[numbers] = embeddings[:, :full]

    lengths = data.documents.lengths if isinstance(data.documents, Corpus) else None
    with ProgressReport("encoding documents", active=is_shown, log=log) as progress:
        encode_chunks(
            model,
            featuriser,
            data.documents,
            "document",
            take,
            lengths=lengths,
            progress=progress,
            **options,
        )
    scores = search.scores(query_results)
    if compressed:
        scores |= compressed_scores(
            queries,
            all_documents,
            data,
            sizes,
            normalize,
        )
    return scores


def similarity_metrics(
    first_ND: np.ndarray,
    second_ND: np.ndarray,
    scores: Sequence[float],
    dims: Sequence[int],
    normalize: bool,
) -> Scores:
    """Return `spearman` and `pearson` between similarities of the embeddings and given scores, and `dim<d>/spearman`
    for their first d coordinates."""
    metrics = {}
    sizes = {"": first_ND.shape[1]} | {f"dim{dim}/": dim for dim in dims}
    for prefix, dim in sizes.items():
        first = first_dims(first_ND, dim, normalize).astype(np.float64)
        second = first_dims(second_ND, dim, normalize).astype(np.float64)
        # The diagonal of first @ second.T, without the other products.
        similarities = np.einsum("nd,nd->n", first, second)
        for name, value in correlations(similarities, scores).items():
            metrics[prefix + name] = value
    return metrics


def check_metric(
    evaluation: EvaluationSection,
    quantize_embeddings: str | None,
    data: EvalData,
    description: ModelDescription,
) -> None:
    """Raise UserError if `eval_metric` is none of the scores that this evaluation will have."""
    full = description.output_dim
    sizes = [dim for dim in description.mrl_dims if dim <= full]
    names = ["spearman", "pearson"]
    if isinstance(data, RetrievalData):
        names = metric_names(evaluation.cutoffs())
        if description.is_reranker:
            names += [FIRST_STAGE + name for name in names]
    whole_names = list(names)
    for dim in sizes:
        names += [f"dim{dim}/{name}" for name in whole_names]
    if quantize_embeddings is not None and isinstance(data, RetrievalData):
        for form in COMPRESSED_FORMS:
            names += [compressed_name(form, dim) for dim in sorted({full, *sizes})]
    if evaluation.eval_metric not in ("auto", *names):
        raise UserError(
            f"eval_metric: {evaluation.eval_metric} is not among what is measured: {', '.join(names)}"
            f"{did_you_mean(evaluation.eval_metric, names)}"
        )


# ---- rerankers: the first documents of a first stage, in the order of the scores -----------------------------------


BM25 = "bm25"
QUERIES_AT_ONCE = 64
"""As many pairs as those of so many queries are tokenised and scored together, per process."""


def _evaluate_reranker(
    model: nn.Module,
    featuriser: PairFeaturiser,
    data: EvalData,
    evaluation: EvaluationSection,
    session: Session | None,
    ks: Sequence[int],
    active: bool,
    log: Log | None,
    check_interrupt: InterruptCheck | None,
    query_results: QueryResults | None,
) -> Scores:
    """Return the scores of a reranker. Collective: every rank calls it and gets the same scores.

    Of retrieval data: those of the first stage's documents in the reranker's order, and `first_stage/...` of those in
    the first stage's own. Of scored pairs: the correlations with the scores of the data.
    """

    def score(pairs: Sequence[Pair]) -> np.ndarray:
        """Return the scores [n, 1] of this rank's pairs. Collective: a rank may have none, but not all of them."""
        scores = encode_features(
            model,
            featuriser,
            featuriser.features(pairs),
            device,
            world_size=world_size,
            check_interrupt=check_interrupt,
        )
        check_finite(scores, f"scores of {featuriser.role}")
        return scores

    refuse_prompts(num_prompts(data), data.name)
    rank = session.rank if session else 0
    world_size = session.world_size if session else 1
    device = session.device if session else next(model.parameters()).device
    if isinstance(data, ScoredPairs):
        pairs = list(zip(data.queries, data.documents, strict=True))
        pair_scores = score(pairs[rank::world_size])
        gathered = from_all_ranks(pair_scores, len(pairs), session)
        return correlations(gathered[:, 0], data.scores)

    # ---- the first stage, once for all evaluations of these data
    stage = f"{evaluation.first_stage} {evaluation.rerank_top_k}"
    # The first stage does not change while the reranker trains.
    if stage not in data.first_stages:
        data.first_stages[stage] = _first_stage(data, evaluation, session)
    candidates = data.first_stages[stage]

    # ---- all pairs of a query and a candidate, dealt to the ranks in turn
    began = time.monotonic()
    query_of, column_of = np.nonzero(candidates >= 0)
    document_of = candidates[query_of, column_of]
    num_pairs = len(query_of)
    dealt = range(rank, num_pairs, world_size)
    at_once = QUERIES_AT_ONCE * candidates.shape[1]
    scores = [np.empty((0, 1), np.float32)]
    title = f"scoring the first {candidates.shape[1]} of {evaluation.first_stage}"
    with ProgressReport(title, active=active, log=log) as progress:
        # Equally often on every rank, because `score` is collective. A rank may have no pairs in the last round.
        for start in range(0, math.ceil(num_pairs / world_size), at_once):
            pairs = []
            for number in dealt[start : start + at_once]:
                document = data.documents[document_of[number]]
                pairs.append((data.queries[query_of[number]], document))
            scores.append(score(pairs))
            progress(min((start + at_once) * world_size, num_pairs), num_pairs)
    if log is not None and active:
        seconds = (time.monotonic() - began) / max(1, len(candidates))
        log(f"{title}: {1000 * seconds:,.1f} ms per query")
    all_scores = from_all_ranks(np.concatenate(scores), num_pairs, session)
    keys = torch.full(candidates.shape, NOTHING)
    keys[query_of, column_of] = as_keys(
        torch.from_numpy(all_scores[:, 0]).float(), torch.from_numpy(document_of)
    )
    rankings = documents_of(keys.sort(dim=1, descending=True).values).numpy()
    names, values = score_rankings(rankings, data.relevance, ks)
    _, first_values = score_rankings(candidates, data.relevance, ks)
    if query_results is not None:
        query_results.names = names
        query_results.values = values
        query_results.first_documents = rankings[:, :NUM_FIRST_DOCUMENTS]
    means = means_of(names, values)
    for name, value in means_of(names, first_values).items():
        means[FIRST_STAGE + name] = value
    return means


def _first_stage(
    data: RetrievalData,
    evaluation: EvaluationSection,
    session: Session | None,
) -> np.ndarray:
    """Return [Q, k] documents of the first stage, best first, -1 where it has fewer. The same on every rank."""
    num_documents = len(data.documents)
    k = min(evaluation.rerank_top_k, num_documents)
    excluded = excluded_pairs(data, range(len(data.queries)))
    if evaluation.has_run_file:
        return run_file_rankings(data, Path(evaluation.first_stage), k, excluded)
    if evaluation.first_stage == BM25:
        index = build_bm25_index(item.text for item in data.documents)
        texts = {row: query.text for row, query in enumerate(data.queries)}
        keys = best_keys(
            index,
            texts,
            num_documents,
            k,
            excluded,
        )
        return documents_of(keys).numpy()
    embedder = Embedder(evaluation.first_stage, session=session)
    normalize = embedder.description.compares_unit_vectors
    queries = embedder.encode(data.queries, "query", normalize=normalize)
    documents = embedder.encode(data.documents, "document", normalize=normalize)
    return top_k(queries, documents, k, excluded)


def run_file_rankings(
    data: RetrievalData,
    path: Path,
    k: int,
    excluded: Pairs,
) -> np.ndarray:
    """Return [Q, k] documents of a run file without the excluded ones, best first, -1 where it has fewer.

    .trec: lines `query-id Q0 corpus-id rank score name` with the ids of a BEIR-style folder, by score. .jsonl: lines
    {"query": ..., "documents": [...]} with texts, as `vembed rerank` reads them, the best first.
    """
    is_trec = path.suffix == ".trec"
    if not is_trec:
        query_texts = {item.text: index for index, item in enumerate(data.queries)}
        find_query: FindIndex = query_texts.get
        texts = {item.text: index for index, item in enumerate(data.documents)}
        find_document: FindIndex = texts.get
    elif data.find_document is not None:
        find_query = data.query_ids.get
        find_document = data.find_document
    else:
        raise UserError(
            f"first_stage: {path} names queries and documents by id, and {data.name} has none: give a BEIR-style folder "
            "as val_data_path, or a run file of texts (.jsonl)"
        )
    named = []
    line = ""
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            if is_trec:
                query, _, name, _, value, *_ = line.split()
                named.append((query, name, float(value)))
            else:
                record = json.loads(line)
                named += [(record["query"], name, 0.0) for name in record["documents"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"first_stage: {path} is no run file: {error}; line {line[:80]!r}"
        ) from error
    scored: dict[int, list[tuple[float, int]]] = {}
    for query, name, score in named:
        row = find_query(query)
        if row is None:  # of another split
            continue
        document = find_document(name)
        if document is None:
            raise UserError(
                f"first_stage: {path}: {name!r} is not in the corpus of {data.name}"
            )
        scored.setdefault(row, []).append((score, document))
    if not scored:
        raise UserError(f"first_stage: {path} has no query of {data.name}")
    rankings = np.full((len(data.queries), k), -1, np.int64)
    # A query has its own content once, so at most one is excluded.
    excluded_of = dict(
        zip(excluded.queries.tolist(), excluded.documents.tolist(), strict=True)
    )
    for row, entries in scored.items():
        # Stable: of equal scores the earlier line comes first. A document that is named twice counts once.
        entries.sort(key=lambda entry: -entry[0])
        documents = dict.fromkeys(document for _, document in entries)
        documents.pop(excluded_of.get(row, -1), None)
        best = list(documents)[:k]
        rankings[row, : len(best)] = best
    return rankings


# ---- full-corpus retrieval: nDCG, MRR, Recall and MAP by trec_eval, also of documents in int8 or in bits -----------


DOCUMENTS_PER_SEARCH_TILE = 8192
"""Documents that are searched at once. Only a tile of them is copied and normalised at a time."""
METRICS = ("ndcg", "mrr", "recall", "map")
COMPRESSED_FORMS = ("float32", "int8", "binary", "binary_rescored")
COMPRESSED_K = 10
RESCORING_FACTOR = 4
"""Binary with rescoring: the search by bits finds RESCORING_FACTOR * COMPRESSED_K documents, which are then ordered."""


def retrieval_metrics(
    queries_QD: np.ndarray,
    documents_ND: np.ndarray,
    data: RetrievalData,
    ks: Sequence[int],
    dims: Sequence[int] = (),
    **options: Any,
) -> Scores:
    """Return the scores of a `RetrievalSearch` in all documents at once."""
    search = RetrievalSearch(
        queries_QD,
        data,
        ks,
        dims,
        **options,
    )
    search.add(documents_ND, np.arange(len(documents_ND)))
    return search.scores()


class RetrievalSearch:
    """The first documents of every query, by the whole embeddings and by their first coordinates. Documents are added in
    parts.

    A document with the query's own content is excluded unless the data mark it as relevant. With a session of several
    ranks it is collective: every rank passes the same embeddings, searches for its share of the queries, and gets the
    same scores. `check_interrupt` is called after each tile, equally often on all ranks.
    """

    def __init__(
        self,
        queries_QD: np.ndarray,
        data: RetrievalData,
        ks: Sequence[int],
        dims: Sequence[int] = (),
        *,
        normalize: bool = True,
        session: Session | None = None,
        check_interrupt: InterruptCheck | None = None,
    ) -> None:
        """`dims`: further sizes; each is normalised after the cut, if `normalize`."""
        self._data = data
        self._ks = ks
        self._dims = dims
        self._normalize = normalize
        self._check_interrupt = check_interrupt
        self._session = session
        self._full = queries_QD.shape[1]
        world_size = session.world_size if session else 1
        # Queries are dealt to the ranks in turn.
        first = session.rank if session else 0
        self._dealt = range(first, len(queries_QD), world_size)
        device = session.device if session else "cpu"
        excluded = excluded_pairs(data, self._dealt)
        self._searches: dict[int, TopK] = {}
        for dim in dict.fromkeys([self._full, *dims]):
            queries = first_dims(queries_QD[first::world_size], dim, normalize)
            on_device = torch.from_numpy(queries).to(device)
            self._searches[dim] = TopK(on_device, max(ks), excluded)

    def add(
        self,
        documents_ND: np.ndarray,
        numbers_N: np.ndarray,
    ) -> None:
        """Search in some documents, which have these numbers in the data."""
        for dim, search in self._searches.items():
            for start in range(0, len(documents_ND), DOCUMENTS_PER_SEARCH_TILE):
                tile = slice(start, start + DOCUMENTS_PER_SEARCH_TILE)
                documents = first_dims(documents_ND[tile], dim, self._normalize)
                search.add(
                    torch.from_numpy(documents), torch.from_numpy(numbers_N[tile])
                )
                if self._check_interrupt is not None:
                    self._check_interrupt()

    def scores(self, results: QueryResults | None = None) -> Scores:
        """Return `ndcg@k`, `mrr@k`, `recall@k` and `map@k` for the embeddings, and `dim<d>/ndcg@k` for the further
        sizes. `results` gets those of each query, for the whole embeddings."""
        scores = {}
        num_queries = len(self._data.queries)
        relevance = [self._data.relevance[query] for query in self._dealt]
        for dim, search in self._searches.items():
            rankings = search.rankings()
            names, values = score_rankings(rankings, relevance, self._ks)
            # Summed in the order of the queries, so that rounding does not depend on the number of ranks.
            by_query = from_all_ranks(values, num_queries, self._session)
            means = means_of(names, by_query)
            if dim == self._full:
                scores.update(means)
                if results is not None:
                    first = rankings[:, :NUM_FIRST_DOCUMENTS]
                    results.names = names
                    results.values = by_query
                    results.first_documents = from_all_ranks(
                        first, num_queries, self._session
                    )
            if dim in self._dims:
                for name, value in means.items():
                    scores[f"dim{dim}/{name}"] = value
        return scores


def correlations(similarities: np.ndarray, labels: Sequence[float]) -> Scores:
    """Return `spearman` and `pearson` between similarities and the scores of the data."""
    from scipy import stats  # takes a third of a second to import, and few runs need it

    if np.ptp(similarities) == 0:  # undefined for a constant; counted as 0
        return {"spearman": 0.0, "pearson": 0.0}
    return {
        "spearman": float(stats.spearmanr(similarities, labels).statistic),
        "pearson": float(stats.pearsonr(similarities, labels).statistic),
    }


def excluded_pairs(data: RetrievalData, queries: Sequence[int]) -> Pairs:
    """Return, for some of the queries, the document with the query's own content, unless it is relevant."""
    documents = data.documents
    if isinstance(documents, Corpus):
        keys = documents.keys
    else:
        keys = np.array([item.key() for item in documents], np.int64)
    query_keys = np.array([data.queries[query].key() for query in queries], np.int64)
    rows = []
    excluded = []
    for row, document in enumerate(KeyIndex(keys).find(query_keys).tolist()):
        if document >= 0 and document not in data.relevance[queries[row]]:
            rows.append(row)
            excluded.append(document)
    return Pairs.of(rows, excluded)


def metric_names(ks: Sequence[int]) -> list[str]:
    """Return the names of the metrics at these cut-offs, in the order of `score_rankings`."""
    names = []
    for metric in METRICS:
        names += [f"{metric}@{k}" for k in ks]
    return names


def score_rankings(
    rankings: np.ndarray,
    relevance: Sequence[Grades],
    ks: Sequence[int],
) -> tuple[list[str], np.ndarray]:
    """Return the names of the metrics, and their values per query [Q, number of names], by trec_eval. nDCG uses the
    grade as gain; for the others every grade of 1 or more is relevant."""
    import pytrec_eval  # here, so that what is trained without evaluation does without it

    cuts = ",".join(str(k) for k in ks)
    measures = {f"ndcg_cut.{cuts}", f"recall.{cuts}", f"map_cut.{cuts}", "recip_rank"}
    judged = {}
    run = {}
    for query, grades in enumerate(relevance):
        judged[str(query)] = {str(number): grade for number, grade in grades.items()}
        # trec_eval sorts by score and breaks ties by name. Using the negative position as score keeps our order.
        ranked = rankings[query][rankings[query] >= 0]
        run[str(query)] = {
            str(number): -float(place) for place, number in enumerate(ranked)
        }
    by_query = pytrec_eval.RelevanceEvaluator(judged, measures).evaluate(run)
    names = metric_names(ks)
    values = np.zeros((len(rankings), len(names)))
    for query, measured in by_query.items():
        # trec_eval's reciprocal rank has no cut-off: a rank beyond k counts as 0.
        reciprocal = measured["recip_rank"]
        # In the order of METRICS.
        row = [measured[f"ndcg_cut_{k}"] for k in ks]
        row += [reciprocal if reciprocal >= 1 / k else 0.0 for k in ks]
        row += [measured[f"recall_{k}"] for k in ks]
        row += [measured[f"map_cut_{k}"] for k in ks]
        values[int(query)] = row
    return names, values


def means_of(names: Sequence[str], values: np.ndarray) -> Scores:
    """Return the mean of each metric over the queries, for values [Q, number of names]."""
    return dict(zip(names, values.mean(axis=0).tolist(), strict=True))


def compressed_scores(
    queries_QD: np.ndarray,
    documents_ND: np.ndarray,
    data: RetrievalData,
    dims: Sequence[int],
    normalize: bool,
) -> Scores:
    """Return `compressed/<form>/<size>/ndcg@10` for each form of the stored documents and each size.

    int8: queries stay float, documents are levels of each coordinate. binary: signs of both. binary_rescored: the first
    documents by signs, ordered by the float query and the documents' signs, so that only bits are stored.
    """
    excluded = excluded_pairs(data, range(len(data.queries)))
    scores = {}
    for dim in dict.fromkeys([documents_ND.shape[1], *dims]):
        queries = first_dims(queries_QD, dim, normalize)
        documents = first_dims(documents_ND, dim, normalize)
        # int8 as a search engine reads it: the middle of each of the 256 levels, as floats [N, dim].
        ranges = ranges_of(documents)
        low, high = ranges
        steps = np.where(high > low, (high - low) / 255, 1)
        levels = quantized(documents, "uint8", ranges).astype(np.float32)
        restored = (low + (levels + 0.5) * steps).astype(np.float32)
        # Bits as a search engine reads them: 0 and below are -1.
        signs = np.where(documents > 0, 1, -1).astype(np.float32)
        query_signs = np.where(queries > 0, 1, -1).astype(np.float32)
        # C candidates by bits, ordered by the float query and the documents' signs.
        candidates_QC = top_k(
            query_signs, signs, COMPRESSED_K * RESCORING_FACTOR, excluded
        )
        scores_QC = np.einsum("qd,qcd->qc", queries, signs[candidates_QC])
        scores_QC = np.where(candidates_QC >= 0, scores_QC, -np.inf)
        # Stable: equal scores keep the order by bits, which already breaks ties by number.
        order = np.argsort(-scores_QC, axis=1, kind="stable")[:, :COMPRESSED_K]
        rankings = (
            top_k(queries, documents, COMPRESSED_K, excluded),
            top_k(queries, restored, COMPRESSED_K, excluded),
            top_k(query_signs, signs, COMPRESSED_K, excluded),
            np.take_along_axis(candidates_QC, order, axis=1),
        )
        for form, ranking in zip(COMPRESSED_FORMS, rankings, strict=True):
            _, values = score_rankings(ranking, data.relevance, [COMPRESSED_K])
            scores[compressed_name(form, dim)] = float(values[:, 0].mean())
    return scores


def compressed_name(form: str, dim: int) -> str:
    """Return the name of the score of a stored form at a size."""
    return f"compressed/{form}/{dim}/ndcg@{COMPRESSED_K}"
