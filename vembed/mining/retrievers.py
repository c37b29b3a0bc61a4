"""Retrievers: BM25 by the package bm25s, vectors of models, and the fusion of several rankings."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from vembed.data.cache import short_hash
from vembed.data.near_duplicates import words
from vembed.errors import UserError
from vembed.evaluation.top_k import (
    NOTHING,
    Pairs,
    as_keys,
    documents_of,
    scores_of,
)
from vembed.mining.config import ModelOptions, Retriever
from vembed.mining.documents import Documents, array_identity
from vembed.mining.encoders import (
    Encode,
    encoder_identity,
    encoder_precision,
    load_encoder,
)
from vembed.mining.known_positives import KnownPositives
from vembed.mining.vectors import VectorStore
from vembed.parallel import collectives
from vembed.parallel.session import Session

Ranking = tuple[np.ndarray, np.ndarray]
"""[Q, k] numbers of documents, best first, -1 where there are fewer; and their scores."""
FORMAT = 2
"""Format version of the index. Increase it when `words` gives other words."""


def check_bm25() -> None:
    """Raise where the package is missing."""
    if find_spec("bm25s") is None:
        raise UserError("bm25 needs the package bm25s: pip install 'vembed[mine]'")


class LexicalRetriever:
    """Words in common, weighted by how rare they are. While the index is built, it is held in memory by one process."""

    identity = ""
    """It depends on the documents and queries alone."""

    def __init__(
        self,
        folder: Path,
        documents: Documents,
        known: KnownPositives,
        session: Session,
    ) -> None:
        check_bm25()
        self._documents = documents
        self._known = known
        self._session = session
        # With their order: the index knows documents by their numbers alone.
        name = short_hash(FORMAT, array_identity(documents.exact))
        self._folder = folder / "bm25" / name
        if session.is_main and not self._folder.exists():
            self._build()
        session.barrier()
        if not self._folder.exists():
            raise UserError(
                f"{self._folder} is not here: work_dir must be a folder that all machines see"
            )
        import bm25s

        self._index = bm25s.BM25.load(
            str(self._folder), mmap=True, load_corpus=False, show_progress=False
        )

    def search(self, first: int, last: int, k: int, excluded: Pairs) -> Ranking:
        """[Q, k] best candidates for queries first .. last - 1, and their scores, as `search` of dense vectors.

        `excluded` counts queries from `first`. Collective: the ranks share the queries.
        """
        num_candidates = self._documents.num_candidates
        numbers = torch.arange(num_candidates)
        bounds = excluded.bounds(last - first)
        # The index is mapped by every rank, so that the queries are shared and not the documents.
        dealt = range(self._session.rank, last - first, self._session.world_size)
        best = torch.full((len(dealt), k), NOTHING, dtype=torch.int64)
        for row, query in enumerate(dealt):
            scores = self._scores(first + query)[:num_candidates]
            # A score of 0 means no word in common, and no candidate.
            keys = torch.where(scores > 0, as_keys(scores, numbers), NOTHING)
            left_out = excluded.documents[bounds[query] : bounds[query + 1]]
            # Documents of the rows beyond the candidates may be excluded too, and have no key.
            keys[torch.from_numpy(left_out[left_out < num_candidates])] = NOTHING
            best_keys = keys.topk(min(k, num_candidates)).values
            best[row, : len(best_keys)] = best_keys
        device = self._session.device
        merged = collectives.all_gather_dealt(best.to(device), last - first).cpu()
        return documents_of(merged).numpy(), scores_of(merged).numpy()

    def pair_scores(self, first: int, pairs: Pairs) -> np.ndarray:
        """The score of each pair, whose queries count from `first`. Collective."""
        result = torch.zeros(len(pairs))
        for query in np.unique(pairs.queries).tolist():
            if query % self._session.world_size == self._session.rank:
                begin, end = np.searchsorted(pairs.queries, [query, query + 1])
                scores = self._scores(first + query)
                result[begin:end] = scores[torch.from_numpy(pairs.documents[begin:end])]
        return collectives.sum_tensor(result).numpy()

    def _scores(self, query: int) -> torch.Tensor:
        tokens = self._index.get_tokens_ids(words(self._known.item(query).text or ""))
        if not tokens:
            return torch.zeros(len(self._documents))
        scores = self._index.get_scores_from_ids(tokens)
        return torch.tensor(scores, dtype=torch.float32)

    def _build(self) -> None:
        import bm25s

        vocabulary: dict[str, int] = {}
        ids = []
        for number in range(len(self._documents)):
            text = self._documents.item(number).text or ""
            ids.append(
                [vocabulary.setdefault(word, len(vocabulary)) for word in words(text)]
            )
        if not vocabulary:
            raise UserError(
                "bm25 finds words in common, and the documents hold no text"
            )
        index = bm25s.BM25()
        index.index((ids, vocabulary), show_progress=False)
        partial = self._folder.with_suffix(".part")
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        index.save(str(partial), show_progress=False)
        # Renamed when whole: an index that a killed run left half built never counts.
        partial.rename(self._folder)


class DenseRetriever:
    """Vectors of queries and documents on disk. Methods are collective."""

    identity = ""
    summary = ""
    """One line for the log."""
    num_encoded = 0
    """Vectors that were computed now, and not found on disk."""

    def __init__(
        self,
        folder: Path,
        identity: str,
        documents: Documents,
        known: KnownPositives,
        session: Session,
        dtype: str = "float32",
    ) -> None:
        """`identity`: of the model that encodes."""
        self.identity = identity
        self._folder = folder
        self._num_candidates = documents.num_candidates
        self._document_keys = documents.exact
        self._query_keys = known.exact
        self._session = session
        self._dtype = dtype
        self.documents = self._open("document", documents.exact)
        self.queries = self._open("query", known.exact)

    def _open(self, name: str, keys: np.ndarray) -> VectorStore:
        folder = self._folder / name
        return VectorStore(folder, self.identity, keys, self._dtype, self._session)

    def search(self, first: int, last: int, k: int, excluded: Pairs) -> Ranking:
        """[Q, k] best candidates for queries first .. last - 1 and their scores. `excluded` counts from `first`."""
        queries = self.queries.take(np.arange(first, last))
        return self.documents.search(queries, self._num_candidates, k, excluded)

    def pair_scores(self, first: int, pairs: Pairs) -> np.ndarray:
        """The score of each pair, whose queries count from `first`."""
        if not len(pairs):
            return np.zeros(0, np.float32)
        last = first + int(pairs.queries.max()) + 1
        queries = self.queries.take(np.arange(first, last))
        return self.documents.pair_scores(queries, pairs)

    def sums_of(self, pairs: Pairs) -> VectorStore:
        """Return the sums of the vectors of query and document of each pair, without normalising."""
        queries = self._query_keys[pairs.queries]
        documents = self._document_keys[pairs.documents]
        sums = self._open("sum", np.stack([queries, documents], axis=1))

        def add(numbers: np.ndarray) -> np.ndarray:
            queries = self.queries.take(pairs.queries[numbers])
            documents = self.documents.take(pairs.documents[numbers])
            return (queries + documents).numpy()

        sums.encode(add)
        return sums


def open_dense(
    retriever: Retriever,
    options: ModelOptions,
    folder: Path,
    documents: Documents,
    known: KnownPositives,
    session: Session,
) -> DenseRetriever:
    """Encode what is not on disk yet with the model of a retriever. Collective."""
    precision = encoder_precision(retriever, options, session)
    dtype = "bfloat16" if precision.value == "bf16" else "the dtype of the weights"
    dense = DenseRetriever(
        folder / "vectors",
        encoder_identity(retriever, options, precision.value),
        documents,
        known,
        session,
        options.vector_dtype,
    )
    dense.summary = f"{retriever.model}: vectors are computed in {dtype} ({precision.reason}) and stored as {options.vector_dtype}"

    # Loaded at most once, and only where vectors are missing.
    @cache
    def encoder() -> Encode:
        return load_encoder(retriever, options, session.device, precision.value)

    def encode_queries(numbers: np.ndarray) -> np.ndarray:
        return encoder()(list(map(known.item, numbers.tolist())), "query")

    def encode_documents(numbers: np.ndarray) -> np.ndarray:
        return encoder()(list(map(documents.item, numbers.tolist())), "document")

    title = f"{retriever.model}: encoding"
    dense.num_encoded = dense.queries.encode(encode_queries, f"{title} queries")
    dense.num_encoded += dense.documents.encode(encode_documents, f"{title} documents")
    return dense


def fuse(
    rankings: Sequence[Ranking],
    weights: Sequence[float],
    k: int,
    method: str,
    rrf_k: int,
) -> np.ndarray:
    """[Q, k] documents of several rankings ([Q, n] documents and scores each) as one, -1 where there are fewer."""
    gains = []
    for (documents, scores), weight in zip(rankings, weights, strict=True):
        if method == "rrf":
            gain = weight / (rrf_k + 1.0 + np.arange(documents.shape[1]))
            gain = np.broadcast_to(gain, documents.shape)
        else:
            gain = weight * _standardised(scores)
        gains.append(np.where(documents >= 0, gain, 0.0))
    documents = np.concatenate([documents for documents, _ in rankings], axis=1)
    order = np.argsort(documents, axis=1, kind="stable")
    documents = np.take_along_axis(documents, order, axis=1)
    gain = np.take_along_axis(np.concatenate(gains, axis=1), order, axis=1)
    # Equal documents are neighbours now: the first of them gets the sum of all.
    is_first = np.ones(documents.shape, bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    group = np.cumsum(is_first.ravel()) - 1
    total = np.bincount(group, gain.ravel())[group].reshape(documents.shape)
    total[~is_first | (documents < 0)] = -np.inf
    # Stable: of equal ones the lower number first.
    best = np.argsort(-total, axis=1, kind="stable")[:, :k]
    chosen = np.take_along_axis(documents, best, axis=1)
    return np.where(np.take_along_axis(total, best, axis=1) > -np.inf, chosen, -1)


def _standardised(scores_QK: np.ndarray) -> np.ndarray:
    """Scores in standard deviations above the lowest of their query, so that a document that is missing has 0."""
    is_finite = np.isfinite(scores_QK)
    count = np.maximum(is_finite.sum(axis=1, keepdims=True), 1)
    values = np.where(is_finite, scores_QK, 0.0).astype(np.float64)
    mean = values.sum(axis=1, keepdims=True) / count
    squares = np.where(is_finite, values - mean, 0.0) ** 2
    deviation = np.sqrt(squares.sum(axis=1, keepdims=True) / count)
    lowest = np.where(is_finite, scores_QK, np.inf).min(axis=1, keepdims=True)
    above = np.where(
        is_finite, values - np.where(np.isfinite(lowest), lowest, 0.0), 0.0
    )
    result: np.ndarray = above / np.maximum(deviation, 1e-12)
    return result
