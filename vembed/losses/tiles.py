"""Loss and gradient over a score matrix that is never materialised: blocks of rows, split into tiles of columns.

For one block of own rows the scores against all columns are kept, at every Matryoshka size: O(N * block) memory. The
rows' sums are then complete, and the gradient is computed from the same scores at once. The total is three matrix
products (scores, gradient of the rows, gradient of the columns), as with the full matrix, and no score is computed
twice. The forward pass computes the gradient; `backward` only multiplies it by the incoming gradient.

In a ring the columns of other ranks come block by block, and a row's sum is complete after the last. All own rows then
meet the blocks in two rounds, and scores are computed twice, in tiles that nothing keeps: four matrix products. The
exception are the own columns and the block that comes last: they wait for the end of the first round, and a block of
rows then goes on with them as without a ring, in three products.

Where a score's derivative does not depend on the others of its row (`Scoring.is_separable`), each tile is
differentiated as soon as it is scored: three products, nothing kept, and a ring goes round once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vembed.losses.candidates import (
    Anchor,
    Candidates,
    ExplicitPairs,
    ForeignColumns,
    LeftOut,
    ScoreBlock,
)
from vembed.losses.matryoshka import PrefixTable, Similarity, arithmetic_dtype, chunks
from vembed.losses.rows import LEFT_OUT, RowLoss
from vembed.losses.score_columns import (
    Columns,
    HomeColumns,
    TeacherTable,
    foreign_columns,
)
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
        limits = (
            (192, 32, 512) if embeddings.device.type == "cpu" else (1024, 128, 4096)
        )
        return cls._within(*limits, scores_per_row, embeddings)

    @classmethod
    def for_ring(cls, scores_per_row: int, embeddings: Tensor) -> Tiling:
        """Return blocks of at most 64 MiB of scores on a CPU, 512 MiB elsewhere, against the columns that a ring scores
        once; with tiles of 1 MiB on a CPU, which stay in its cache, and of 128 MiB elsewhere."""
        limits = (64, 1, 512) if embeddings.device.type == "cpu" else (512, 128, 4096)
        return cls._within(*limits, scores_per_row, embeddings)

    @classmethod
    def _within(
        cls,
        block: int,
        tile: int,
        most_rows: int,
        scores_per_row: int,
        embeddings: Tensor,
    ) -> Tiling:
        size = arithmetic_dtype(embeddings).itemsize
        # A block keeps rows * scores_per_row values (scores_per_row counts all columns and sizes). A tile is a
        # temporary of rows * columns values. At least 16 each, or a huge batch would degrade to vector products.
        rows = min(
            most_rows, max(16, block * MEBIBYTE // (size * max(1, scores_per_row)))
        )
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
    is_separable: bool = False
    """The row losses are sums of a function of each score, so that no derivative waits for the other scores."""


def tiled_loss(
    embeddings: Tensor, scoring: Scoring, scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return the sum over own rows, sizes and directions of coefficient * size weight * row loss.

    Logits are scale * score; the row loss adds the bias. Differentiable once, in embeddings, scale and bias.
    """
    loss: Tensor
    if torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (embeddings, scale, bias)
    ):
        loss = _TiledLoss.apply(embeddings, scale, bias, scoring)  # type: ignore[no-untyped-call]
    else:
        loss = _run(embeddings, scale, bias, scoring, with_gradient=False).loss
    return loss


def _run(
    embeddings: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    scoring: Scoring,
    *,
    with_gradient: bool,
) -> _Blocks:
    # Gradients are computed by hand below. Autocast would run the matrix products in 16 bits.
    with torch.no_grad(), torch.autocast(embeddings.device.type, enabled=False):
        blocks = _Blocks(embeddings, scoring, scale, bias, with_gradient=with_gradient)
        blocks.run()
    return blocks


class _TiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        scoring: Scoring,
    ) -> Tensor:
        blocks = _run(embeddings, scale, bias, scoring, with_gradient=True)
        gradient = blocks.table.gradient().to(embeddings.dtype)
        ctx.save_for_backward(gradient, blocks.d_scale, blocks.d_bias)
        return blocks.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        # L is a scalar, so the chain rule is one multiplication. The saved tensors stand in the order of the inputs.
        gradients = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        scaled = (
            gradient * d_loss.to(gradient.dtype) if needed else None
            for gradient, needed in gradients
        )
        return (*scaled, None)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some columns of a score block, with a buffer for the logits of all sizes."""

    columns: Columns
    places: slice
    """Places of the tile among them."""
    score_block: ScoreBlock
    left_out: tuple[LeftOut, ...]
    """Scores that no size counts."""
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


@dataclass(frozen=True, slots=True)
class _RowBlock:
    """A block of own rows, with the state of its losses."""

    rows: slice
    own: tuple[slice, slice]
    """Positions of the rows' queries and positives."""
    own_scores: Tensor
    """[K, n]"""
    losses: list[list[RowLoss]]
    """By size and direction."""
    ceilings: Tensor | None
    """[K, n] logits above which candidates are left out."""
    guide_ceilings: Tensor | None
    """[n] the same of the guide's scores."""
    explicit: list[_Explicit]

    @property
    def num_rows(self) -> int:
        return int(self.rows.stop - self.rows.start)


class _Blocks:
    """One pass over all blocks of own rows. Accumulates the loss and, if requested, its gradients."""

    def __init__(
        self,
        embeddings: Tensor,
        scoring: Scoring,
        scale: Tensor,
        bias: Tensor | None,
        *,
        with_gradient: bool,
    ) -> None:
        dtype, candidates = arithmetic_dtype(embeddings), scoring.candidates
        self.candidates = candidates
        self.scoring = scoring
        self.with_gradient = with_gradient
        self.scale = scale.detach().to(embeddings.device, dtype)
        self.bias = None if bias is None else bias.detach().to(embeddings.device, dtype)
        self.num_sizes = len(scoring.similarity.dims)
        self.table = PrefixTable(
            embeddings,
            candidates.index,
            scoring.similarity,
            with_gradient=with_gradient,
        )
        self.num_columns = sum(
            score_block.columns.stop - score_block.columns.start
            for score_block in candidates.score_blocks
        )
        self.guide, self.teacher = (
            None
            if one is None
            else TeacherTable.of_occurrences(one, candidates.occurrence, self.table.x)
            for one in (
                scoring.guide.vectors if scoring.guide else None,
                scoring.teacher,
            )
        )
        self.num_matrices = self.num_sizes + (self.teacher is not None)
        self.foreign = candidates.foreign
        tiling = Tiling.for_scores if self.foreign is None else Tiling.for_ring
        self.tiling = scoring.tiling or tiling(
            self.num_columns * self.num_matrices, embeddings
        )
        self.differentiates_at_once = with_gradient and scoring.is_separable
        # Buffers, which grow to the largest need.
        self.logits_room, self.scratch_room = (
            self.table.x.new_empty(0),
            self.table.x.new_empty(2, 0),
        )
        self.loss, self.d_scale, self.d_bias = (
            self.table.x.new_zeros(()) for _ in range(3)
        )

    def run(self) -> None:
        """Accumulate `loss`, and with gradients also `d_scale`, `d_bias` and the table's gradient."""
        home = Columns.of_table(
            self.table, self.candidates.score_blocks, self.guide, self.teacher
        )
        # A generator: only a ring needs the state of all rows at once.
        blocks = (
            self._begin(rows)
            for rows in chunks(self.candidates.num_own_rows, self.tiling.rows)
        )
        if self.foreign is None:
            for block in blocks:
                self._complete(block, [home])
            return
        own = HomeColumns(self.table, self.foreign.counts, self.guide, self.teacher)
        if self.differentiates_at_once:
            self._ring_once(list(blocks), home, own, self.foreign)
        else:
            self._ring(list(blocks), home, own, self.foreign)

    def _complete(self, block: _RowBlock, last: Sequence[Columns]) -> None:
        """Score one block of rows against the last of its columns, and differentiate the same scores."""
        if self.differentiates_at_once:
            self._differentiate(block, last, self._scored_tiles(block, last))
            self._finish(block)
            return
        # Every tile's logits go into the row sums. They must be complete before any derivative is known.
        tiles = list(self._scored_tiles(block, last, keep=self.with_gradient))
        self._finish(block)
        if self.with_gradient:
            self._differentiate(block, last, tiles)

    def _ring(
        self,
        blocks: list[_RowBlock],
        home: Columns,
        own: HomeColumns,
        foreign: ForeignColumns,
    ) -> None:
        """Go round for the row sums; and, with gradients, a second time."""
        held = self._sums(blocks, home, own, foreign)
        if not self.with_gradient:
            return
        for visit in foreign.ring.visits(own, with_gradient=True, held=held):
            columns = foreign_columns(visit, own, foreign.score_blocks(visit.owner))
            for block in blocks:
                # The same logits again: they count already.
                self._differentiate(
                    block, [columns], self._scored_tiles(block, [columns], counts=False)
                )

    def _sums(
        self,
        blocks: list[_RowBlock],
        home: Columns,
        own: HomeColumns,
        foreign: ForeignColumns,
    ) -> Tensor | None:
        """Complete the row sums; and, with gradients, differentiate the scores against the own columns and the last
        visit. Return the gradient of the latter."""
        last, held = [home], None
        for visit in foreign.ring.visits(own, with_gradient=False):
            if visit.is_last and self.with_gradient:
                held = visit.values.new_zeros(visit.values.shape[0], own.gradient_width)
                with_gradient = replace(visit, gradient=held)
                last.append(
                    foreign_columns(
                        with_gradient, own, foreign.score_blocks(visit.owner)
                    )
                )
                continue
            columns = foreign_columns(visit, own, foreign.score_blocks(visit.owner))
            for block in blocks:
                for _ in self._scored_tiles(block, [columns]):
                    pass
        # With the last columns the sums of a block of rows are complete, so that their scores are computed once.
        for block in blocks:
            self._complete(block, last)
        self.logits_room = self.logits_room.new_empty(
            0
        )  # a second round keeps no logits
        return held

    def _ring_once(
        self,
        blocks: list[_RowBlock],
        home: Columns,
        own: HomeColumns,
        foreign: ForeignColumns,
    ) -> None:
        """Go round once: no derivative waits for other scores."""
        for visit in foreign.ring.visits(own, with_gradient=True):
            columns = foreign_columns(visit, own, foreign.score_blocks(visit.owner))
            for block in blocks:
                self._differentiate(
                    block, [columns], self._scored_tiles(block, [columns])
                )
        for block in blocks:
            self._complete(block, [home])

    def _positions(self, anchor: Anchor, rows: slice) -> slice:
        first = self.candidates.anchors(anchor).start
        return slice(first + rows.start, first + rows.stop)

    def _tiles(
        self, block: _RowBlock, some: Sequence[Columns], *, keep: bool
    ) -> Iterator[_Tile]:
        """Yield the tiles of some columns, with room for their logits: each its own with `keep`, else all the same."""
        ranges = [(columns, *one) for columns in some for one in columns.ranges()]
        lengths = [here.stop - here.start for _, _, here in ranges]
        n, longest = block.num_rows, min(self.tiling.columns, max(lengths, default=0))
        self._make_room(
            n * self.num_matrices * (sum(lengths) if keep else longest), n * longest
        )
        offset = 0
        for (columns, score_block, here), length in zip(ranges, lengths, strict=True):
            first = columns.first + here.start - score_block.columns.start
            left_out = score_block.left_out(
                block.rows, slice(first, first + length), self.tiling.columns
            )
            for part, masks in zip(
                chunks(length, self.tiling.columns), left_out, strict=False
            ):
                places = slice(here.start + part.start, here.start + part.stop)
                size = self.num_matrices * n * (part.stop - part.start)
                room = self.logits_room[offset : offset + size].view(
                    self.num_matrices, n, -1
                )
                target = None if self.teacher is None else room[-1]
                yield _Tile(
                    columns, places, score_block, masks, room[: self.num_sizes], target
                )
                offset += size if keep else 0

    def _make_room(self, logits: int, scratch: int) -> None:
        # The buffers are reused by all blocks of rows and all columns.
        if self.logits_room.numel() < logits:
            self.logits_room = self.logits_room.new_empty(logits)
        if self.scratch_room.shape[1] < scratch:
            self.scratch_room = self.scratch_room.new_empty(2, scratch)

    def _scored_tiles(
        self,
        block: _RowBlock,
        some: Sequence[Columns],
        *,
        keep: bool = False,
        counts: bool = True,
    ) -> Iterator[_Tile]:
        """Yield the tiles of a block of rows with their logits, which hold until the next tile unless they are kept.
        `counts`: add them to the row losses."""
        scaled = self._scaled_anchors(block, some)
        for tile in self._tiles(block, some, keep=keep):
            self._score(tile, block, scaled[tile.score_block.anchor], counts=counts)
            yield tile

    def _scratch(self, number: int, like: Tensor) -> Tensor:
        return self.scratch_room[number, : like.numel()].view_as(like)

    def _scaled_anchors(
        self, block: _RowBlock, some: Sequence[Columns]
    ) -> dict[Anchor, Tensor]:
        # Scale the n anchors [n, d] rather than the n * N scores.
        anchors = dict.fromkeys(
            score_block.anchor
            for columns in some
            for score_block in columns.score_blocks
        )
        return {
            anchor: self.table.x[self._positions(anchor, block.rows)] * self.scale
            for anchor in anchors
        }

    def _begin(self, rows: slice) -> _RowBlock:
        """Start the losses of a block with its own pairs and explicit pairs."""
        own = self._positions("query", rows), self._positions("positive", rows)
        # The own pairs first: they start the online softmax and define the margin's ceiling. [K, n]
        own_scores = self.table.pair_scores(*own)
        own_logits = own_scores * self.scale
        targets = None if self.teacher is None else self.teacher.pair_scores(*own)
        losses = [
            [
                self.scoring.row_loss(logits, weight * factor, self.bias, targets)
                for factor in self.scoring.coefficients
            ]
            for logits, weight in zip(
                own_logits, self.scoring.similarity.weights, strict=True
            )
        ]
        ceilings = self._ceilings(own_scores)
        guide_ceilings = None
        if self.guide is not None and self.scoring.guide is not None:
            guide_ceilings = self.scoring.guide.ceilings(self.guide.pair_scores(*own))
        explicit = [
            self._explicit(pairs, rows, ceilings, guide_ceilings)
            for pairs in self.candidates.explicit
        ]
        for one in explicit:
            for k in range(self.num_sizes):
                losses[k][one.pairs.direction].add_explicit(
                    one.scores[k] * self.scale, one.row, one.target
                )
        return _RowBlock(
            rows, own, own_scores, losses, ceilings, guide_ceilings, explicit
        )

    def _finish(self, block: _RowBlock) -> None:
        """Count the losses of a block whose sums are complete, and differentiate its own and explicit pairs."""
        losses = block.losses
        self.loss += _sum(
            [loss.total() for by_direction in losses for loss in by_direction]
        )
        if not self.with_gradient:
            return
        # Both directions share the own pair's score, so their derivatives add up.
        d_own = torch.stack(
            [
                _sum([loss.grad_of_positive_logit() for loss in by_direction])
                for by_direction in losses
            ]
        )
        self._take_in_pairs(*block.own, block.own_scores, d_own)
        for one in block.explicit:
            weights = [
                by_direction[one.pairs.direction].grad_of_explicit_logits(
                    score * self.scale, one.row, one.target
                )
                for by_direction, score in zip(losses, one.scores, strict=True)
            ]
            self._take_in_pairs(
                one.anchor, one.position, one.scores, torch.stack(weights)
            )

    def _differentiate(
        self, block: _RowBlock, some: Sequence[Columns], tiles: Iterable[_Tile]
    ) -> None:
        """Add the gradients of the tiles with respect to the block's rows and to the columns."""
        scaled = self._scaled_anchors(block, some)
        d_scaled = {anchor: torch.zeros_like(x) for anchor, x in scaled.items()}
        for tile in tiles:
            anchor = tile.score_block.anchor
            self._differentiate_tile(tile, block, scaled[anchor], d_scaled[anchor])
        for anchor, d_x in d_scaled.items():
            positions = self._positions(anchor, block.rows)
            # logits = scale * (x . column): d_x * x summed is dL/d(scale), and d_x * scale is dL/dx.
            self.d_scale += (d_x * self.table.x[positions]).sum()
            self.table.dx[positions] += d_x.mul_(self.scale)

    def _ceilings(self, own_scores: Tensor) -> Tensor | None:
        """Return [K, n], the logits above which candidates are left out, with a tolerance for rounding; or None."""
        if self.scoring.margin is None:
            return None
        rounding = 64 * torch.finfo(own_scores.dtype).eps
        ceilings = own_scores + self.scoring.margin
        return (ceilings + rounding * ceilings.abs().clamp(min=1.0)) * self.scale

    def _explicit(
        self,
        pairs: ExplicitPairs,
        rows: slice,
        ceilings: Tensor | None,
        guide_ceilings: Tensor | None,
    ) -> _Explicit:
        # The rows of the pairs ascend, so that those of a block are a range.
        first, last = (
            int(torch.searchsorted(pairs.row, bound))
            for bound in (rows.start, rows.stop)
        )
        row, position = pairs.row[first:last] - rows.start, pairs.position[first:last]
        anchor = self._positions(pairs.anchor, rows).start + row
        # Masked as scores, before the scale: an excluded pair's logit is LEFT_OUT times the scale.
        scores = self.table.pair_scores(anchor, position)
        if ceilings is not None:
            scores.masked_fill_(scores * self.scale > ceilings[:, row], LEFT_OUT)
        if self.guide is not None and guide_ceilings is not None:
            scores.masked_fill_(
                self.guide.pair_scores(anchor, position) > guide_ceilings[row], LEFT_OUT
            )
        target = (
            None if self.teacher is None else self.teacher.pair_scores(anchor, position)
        )
        return _Explicit(pairs, scores, row, anchor, position, target)

    def _left_out(self, tile: _Tile, block: _RowBlock) -> list[LeftOut]:
        """Masks or places of what no size counts of a tile; and the teacher's scores of it, if they are asked for."""
        masks = [*tile.left_out]
        anchors = self._positions(tile.score_block.anchor, block.rows)
        if (
            self.guide is not None
            and tile.columns.guide is not None
            and block.guide_ceilings is not None
        ):
            found = self._scratch(0, tile.logits[0])
            torch.mm(
                self.guide.rows(anchors),
                tile.columns.guide.rows(tile.places).T,
                out=found,
            )
            masks.append(found > block.guide_ceilings[:, None])
        if (
            self.teacher is not None
            and tile.columns.teacher is not None
            and tile.target is not None
        ):
            torch.mm(
                self.teacher.rows(anchors),
                tile.columns.teacher.rows(tile.places).T,
                out=tile.target,
            )
        return masks

    def _score(
        self, tile: _Tile, block: _RowBlock, scaled: Tensor, *, counts: bool
    ) -> None:
        """Compute a tile's logits, from the smallest size to the largest, and add them to the row losses."""
        left_out = self._left_out(tile, block)
        # The last size's buffer accumulates the raw products: each size costs its additional coordinates only. Masks
        # are written after that size's copy was taken; at the last size no product follows that they could spoil.
        x, products = tile.columns.x[tile.places], tile.logits[-1]
        for k, part in enumerate(self.scoring.similarity.parts):
            logits = tile.logits[k]
            if k == 0:
                torch.mm(scaled[:, part], x[:, part].T, out=products)
            else:
                products.addmm_(scaled[:, part], x[:, part].T)
            if k < self.num_sizes - 1:
                self._with_prefix_scales(products, k, tile, block.rows, logits)
            for one in left_out:
                if isinstance(one, Tensor):
                    logits.masked_fill_(one, LEFT_OUT)
                elif one[0].numel():
                    logits[one] = LEFT_OUT
            if block.ceilings is not None:
                logits.masked_fill_(logits > block.ceilings[k, :, None], LEFT_OUT)
            if counts:
                block.losses[k][tile.score_block.direction].add(
                    logits, self._scratch(0, logits), tile.target
                )

    def _with_prefix_scales(
        self, source: Tensor, k: int, tile: _Tile, rows: slice, out: Tensor
    ) -> Tensor:
        """Multiply `source` by the prefix scales of rows and columns at size k and write the result to `out`."""
        if self.table.prefix_scales is None or tile.columns.prefix_scales is None:
            return out.copy_(source)
        own = self.table.prefix_scales[
            k, self._positions(tile.score_block.anchor, rows), None
        ]
        return torch.mul(
            source, tile.columns.prefix_scales[k, tile.places], out=out
        ).mul_(own)

    def _differentiate_tile(
        self, tile: _Tile, block: _RowBlock, scaled: Tensor, d_scaled: Tensor
    ) -> None:
        """Add a tile's gradients with respect to its rows and columns, from the largest size to the smallest.

        A part's coordinates belong to every size that is large enough, so the gradients with respect to the products
        accumulate in the buffer of the largest size.
        """
        table = self.table
        columns = tile.columns
        assert columns.dx is not None and columns.norm_grad is not None, (
            "a pass with gradients"
        )
        x, d_x = tile.columns.x[tile.places], columns.dx[tile.places]
        d_products = tile.logits[-1]
        for k, part in reversed(list(enumerate(self.scoring.similarity.parts))):
            logits, loss = tile.logits[k], block.losses[k][tile.score_block.direction]
            if k == self.num_sizes - 1:
                # The largest size's logits are not needed again: overwrite them in place.
                loss.grad_of_logits(logits, logits, tile.target)
                self._count_bias(logits)
            else:
                weights = loss.grad_of_logits(
                    logits, self._scratch(0, logits), tile.target
                )
                self._count_bias(weights)
                if table.prefix_scales is not None:
                    # logits * dL/d(logits) = score * dL/d(score), the terms of the gradient of the norm.
                    logits.mul_(weights)
                    table.norm_grad[
                        k, self._positions(tile.score_block.anchor, block.rows)
                    ] += logits.sum(1)
                    columns.norm_grad[k, tile.places] += logits.sum(0)
                # `weights` stand in scratch 0, so their products with the prefix scales need the other buffer.
                d_products += self._with_prefix_scales(
                    weights, k, tile, block.rows, self._scratch(1, logits)
                )
            # [n, t] @ [t, part] for the rows, [t, n] @ [n, part] for the columns.
            d_scaled[:, part].addmm_(d_products, x[:, part])
            d_x[:, part].addmm_(d_products.T, scaled[:, part])

    def _take_in_pairs(
        self,
        left: slice | Tensor,
        right: slice | Tensor,
        scores: Tensor,
        d_logits: Tensor,
    ) -> None:
        self._count_bias(d_logits)
        # An excluded pair has d_logits 0 and a finite score, so it adds 0 here and not NaN.
        self.d_scale += (d_logits * scores).sum()
        self.table.add_pair_gradient(left, right, scores, d_logits * self.scale)

    def _count_bias(self, d_logits: Tensor) -> None:
        if self.bias is not None:
            self.d_bias += d_logits.sum()


def _sum(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)
