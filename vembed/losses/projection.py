"""Embedding distillation: a learned linear map from the student's embeddings to a teacher's vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vembed.config.schema import TrainConfig
from vembed.config.terms import followed_teacher
from vembed.errors import UserError
from vembed.losses.batch import LossBatch
from vembed.losses.matryoshka import Similarity, arithmetic_dtype, chunks
from vembed.losses.targets import TeacherVectors
from vembed.losses.temperature import ScoredLoss

OCCURRENCES_AT_ONCE = 2048


class EmbeddingDistillation(ScoredLoss):
    """loss: embedding. Over all M = 2 N + H occurrences z of queries, positives and hard negatives,

        L = 1/M * sum_z 1 - cos( W z, t_z )

    W is learned with the model, and is no part of what is saved. At a smaller Matryoshka size k only the first k
    coordinates of z and columns of W count. Inputs that the teacher does not know count as 0.
    """

    def __init__(
        self,
        config: TrainConfig,
        mrl_dims: Sequence[int],
        embedding_dim: int,
        teacher_dim: int,
    ) -> None:
        """W starts as the identity where the sizes are equal, otherwise at random from `seed`."""
        super().__init__(config, mrl_dims)
        self.teacher_name = str(followed_teacher(config))
        if embedding_dim == teacher_dim:
            start = torch.eye(embedding_dim)
        else:
            draw = torch.Generator().manual_seed(config.run.seed)
            start = (
                torch.randn(teacher_dim, embedding_dim, generator=draw)
                / embedding_dim**0.5
            )
        self.projection = nn.Parameter(start)

    def forward(self, batch: LossBatch) -> Tensor:
        """Return the own occurrences' part of L."""
        teacher = batch.teacher_vectors(self.teacher_name, "loss: embedding")
        projection = self.projection.to(
            batch.embeddings.device, arithmetic_dtype(batch.embeddings)
        )
        return _part(batch, teacher, projection, self.similarity_for(batch.embeddings))


class Anchor(ScoredLoss):
    """loss: anchor. The formula of EmbeddingDistillation with W the identity, at the full size alone: the mean of
    1 - cos(z, t) with t the embedding that the start model gives to the same input."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config, ())
        self.teacher_name = str(followed_teacher(config))

    def forward(self, batch: LossBatch) -> Tensor:
        """Return the own occurrences' part of L."""
        teacher = batch.teacher_vectors(self.teacher_name, "anchor_weight")
        dim, known = batch.embeddings.shape[1], teacher.vectors.shape[1]
        if dim != known:
            raise UserError(
                f"anchor_weight: the embeddings have {dim} dimensions, and those of {self.teacher_name} before "
                f"training have {known}: leave out what changes the size, or anchor_weight"
            )
        identity = torch.eye(
            dim,
            device=batch.embeddings.device,
            dtype=arithmetic_dtype(batch.embeddings),
        )
        return _part(batch, teacher, identity, self.similarity_for(batch.embeddings))


def _part(
    batch: LossBatch,
    teacher: TeacherVectors,
    projection: Tensor,
    similarity: Similarity,
) -> Tensor:
    """Return the own occurrences' part of the mean distance."""
    own, negatives = batch.own(), batch.own_hard_negatives()
    index = batch.places(
        torch.cat((batch.query[own], batch.positive[own], batch.negative[negatives]))
    )
    wanted = teacher.places(
        torch.cat(
            (teacher.query[own], teacher.positive[own], teacher.negative[negatives])
        )
    )
    num = 2 * batch.num_rows + batch.negative.numel()
    vectors = teacher.vectors.to(batch.embeddings.device, projection.dtype)
    losses: Tensor = _Distances.apply(  # type: ignore[no-untyped-call]
        batch.embeddings, projection, vectors, index, wanted, similarity
    )
    return losses / max(1, num)


class _Distances(torch.autograd.Function):
    """The sum of the distances, and its gradients, chunk by chunk of occurrences."""

    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        projection: Tensor,
        vectors: Tensor,
        index: Tensor,
        wanted: Tensor,
        similarity: Similarity,
    ) -> Tensor:
        total = projection.new_zeros(())
        d_embeddings = torch.zeros_like(embeddings, dtype=projection.dtype)
        d_projection = torch.zeros_like(projection)
        with torch.autocast(embeddings.device.type, enabled=False):
            for some in chunks(index.numel(), OCCURRENCES_AT_ONCE):
                # Autograd for one chunk: the projected vectors [M, teacher dim] of all occurrences never exist at once.
                with torch.enable_grad():
                    z = (
                        embeddings.detach()[index[some]]
                        .to(projection.dtype)
                        .requires_grad_()
                    )
                    weight = projection.detach().requires_grad_()
                    loss = _distances(z, weight, vectors[wanted[some]], similarity)
                d_z, d_weight = torch.autograd.grad(loss, (z, weight))
                total += loss.detach()
                # An input that occurs several times gets the sum of the gradients of its occurrences.
                d_embeddings.index_add_(0, index[some], d_z)
                d_projection += d_weight
        ctx.dtype = embeddings.dtype
        ctx.save_for_backward(d_embeddings, d_projection)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        d_embeddings, d_projection = ctx.saved_tensors
        return (
            (d_embeddings * d_loss).to(ctx.dtype),
            d_projection * d_loss,
            None,
            None,
            None,
            None,
        )


def _distances(
    z: Tensor, projection: Tensor, vectors: Tensor, similarity: Similarity
) -> Tensor:
    """The weighted sum over sizes and occurrences of 1 - cos(W z, t)."""
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
        inverse = torch.where(
            squares > 0, squares, torch.ones_like(squares)
        ).rsqrt() * (squares > 0)
        cosine = (projected * vectors).sum(1) * inverse
        losses.append(((1.0 - cosine) * known).sum())
    return similarity.total(torch.stack(losses))
