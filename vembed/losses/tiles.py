"""Loss and gradient over a score matrix that never exists as a whole.

The matrix has this rank's rows against all candidates. It is cut into blocks of rows, and
each block into tiles of columns:

                       columns (documents, queries)
            +---------+---------+---------+------
    block   | tile    | tile    | tile    |        logits of a tile: [K, n, t]
    of rows |         |         |         |        for K Matryoshka sizes,
            +---------+---------+---------+------  n rows and t columns
    block   | ...

For a loss L = sum over rows of l(row), with logits z = scale * score, the gradient with
respect to the vectors x of rows and y of columns is

    dL/dx_i = scale * sum_j dl/dz_ij * y_j          dL/dy_j = scale * sum_i dl/dz_ij * x_i

dl/dz_ij depends on sums over the whole row, such as the sum of a softmax. So the scores of
one block of rows against all columns are kept: O(N * block) memory. The sums of its rows
are then complete, and the gradient is computed from the same scores at once. The total is
three matrix products (scores, gradient of the rows, gradient of the columns), as with the
full matrix, and no score is computed twice. The forward pass computes the gradient.
`backward` only multiplies it by the incoming gradient.

Some columns may not be here all the time (`StreamedColumns`): they come block by block,
and a row's sum is complete after the last. All rows then meet the streamed columns in two
rounds, and their scores are computed twice, in tiles that nothing keeps: four matrix
products. The exception are the columns that stay: they wait for the end of the first
round, and a block of rows then goes on with them as above, in three products.

Where a score's derivative does not depend on the others of its row
(`Scoring.is_separable`), each tile is differentiated as soon as it is scored: three
products, nothing kept, and one round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vembed.losses.batch import TeacherVectors
from vembed.losses.candidates import (
    Anchor,
    ExplicitPairs,
    LeftOut,
    LossCandidates,
    ScoreBlock,
)
from vembed.losses.columns import LossColumns, StreamedColumns, TeacherTable
from vembed.losses.row_losses import LEFT_OUT, RowLoss
from vembed.losses.similarity import Anchors, Similarity, arithmetic_dtype, chunks

MEBIBYTE = 2**20
TIE_TOLERANCE = 64
"""Rounding steps within which a score counts as equal to a ceiling, and stays."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Numbers of rows and columns that are scored at once. They change memory and speed, not the result."""

    rows: int
    columns: int

    @classmethod
    def for_scores(cls, scores_per_row: int, embeddings: Tensor) -> Tiling:
        """Return blocks of at most 192 MiB of scores on a CPU, 1 GiB elsewhere, with tiles of 32 and 128 MiB."""
        if embeddings.device.type == "cpu":
            return cls._within(192, 32, 512, scores_per_row, embeddings)
        return cls._within(1024, 128, 4096, scores_per_row, embeddings)

    @classmethod
    def for_stream(cls, scores_per_row: int, embeddings: Tensor) -> Tiling:
        """Return blocks of at most 64 MiB of kept scores on a CPU, 512 MiB elsewhere.

        Tiles have 1 MiB on a CPU, so that they stay in its cache, and 128 MiB elsewhere.
        """
        if embeddings.device.type == "cpu":
            return cls._within(64, 1, 512, scores_per_row, embeddings)
        return cls._within(512, 128, 4096, scores_per_row, embeddings)

    @classmethod
    def _within(
        cls,
        block_mebibytes: int,
        tile_mebibytes: int,
        max_rows: int,
        scores_per_row: int,
        embeddings: Tensor,
    ) -> Tiling:
        # A block keeps rows * scores_per_row values, where scores_per_row counts all
        # columns and sizes. A tile is a temporary of rows * columns values. At least 16
        # each, or a huge batch would degrade to vector products.
        mebibyte = MEBIBYTE // arithmetic_dtype(embeddings).itemsize
        rows = max(16, block_mebibytes * mebibyte // max(1, scores_per_row))
        rows = min(max_rows, rows)
        return cls(rows, max(16, tile_mebibytes * mebibyte // rows))


@dataclass(frozen=True, slots=True)
class Guide:
    """A teacher that says which candidates are too good to be negatives.

    They are those that it scores above the row's own pair less a margin. A `relative`
    margin is a share of the own pair's score.
    """

    vectors: TeacherVectors
    margin: float
    relative: bool

    def ceilings(self, own_scores: Tensor) -> Tensor:
        """Return [n] the score of each row above which candidates are left out."""
        margin = own_scores.abs() * self.margin if self.relative else self.margin
        return _with_tolerance(own_scores - margin)


@dataclass(frozen=True, slots=True)
class Scoring:
    """Definition of a loss over scores: candidates, similarity, row loss and options."""

    candidates: LossCandidates
    similarity: Similarity
    row_loss: Callable[[Tensor, float, Tensor | None, Tensor | None], RowLoss]
    """Makes the losses of a block from the own pairs' logits, a coefficient, the bias, and the own pairs' targets."""
    coefficients: tuple[float, ...]
    """Factor of each direction (forward, reverse)."""
    margin: float | None
    """Leave out candidates whose score exceeds the own pair's by more than this. None: keep all."""
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

    Logits are scale * score. The row loss adds the bias. Differentiable once, in
    embeddings, scale and bias.
    """
    inputs = [embeddings, scale] if bias is None else [embeddings, scale, bias]
    needs_gradient = any(tensor.requires_grad for tensor in inputs)
    if not (torch.is_grad_enabled() and needs_gradient):
        return _run(embeddings, scale, bias, scoring, with_gradient=False).loss
    loss: Tensor = _TiledLoss.apply(embeddings, scale, bias, scoring)  # type: ignore[no-untyped-call]
    return loss


def _run(
    embeddings: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    scoring: Scoring,
    *,
    with_gradient: bool,
) -> _ScorePass:
    # Gradients are computed by hand below. Autocast would run the products in 16 bits.
    with torch.no_grad(), torch.autocast(embeddings.device.type, enabled=False):
        score_pass = _ScorePass(
            embeddings, scoring, scale, bias, with_gradient=with_gradient
        )
        score_pass.run()
    return score_pass


class _TiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        scoring: Scoring,
    ) -> Tensor:
        score_pass = _run(embeddings, scale, bias, scoring, with_gradient=True)
        gradient = score_pass.table.gradient().to(embeddings.dtype)
        ctx.save_for_backward(gradient, score_pass.d_scale, score_pass.d_bias)
        return score_pass.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        # L is a scalar, so the chain rule is one multiplication. The saved tensors stand
        # in the order of the inputs.
        scaled: list[Tensor | None] = []
        for gradient, is_needed in zip(
            ctx.saved_tensors, ctx.needs_input_grad, strict=False
        ):
            product = gradient * d_loss.to(gradient.dtype) if is_needed else None
            scaled.append(product)
        return (*scaled, None)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some columns of a score block, with a buffer for the logits of all sizes."""

    columns: LossColumns
    positions: slice
    """Positions of the tile among the columns."""
    score_block: ScoreBlock
    left_out: tuple[LeftOut, ...]
    """Scores that no size counts."""
    logits: Tensor
    """[K, n, t]"""
    target: Tensor | None
    """[n, t] the teacher's scores."""


@dataclass(frozen=True, slots=True)
class _ScoredPairs:
    """The explicit pairs of a block of rows."""

    direction: int
    scores: Tensor
    """[K, P]"""
    row: Tensor
    """[P] counted from the block's first row."""
    anchor: Tensor
    """[P] position of the row's anchor in the table."""
    position: Tensor
    """[P] position of the hard negative in the table."""
    target: Tensor | None
    """[P] the teacher's scores."""


@dataclass(frozen=True, slots=True)
class _RowBlock:
    """A block of n rows of this rank, with the state of its losses."""

    rows: slice
    queries: slice
    """Positions of the rows' queries in the table."""
    positives: slice
    """Positions of the rows' positives."""
    own_scores: Tensor
    """[K, n] scores of the own pairs."""
    losses: list[list[RowLoss]]
    """By size and direction."""
    ceilings: Tensor | None
    """[K, n] logits above which candidates are left out."""
    guide_ceilings: Tensor | None
    """[n] scores of the guide above which candidates are left out."""
    explicit: list[_ScoredPairs]

    @property
    def num_rows(self) -> int:
        return int(self.rows.stop - self.rows.start)


class _ScorePass:
    """One pass over all blocks of rows. Accumulates the loss and, if requested, its gradients."""

    def __init__(
        self,
        embeddings: Tensor,
        scoring: Scoring,
        scale: Tensor,
        bias: Tensor | None,
        *,
        with_gradient: bool,
    ) -> None:
        dtype = arithmetic_dtype(embeddings)
        candidates = scoring.candidates
        self.candidates = candidates
        self.scoring = scoring
        self.with_gradient = with_gradient
        self.scale = scale.detach().to(embeddings.device, dtype)
        self.bias: Tensor | None = None
        if bias is not None:
            self.bias = bias.detach().to(embeddings.device, dtype)
        self.num_sizes = len(scoring.similarity.dims)
        self.table = scoring.similarity.table(
            embeddings, candidates.index, with_gradient=with_gradient
        )
        self.guide = self._teacher_table(
            None if scoring.guide is None else scoring.guide.vectors
        )
        self.teacher = self._teacher_table(scoring.teacher)
        self.stream: StreamedColumns | None = None
        if candidates.foreign is not None:
            self.stream = StreamedColumns(
                candidates.foreign, self.table, self.guide, self.teacher
            )
        # A tile's logits at all sizes, and the teacher's scores where there is one.
        self.num_matrices = self.num_sizes + (self.teacher is not None)
        num_columns = 0
        for score_block in candidates.score_blocks:
            num_columns += score_block.columns.stop - score_block.columns.start
        tiling = Tiling.for_scores if self.stream is None else Tiling.for_stream
        self.tiling = scoring.tiling or tiling(
            num_columns * self.num_matrices, embeddings
        )
        self.differentiates_at_once = with_gradient and scoring.is_separable
        # Buffers, which grow to the largest need.
        self.logits_buffer = self.table.x.new_empty(0)
        self.scratch_buffer = self.table.x.new_empty(2, 0)
        self.loss = self.table.x.new_zeros(())
        self.d_scale = self.table.x.new_zeros(())
        self.d_bias = self.table.x.new_zeros(())

    def _teacher_table(self, vectors: TeacherVectors | None) -> TeacherTable | None:
        if vectors is None:
            return None
        occurrence = self.candidates.occurrence
        return TeacherTable.of_occurrences(vectors, occurrence, self.table.x)

    def run(self) -> None:
        """Accumulate `loss`, and with gradients also `d_scale`, `d_bias` and the table's gradient."""
        here = LossColumns(
            score_blocks=self.candidates.score_blocks,
            first=0,
            count=self.table.x.shape[0],
            vectors=self.table.columns(),
            guide=self.guide,
            teacher=self.teacher,
        )
        row_chunks = chunks(self.candidates.num_own_rows, self.tiling.rows)
        if self.stream is None:
            for rows in row_chunks:
                self._complete(self._begin(rows), [here])
            return
        # Streamed columns meet all rows, so the state of all rows is kept.
        blocks = [self._begin(rows) for rows in row_chunks]
        if self.differentiates_at_once:
            for columns in self.stream.differentiated():
                for block in blocks:
                    tiles = self._scored_tiles(block, [columns])
                    self._differentiate(block, [columns], tiles)
            for block in blocks:
                self._complete(block, [here])
            return
        last = [here]
        for columns in self.stream.scored(keeps_last=self.with_gradient):
            if columns.stays:
                last.append(columns)
                continue
            for block in blocks:
                for _ in self._scored_tiles(block, [columns]):
                    pass
        # With the last columns the sums of a block of rows are complete, so that their
        # scores are computed once.
        for block in blocks:
            self._complete(block, last)
        if not self.with_gradient:
            return
        self.logits_buffer = self.logits_buffer.new_empty(
            0
        )  # the second round keeps none
        for columns in self.stream.differentiated():
            for block in blocks:
                # The same logits again: they count already.
                tiles = self._scored_tiles(block, [columns], counts=False)
                self._differentiate(block, [columns], tiles)

    def _complete(self, block: _RowBlock, last: Sequence[LossColumns]) -> None:
        """Score one block of rows against the last of its columns, and differentiate the same scores."""
        if self.differentiates_at_once:
            self._differentiate(block, last, self._scored_tiles(block, last))
            self._finish(block)
            return
        # Every tile's logits go into the row sums. They must be complete before any
        # derivative is known.
        tiles = list(self._scored_tiles(block, last, keep=self.with_gradient))
        self._finish(block)
        if self.with_gradient:
            self._differentiate(block, last, tiles)

    # ---- A block of rows: its own pairs and explicit pairs ----------------------------

    def _begin(self, rows: slice) -> _RowBlock:
        """Start the losses of a block with its own pairs and explicit pairs."""
        queries = self._positions("query", rows)
        positives = self._positions("positive", rows)
        # The own pairs first: they start the online softmax and define the ceiling of
        # the margin. [K, n]
        own_scores = self.table.pair_scores(queries, positives)
        targets = None
        if self.teacher is not None:
            targets = self.teacher.pair_scores(queries, positives)
        losses = []
        for scores, weight in zip(
            own_scores, self.scoring.similarity.weights, strict=True
        ):
            by_direction = []
            for factor in self.scoring.coefficients:
                row_loss = self.scoring.row_loss(
                    scores * self.scale, weight * factor, self.bias, targets
                )
                by_direction.append(row_loss)
            losses.append(by_direction)
        ceilings = None
        if self.scoring.margin is not None:
            ceilings = _with_tolerance(own_scores + self.scoring.margin) * self.scale
        guide_ceilings = None
        if self.guide is not None and self.scoring.guide is not None:
            guide_scores = self.guide.pair_scores(queries, positives)
            guide_ceilings = self.scoring.guide.ceilings(guide_scores)
        explicit = []
        for pairs in self.candidates.explicit:
            scored = self._score_pairs(pairs, rows, ceilings, guide_ceilings)
            for k in range(self.num_sizes):
                losses[k][scored.direction].add_explicit(
                    scored.scores[k] * self.scale, scored.row, scored.target
                )
            explicit.append(scored)
        return _RowBlock(
            rows=rows,
            queries=queries,
            positives=positives,
            own_scores=own_scores,
            losses=losses,
            ceilings=ceilings,
            guide_ceilings=guide_ceilings,
            explicit=explicit,
        )

    def _score_pairs(
        self,
        pairs: ExplicitPairs,
        rows: slice,
        ceilings: Tensor | None,
        guide_ceilings: Tensor | None,
    ) -> _ScoredPairs:
        of_rows = pairs.of_rows(rows)
        row = pairs.row[of_rows] - rows.start
        position = pairs.position[of_rows]
        anchor = self._positions(pairs.anchor, rows).start + row
        # Masked as scores, before the scale: an excluded pair's logit is LEFT_OUT times
        # the scale.
        scores = self.table.pair_scores(anchor, position)
        if ceilings is not None:
            is_above = scores * self.scale > ceilings[:, row]
            scores.masked_fill_(is_above, LEFT_OUT)
        if self.guide is not None and guide_ceilings is not None:
            is_above = self.guide.pair_scores(anchor, position) > guide_ceilings[row]
            scores.masked_fill_(is_above, LEFT_OUT)
        target = None
        if self.teacher is not None:
            target = self.teacher.pair_scores(anchor, position)
        return _ScoredPairs(pairs.direction, scores, row, anchor, position, target)

    def _finish(self, block: _RowBlock) -> None:
        """Count the losses of a block whose sums are complete, and differentiate its own and explicit pairs."""
        for by_direction in block.losses:
            for row_loss in by_direction:
                self.loss += row_loss.total()
        if not self.with_gradient:
            return
        d_own = []
        for by_direction in block.losses:
            # Both directions share the own pair's score, so their derivatives add up.
            gradients = [loss.grad_of_positive_logit() for loss in by_direction]
            d_own.append(torch.stack(gradients).sum(0))
        self._add_pair_gradient(
            block.queries, block.positives, block.own_scores, torch.stack(d_own)
        )
        for pairs in block.explicit:
            d_logits = []
            for by_direction, scores in zip(block.losses, pairs.scores, strict=True):
                row_loss = by_direction[pairs.direction]
                gradient = row_loss.grad_of_explicit_logits(
                    scores * self.scale, pairs.row, pairs.target
                )
                d_logits.append(gradient)
            self._add_pair_gradient(
                pairs.anchor, pairs.position, pairs.scores, torch.stack(d_logits)
            )

    def _add_pair_gradient(
        self,
        left: slice | Tensor,
        right: slice | Tensor,
        scores: Tensor,
        d_logits: Tensor,
    ) -> None:
        self._count_bias(d_logits)
        # An excluded pair has d_logits 0 and a finite score, so it adds 0 and not NaN.
        self.d_scale += (d_logits * scores).sum()
        self.table.add_pair_gradient(left, right, scores, d_logits * self.scale)

    # ---- A block of rows against tiles of columns -------------------------------------

    def _tiles(
        self, block: _RowBlock, columns: Sequence[LossColumns], *, keep: bool
    ) -> Iterator[_Tile]:
        """Yield the tiles of some columns, with room for their logits.

        With `keep` each tile has its own, otherwise they all have the same.
        """
        num_rows = block.num_rows
        ranges = []
        num_columns = 0
        longest = 0
        for part in columns:
            for score_block, positions in part.ranges():
                ranges.append((part, score_block, positions))
                length = positions.stop - positions.start
                num_columns += length
                longest = max(longest, min(length, self.tiling.columns))
        width = num_columns if keep else longest
        self._reserve(num_rows * self.num_matrices * width, num_rows * longest)
        offset = 0
        for part, score_block, positions in ranges:
            length = positions.stop - positions.start
            first = part.first + positions.start - score_block.columns.start
            left_out = score_block.left_out(
                block.rows, slice(first, first + length), self.tiling.columns
            )
            for tile, masks in zip(
                chunks(length, self.tiling.columns), left_out, strict=False
            ):
                size = self.num_matrices * num_rows * (tile.stop - tile.start)
                buffer = self.logits_buffer[offset : offset + size]
                matrices = buffer.view(self.num_matrices, num_rows, -1)
                start = positions.start
                yield _Tile(
                    columns=part,
                    positions=slice(start + tile.start, start + tile.stop),
                    score_block=score_block,
                    left_out=masks,
                    logits=matrices[: self.num_sizes],
                    target=None if self.teacher is None else matrices[-1],
                )
                offset += size if keep else 0

    def _reserve(self, logits: int, scratch: int) -> None:
        # The buffers are reused by all blocks of rows and all columns.
        if self.logits_buffer.numel() < logits:
            self.logits_buffer = self.logits_buffer.new_empty(logits)
        if self.scratch_buffer.shape[1] < scratch:
            self.scratch_buffer = self.scratch_buffer.new_empty(2, scratch)

    def _scratch(self, number: int, like: Tensor) -> Tensor:
        return self.scratch_buffer[number, : like.numel()].view_as(like)

    def _scored_tiles(
        self,
        block: _RowBlock,
        columns: Sequence[LossColumns],
        *,
        keep: bool = False,
        counts: bool = True,
    ) -> Iterator[_Tile]:
        """Yield the tiles of a block of rows with their logits.

        The logits hold until the next tile unless they are kept. `counts`: add them to
        the row losses.
        """
        anchors = self._anchors(block, columns)
        for tile in self._tiles(block, columns, keep=keep):
            self._score(tile, block, anchors[tile.score_block.anchor], counts=counts)
            yield tile

    def _score(
        self, tile: _Tile, block: _RowBlock, anchors: Anchors, *, counts: bool
    ) -> None:
        """Compute a tile's logits, from the smallest size to the largest, and add them to the row losses."""
        masks: list[LeftOut] = [*tile.left_out]
        guide = tile.columns.guide
        ceilings = block.guide_ceilings
        if self.guide is not None and guide is not None and ceilings is not None:
            scores = self._scratch(0, tile.logits[0])
            row_vectors = self.guide.rows(anchors.positions)
            torch.mm(row_vectors, guide.rows(tile.positions).T, out=scores)
            masks.append(scores > ceilings[:, None])
        teacher = tile.columns.teacher
        if self.teacher is not None and teacher is not None and tile.target is not None:
            row_vectors = self.teacher.rows(anchors.positions)
            torch.mm(row_vectors, teacher.rows(tile.positions).T, out=tile.target)
        for k in self.table.scores(
            anchors, tile.columns.vectors, tile.positions, tile.logits
        ):
            logits = tile.logits[k]
            for mask in masks:
                if isinstance(mask, Tensor):
                    logits.masked_fill_(mask, LEFT_OUT)
                elif mask[0].numel():
                    logits[mask] = LEFT_OUT
            if block.ceilings is not None:
                is_above = logits > block.ceilings[k, :, None]
                logits.masked_fill_(is_above, LEFT_OUT)
            if counts:
                row_loss = block.losses[k][tile.score_block.direction]
                row_loss.add(logits, self._scratch(0, logits), tile.target)

    def _differentiate(
        self, block: _RowBlock, columns: Sequence[LossColumns], tiles: Iterable[_Tile]
    ) -> None:
        """Add the gradients of the tiles with respect to the block's rows and to the columns."""
        anchors = self._anchors(block, columns)
        for tile in tiles:
            self._differentiate_tile(tile, block, anchors[tile.score_block.anchor])
        for rows in anchors.values():
            self.d_scale += self.table.finish(rows, self.scale)

    def _differentiate_tile(
        self, tile: _Tile, block: _RowBlock, anchors: Anchors
    ) -> None:
        def derivative(k: int) -> Tensor:
            logits = tile.logits[k]
            # The largest size's logits are not needed again: overwrite them in place.
            is_largest = k == self.num_sizes - 1
            out = logits if is_largest else self._scratch(0, logits)
            row_loss = block.losses[k][tile.score_block.direction]
            d_logits = row_loss.grad_of_logits(logits, out, tile.target)
            self._count_bias(d_logits)
            return d_logits

        # The derivatives stand in scratch 0, so the table needs the other buffer.
        self.table.add_gradient(
            anchors,
            tile.columns.vectors,
            tile.positions,
            tile.logits,
            derivative,
            self._scratch(1, tile.logits[0]),
        )

    def _anchors(
        self, block: _RowBlock, columns: Sequence[LossColumns]
    ) -> dict[Anchor, Anchors]:
        """Return the block's rows of the table, for each kind of anchor of the score blocks."""
        anchors: dict[Anchor, Anchors] = {}
        for part in columns:
            for score_block in part.score_blocks:
                kind = score_block.anchor
                if kind not in anchors:
                    positions = self._positions(kind, block.rows)
                    anchors[kind] = self.table.anchors(positions, self.scale)
        return anchors

    def _positions(self, anchor: Anchor, rows: slice) -> slice:
        first = self.candidates.anchors(anchor).start
        return slice(first + rows.start, first + rows.stop)

    def _count_bias(self, d_logits: Tensor) -> None:
        if self.bias is not None:
            self.d_bias += d_logits.sum()


def _with_tolerance(ceilings: Tensor) -> Tensor:
    """Return ceilings that are higher by rounding errors: scores within them are not above."""
    rounding = TIE_TOLERANCE * torch.finfo(ceilings.dtype).eps
    return ceilings + rounding * ceilings.abs().clamp(min=1.0)
