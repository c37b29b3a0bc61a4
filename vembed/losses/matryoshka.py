"""Matryoshka sizes and weights, and similarities of embedding prefixes at all sizes in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

ROWS_AT_ONCE = 2048

Positions = slice | Tensor
"""Rows of a PrefixTable: a slice (a view, no copy) or an index tensor."""


@dataclass(frozen=True, slots=True)
class Similarity:
    """Similarity function (cosine or dot product), applied to prefixes of one or several sizes.

    With several sizes, L = sum over sizes of weight * L(prefix of that size), each prefix normalised for the cosine.
    """

    cosine: bool
    dims: tuple[int, ...]
    """The K sizes, ascending."""
    weights: tuple[float, ...]

    @classmethod
    def at(
        cls, dims: Sequence[int], weights: Sequence[float], *, cosine: bool
    ) -> Similarity:
        """Return a Similarity for sizes in any order, each with its weight. Weights of a repeated size are added."""
        total: dict[int, float] = {}
        for dim, weight in zip(dims, weights, strict=True):
            total[dim] = total.get(dim, 0.0) + weight
        ordered = sorted(total)
        return cls(cosine, tuple(ordered), tuple(total[dim] for dim in ordered))

    def total(self, by_size: Tensor) -> Tensor:
        """Return the weighted sum of per-size losses [K]. Not a matrix product: autocast would run it in 16 bits."""
        return (by_size * by_size.new_tensor(self.weights)).sum()

    @property
    def parts(self) -> list[slice]:
        """Coordinates that each size adds to the next smaller size."""
        return [
            slice(start, stop)
            for start, stop in zip((0, *self.dims), self.dims, strict=False)
        ]


def arithmetic_dtype(embeddings: Tensor) -> torch.dtype:
    """Return the dtype of the scores: float64 for float64 embeddings, otherwise float32."""
    return torch.float64 if embeddings.dtype == torch.float64 else torch.float32


class PrefixTable:
    """Table of N embedding occurrences: scores at all sizes, and the gradient with respect to the embeddings.

    `x` [N, d]: for the cosine, the embeddings divided by the norm of their first d coordinates, d the largest size.
    The cosine at a smaller size k is dot(x_i[:k], x_j[:k]) * a_k[i] * a_k[j] with the prefix scale
    a_k = 1 / |x[:k]|. Dot products of all sizes are thus partial sums of one product. A zero vector has cosine 0
    and gradient 0.

    The gradient has two parts. `dx` treats prefix scales as constants. `norm_grad[k][i]` is the sum of dL/ds * s over
    all scores s of size k with i in them; it gives the gradient of the norm, as d(a_k)/dx = -a_k^3 * x[:k]. The dot
    product has neither prefix scales nor norm gradients.
    """

    def __init__(
        self,
        embeddings: Tensor,
        index: Tensor,
        similarity: Similarity,
        *,
        with_gradient: bool,
    ) -> None:
        self.embeddings = embeddings
        self.index = index
        self.similarity = similarity
        self.with_gradient = with_gradient
        num, num_smaller = index.numel(), len(similarity.dims) - 1
        dtype = arithmetic_dtype(embeddings)
        self.x = embeddings.new_empty(num, similarity.dims[-1], dtype=dtype)
        self.prefix_scales = (
            embeddings.new_empty(num_smaller, num, dtype=dtype)
            if similarity.cosine
            else None
        )
        for rows in chunks(num, ROWS_AT_ONCE):
            x = self._gather(rows)
            if self.prefix_scales is not None:
                inverse_norms = _inverse_prefix_norms(x, similarity)
                x *= inverse_norms[-1][:, None]
                # |e[:d]| / |e[:k]| = 1 / |x[:k]|. For a zero vector both inverses are 0, and 0 / 0 must become 0.
                self.prefix_scales[:, rows] = (
                    inverse_norms[:-1] / inverse_norms[-1]
                ).nan_to_num_(0.0)
            self.x[rows] = x
        if with_gradient:
            self.dx = torch.zeros_like(self.x)
            self.norm_grad = embeddings.new_zeros(num_smaller, num, dtype=dtype)

    def _gather(self, rows: slice) -> Tensor:
        wanted = self.embeddings.index_select(0, self.index[rows])[
            :, : self.similarity.dims[-1]
        ]
        return wanted.to(arithmetic_dtype(wanted))

    def pair_scores(self, left: Positions, right: Positions) -> Tensor:
        """Return the scores [K, P] of the pairs (left_n, right_n) at all K sizes."""
        product = self.x[left] * self.x[right]
        # Sum each size's own coordinates once; the running sum over sizes gives every prefix.
        scores = _running_sums(
            product[:, part].sum(1) for part in self.similarity.parts
        )
        if self.prefix_scales is not None:
            scores[:-1] *= self.prefix_scales[:, left] * self.prefix_scales[:, right]
        return scores

    def add_pair_gradient(
        self, left: Positions, right: Positions, scores: Tensor, d_scores: Tensor
    ) -> None:
        """Accumulate the gradient for dL/d(scores) [K, P], where `pair_scores` returned `scores`."""
        d_products = d_scores.clone()
        if self.prefix_scales is not None:
            d_products[:-1] *= (
                self.prefix_scales[:, left] * self.prefix_scales[:, right]
            )
            # The largest size has no prefix scale: its normalisation is part of `x` and handled in `gradient`.
            norm_grad = (d_scores * scores)[:-1]
            _add(self.norm_grad, 1, left, norm_grad)
            _add(self.norm_grad, 1, right, norm_grad)
        # A coordinate is part of every size that is large enough: a suffix sum over sizes, [K, P].
        d_parts = _running_sums(d_products.flip(0)).flip(0)
        for part, d_part in zip(self.similarity.parts, d_parts, strict=True):
            _add(self.dx[:, part], 0, left, self.x[right, part] * d_part[:, None])
            _add(self.dx[:, part], 0, right, self.x[left, part] * d_part[:, None])

    def gradient(self, into: Tensor | None = None) -> Tensor:
        """Return the gradient [U, D] with respect to the embeddings, added to `into` if given.

        This must be the last call on the table. `x` is freed before the gradient is allocated and recomputed in chunks,
        so that at most two tensors of this size exist.
        """
        del self.x
        if into is None:
            into = torch.zeros_like(self.embeddings, dtype=self.dx.dtype)
        dims = self.similarity.dims
        for rows in chunks(self.index.numel(), ROWS_AT_ONCE):
            dx = self.dx[rows]
            if self.prefix_scales is not None:
                x = self._gather(rows)
                inverse_norm = _inverse_prefix_norms(x, self.similarity)[-1][:, None]
                x *= inverse_norm
                for dim, prefix_scale, norm_grad in zip(
                    dims[:-1],
                    self.prefix_scales[:, rows],
                    self.norm_grad[:, rows],
                    strict=True,
                ):
                    # Through the prefix scale a: s is proportional to a, so dL/da = norm_grad / a, times -a^3 * x[:k].
                    dx[:, :dim] -= (
                        x[:, :dim] * (prefix_scale * prefix_scale * norm_grad)[:, None]
                    )
                # Through x = e / |e[:d]|: remove the component along x, then divide by the norm.
                dx -= x * (x * dx).sum(1, keepdim=True)
                dx *= inverse_norm
            # index_add_, not assignment: an embedding may occur in several rows of the table.
            into[:, : dims[-1]].index_add_(0, self.index[rows], dx)
        return into


def chunks(num: int, size: int) -> list[slice]:
    """Return the range 0 .. num as slices of at most `size`."""
    return [slice(start, min(start + size, num)) for start in range(0, num, size)]


def _inverse_prefix_norms(x: Tensor, similarity: Similarity) -> Tensor:
    """Return [K, n], the inverse norm of each prefix; 0 for a zero vector."""
    squares = _running_sums(x[:, part].square().sum(1) for part in similarity.parts)
    return torch.where(squares > 0, squares.rsqrt(), torch.zeros_like(squares))


def _running_sums(parts: Iterable[Tensor]) -> Tensor:
    """Return the sums of the first 1, 2, ... parts, stacked. Not by cumsum, which has no deterministic kernel for
    floating-point numbers on GPUs, so that `deterministic: true` would refuse it."""
    return torch.stack(list(accumulate(parts)))


def _add(target: Tensor, axis: int, positions: Positions, value: Tensor) -> None:
    """Add `value` to target[positions] along an axis. Positions may repeat."""
    if isinstance(positions, slice):
        target.narrow(axis, positions.start, positions.stop - positions.start).add_(
            value
        )
    else:
        target.index_add_(axis, positions, value)
