"""Similarities of embeddings at all Matryoshka dims, with their gradients.

`VectorTable` is the score table of dense vectors: it scores tiles and single pairs, and turns derivatives of scores into
the gradient of the embeddings.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

VECTORS_AT_ONCE = 2048
PAIRS_AT_ONCE = 4096

Entries = slice | Tensor
"""Entries of a table: a slice (a view, no copy) or an index tensor."""


@dataclass(frozen=True)
class Similarity:
    """Cosine or dot product, applied to prefixes of one or several dims.

    With several dims, L = sum over dims of weight * L(prefix of that dim), each prefix normalised for the cosine.
    """

    cosine: bool = True
    dims: tuple[int, ...] = ()
    """The K dims, ascending. Empty: the width of the embeddings, known to `TermModule.similarity`."""
    weights: tuple[float, ...] = (1.0,)

    def total(self, by_dim: Tensor) -> Tensor:
        """Return the weighted sum of per-dim losses [K]."""
        weights = _constant(self.weights, by_dim.dtype, by_dim.device)
        # Not a matrix product: autocast would run it in 16 bits.
        return (by_dim * weights).sum()

    @property
    def parts(self) -> list[slice]:
        """Coordinates that each dim adds to the next smaller dim."""
        bounds = pairwise((0, *self.dims))
        return [slice(start, stop) for start, stop in bounds]


def arithmetic_dtype(embeddings: Tensor) -> torch.dtype:
    """Return the dtype of the scores: float64 for float64 embeddings, otherwise float32."""
    return torch.float64 if embeddings.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class RowVectors:
    """The vectors of n rows of the score matrix, scaled, and the buffer of their gradient."""

    entries: slice
    scaled_x: Tensor
    """[n, d] vectors of the entries times the scale of the logits."""
    d_scaled_x: Tensor
    """[n, d] gradient with respect to the scaled vectors."""


class VectorTable:
    """Score table of N vectors: scores at all K dims, and the gradient.

    `x` [N, d]: for the cosine, the embeddings divided by the norm of their first d coordinates, with d the largest dim.
    The cosine at a smaller dim k is

        s_k(i, j) = dot(x_i[:k], x_j[:k]) * a_k[i] * a_k[j]      a_k[i] = 1 / |x_i[:k]|

    with the prefix scales a_k. So the dot products of all dims are partial sums of one product. A zero vector has
    cosine 0 and gradient 0.

    The gradient has two parts. `dx` [N, d] treats the prefix scales as constants. `norm_grad[k][i]` is the sum of
    dL/ds * s over all scores s of dim k with i in them. s is proportional to a_k[i], so dL/d(a_k[i]) =
    norm_grad[k][i] / a_k[i], and with d(a_k)/dx = -a_k^3 * x[:k] the gradient of the norm follows. The dot product has
    neither prefix scales nor norm gradients.
    """

    def __init__(
        self,
        embeddings: Tensor,
        index: Tensor,
        similarity: Similarity,
        *,
        with_gradient: bool,
    ) -> None:
        """Make the table of the embeddings [U, D] at `index` [N]."""
        self.embeddings = embeddings
        self.index = index
        self.is_cosine = similarity.cosine
        self.dims = similarity.dims
        self.parts = similarity.parts
        num_entries = index.numel()
        num_smaller = len(self.dims) - 1
        dtype = arithmetic_dtype(embeddings)
        self.x = embeddings.new_empty(num_entries, self.dims[-1], dtype=dtype)
        self.prefix_scales: Tensor | None = None
        """[K - 1, N] a_k of the smaller dims, for the cosine. That of the largest dim is part of `x`. None without
        smaller dims."""
        if self.is_cosine and num_smaller:
            self.prefix_scales = self.x.new_empty(num_smaller, num_entries)
        for entries in chunks(num_entries, VECTORS_AT_ONCE):
            x, inverse_norms = self._table_vectors(entries)  # [n, d], [K, n]
            self.x[entries] = x
            if self.prefix_scales is not None:
                # |e[:d]| / |e[:k]| = 1 / |x[:k]|. For a zero vector both inverses are 0, and 0 / 0 must become 0.
                scales = inverse_norms[:-1] / inverse_norms[-1]
                self.prefix_scales[:, entries] = scales.nan_to_num_(0.0)
        if with_gradient:
            self.dx = torch.zeros_like(self.x)
            self.norm_grad = self.x.new_zeros(num_smaller, num_entries)

    def _table_vectors(self, entries: slice) -> tuple[Tensor, Tensor]:
        """Return `x` [n, d] of some entries, and [K, n] one over the norm of each prefix of their embeddings."""
        vectors = self.embeddings.index_select(0, self.index[entries])
        prefixes = vectors[:, : self.dims[-1]]
        x = prefixes.to(arithmetic_dtype(vectors))
        # [K, n] the squares of the coordinates that each dim adds, and their sums over the smaller dims.
        added = [x[:, part].square().sum(1) for part in self.parts]
        squares = _running_sums(added)
        zeros = torch.zeros_like(squares)
        inverse_norms = torch.where(squares > 0, squares.rsqrt(), zeros)
        if self.is_cosine:
            x *= inverse_norms[-1][:, None]
        return x, inverse_norms

    # ---- Single pairs ----------------------------------------------------------------

    def pair_scores(self, left: Entries, right: Entries) -> Tensor:
        """Return the scores [K, P] of the pairs (left_n, right_n) at all K dims."""
        product = self.x[left] * self.x[right]
        # Sum the coordinates that each dim adds once. The running sum over dims gives every prefix.
        added = [product[:, part].sum(1) for part in self.parts]
        scores = _running_sums(added)
        if self.prefix_scales is not None:
            left_scales = self.prefix_scales[:, left]
            scores[:-1] *= left_scales * self.prefix_scales[:, right]
        return scores

    def add_pair_gradient(
        self,
        left: Entries,
        right: Entries,
        scores: Tensor,
        d_scores: Tensor,
    ) -> None:
        """Accumulate the gradient for dL/d(scores) [K, P], where `pair_scores` returned `scores`."""
        d_products = d_scores
        if self.prefix_scales is not None:
            left_scales = self.prefix_scales[:, left]
            d_products = d_scores.clone()
            d_products[:-1] *= left_scales * self.prefix_scales[:, right]
            norm_grad = (d_scores * scores)[:-1]
            _add(self.norm_grad, 1, left, norm_grad)
            _add(self.norm_grad, 1, right, norm_grad)
        # A coordinate is part of every dim that is large enough: sums [P] from the largest dim to the smallest.
        d_parts = accumulate(reversed(d_products.unbind()))
        for part, d_part in zip(reversed(self.parts), d_parts, strict=True):
            # d(x_l . x_r) / d x_l = x_r, and the other way round.
            factor = d_part[:, None]
            d_left = self.x[right, part] * factor
            d_right = self.x[left, part] * factor
            d_prefix = self.dx[:, part]
            _add(d_prefix, 0, left, d_left)
            _add(d_prefix, 0, right, d_right)

    # ---- Tiles: n rows against t columns ---------------------------------------------

    def fill_logits(
        self,
        rows: RowVectors,
        columns: slice,
        out: Tensor,
    ) -> Iterator[int]:
        """Fill `out` [K, n, t] with the logits of t columns, and yield each dim k when out[k] is there.

        Sizes come from the smallest to the largest. The caller may overwrite out[k] once it is yielded.
        """
        # The last dim's buffer accumulates the raw products: each dim costs its additional coordinates only. Masks
        # are written after that dim's copy was taken. At the last dim no product follows that they could spoil.
        products = out[-1]
        for k, part in enumerate(self.parts):
            row_part = rows.scaled_x[:, part]
            column_part = self.x[columns, part]
            if k == 0:
                torch.mm(row_part, column_part.T, out=products)
            else:
                products.addmm_(row_part, column_part.T)
            if k < len(out) - 1:
                self._scale_prefixes(products, k, rows, columns, out[k])
            yield k

    def add_gradient(
        self,
        rows: RowVectors,
        columns: slice,
        k: int,
        logits: Tensor,
        d_logits: Tensor,
        scratch: Tensor,
    ) -> None:
        """Add the gradients of dim k of a tile with respect to its rows and to its columns.

        Call it for all dims, from the largest to the smallest. `logits` [K, n, t] are as `fill_logits` filled them, and are
        overwritten. `d_logits` [n, t] is dL/d(logits[k]), for the largest dim in logits[-1] itself. `scratch` [n, t] is
        free for use.
        """
        # A part's coordinates belong to every dim that is large enough, so the gradients with respect to the products
        # accumulate in the buffer of the largest dim.
        d_products = logits[-1]
        if k < len(logits) - 1:
            if self.prefix_scales is not None:
                # logits * dL/d(logits) = score * dL/d(score), the terms of the gradient of the norm.
                norm_terms = logits[k].mul_(d_logits)
                self.norm_grad[k, rows.entries] += norm_terms.sum(1)
                self.norm_grad[k, columns] += norm_terms.sum(0)
            d_products += self._scale_prefixes(d_logits, k, rows, columns, scratch)
        part = self.parts[k]
        # [n, t] @ [t, part] for the rows, [t, n] @ [n, part] for the columns.
        column_part = self.x[columns, part]
        rows.d_scaled_x[:, part].addmm_(d_products, column_part)
        row_part = rows.scaled_x[:, part]
        self.dx[columns, part].addmm_(d_products.T, row_part)

    def _scale_prefixes(
        self,
        source: Tensor,
        k: int,
        rows: RowVectors,
        columns: slice,
        out: Tensor,
    ) -> Tensor:
        """Write `source` [n, t] times the prefix scales of rows and columns to `out`."""
        if self.prefix_scales is None:
            return out.copy_(source)
        scales = self.prefix_scales[k]
        torch.mul(source, scales[columns], out=out)
        return out.mul_(scales[rows.entries, None])

    def add_row_gradient(self, rows: RowVectors, logit_scale: Tensor) -> None:
        """Add the gradient of the rows to the table's. Overwrites `rows.d_scaled_x`."""
        # By the chain rule through rows.scaled_x = logit_scale * x.
        _add(self.dx, 0, rows.entries, rows.d_scaled_x.mul_(logit_scale))

    def gradient(self, into: Tensor | None = None) -> Tensor:
        """Return the gradient [U, D] with respect to the embeddings, added to `into` if given.

        This must be the last call on the table: `x` is freed before the gradient is allocated and recomputed in chunks,
        so that at most two tensors of this size exist.
        """
        del self.x
        if into is None:
            into = torch.zeros_like(self.embeddings, dtype=self.dx.dtype)
        for entries in chunks(self.index.numel(), VECTORS_AT_ONCE):
            dx = self.dx[entries]
            if self.is_cosine:
                x, inverse_norms = self._table_vectors(entries)
                for k, dim in enumerate(self.dims[:-1]):
                    assert self.prefix_scales is not None
                    # Through the prefix scale a: dL/da = norm_grad / a, times -a^3 * x[:k].
                    scale = self.prefix_scales[k, entries]
                    factor = scale * scale * self.norm_grad[k, entries]
                    dx[:, :dim] -= x[:, :dim] * factor[:, None]
                # Through x = e / |e[:d]|: remove the component along x, then divide by the norm.
                along = (x * dx).sum(1, keepdim=True)
                dx -= x * along
                dx *= inverse_norms[-1][:, None]
            # index_add_, not assignment: a vector may have several entries.
            prefix = into[:, : self.dims[-1]]
            prefix.index_add_(0, self.index[entries], dx)
        return into


def pair_scores(
    embeddings: Tensor,
    left: Tensor,
    right: Tensor,
    similarity: Similarity,
) -> Tensor:
    """Return similarities [K, P] of the pairs (left_n, right_n) of the embeddings [U, D].

    Differentiable once. For losses that need no score matrix.
    """
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
        num_dims = len(similarity.dims)
        dtype = arithmetic_dtype(embeddings)
        scores = embeddings.new_empty(num_dims, left.numel(), dtype=dtype)
        for pairs in chunks(left.numel(), PAIRS_AT_ONCE):
            index = torch.cat((left[pairs], right[pairs]))
            table = VectorTable(embeddings, index, similarity, with_gradient=False)
            left_entries, right_entries = chunks(len(index), length_of(pairs))
            scores[:, pairs] = table.pair_scores(left_entries, right_entries)
        # Save indices and scores only: the gathered vectors [2P, D] may take more memory than the embeddings, so
        # `backward` gathers them again.
        ctx.save_for_backward(embeddings, left, right, scores)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_scores: Tensor) -> tuple[Tensor | None, ...]:
        embeddings, left, right, scores = ctx.saved_tensors
        # Accumulate over chunks in the arithmetic dtype. Rounding to the embeddings' dtype happens once, at the end.
        gradient = torch.zeros_like(embeddings, dtype=scores.dtype)
        for pairs in chunks(left.numel(), PAIRS_AT_ONCE):
            index = torch.cat((left[pairs], right[pairs]))
            table = VectorTable(embeddings, index, ctx.similarity, with_gradient=True)
            left_entries, right_entries = chunks(len(index), length_of(pairs))
            table.add_pair_gradient(
                left_entries, right_entries, scores[:, pairs], d_scores[:, pairs]
            )
            table.gradient(into=gradient)
        return gradient.to(embeddings.dtype), None, None, None


class KnownGradients(torch.autograd.Function):
    """The scalar `loss` as a function of `inputs`, whose gradients with respect to them have been computed by hand."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        gradients: Sequence[Tensor],
        *inputs: Tensor,
    ) -> Tensor:
        """Return the loss, and keep the gradients."""
        del inputs  # autograd reads from `ctx` which of them need a gradient
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients with respect to the inputs."""
        # The loss is a scalar, so the chain rule is one multiplication. The arguments `loss` and `gradients` of
        # `forward` get no gradient.
        products = [None, None]
        for needs_gradient, gradient in zip(
            ctx.needs_input_grad[2:], ctx.saved_tensors, strict=True
        ):
            product = gradient * d_loss.to(gradient.dtype) if needs_gradient else None
            products.append(product)
        return tuple(products)


def softplus(values: Tensor) -> Tensor:
    """Return log(1 + exp(x)). torch returns x itself above 20 by default, which is too coarse in float64."""
    return F.softplus(values, threshold=50.0)


def length_of(entries: slice) -> int:
    """Return the number of entries of a slice with plain bounds."""
    return int(entries.stop - entries.start)


def chunks(num: int, size: int) -> list[slice]:
    """Return the range 0 .. num - 1 as slices of at most `size`."""
    return [slice(start, min(start + size, num)) for start in range(0, num, size)]


def _running_sums(parts: Iterable[Tensor]) -> Tensor:
    """Return the sums of the first 1, 2, ... parts, stacked."""
    # Not by cumsum, which has no deterministic kernel for floating-point numbers on GPUs, so that `deterministic: true`
    # would refuse it.
    return torch.stack(list(accumulate(parts)))


def _add(
    target: Tensor,
    axis: int,
    entries: Entries,
    value: Tensor,
) -> None:
    """Add `value` to target[entries] along an axis. Entries may repeat."""
    if isinstance(entries, slice):
        target.narrow(axis, entries.start, length_of(entries)).add_(value)
    else:
        target.index_add_(axis, entries, value)


@lru_cache
def _constant(
    values: tuple[float, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return a tensor of a run's constants, copied once: the host waits for each copy to a GPU."""
    return torch.tensor(values, dtype=dtype, device=device)
