"""Distances between projected embeddings and a teacher's vectors, chunk by chunk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vembed.losses.similarity import Similarity, chunks

OCCURRENCES_AT_ONCE = 2048


def projected_distances(
    embeddings: Tensor,
    projection: Tensor,
    vectors: Tensor,
    index: Tensor,
    target_index: Tensor,
    similarity: Similarity,
) -> Tensor:
    """Return the sum over occurrences and sizes of weight * (1 - cos(W z, t)).

    `projection`: W [E, D]. `index`, `target_index` [M]: of each occurrence, the row of
    its embedding z in `embeddings` [U, D] and that of the teacher's vector t in
    `vectors` [V, E]. Inputs that the teacher does not know, whose vector is zero, count
    as 0. Differentiable once, in the embeddings and W.
    """
    distances: Tensor = _Distances.apply(  # type: ignore[no-untyped-call]
        embeddings, projection, vectors, index, target_index, similarity
    )
    return distances


class _Distances(torch.autograd.Function):
    """The sum of the distances, and its gradients, chunk by chunk of occurrences."""

    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        projection: Tensor,
        vectors: Tensor,
        index: Tensor,
        target_index: Tensor,
        similarity: Similarity,
    ) -> Tensor:
        total = projection.new_zeros(())
        d_embeddings = torch.zeros_like(embeddings, dtype=projection.dtype)
        d_projection = torch.zeros_like(projection)
        with torch.autocast(embeddings.device.type, enabled=False):
            for chunk in chunks(index.numel(), OCCURRENCES_AT_ONCE):
                # Autograd for one chunk: the projected vectors [M, teacher dim] of all occurrences never exist at once.
                with torch.enable_grad():
                    z = embeddings.detach()[index[chunk]].to(projection.dtype)
                    z.requires_grad_()
                    weight = projection.detach().requires_grad_()
                    targets = vectors[target_index[chunk]]
                    loss = _distances(z, weight, targets, similarity)
                d_z, d_weight = torch.autograd.grad(loss, (z, weight))
                total += loss.detach()
                # An input that occurs several times gets the sum of the gradients of its occurrences.
                d_embeddings.index_add_(0, index[chunk], d_z)
                d_projection += d_weight
        ctx.dtype = embeddings.dtype
        ctx.save_for_backward(d_embeddings, d_projection)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        d_embeddings, d_projection = ctx.saved_tensors
        gradient = (d_embeddings * d_loss).to(ctx.dtype)
        return gradient, d_projection * d_loss, None, None, None, None


def _distances(
    z: Tensor, projection: Tensor, vectors: Tensor, similarity: Similarity
) -> Tensor:
    """Return the distances of one chunk: z [m, D], vectors [m, E]."""
    # Inputs that the teacher does not know have a vector of zeros.
    known = vectors.square().sum(1) > 0
    projected: Tensor | None = None
    losses = []
    for part in similarity.parts:
        # The coordinates that this size adds to the one before: W z of every size for the price of the full one.
        more = z[:, part] @ projection[:, part].T
        projected = more if projected is None else projected + more
        squares = projected.square().sum(1)
        # A vector of zeros has the cosine 0 and no gradient.
        safe = torch.where(squares > 0, squares, torch.ones_like(squares))
        inverse = safe.rsqrt() * (squares > 0)
        cosine = (projected * vectors).sum(1) * inverse
        losses.append(((1.0 - cosine) * known).sum())
    return similarity.total(torch.stack(losses))
