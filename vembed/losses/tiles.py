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

dl/dz_ij depends on sums over the whole row, such as the sum of a softmax. So all tiles of
one block of rows are scored and kept: O(N * block) memory. The sums of its rows are then
complete, and the gradient is computed from the same scores at once. The total is three
matrix products (scores, gradient of the rows, gradient of the columns), as with the full
matrix, and no score is computed twice. The forward pass computes the gradient.
`backward` only multiplies it by the incoming gradient.

Where a score's derivative does not depend on the others of its row
(`Scoring.is_separable`), each tile is differentiated as soon as it is scored, and all
tiles share one buffer.

Who does what: `candidates.py` says which scores count. The similarity's table computes
them and turns their derivatives into the gradient of the embeddings. The row losses add
them up. This module brings the three together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vembed.losses.batch import TeacherVectors
from vembed.losses.candidates import (
    Anchor,
    ExcludedScores,
    ExplicitPairs,
    LossCandidates,
    ScoreBlock,
)
from vembed.losses.row_losses import EXCLUDED, Candidates, RowLoss, RowStart
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
        """Return blocks of at most 192 MiB of scores on a CPU, 1 GiB elsewhere, with tiles of 32 and 128 MiB.

        `scores_per_row` counts all columns and sizes.
        """
        is_cpu = embeddings.device.type == "cpu"
        block_mebibytes = 192 if is_cpu else 1024
        tile_mebibytes = 32 if is_cpu else 128
        max_rows = 512 if is_cpu else 4096
        scores_per_mebibyte = MEBIBYTE // arithmetic_dtype(embeddings).itemsize
        # A block keeps rows * scores_per_row values. A tile is a temporary of rows *
        # columns values. At least 16 each, or a huge batch would degrade to vector
        # products.
        rows = block_mebibytes * scores_per_mebibyte // max(1, scores_per_row)
        rows = min(max_rows, max(16, rows))
        return cls(rows, max(16, tile_mebibytes * scores_per_mebibyte // rows))


@dataclass(frozen=True, slots=True)
class Guide:
    """A teacher that says which candidates are too good to be negatives.

    They are those that it scores above the row's positive less a margin. A `relative`
    margin is a share of the positive's score.
    """

    vectors: TeacherVectors
    margin: float
    relative: bool


@dataclass(frozen=True, slots=True)
class Scoring:
    """Definition of a loss over scores: candidates, similarity, row loss and options."""

    candidates: LossCandidates
    similarity: Similarity
    row_loss: Callable[[RowStart], RowLoss]
    """Makes the losses of a block of rows."""
    coefficients: tuple[float, ...]
    """Factor of each direction (forward, reverse)."""
    margin: float | None
    """Leave out candidates whose score exceeds the positive's by more than this. None: keep all."""
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
    """Return the sum over this rank's rows, sizes and directions of coefficient * size weight * row loss.

    Logits are scale * score. The row loss adds the bias. Differentiable once, in
    embeddings, scale and bias.
    """
    loss: Tensor = _TiledLoss.apply(  # type: ignore[no-untyped-call]
        embeddings, scale, bias, scoring, torch.is_grad_enabled()
    )
    return loss


class _TiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        scoring: Scoring,
        is_grad_enabled: bool,
    ) -> Tensor:
        with_gradient = is_grad_enabled and any(ctx.needs_input_grad)
        # Gradients are computed by hand. Autocast would run the products in 16 bits.
        with torch.autocast(embeddings.device.type, enabled=False):
            score_pass = _ScorePass(
                embeddings, scoring, scale, bias, with_gradient=with_gradient
            )
            score_pass.run()
        if with_gradient:
            gradient = score_pass.table.gradient().to(embeddings.dtype)
            ctx.save_for_backward(gradient, score_pass.d_scale, score_pass.d_bias)
        return score_pass.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        # L is a scalar, so the chain rule is one multiplication. The saved tensors stand
        # in the order of the inputs.
        products: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for number, gradient in enumerate(ctx.saved_tensors):
            if ctx.needs_input_grad[number]:
                products[number] = gradient * d_loss.to(gradient.dtype)
        return tuple(products)


class _TeacherTable:
    """A teacher's vectors by position in the candidates' table."""

    def __init__(
        self, teacher: TeacherVectors, occurrence: Tensor, like: Tensor
    ) -> None:
        """`like`: has the device and dtype of the scores."""
        self.vectors = teacher.vectors.to(like.device, like.dtype)
        self.index = teacher.occurrences()[occurrence]

    def rows(self, positions: slice | Tensor) -> Tensor:
        """Return [n, E] vectors."""
        return self.vectors[self.index[positions]]

    def pair_scores(self, left: slice | Tensor, right: slice | Tensor) -> Tensor:
        """Return [n] scores of pairs."""
        return (self.rows(left) * self.rows(right)).sum(1)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some columns of a score block, with a buffer for the logits of all sizes."""

    score_block: ScoreBlock
    columns: slice
    """Positions of the columns in the table."""
    excluded: tuple[ExcludedScores, ...]
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
    anchors: dict[Anchor, Anchors]
    """The rows' vectors, with room for their gradient, for each kind of anchor."""
    positive_scores: Tensor
    """[K, n] scores of the rows' queries and positives."""
    losses: list[list[RowLoss]]
    """By size and direction."""
    ceilings: Tensor | None
    """[K, n] logits above which candidates are left out."""
    guide_ceilings: Tensor | None
    """[n] scores of the guide above which candidates are left out."""
    explicit: list[_ScoredPairs]


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
        self.candidates = scoring.candidates
        self.scoring = scoring
        self.with_gradient = with_gradient
        self.scale = scale.detach().to(embeddings.device, dtype)
        self.bias: Tensor | None = None
        if bias is not None:
            self.bias = bias.detach().to(embeddings.device, dtype)
        self.num_sizes = len(scoring.similarity.dims)
        self.table = scoring.similarity.table(
            embeddings, self.candidates.index, with_gradient=with_gradient
        )
        occurrence = self.candidates.occurrence
        self.guide: _TeacherTable | None = None
        if scoring.guide is not None:
            vectors = scoring.guide.vectors
            self.guide = _TeacherTable(vectors, occurrence, self.scale)
        self.teacher: _TeacherTable | None = None
        if scoring.teacher is not None:
            self.teacher = _TeacherTable(scoring.teacher, occurrence, self.scale)
        # A tile's logits at all sizes, and the teacher's scores where there is one.
        self.num_matrices = self.num_sizes + (self.teacher is not None)
        lengths = [block.num_columns for block in self.candidates.score_blocks]
        self.num_columns = sum(lengths)
        self.tiling = scoring.tiling or Tiling.for_scores(
            self.num_columns * self.num_matrices, embeddings
        )
        self.differentiates_at_once = with_gradient and scoring.is_separable
        self.keeps_tiles = with_gradient and not scoring.is_separable
        self.longest_tile = min(max(lengths, default=0), self.tiling.columns)
        # Buffers for the largest block of rows: the logits of all tiles, or of one where
        # none is kept, and two temporaries of the size of a tile.
        max_rows = min(self.tiling.rows, self.candidates.num_rows)
        width = self.num_columns if self.keeps_tiles else self.longest_tile
        size = self.num_matrices * max_rows * width
        self.logits_buffer = self.scale.new_empty(size)
        self.scratch_buffer = self.scale.new_empty(2, max_rows * self.longest_tile)
        self.loss = self.scale.new_zeros(())
        self.d_scale = self.scale.new_zeros(())
        self.d_bias = self.scale.new_zeros(())

    def run(self) -> None:
        """Accumulate `loss`, and with gradients also `d_scale`, `d_bias` and the table's gradient."""
        for rows in chunks(self.candidates.num_rows, self.tiling.rows):
            block = self._begin(rows)
            if self.differentiates_at_once:
                for tile in self._scored_tiles(block):
                    self._differentiate(tile, block)
                self._finish(block)
            else:
                # All logits enter the sums of their rows before any derivative is known.
                tiles = list(self._scored_tiles(block))
                self._finish(block)
                if self.with_gradient:
                    for tile in tiles:
                        self._differentiate(tile, block)
            if self.with_gradient:
                for anchors in block.anchors.values():
                    self.d_scale += self.table.finish(anchors, self.scale)

    # ---- A block of rows: its positives and its explicit pairs ------------------------

    def _begin(self, rows: slice) -> _RowBlock:
        """Start the losses of a block with its positives and its explicit pairs."""
        queries = self._positions("query", rows)
        positives = self._positions("positive", rows)
        # The positives first: they start the online softmax and define the ceiling of
        # the margin. [K, n]
        positive_scores = self.table.pair_scores(queries, positives)
        targets = None
        if self.teacher is not None:
            targets = self.teacher.pair_scores(queries, positives)
        losses = []
        weights = self.scoring.similarity.weights
        for scores, weight in zip(positive_scores, weights, strict=True):
            by_direction = []
            for factor in self.scoring.coefficients:
                logits = scores * self.scale
                start = RowStart(logits, weight * factor, self.bias, targets)
                by_direction.append(self.scoring.row_loss(start))
            losses.append(by_direction)
        ceilings = None
        if self.scoring.margin is not None:
            ceilings = positive_scores + self.scoring.margin
            ceilings = _with_tolerance(ceilings) * self.scale
        guide_ceilings = None
        guide = self.scoring.guide
        if self.guide is not None and guide is not None:
            guide_scores = self.guide.pair_scores(queries, positives)
            margin = (
                guide_scores.abs() * guide.margin if guide.relative else guide.margin
            )
            guide_ceilings = _with_tolerance(guide_scores - margin)
        explicit = []
        for pairs in self.candidates.explicit:
            scored = self._score_pairs(pairs, rows, ceilings, guide_ceilings)
            for k in range(self.num_sizes):
                logits = scored.scores[k] * self.scale
                single = Candidates(logits, scored.target, row=scored.row)
                losses[k][scored.direction].add(single)
            explicit.append(scored)
        anchors = {}
        for score_block in self.candidates.score_blocks:
            kind = score_block.anchor
            if kind not in anchors:
                positions = self._positions(kind, rows)
                anchors[kind] = self.table.anchors(positions, self.scale)
        return _RowBlock(
            rows=rows,
            anchors=anchors,
            positive_scores=positive_scores,
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
        # The pairs stand in the order of their rows: those of a block are adjacent.
        first = int(torch.searchsorted(pairs.host_row, rows.start))
        last = int(torch.searchsorted(pairs.host_row, rows.stop))
        row = pairs.row[first:last] - rows.start
        position = pairs.position[first:last]
        anchor = self._positions(pairs.anchor, rows).start + row
        # Masked as scores, before the scale: an excluded pair's logit is EXCLUDED times
        # the scale.
        scores = self.table.pair_scores(anchor, position)
        if ceilings is not None:
            is_above = scores * self.scale > ceilings[:, row]
            scores.masked_fill_(is_above, EXCLUDED)
        if self.guide is not None and guide_ceilings is not None:
            is_above = self.guide.pair_scores(anchor, position) > guide_ceilings[row]
            scores.masked_fill_(is_above, EXCLUDED)
        target = None
        if self.teacher is not None:
            target = self.teacher.pair_scores(anchor, position)
        return _ScoredPairs(pairs.direction, scores, row, anchor, position, target)

    def _finish(self, block: _RowBlock) -> None:
        """Count the losses of a block whose sums are complete, and differentiate its positives and explicit pairs."""
        for by_direction in block.losses:
            for row_loss in by_direction:
                self.loss += row_loss.total()
        if not self.with_gradient:
            return
        d_positive = []
        for by_direction in block.losses:
            # Both directions share the positive's score, so their derivatives add up.
            gradients = [loss.grad_of_positive_logit() for loss in by_direction]
            d_positive.append(torch.stack(gradients).sum(0))
        self._add_pair_gradient(
            self._positions("query", block.rows),
            self._positions("positive", block.rows),
            block.positive_scores,
            torch.stack(d_positive),
        )
        for pairs in block.explicit:
            d_logits = []
            for by_direction, scores in zip(block.losses, pairs.scores, strict=True):
                logits = scores * self.scale
                single = Candidates(logits, pairs.target, row=pairs.row)
                d_logits.append(by_direction[pairs.direction].grad(single))
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
        if self.bias is not None:
            self.d_bias += d_logits.sum()
        # An excluded pair has d_logits 0 and a finite score, so it adds 0 and not NaN.
        self.d_scale += (d_logits * scores).sum()
        self.table.add_pair_gradient(left, right, scores, d_logits * self.scale)

    # ---- A block of rows against tiles of columns -------------------------------------

    def _scored_tiles(self, block: _RowBlock) -> Iterator[_Tile]:
        """Yield the tiles of a block of rows with their logits, which count in the row losses.

        Logits that are not kept hold until the next tile.
        """
        num_rows = block.rows.stop - block.rows.start
        offset = 0
        for score_block in self.candidates.score_blocks:
            tiles = chunks(score_block.num_columns, self.tiling.columns)
            masks = score_block.excluded(block.rows, self.tiling.columns)
            for columns, excluded in zip(tiles, masks, strict=False):
                num_columns = columns.stop - columns.start
                size = self.num_matrices * num_rows * num_columns
                buffer = self.logits_buffer[offset : offset + size]
                matrices = buffer.view(self.num_matrices, num_rows, num_columns)
                tile = _Tile(
                    score_block=score_block,
                    columns=_shifted(columns, score_block.columns.start),
                    excluded=excluded,
                    logits=matrices[: self.num_sizes],
                    target=None if self.teacher is None else matrices[-1],
                )
                self._score(tile, block)
                yield tile
                if self.keeps_tiles:
                    offset += size

    def _score(self, tile: _Tile, block: _RowBlock) -> None:
        """Compute a tile's logits, from the smallest size to the largest, and add them to the row losses."""
        anchors = block.anchors[tile.score_block.anchor]
        excluded = list(tile.excluded)
        if self.guide is not None and block.guide_ceilings is not None:
            scores = self._scratch(0, tile.logits[0])
            columns = self.guide.rows(tile.columns)
            torch.mm(self.guide.rows(anchors.positions), columns.T, out=scores)
            excluded.append(scores > block.guide_ceilings[:, None])
        if self.teacher is not None and tile.target is not None:
            columns = self.teacher.rows(tile.columns)
            torch.mm(self.teacher.rows(anchors.positions), columns.T, out=tile.target)
        for k in self.table.scores(anchors, tile.columns, tile.logits):
            logits = tile.logits[k]
            for mask in excluded:
                if isinstance(mask, Tensor):
                    logits.masked_fill_(mask, EXCLUDED)
                elif mask[0].numel():
                    logits[mask] = EXCLUDED
            if block.ceilings is not None:
                is_above = logits > block.ceilings[k, :, None]
                logits.masked_fill_(is_above, EXCLUDED)
            row_loss = block.losses[k][tile.score_block.direction]
            scratch = self._scratch(0, logits)
            row_loss.add(Candidates(logits, tile.target, out=scratch))

    def _differentiate(self, tile: _Tile, block: _RowBlock) -> None:
        """Add the gradient of a tile with respect to the block's rows and to the columns."""

        def derivative(k: int) -> Tensor:
            logits = tile.logits[k]
            # The largest size's logits are not needed again: overwrite them in place.
            is_largest = k == self.num_sizes - 1
            out = logits if is_largest else self._scratch(0, logits)
            row_loss = block.losses[k][tile.score_block.direction]
            d_logits = row_loss.grad(Candidates(logits, tile.target, out=out))
            if self.bias is not None:
                self.d_bias += d_logits.sum()
            return d_logits

        # The derivatives stand in scratch 0, so the table needs the other buffer.
        self.table.add_gradient(
            block.anchors[tile.score_block.anchor],
            tile.columns,
            tile.logits,
            derivative,
            self._scratch(1, tile.logits[0]),
        )

    def _scratch(self, number: int, like: Tensor) -> Tensor:
        return self.scratch_buffer[number, : like.numel()].view_as(like)

    def _positions(self, anchor: Anchor, rows: slice) -> slice:
        """Return the positions of some rows' queries or positives in the table."""
        candidates = self.candidates
        anchors = candidates.queries if anchor == "query" else candidates.positives
        return _shifted(rows, anchors.start)


def _shifted(positions: slice, offset: int) -> slice:
    return slice(positions.start + offset, positions.stop + offset)


def _with_tolerance(ceilings: Tensor) -> Tensor:
    """Return ceilings that are higher by rounding errors: scores within them are not above."""
    rounding = TIE_TOLERANCE * torch.finfo(ceilings.dtype).eps
    return ceilings + rounding * ceilings.abs().clamp(min=1.0)
