"""BM25: words that a query and a document have in common, weighted by how rare they are, by the package bm25s."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vembed.data.near_duplicates import words
from vembed.errors import UserError
from vembed.evaluation.top_k import NOTHING, as_keys


def check_bm25() -> None:
    """Raise where the package is missing."""
    if find_spec("bm25s") is None:
        raise UserError("bm25 needs the package bm25s: pip install 'vembed[mine]'")


def build_bm25_index(texts: Iterable[str | None]) -> Any:
    """Return the index of documents, which knows them by their numbers."""
    check_bm25()
    import bm25s

    vocabulary: dict[str, int] = {}
    tokens = []
    for text in texts:
        text_tokens = []
        for word in words(text or ""):
            text_tokens.append(vocabulary.setdefault(word, len(vocabulary)))
        tokens.append(text_tokens)
    if not vocabulary:
        raise UserError(
            "bm25 finds words in common, and the documents hold no text: name an embedding model"
        )
    index = bm25s.BM25()
    index.index((tokens, vocabulary), show_progress=False)
    return index


def scores_of_query(
    index: Any,
    text: str | None,
    num_documents: int,
) -> Tensor:
    """Return the float32 score of each document; 0 where no word is in common."""
    tokens = index.get_tokens_ids(words(text or ""))
    if not tokens:
        return torch.zeros(num_documents)
    return torch.tensor(index.get_scores_from_ids(tokens), dtype=torch.float32)


def best_keys(
    scores: Tensor,
    k: int,
    excluded: np.ndarray,
) -> Tensor:
    """Return the keys of at most k documents, best first; NOTHING in place of those without a word in common."""
    keys = as_keys(scores, torch.arange(len(scores)))
    keys = torch.where(scores > 0, keys, NOTHING)
    keys[torch.from_numpy(excluded)] = NOTHING
    return keys.topk(min(k, len(keys))).values
