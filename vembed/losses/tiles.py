"""Loss and gradient over a score matrix that is never materialised: blocks of rows, split into tiles of columns.

For one block of own rows the scores against all columns are kept, at every Matryoshka size: O(N * block) memory. The
rows' sums are then complete, and the gradient is computed from the same scores at once. The total is three matrix
products (scores, gradient of the rows, gradient of the columns), as with the full matrix, and no score is computed
twice. The forward pass computes the gradient; `backward` only multiplies it by the incoming gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vembed.losses.candidates import Anchor, Candidates, ExplicitPairs, ScoreBlock
from vembed.losses.matryoshka import PrefixTable, Similarity, arithmetic_dtype
from vembed.losses.rows import LEFT_OUT, RowLoss
from vembed.losses.targets import Guide, TeacherVectors

MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True)
class Tiling:
    """Numbers of rows and columns that are scored at once. They change memory and speed, not the result."""

    rows: int
    columns: int

    @classmethod
    def for_scores(cls, scores_per_row: int, embeddings: Tensor) -> Tiling:
        """Return blocks of at most 192 MiB of scores on a CPU, 1 GiB elsewhere, with tiles of 32 and 128 MiB."""
        block, tile, most_rows = (192, 32, 512) if embeddings.device.type == "cpu" else (1024, 128, 4096)
        size = arithmetic_dtype(embeddings).itemsize
        # A block keeps rows * scores_per_row values (scores_per_row counts all columns and sizes). A tile is a
        # temporary of rows * columns values. At least 16 each, or a huge batch would degrade to vector products.
        rows = min(most_rows, max(16, block * MEBIBYTE // (size * max(1, scores_per_row))))
        return cls(rows, max(16, tile * MEBIBYTE // (size * rows)))


@dataclass(frozen=True, slots=True)
class Scoring:
    """Definition of a loss over scores: candidates, similarity, row loss and options."""

    candidates: Candidates
    similarity: Similarity
    row_loss: Callable[[Tensor, float, Tensor | None, Tensor | None], RowLoss]
    """Makes the losses of a block from the own pairs' logits, a coefficient, the bias, and the own pairs' targets."""
    coefficients: tuple[float, ...]
    """Factor of each direction (forward, reverse)."""
    margin: float | None
    """Leave out candidates whose score exceeds the own pair's by more than this; None: keep all."""
    tiling: Tiling | None
    guide: Guide | None = None
    """Leave out candidates that this teacher finds too good."""
    teacher: TeacherVectors | None = None
    """Whose scores are the targets of the row losses."""


def tiled_loss(embeddings: Tensor, scoring: Scoring, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the sum over own rows, sizes and directions of coefficient * size weight * row loss.

    Logits are scale * score; the row loss adds the bias. Differentiable once, in embeddings, scale and bias.
    """
    loss: Tensor
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (embeddings, scale, bias)):
        loss = _TiledLoss.apply(embeddings, scale, bias, scoring)  # type: ignore[no-untyped-call]
    else:
        loss = _run(embeddings, scale, bias, scoring, with_gradient=False).loss
    return loss


def _run(embeddings: Tensor, scale: Tensor, bias: Tensor | None, scoring: Scoring, *, with_gradient: bool) -> _Blocks:
    # Gradients are computed by hand below. Autocast would run the matrix products in 16 bits.
    with torch.no_grad(), torch.autocast(embeddings.device.type, enabled=False):
        blocks = _Blocks(embeddings, scoring, scale, bias, with_gradient=with_gradient)
        blocks.run()
    return blocks


class _TiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, scale: Tensor, bias: Tensor | None, scoring: Scoring) -> Tensor:
        blocks = _run(embeddings, scale, bias, scoring, with_gradient=True)
        gradient = blocks.table.gradient().to(embeddings.dtype)
        ctx.save_for_backward(gradient, blocks.d_scale, blocks.d_bias)
        return blocks.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        # L is a scalar, so the chain rule is one multiplication. The saved tensors stand in the order of the inputs.
        gradients = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        scaled = (gradient * d_loss.to(gradient.dtype) if needed else None for gradient, needed in gradients)
        return (*scaled, None)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Columns of a score block from start to stop, with a buffer for the logits of all sizes."""

    score_block: ScoreBlock
    columns: slice
    """Positions in the table."""
    within: slice
    """The same columns, counted from the score block's first column."""
    logits: Tensor
    """[K, n, t]"""
    target: Tensor | None
    """[n, t] the teacher's scores."""


@dataclass(frozen=True, slots=True)
class _Explicit:
    """Single pairs of a block."""

    pairs: ExplicitPairs
    scores: Tensor
    """[K, P]"""
    row: Tensor
    """[P] counted from the block's first row."""
    anchor: Tensor
    """[P] position in the table."""
    position: Tensor
    """[P] the same of the other side."""
    target: Tensor | None
    """[P] the teacher's scores."""


class _TeacherTable:
    """A teacher's vectors by the positions of the candidates' table."""

    def __init__(self, vectors: TeacherVectors, occurrence: Tensor, like: Tensor) -> None:
        self.vectors = vectors.vectors.to(like.device, like.dtype)
        self.index = vectors.occurrences()[occurrence]

    def rows(self, positions: slice | Tensor) -> Tensor:
        """[n, E] vectors."""
        return self.vectors[self.index[positions]]

    def pair_scores(self, left: slice | Tensor, right: slice | Tensor) -> Tensor:
        """[n] scores of pairs."""
        return (self.rows(left) * self.rows(right)).sum(1)


class _Blocks:
    """One pass over all blocks of own rows. Accumulates the loss and, if requested, its gradients."""

    def __init__(
        self, embeddings: Tensor, scoring: Scoring, scale: Tensor, bias: Tensor | None, *, with_gradient: bool
    ) -> None:
        dtype, candidates = arithmetic_dtype(embeddings), scoring.candidates
        self.candidates = candidates
        self.scoring = scoring
        self.with_gradient = with_gradient
        self.scale = scale.detach().to(embeddings.device, dtype)
        self.bias = None if bias is None else bias.detach().to(embeddings.device, dtype)
        self.num_sizes = len(scoring.similarity.dims)
        self.table = PrefixTable(embeddings, candidates.index, scoring.similarity, with_gradient=with_gradient)
        self.num_columns = sum(
            score_block.columns.stop - score_block.columns.start for score_block in candidates.score_blocks
        )
        self.guide, self.teacher = (
            None if one is None else _TeacherTable(one, candidates.occurrence, self.table.x)
            for one in (scoring.guide.vectors if scoring.guide else None, scoring.teacher)
        )
        self.num_matrices = self.num_sizes + (self.teacher is not None)
        self.tiling = scoring.tiling or Tiling.for_scores(self.num_columns * self.num_matrices, embeddings)
        self.loss, self.d_scale, self.d_bias = (self.table.x.new_zeros(()) for _ in range(3))

    def run(self) -> None:
        """Accumulate `loss`, and with gradients also `d_scale`, `d_bias` and the table's gradient."""
        num_rows = self.candidates.num_own_rows
        block = min(self.tiling.rows, num_rows)
        tile = min(self.tiling.columns, max(1, self.num_columns))
        # Buffers are allocated once and reused by every block. Without gradients no logits are read again, so all tiles
        # share the buffer of one tile.
        room = block * (self.num_columns if self.with_gradient else tile) * self.num_matrices
        self.logits_room = self.table.x.new_empty(room)
        self.scratch_room = self.table.x.new_empty(2, block * tile)
        for start in range(0, num_rows, max(1, block)):
            self._block(slice(start, min(start + block, num_rows)))

    def _positions(self, anchor: Anchor, rows: slice) -> slice:
        first = self.candidates.anchors(anchor).start
        return slice(first + rows.start, first + rows.stop)

    def _tiles(self, num_rows: int) -> Iterator[_Tile]:
        # Tiles are consecutive parts of one buffer. A last, smaller block uses views of the beginning.
        offset = 0
        for score_block in self.candidates.score_blocks:
            for start in range(score_block.columns.start, score_block.columns.stop, self.tiling.columns):
                stop = min(start + self.tiling.columns, score_block.columns.stop)
                size = self.num_matrices * num_rows * (stop - start)
                room = self.logits_room[offset : offset + size].view(self.num_matrices, num_rows, stop - start)
                within = slice(start - score_block.columns.start, stop - score_block.columns.start)
                target = None if self.teacher is None else room[-1]
                yield _Tile(score_block, slice(start, stop), within, room[: self.num_sizes], target)
                offset += size if self.with_gradient else 0

    def _scratch(self, number: int, like: Tensor) -> Tensor:
        return self.scratch_room[number, : like.numel()].view_as(like)

    def _block(self, rows: slice) -> None:
        table, num_rows = self.table, rows.stop - rows.start
        own = self._positions("query", rows), self._positions("positive", rows)
        # The own pairs first: they start the online softmax and define the margin's ceiling. [K, n]
        own_scores = table.pair_scores(*own)
        own_logits = own_scores * self.scale
        targets = None if self.teacher is None else self.teacher.pair_scores(*own)
        losses = [
            [self.scoring.row_loss(logits, weight * factor, self.bias, targets) for factor in self.scoring.coefficients]
            for logits, weight in zip(own_logits, self.scoring.similarity.weights, strict=True)
        ]
        ceilings = self._ceilings(own_scores)
        guide_ceilings = None
        if self.guide is not None and self.scoring.guide is not None:
            guide_ceilings = self.scoring.guide.ceilings(self.guide.pair_scores(*own))
        # Scale the n anchors [n, d] rather than the n * N scores.
        scaled = {anchor: table.x[self._positions(anchor, rows)] * self.scale for anchor in self._anchors()}

        explicit = [self._explicit(pairs, rows, ceilings, guide_ceilings) for pairs in self.candidates.explicit]
        for one in explicit:
            for k in range(self.num_sizes):
                losses[k][one.pairs.direction].add_explicit(one.scores[k] * self.scale, one.row, one.target)
        # First pass: every tile's logits go into the row sums. They must be complete before any derivative is known.
        tiles = []
        for tile in self._tiles(num_rows):
            left_out = self._left_out(tile, rows, guide_ceilings)
            self._score(tile, rows, scaled[tile.score_block.anchor], ceilings, left_out, losses)
            tiles.append(tile)
        self.loss += _sum([loss.total() for by_direction in losses for loss in by_direction])
        if not self.with_gradient:
            return

        # Second pass: gradients with respect to the logits, of own pairs, explicit pairs and tiles.
        d_own = torch.stack([_sum([loss.grad_of_positive_logit() for loss in by_direction]) for by_direction in losses])
        self._take_in_pairs(*own, own_scores, d_own)
        for one in explicit:
            weights = [
                by_direction[one.pairs.direction].grad_of_explicit_logits(score * self.scale, one.row, one.target)
                for by_direction, score in zip(losses, one.scores, strict=True)
            ]
            self._take_in_pairs(one.anchor, one.position, one.scores, torch.stack(weights))
        d_scaled = {anchor: torch.zeros_like(x) for anchor, x in scaled.items()}
        for tile in tiles:
            self._differentiate(tile, rows, scaled[tile.score_block.anchor], d_scaled[tile.score_block.anchor], losses)
        for anchor, d_x in d_scaled.items():
            positions = self._positions(anchor, rows)
            # logits = scale * (x . column): d_x * x summed is dL/d(scale), and d_x * scale is dL/dx.
            self.d_scale += (d_x * table.x[positions]).sum()
            table.dx[positions] += d_x.mul_(self.scale)

    def _anchors(self) -> list[Anchor]:
        # A list, not a set: the order of a set may differ between runs, and the rounding of sums with it.
        return list(dict.fromkeys(score_block.anchor for score_block in self.candidates.score_blocks))

    def _ceilings(self, own_scores: Tensor) -> Tensor | None:
        """Return [K, n], the logits above which candidates are left out, with a tolerance for rounding; or None."""
        if self.scoring.margin is None:
            return None
        rounding = 64 * torch.finfo(own_scores.dtype).eps
        ceilings = own_scores + self.scoring.margin
        return (ceilings + rounding * ceilings.abs().clamp(min=1.0)) * self.scale

    def _explicit(
        self, pairs: ExplicitPairs, rows: slice, ceilings: Tensor | None, guide_ceilings: Tensor | None
    ) -> _Explicit:
        first, last = (int(torch.searchsorted(pairs.row, bound)) for bound in (rows.start, rows.stop))
        row, position = pairs.row[first:last] - rows.start, pairs.position[first:last]
        anchor = self._positions(pairs.anchor, rows).start + row
        scores = self.table.pair_scores(anchor, position)
        if ceilings is not None:
            scores.masked_fill_(scores * self.scale > ceilings[:, row], LEFT_OUT)
        if self.guide is not None and guide_ceilings is not None:
            scores.masked_fill_(self.guide.pair_scores(anchor, position) > guide_ceilings[row], LEFT_OUT)
        target = None if self.teacher is None else self.teacher.pair_scores(anchor, position)
        return _Explicit(pairs, scores, row, anchor, position, target)

    def _left_out(self, tile: _Tile, rows: slice, guide_ceilings: Tensor | None) -> list[Tensor]:
        """Masks [n, t] of what no size counts; and the teacher's scores of the tile, where they are asked for."""
        masks = [rule.mask(rows, tile.within) for rule in tile.score_block.exclusion_masks]
        anchors = self._positions(tile.score_block.anchor, rows)
        if self.guide is not None and guide_ceilings is not None:
            found = self._scratch(0, tile.logits[0])
            torch.mm(self.guide.rows(anchors), self.guide.rows(tile.columns).T, out=found)
            masks.append(found > guide_ceilings[:, None])
        if self.teacher is not None and tile.target is not None:
            torch.mm(self.teacher.rows(anchors), self.teacher.rows(tile.columns).T, out=tile.target)
        return masks

    def _score(
        self,
        tile: _Tile,
        rows: slice,
        scaled: Tensor,
        ceilings: Tensor | None,
        left_out: list[Tensor],
        losses: list[list[RowLoss]],
    ) -> None:
        """Compute a tile's logits, from the smallest size to the largest, and add them to the row losses."""
        # The last size's buffer accumulates the raw products: each size costs its additional coordinates only. Masks
        # are written after that size's copy was taken; at the last size no product follows that they could spoil.
        columns, products = self.table.x[tile.columns], tile.logits[-1]
        for k, part in enumerate(self.scoring.similarity.parts):
            logits = tile.logits[k]
            if k == 0:
                torch.mm(scaled[:, part], columns[:, part].T, out=products)
            else:
                products.addmm_(scaled[:, part], columns[:, part].T)
            if k < self.num_sizes - 1:
                self._with_prefix_scales(products, k, tile, rows, logits)
            for mask in left_out:
                logits.masked_fill_(mask, LEFT_OUT)
            if ceilings is not None:
                logits.masked_fill_(logits > ceilings[k, :, None], LEFT_OUT)
            losses[k][tile.score_block.direction].add(logits, self._scratch(0, logits), tile.target)

    def _with_prefix_scales(self, source: Tensor, k: int, tile: _Tile, rows: slice, out: Tensor) -> Tensor:
        """Multiply `source` by the prefix scales of rows and columns at size k and write the result to `out`."""
        if self.table.prefix_scales is None:
            return out.copy_(source)
        prefix_scales = self.table.prefix_scales[k]
        return torch.mul(source, prefix_scales[tile.columns], out=out).mul_(
            prefix_scales[self._positions(tile.score_block.anchor, rows), None]
        )

    def _differentiate(
        self, tile: _Tile, rows: slice, scaled: Tensor, d_scaled: Tensor, losses: list[list[RowLoss]]
    ) -> None:
        """Add a tile's gradients with respect to its rows and columns, from the largest size to the smallest.

        A part's coordinates belong to every size that is large enough, so the gradients with respect to the products
        accumulate in the buffer of the largest size.
        """
        table = self.table
        columns, d_columns = table.x[tile.columns], table.dx[tile.columns]
        d_products = tile.logits[-1]
        for k, part in reversed(list(enumerate(self.scoring.similarity.parts))):
            logits, loss = tile.logits[k], losses[k][tile.score_block.direction]
            if k == self.num_sizes - 1:
                # The largest size's logits are not needed again: overwrite them in place.
                loss.grad_of_logits(logits, logits, tile.target)
                self._count_bias(logits)
            else:
                weights = loss.grad_of_logits(logits, self._scratch(0, logits), tile.target)
                self._count_bias(weights)
                if table.prefix_scales is not None:
                    # logits * dL/d(logits) = score * dL/d(score), the terms of the gradient of the norm.
                    logits.mul_(weights)
                    table.norm_grad[k, self._positions(tile.score_block.anchor, rows)] += logits.sum(1)
                    table.norm_grad[k, tile.columns] += logits.sum(0)
                d_products += self._with_prefix_scales(weights, k, tile, rows, self._scratch(1, logits))
            # [n, t] @ [t, part] for the rows, [t, n] @ [n, part] for the columns.
            d_scaled[:, part].addmm_(d_products, columns[:, part])
            d_columns[:, part].addmm_(d_products.T, scaled[:, part])

    def _take_in_pairs(self, left: slice | Tensor, right: slice | Tensor, scores: Tensor, d_logits: Tensor) -> None:
        self._count_bias(d_logits)
        self.d_scale += (d_logits * scores).sum()
        self.table.add_pair_gradient(left, right, scores, d_logits * self.scale)

    def _count_bias(self, d_logits: Tensor) -> None:
        if self.bias is not None:
            self.d_bias += d_logits.sum()


def _sum(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)
