"""Matryoshka: the sizes at which a loss counts, and similarities of embeddings at all of them in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_AT_ONCE = 2048

Positions = slice | Tensor
"""Rows of a PrefixTable: a range, which costs no copy, or their numbers."""


@dataclass(frozen=True, slots=True)
class Similarity:
    """How embeddings are compared: by cosine or dot product of their first coordinates, at one size or at several.

    With several, L = sum over sizes of weight * L(first so many coordinates, for the cosine normalised again).
    """

    cosine: bool
    dims: tuple[int, ...]
    """The K sizes, ascending."""
    weights: tuple[float, ...]

    @classmethod
    def at(cls, dims: Sequence[int], weights: Sequence[float], *, cosine: bool) -> Similarity:
        """From sizes in any order, each with its own weight; a size given twice counts with both weights."""
        total: dict[int, float] = {}
        for dim, weight in zip(dims, weights, strict=True):
            total[dim] = total.get(dim, 0.0) + weight
        ordered = sorted(total)
        return cls(cosine, tuple(ordered), tuple(total[dim] for dim in ordered))

    def total(self, by_size: Tensor) -> Tensor:
        """The weighted sum of the sizes' losses [K]; not a product of matrices, which autocast would cut short."""
        return (by_size * by_size.new_tensor(self.weights)).sum()

    @property
    def parts(self) -> list[slice]:
        """The coordinates that each size has and the size before it has not."""
        return [slice(start, stop) for start, stop in zip((0, *self.dims), self.dims, strict=False)]


def arithmetic_dtype(embeddings: Tensor) -> torch.dtype:
    """float64 stays, everything else is scored in float32."""
    return torch.float64 if embeddings.dtype == torch.float64 else torch.float32


class PrefixTable:
    """N occurrences of embeddings, ready to be scored at all sizes at once, and the gradient that comes back to them.

    `x` [N, d] holds, for the cosine, the embeddings divided by the norm of their first d coordinates, d the largest
    size. The cosine at a smaller size k is then dot(x_i[:k], x_j[:k]) * gain_k[i] * gain_k[j], gain_k = 1 / |x[:k]|, so
    that the dot products of all sizes are partial sums of one. A vector of zeros has the cosine 0 and no gradient.

    Gradients are collected in two parts: `dx`, as if the gains were constants, and `pull[k][i]`, the sum of
    dL/ds * s over all scores s of size k in which i took part, from which the gradient through the gain follows, since
    d(gain_k)/dx = -gain_k^3 * x[:k]. For the dot product there are neither gains nor pulls.
    """

    def __init__(self, embeddings: Tensor, index: Tensor, similarity: Similarity, *, with_gradient: bool) -> None:
        self.embeddings = embeddings
        self.index = index
        self.similarity = similarity
        num, num_smaller = index.numel(), len(similarity.dims) - 1
        dtype = arithmetic_dtype(embeddings)
        self.x = embeddings.new_empty(num, similarity.dims[-1], dtype=dtype)
        self.gains = embeddings.new_empty(num_smaller, num, dtype=dtype) if similarity.cosine else None
        for rows in chunks(num, ROWS_AT_ONCE):
            x = self._gather(rows)
            if self.gains is not None:
                inverse_norms = _inverse_prefix_norms(x, similarity)
                x *= inverse_norms[-1][:, None]
                self.gains[:, rows] = (inverse_norms[:-1] / inverse_norms[-1]).nan_to_num_(0.0)
            self.x[rows] = x
        if with_gradient:
            self.dx = torch.zeros_like(self.x)
            self.pull = embeddings.new_zeros(num_smaller, num, dtype=dtype)

    def _gather(self, rows: slice) -> Tensor:
        wanted = self.embeddings.index_select(0, self.index[rows])[:, : self.similarity.dims[-1]]
        return wanted.to(arithmetic_dtype(wanted))

    def pair_scores(self, left: Positions, right: Positions) -> Tensor:
        """[K, P] scores of the pairs (left_n, right_n) at all K sizes."""
        product = self.x[left] * self.x[right]
        scores = torch.stack([product[:, part].sum(1) for part in self.similarity.parts]).cumsum(0)
        if self.gains is not None:
            scores[:-1] *= self.gains[:, left] * self.gains[:, right]
        return scores

    def add_pair_gradient(self, left: Positions, right: Positions, scores: Tensor, d_scores: Tensor) -> None:
        """Take in dL/d(scores) [K, P] of what `pair_scores` returned."""
        d_products = d_scores.clone()
        if self.gains is not None:
            d_products[:-1] *= self.gains[:, left] * self.gains[:, right]
            pull = (d_scores * scores)[:-1]
            _add(self.pull, 1, left, pull)
            _add(self.pull, 1, right, pull)
        # A coordinate counts at every size that reaches it.
        d_parts = d_products.flip(0).cumsum(0).flip(0)
        for part, d_part in zip(self.similarity.parts, d_parts, strict=True):
            _add(self.dx[:, part], 0, left, self.x[right, part] * d_part[:, None])
            _add(self.dx[:, part], 0, right, self.x[left, part] * d_part[:, None])

    def gradient(self, into: Tensor | None = None) -> Tensor:
        """[U, D] the gradient of the embeddings, added to `into` where that is given. The table's last act: `x` is
        given up before the gradient is allocated, and made again chunk by chunk, so that never three copies exist."""
        del self.x
        if into is None:
            into = torch.zeros_like(self.embeddings, dtype=self.dx.dtype)
        dims = self.similarity.dims
        for rows in chunks(self.index.numel(), ROWS_AT_ONCE):
            dx = self.dx[rows]
            if self.gains is not None:
                x = self._gather(rows)
                inverse_norm = _inverse_prefix_norms(x, self.similarity)[-1][:, None]
                x *= inverse_norm
                for dim, gain, pull in zip(dims[:-1], self.gains[:, rows], self.pull[:, rows], strict=True):
                    dx[:, :dim] -= x[:, :dim] * (gain * gain * pull)[:, None]
                dx -= x * (x * dx).sum(1, keepdim=True)
                dx *= inverse_norm
            into[:, : dims[-1]].index_add_(0, self.index[rows], dx)
        return into


def chunks(num: int, size: int) -> list[slice]:
    """0 .. num in ranges of at most `size`."""
    return [slice(start, min(start + size, num)) for start in range(0, num, size)]


def _inverse_prefix_norms(x: Tensor, similarity: Similarity) -> Tensor:
    """[K, n] one over the norm of each prefix; 0 for a vector of zeros."""
    squares = torch.stack([x[:, part].square().sum(1) for part in similarity.parts]).cumsum(0)
    return torch.where(squares > 0, squares.rsqrt(), torch.zeros_like(squares))


def _add(target: Tensor, axis: int, positions: Positions, value: Tensor) -> None:
    """target[positions] += value along an axis; numbers may repeat."""
    if isinstance(positions, slice):
        target.narrow(axis, positions.start, positions.stop - positions.start).add_(value)
    else:
        target.index_add_(axis, positions, value)
