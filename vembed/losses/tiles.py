"""Loss and gradient of a matrix of scores that never exists as a whole: blocks of rows, and in them tiles of columns.

For one block of own rows the scores against ALL columns are held, for every Matryoshka size: O(N * block). That is
enough to close the rows' sums and to go back over the same scores for the gradient at once, so that three matrix
products (scores, gradient of the rows, gradient of the columns) do for the whole, as in the plain version, and no score
is computed twice. Only the finished gradient waits for `backward`, which multiplies it by what comes from above.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vembed.losses.candidates import Anchor, Candidates, GivenPairs, Panel
from vembed.losses.matryoshka import PrefixTable, Similarity, arithmetic_dtype
from vembed.losses.rows import LEFT_OUT, RowLoss

MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True)
class Tiling:
    """How many rows and columns are scored at once. Changes memory and speed, not the result."""

    rows: int
    columns: int

    @classmethod
    def for_scores(cls, scores_per_row: int, embeddings: Tensor) -> Tiling:
        """Blocks of at most 192 MiB of scores on a CPU, 1 GiB elsewhere; in them tiles of 32 and 128 MiB."""
        block, tile, most_rows = (192, 32, 512) if embeddings.device.type == "cpu" else (1024, 128, 4096)
        size = arithmetic_dtype(embeddings).itemsize
        rows = min(most_rows, max(16, block * MEBIBYTE // (size * max(1, scores_per_row))))
        return cls(rows, max(16, tile * MEBIBYTE // (size * rows)))


@dataclass(frozen=True, slots=True)
class Scoring:
    """Which scores there are and what to do with them."""

    candidates: Candidates
    similarity: Similarity
    row_loss: type[RowLoss]
    coefficients: tuple[float, ...]
    """Factor of each direction."""
    margin: float | None
    """Leave out candidates that score above the own pair plus this."""
    tiling: Tiling | None


def tiled_loss(embeddings: Tensor, scoring: Scoring, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The sum over own rows, sizes and directions of coefficient * weight * the row's loss on the logits scale * score
    (and what the row loss makes of the bias). Differentiable once, in embeddings, scale and bias."""
    loss: Tensor
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (embeddings, scale, bias)):
        loss = _TiledLoss.apply(embeddings, scale, bias, scoring)  # type: ignore[no-untyped-call]
    else:
        loss = _run(embeddings, scale, bias, scoring, with_gradient=False).loss
    return loss


def _run(embeddings: Tensor, scale: Tensor, bias: Tensor | None, scoring: Scoring, *, with_gradient: bool) -> _Blocks:
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
        gradients = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        scaled = (gradient * d_loss.to(gradient.dtype) if needed else None for gradient, needed in gradients)
        return (*scaled, None)


@dataclass(frozen=True, slots=True)
class _Tile:
    """A panel's columns from start to stop, with room for the scores of all sizes."""

    panel: Panel
    columns: slice
    """Positions in the table."""
    within: slice
    """The same, counted from the panel's first column."""
    logits: Tensor
    """[K, n, t]"""


class _Blocks:
    """One pass over all blocks of own rows."""

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
        self.num_columns = sum(panel.columns.stop - panel.columns.start for panel in candidates.panels)
        self.tiling = scoring.tiling or Tiling.for_scores(self.num_columns * self.num_sizes, embeddings)
        self.loss, self.d_scale, self.d_bias = (self.table.x.new_zeros(()) for _ in range(3))

    def run(self) -> None:
        """Add up `loss`, and with gradients `d_scale`, `d_bias` and what the table collects."""
        num_rows = self.candidates.num_own_rows
        block = min(self.tiling.rows, num_rows)
        tile = min(self.tiling.columns, max(1, self.num_columns))
        # Without gradients nothing comes back to the scores: the room of one tile serves them all.
        room = block * (self.num_columns if self.with_gradient else tile) * self.num_sizes
        self.logits_room = self.table.x.new_empty(room)
        self.scratch_room = self.table.x.new_empty(2, block * tile)
        for start in range(0, num_rows, max(1, block)):
            self._block(slice(start, min(start + block, num_rows)))

    def _positions(self, anchor: Anchor, rows: slice) -> slice:
        first = self.candidates.anchors(anchor).start
        return slice(first + rows.start, first + rows.stop)

    def _tiles(self, num_rows: int) -> Iterator[_Tile]:
        offset = 0
        for panel in self.candidates.panels:
            for start in range(panel.columns.start, panel.columns.stop, self.tiling.columns):
                stop = min(start + self.tiling.columns, panel.columns.stop)
                size = self.num_sizes * num_rows * (stop - start)
                logits = self.logits_room[offset : offset + size].view(self.num_sizes, num_rows, stop - start)
                within = slice(start - panel.columns.start, stop - panel.columns.start)
                yield _Tile(panel, slice(start, stop), within, logits)
                offset += size if self.with_gradient else 0

    def _scratch(self, number: int, like: Tensor) -> Tensor:
        return self.scratch_room[number, : like.numel()].view_as(like)

    def _block(self, rows: slice) -> None:
        table, num_rows = self.table, rows.stop - rows.start
        own = self._positions("query", rows), self._positions("positive", rows)
        own_scores = table.pair_scores(*own)
        own_logits = own_scores * self.scale
        losses = [
            [self.scoring.row_loss(logits, weight * factor, self.bias) for factor in self.scoring.coefficients]
            for logits, weight in zip(own_logits, self.scoring.similarity.weights, strict=True)
        ]
        ceilings = self._ceilings(own_scores)
        scaled = {anchor: table.x[self._positions(anchor, rows)] * self.scale for anchor in self._anchors()}

        given = [self._given(pairs, rows, ceilings) for pairs in self.candidates.given]
        for pairs, scores, row, _ in given:
            for k in range(self.num_sizes):
                losses[k][pairs.direction].add_given(scores[k] * self.scale, row)
        tiles = []
        for tile in self._tiles(num_rows):
            self._score(tile, rows, scaled[tile.panel.anchor], ceilings, losses)
            tiles.append(tile)
        self.loss += _sum([loss.total() for by_direction in losses for loss in by_direction])
        if not self.with_gradient:
            return

        d_own = torch.stack([_sum([loss.weigh_positive() for loss in by_direction]) for by_direction in losses])
        self._take_in_pairs(*own, own_scores, d_own)
        for pairs, scores, row, position in given:
            by_size = [by_direction[pairs.direction] for by_direction in losses]
            weights = [loss.weigh_given(score * self.scale, row) for loss, score in zip(by_size, scores, strict=True)]
            anchors = self._positions(pairs.anchor, rows).start + row
            self._take_in_pairs(anchors, position, scores, torch.stack(weights))
        d_scaled = {anchor: torch.zeros_like(x) for anchor, x in scaled.items()}
        for tile in tiles:
            self._differentiate(tile, rows, scaled[tile.panel.anchor], d_scaled[tile.panel.anchor], losses)
        for anchor, d_x in d_scaled.items():
            positions = self._positions(anchor, rows)
            self.d_scale += (d_x * table.x[positions]).sum()
            table.dx[positions] += d_x.mul_(self.scale)

    def _anchors(self) -> list[Anchor]:
        # Not a set, whose order differs from run to run, and sums with it.
        return list(dict.fromkeys(panel.anchor for panel in self.candidates.panels))

    def _ceilings(self, own_scores: Tensor) -> Tensor | None:
        """[K, n] the logits above which candidates are left out. Scores within rounding of it are not above it."""
        if self.scoring.margin is None:
            return None
        rounding = 64 * torch.finfo(own_scores.dtype).eps
        ceilings = own_scores + self.scoring.margin
        return (ceilings + rounding * ceilings.abs().clamp(min=1.0)) * self.scale

    def _given(
        self, pairs: GivenPairs, rows: slice, ceilings: Tensor | None
    ) -> tuple[GivenPairs, Tensor, Tensor, Tensor]:
        """The pairs of a block: scores [K, P], rows counted from the block's first, positions in the table."""
        first, last = (int(torch.searchsorted(pairs.row, bound)) for bound in (rows.start, rows.stop))
        row, position = pairs.row[first:last] - rows.start, pairs.position[first:last]
        scores = self.table.pair_scores(self._positions(pairs.anchor, rows).start + row, position)
        if ceilings is not None:
            scores.masked_fill_(scores * self.scale > ceilings[:, row], LEFT_OUT)
        return pairs, scores, row, position

    def _score(
        self, tile: _Tile, rows: slice, scaled: Tensor, ceilings: Tensor | None, losses: list[list[RowLoss]]
    ) -> None:
        """Fill a tile's logits, size by size from the smallest, and hand them to the rows."""
        left_out = [rule.mask(rows, tile.within) for rule in tile.panel.rules]
        columns, products = self.table.x[tile.columns], tile.logits[-1]
        for k, part in enumerate(self.scoring.similarity.parts):
            logits = tile.logits[k]
            if k == 0:
                torch.mm(scaled[:, part], columns[:, part].T, out=products)
            else:
                products.addmm_(scaled[:, part], columns[:, part].T)
            if k < self.num_sizes - 1:
                self._with_gains(products, k, tile, rows, logits)
            for mask in left_out:
                logits.masked_fill_(mask, LEFT_OUT)
            if ceilings is not None:
                logits.masked_fill_(logits > ceilings[k, :, None], LEFT_OUT)
            losses[k][tile.panel.direction].add(logits, self._scratch(0, logits))

    def _with_gains(self, source: Tensor, k: int, tile: _Tile, rows: slice, out: Tensor) -> Tensor:
        """source * the gains of rows and columns at size k."""
        if self.table.gains is None:
            return out.copy_(source)
        gains = self.table.gains[k]
        return torch.mul(source, gains[tile.columns], out=out).mul_(
            gains[self._positions(tile.panel.anchor, rows), None]
        )

    def _differentiate(
        self, tile: _Tile, rows: slice, scaled: Tensor, d_scaled: Tensor, losses: list[list[RowLoss]]
    ) -> None:
        """Turn a tile's logits into their derivatives, size by size from the largest, and add the products with rows
        and columns. Coordinates of a part count at every size that reaches them, so the derivatives accumulate."""
        table = self.table
        columns, d_columns = table.x[tile.columns], table.dx[tile.columns]
        d_products = tile.logits[-1]
        for k, part in reversed(list(enumerate(self.scoring.similarity.parts))):
            logits, loss = tile.logits[k], losses[k][tile.panel.direction]
            if k == self.num_sizes - 1:
                loss.weigh(logits, out=logits)
                self._count_bias(logits)
            else:
                weights = loss.weigh(logits, out=self._scratch(0, logits))
                self._count_bias(weights)
                if table.gains is not None:
                    # logits = scale * score, so that these are the sums of dL/d(score) * score.
                    logits.mul_(weights)
                    table.pull[k, self._positions(tile.panel.anchor, rows)] += logits.sum(1)
                    table.pull[k, tile.columns] += logits.sum(0)
                d_products += self._with_gains(weights, k, tile, rows, self._scratch(1, logits))
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
