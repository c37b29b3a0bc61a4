"""BM25: words that a query and a document have in common, weighted by how rare they are, by the package bm25s."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from vembed.data.near_duplicates import words
from vembed.errors import UserError, require_package
from vembed.evaluation.top_k import NOTHING, Pairs, as_keys


def build_bm25_index(texts: Iterable[str | None]) -> Any:
    """Return the index of documents, which knows them by their numbers."""
    require_package("bm25s", "mine")
    import bm25s

    vocabulary: dict[str, int] = {}
    tokens = []
    for text in texts:
        text_tokens = [
            vocabulary.setdefault(word, len(vocabulary)) for word in words(text or "")
        ]
        tokens.append(text_tokens)
    if not vocabulary:
        raise UserError(
            "bm25 finds words in common, and the documents hold no text: name an embedding model"
        )
    index = bm25s.BM25()
    index.index((tokens, vocabulary), show_progress=False)
    return index


def scores_of_query(index: Any, text: str | None) -> Tensor:
    """Return the float32 score of each document; 0 where no word is in common."""
    tokens = index.get_tokens_ids(words(text or ""))
    if not tokens:
        return torch.zeros(index.scores["num_docs"])
    return torch.tensor(index.get_scores_from_ids(tokens), dtype=torch.float32)


def best_keys(
    index: Any,
    queries: Mapping[int, str | None],
    num_documents: int,
    k: int,
    excluded: Pairs,
) -> Tensor:
    """Return [Q, k] keys of the best of the first `num_documents` documents for each query, best first; NOTHING in place
    of those without a word in common. `queries`: texts by number. `excluded`: (number, document) pairs."""
    best = torch.full((len(queries), k), NOTHING)
    bounds = excluded.bounds(max(queries, default=-1) + 1)
    for row, (query, text) in enumerate(queries.items()):
        scores = scores_of_query(index, text)
        # The pairs are sorted by query, so those of a query are one slice.
        left_out = excluded.documents[bounds[query] : bounds[query + 1]]
        scores[torch.from_numpy(left_out)] = 0.0
        scores = scores[:num_documents]
        keys = as_keys(scores, torch.arange(len(scores)))
        keys = torch.where(scores > 0, keys, NOTHING)
        best[row, : len(keys)] = keys.topk(min(k, len(keys))).values
    return best
