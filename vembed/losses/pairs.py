"""Differentiable similarities of explicit pairs at all Matryoshka sizes, for losses that need no score matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vembed.losses.matryoshka import PrefixTable, Similarity, arithmetic_dtype, chunks

PAIRS_AT_ONCE = 4096


def pair_scores(
    embeddings: Tensor, left: Tensor, right: Tensor, similarity: Similarity
) -> Tensor:
    """Return similarities [K, P] of the pairs (left_n, right_n) at all K sizes. Differentiable once."""
    scores: Tensor = _PairScores.apply(embeddings, left, right, similarity)  # type: ignore[no-untyped-call]
    return scores


class _PairScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        left: Tensor,
        right: Tensor,
        similarity: Similarity,
    ) -> Tensor:
        ctx.similarity = similarity
        scores = embeddings.new_empty(
            len(similarity.dims), left.numel(), dtype=arithmetic_dtype(embeddings)
        )
        for some in chunks(left.numel(), PAIRS_AT_ONCE):
            index = torch.cat((left[some], right[some]))
            table = PrefixTable(embeddings, index, similarity, with_gradient=False)
            scores[:, some] = table.pair_scores(*_halves(index))
        # Save indices and scores only: the gathered rows [2P, D] may exceed the embeddings; backward gathers again.
        ctx.save_for_backward(embeddings, left, right, scores)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_scores: Tensor) -> tuple[Tensor | None, ...]:
        embeddings, left, right, scores = ctx.saved_tensors
        # Accumulate over chunks in the arithmetic dtype; rounding to the embeddings' dtype happens once, at the end.
        gradient = torch.zeros_like(embeddings, dtype=scores.dtype)
        for some in chunks(left.numel(), PAIRS_AT_ONCE):
            index = torch.cat((left[some], right[some]))
            table = PrefixTable(embeddings, index, ctx.similarity, with_gradient=True)
            table.add_pair_gradient(*_halves(index), scores[:, some], d_scores[:, some])
            table.gradient(into=gradient)
        return gradient.to(embeddings.dtype), None, None, None


def _halves(index: Tensor) -> tuple[slice, slice]:
    half = index.numel() // 2
    return slice(0, half), slice(half, 2 * half)
