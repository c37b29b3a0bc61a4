"""Loss and gradient over a score matrix that never exists as a whole.

A row is a (query, positive) pair of the batch. The matrix has this rank's rows against all candidates. It is cut into
row blocks, and each block into tiles of columns:

                       columns (documents, queries)
            +---------+---------+---------+------
    row     | tile    | tile    | tile    |        logits of a tile: [K, n, t]
    block   |         |         |         |        for K Matryoshka dims,
            +---------+---------+---------+------  n rows and t columns
    block   | ...

The score of row i and column j is the dot product x_i . y_j of their vectors, and its logit is z = logit_scale * score. For
a loss L = sum over rows of l(row), the gradient with respect to these vectors is as follows. For the cosine x and y are
normalised, and `VectorTable` adds the derivative of that.

    dL/dx_i = logit_scale * sum_j dl/dz_ij * y_j          dL/dy_j = logit_scale * sum_i dl/dz_ij * x_i

dl/dz_ij depends on sums over the whole row, such as the sum of a softmax. So all tiles of one row block are scored
and kept: O(C * block) memory for C columns and `block` rows. The sums of its rows are then complete, and the gradient
follows from the same scores. The total is three matrix products (scores, gradient of the rows, gradient of the
columns), as with the full matrix, and no score is computed twice. All of it happens in the forward pass. `backward`
only multiplies by the incoming gradient.

Where a score's derivative does not depend on the others of its row (`RowLoss.is_separable`), each tile is
differentiated immediately after it is scored, and all tiles share one buffer.

Who does what: `candidates.py` plans which scores count. `VectorTable` holds the vectors, normalised for the cosine, computes scores and
turns their derivatives into the gradient of the embeddings. The row losses add the scores up. `_ScorePass` brings the
three together. Vectors are referred to by their entry (see `candidates.py`).

Shapes: K Matryoshka dims, n rows of a block, t columns of a tile, P negative pairs of a block, N entries. `d_x` is
dL/dx for any x. An excluded candidate does not count: its logit is EXCLUDED.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from vembed.losses.batch import TeacherVectors
from vembed.losses.candidates import FORWARD_DIRECTION, ScorePlan, shifted
from vembed.losses.similarity import (
    Entries,
    KnownGradients,
    RowVectors,
    Similarity,
    VectorTable,
    arithmetic_dtype,
    chunks,
    length_of,
    softplus,
)

MEBIBYTE = 2**20
EXCLUDED = -1e30
"""Logit of an excluded candidate. Finite, since 0 * -inf would be NaN."""
TIE_TOLERANCE = 64
"""A score that exceeds a ceiling by at most this many rounding errors counts as equal to it, and is not excluded."""


# ---- Row losses: the loss of each row and its derivatives, tile by tile ----------------------
#
# A row has the logit of its positive and the logits of its candidates.


def is_excluded(logits: Tensor) -> Tensor:
    """Return true where a candidate is excluded."""
    # The logit of an excluded candidate is EXCLUDED in a tile, and EXCLUDED * logit_scale in a negative pair. logit_scale is
    # above 1e-6, and other logits are far above this bound.
    return logits <= EXCLUDED * 1e-6


@dataclass(frozen=True)
class RowLossStart:
    """What the losses of n rows begin with."""

    logits: Tensor
    """[n] logits of the positives."""
    coefficient: float
    """Weight of the Matryoshka dim times the factor of the direction, > 0."""
    bias: Tensor | None = None
    """Scalar that the row loss adds to every logit."""
    teacher_scores: Tensor | None = None
    """[n] a teacher's scores of the positives."""


@dataclass(frozen=True)
class CandidateLogits:
    """Logits of candidates of n rows: those of a tile, or single ones."""

    logits: Tensor
    """[n, t], or [P] with `row`."""
    teacher_scores: Tensor | None = None
    """A teacher's scores of the same pairs, for losses that follow one."""
    row: Tensor | None = None
    """[P] the row of each single logit. Rows may repeat. None: a tile."""
    out: Tensor | None = None
    """Like the logits: overwritten in place of a new tensor."""


class RowLoss(ABC):
    """Losses of n rows.

    Create it with the positives' logits, add all candidates, call `total`, then ask for the derivatives. If the class
    `is_separable`, `d_candidates` may come before `total`.
    """

    is_separable: ClassVar[bool] = False
    """True for a sum of functions of single scores: the derivative of a score does not depend on the others of its row."""

    def __init__(self, start: RowLossStart) -> None:
        self.positive_logits = start.logits
        self.coefficient = start.coefficient

    @abstractmethod
    def add(self, candidates: CandidateLogits) -> None:
        """Add candidates. `candidates.out` must not be the logits, unless the class allows it."""

    @abstractmethod
    def total(self) -> Tensor:
        """Return coefficient * sum of the rows' losses. Call it once, after all candidates have been added."""

    @abstractmethod
    def d_candidates(self, candidates: CandidateLogits) -> Tensor:
        """Return the gradient of the total with respect to the candidates' logits, written into `out`, which may be the
        logits themselves."""

    @abstractmethod
    def d_positives(self) -> Tensor:
        """Return the gradient of the total with respect to the positives' logits [n]."""


def beside_logits(values: Tensor, row: Tensor | None) -> Tensor:
    """Return a value of each row [n] in a shape that broadcasts to its logits: [n, 1] for a tile, [P] for single logits."""
    return values[:, None] if row is None else values[row]


def _add_to_rows(
    sums: Tensor,
    values: Tensor,
    row: Tensor | None,
) -> Tensor:
    """Return the sums of rows [n] plus the values of a tile [n, t], or of single logits [P]."""
    if row is None:
        return sums + values.sum(1)
    return sums.index_add(0, row, values)


@dataclass
class OnlineSum:
    """Sum of exp(logit) of each row, relative to the row's largest logit so far.

    No exp has a positive exponent. When a tile raises the maximum, what was summed before is rescaled to it.
    """

    largest: Tensor
    """[n]"""
    sum: Tensor
    """[n]"""

    def add(
        self,
        logits: Tensor,
        row: Tensor | None,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Add logits. Return their exp(logit - largest), and [n] the factor of what was summed before."""
        if row is None:
            largest = torch.maximum(self.largest, logits.amax(1))
        else:
            largest = self.largest.scatter_reduce(0, row, logits, "amax")
        shift = beside_logits(largest, row)
        terms = torch.sub(logits, shift, out=out).exp_()
        rescale = torch.exp(self.largest - largest)
        self.sum = _add_to_rows(self.sum * rescale, terms, row)
        self.largest = largest
        return terms, rescale

    def log(self) -> Tensor:
        """Return [n] the logarithm of the sums."""
        return self.largest + self.sum.log()


class SoftmaxRows(RowLoss):
    """Negative log softmax of the positive among itself and all candidates, as an online softmax.

    `others` sums the candidates alone. The positive's term is added at the end by expm1 and log1p, which keeps the
    precision of small losses.

    `stretch` (hardness_alpha): a candidate enters the softmax with logit + hardness_alpha * score, which is stretch * logit
    with stretch = 1 + hardness_alpha / logit_scale. Its gradient is taken as if the added part (stretch - 1) * logit were a
    constant: the stretch weighs hard candidates more within the softmax, and does not make all gradients larger.
    `stretches_own_only` (hardness_scope: own): only single logits are stretched, those of the row's own hard negatives.
    Tiles are not.
    `focal_gamma`: a row's loss l is multiplied by (1 - exp(-l)) ** focal_gamma.
    """

    def __init__(
        self,
        start: RowLossStart,
        *,
        stretch: Tensor | None = None,
        stretches_own_only: bool = False,
        focal_gamma: float = 0.0,
    ) -> None:
        assert start.bias is None, "a bias cancels in a softmax"
        super().__init__(start)
        self.stretch = stretch
        self.stretches_own_only = stretches_own_only
        self.focal_gamma = focal_gamma
        # The positive is part of the maximum from the start.
        zeros = torch.zeros_like(self.positive_logits)
        self.others = OnlineSum(self.positive_logits, zeros)

    def add(self, candidates: CandidateLogits) -> None:
        """See RowLoss. `candidates.out` may be the logits themselves: a subclass may have written its own there."""
        logits = self._stretched(candidates)
        self.others.add(logits, candidates.row, candidates.out)

    def _stretched(self, candidates: CandidateLogits) -> Tensor:
        """Return the logits with which the candidates enter the softmax."""
        is_tile = candidates.row is None
        if self.stretch is None or (is_tile and self.stretches_own_only):
            return candidates.logits
        return torch.mul(candidates.logits, self.stretch, out=candidates.out)

    def total(self) -> Tensor:
        """See RowLoss."""
        largest = self.others.largest
        # log(sum of all exp(logit)) - largest. expm1 and log1p keep precision if the positive dominates.
        positive_term = torch.expm1(self.positive_logits - largest)
        surplus = torch.log1p(self.others.sum + positive_term)
        losses = surplus + (largest - self.positive_logits)
        self.log_sum = surplus + largest  # [n]
        # `focus` [n]: derivative of the focal loss by the loss of the row.
        self.focus: Tensor | float = 1.0
        # The derivative by a candidate's logit is coefficient * focus * exp(logit) / sum, with the sum over the row. It
        # is exp(logit) / denominator, where the denominator [n] is sum / (coefficient * focus).
        log_denominator = self.log_sum - math.log(self.coefficient)
        if self.focal_gamma:
            # c = 1 - exp(-l) [n], by expm1 without cancellation for small l. The focal loss of a row is c^g * l. With
            # dc/dl = 1 - c its derivative by l is c^g * (1 + g * (1 - c) * l / c).
            complement = -torch.expm1(-losses)
            weights = complement**self.focal_gamma
            # l / c, which is 1 in the limit of l = 0.
            ratio = torch.where(
                complement > 0, losses / complement, torch.ones_like(complement)
            )
            growth = self.focal_gamma * (1 - complement) * ratio
            self.focus = weights * (1 + growth)
            log_denominator = log_denominator - torch.log(self.focus)
            losses = losses * weights
        self.log_denominator = log_denominator
        return self.coefficient * losses.sum()

    def d_candidates(self, candidates: CandidateLogits) -> Tensor:
        """See RowLoss."""
        # exp(logit) / denominator (see `total`), by one subtraction and one exp over the tile.
        logits = self._stretched(candidates)
        log_denominator = beside_logits(self.log_denominator, candidates.row)
        return torch.sub(logits, log_denominator, out=candidates.out).exp_()

    def d_positives(self) -> Tensor:
        """See RowLoss."""
        # coefficient * (softmax - 1). expm1 avoids the cancellation where the softmax is near 1.
        slope = torch.expm1(self.positive_logits - self.log_sum)
        return self.coefficient * self.focus * slope


class CircleRows(SoftmaxRows):
    """Softmax over weighted logits: that of the positive is a (s - 1 + m) / T, that of a candidate b (s - m) / T, with
    s = T * logit. The weights a = max(0, 1 + m - s) and b = max(0, s + m) count as constants, so the derivatives by the
    logit are a and b."""

    def __init__(
        self,
        start: RowLossStart,
        *,
        temperature: float,
        margin: float,
    ) -> None:
        self.temperature = temperature
        self.margin = margin
        score = start.logits * temperature
        distance = 1.0 + margin - score
        # The weight a. `d_positives` multiplies by it.
        self.positive_weight = distance.clamp_(min=0.0)
        weighted = self.positive_weight * (score - (1.0 - margin)) / temperature
        super().__init__(replace(start, logits=weighted))

    def _weights(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        """Return b, 0 for excluded candidates."""
        scores = torch.mul(logits, self.temperature, out=out)
        return scores.add_(self.margin).clamp_(min=0.0)

    def _weighted(self, candidates: CandidateLogits) -> CandidateLogits:
        """Return the weighted logits b (s - m) / T, and EXCLUDED for excluded candidates.

        Wherever b is not 0 it is s + m. So they are computed as (b - 2 m) b / T.
        """
        excluded = is_excluded(candidates.logits)  # first, since `out` may be the tile
        weights = self._weights(candidates.logits, candidates.out)
        difference = weights - 2.0 * self.margin
        weighted = weights.mul_(difference).div_(self.temperature)
        return replace(candidates, logits=weighted.masked_fill_(excluded, EXCLUDED))

    def add(self, candidates: CandidateLogits) -> None:
        """See RowLoss."""
        super().add(self._weighted(candidates))

    def d_candidates(self, candidates: CandidateLogits) -> Tensor:
        """See RowLoss."""
        # d(b (s - m) / T) / d(logit) is b: with b as a constant, s = T * logit gives it. Computed first, since `out`, which is
        # written next, may be the tile itself.
        weights = self._weights(candidates.logits)
        d_weighted = super().d_candidates(self._weighted(candidates))
        return d_weighted.mul_(weights)

    def d_positives(self) -> Tensor:
        """See RowLoss."""
        return super().d_positives() * self.positive_weight


class SigmoidRows(RowLoss):
    """Sum of -log sigmoid(logit + bias) of the positive and -log sigmoid(-(logit + bias)) of every candidate."""

    is_separable = True

    def __init__(self, start: RowLossStart) -> None:
        super().__init__(start)
        assert start.bias is not None, "the sigmoid loss has a bias"
        self.bias = start.bias
        self.biased_positives = self.positive_logits + self.bias
        self.sum = softplus(-self.biased_positives).sum()

    def add(self, candidates: CandidateLogits) -> None:
        """See RowLoss."""
        # No mask: softplus and sigmoid of EXCLUDED are exactly 0.
        logits = torch.add(candidates.logits, self.bias, out=candidates.out)
        self.sum = self.sum + softplus(logits).sum()

    def total(self) -> Tensor:
        """See RowLoss."""
        return self.coefficient * self.sum

    def d_candidates(self, candidates: CandidateLogits) -> Tensor:
        """See RowLoss."""
        logits = torch.add(candidates.logits, self.bias, out=candidates.out)
        return logits.sigmoid_().mul_(self.coefficient)

    def d_positives(self) -> Tensor:
        """See RowLoss."""
        return -self.coefficient * torch.sigmoid(-self.biased_positives)


class DivergenceRows(RowLoss):
    """KL(softmax(teacher) || softmax(student)) over the positive and all candidates of a row.

    With t and s the logits of teacher and student it is sum_c softmax(t)_c * (t_c - s_c) - log sum exp(t) + log sum
    exp(s). Each of the three is summed up relative to the largest logit so far.
    """

    def __init__(self, start: RowLossStart, *, teacher_scale: float = 1.0) -> None:
        """`teacher_scale`: one over the teacher's temperature."""
        assert start.bias is None, "a bias cancels in a softmax"
        assert start.teacher_scores is not None, "a divergence needs a teacher's scores"
        super().__init__(start)
        self.teacher_scale = teacher_scale
        self.positive_teacher_logits = start.teacher_scores * teacher_scale
        # The positive is the first candidate: exp(0) = 1.
        ones = torch.ones_like(self.positive_logits)
        self.student_sum = OnlineSum(self.positive_logits, ones)
        self.teacher_sum = OnlineSum(self.positive_teacher_logits, ones)
        self.weighted_sum = self.positive_teacher_logits - self.positive_logits
        """[n] sum of exp(t - largest t) * (t - s)"""

    def _targets(self, candidates: CandidateLogits) -> Tensor:
        """Return the teacher's logits, EXCLUDED for candidates that the student excludes."""
        assert candidates.teacher_scores is not None
        targets = candidates.teacher_scores * self.teacher_scale
        return targets.masked_fill_(is_excluded(candidates.logits), EXCLUDED)

    def add(self, candidates: CandidateLogits) -> None:
        """See RowLoss."""
        targets = self._targets(candidates)
        row = candidates.row
        self.student_sum.add(candidates.logits, row, candidates.out)
        weights, rescale = self.teacher_sum.add(targets, row, candidates.out)
        # An excluded candidate has weight exp(EXCLUDED) = 0 and a finite difference, so it adds 0.
        weighted = weights.mul_(targets.sub_(candidates.logits))
        self.weighted_sum = _add_to_rows(self.weighted_sum * rescale, weighted, row)

    def total(self) -> Tensor:
        """See RowLoss."""
        self.student_log_sum = self.student_sum.log()
        self.teacher_log_sum = self.teacher_sum.log()
        cross = self.weighted_sum / self.teacher_sum.sum
        losses = cross - self.teacher_log_sum + self.student_log_sum
        return self.coefficient * losses.sum()

    def d_candidates(self, candidates: CandidateLogits) -> Tensor:
        """See RowLoss."""
        # coefficient * (softmax of the student - softmax of the teacher)
        row = candidates.row
        teacher = self._targets(candidates)
        teacher.sub_(beside_logits(self.teacher_log_sum, row)).exp_()
        log_sum = beside_logits(self.student_log_sum, row)
        student = torch.sub(candidates.logits, log_sum, out=candidates.out)
        student.exp_()
        return student.sub_(teacher).mul_(self.coefficient)

    def d_positives(self) -> Tensor:
        """See RowLoss."""
        student = torch.exp(self.positive_logits - self.student_log_sum)
        teacher = torch.exp(self.positive_teacher_logits - self.teacher_log_sum)
        return self.coefficient * (student - teacher)


class SquaredErrorRows(RowLoss):
    """(logit - teacher's score)^2 summed over all candidates, or logit^2 without a teacher. The positive does not
    count."""

    is_separable = True

    def __init__(self, start: RowLossStart) -> None:
        super().__init__(start)
        self.sum = self.positive_logits.new_zeros(())

    def _errors(self, candidates: CandidateLogits) -> Tensor:
        """Return logit - teacher's score of each candidate, 0 for excluded ones."""
        excluded = is_excluded(candidates.logits)  # first, since `out` may be the tile
        teacher_scores = (
            0.0 if candidates.teacher_scores is None else candidates.teacher_scores
        )
        errors = torch.sub(candidates.logits, teacher_scores, out=candidates.out)
        return errors.masked_fill_(excluded, 0.0)

    def add(self, candidates: CandidateLogits) -> None:
        """See RowLoss."""
        errors = self._errors(candidates)
        self.sum = self.sum + errors.square_().sum()

    def total(self) -> Tensor:
        """See RowLoss."""
        return self.coefficient * self.sum

    def d_candidates(self, candidates: CandidateLogits) -> Tensor:
        """See RowLoss."""
        return self._errors(candidates).mul_(2 * self.coefficient)

    def d_positives(self) -> Tensor:
        """See RowLoss."""
        return torch.zeros_like(self.positive_logits)


# ---- The score matrix: its definition, and the pass over its tiles ----------------------


@dataclass(frozen=True)
class Tiling:
    """Numbers of rows and columns that are scored at once. They change memory and speed, not the result."""

    rows: int
    columns: int

    @classmethod
    def for_scores(cls, scores_per_row: int, embeddings: Tensor) -> "Tiling":
        """Return the tiling for `scores_per_row` scores in a row, over all columns and dims.

        On a CPU a row block takes about 192 MiB and a tile 32 MiB. On other devices they take 1 GiB and 128 MiB.
        """
        is_cpu = embeddings.device.type == "cpu"
        block_mebibytes = 192 if is_cpu else 1024
        tile_mebibytes = 32 if is_cpu else 128
        max_rows = 512 if is_cpu else 4096
        scores_per_mebibyte = MEBIBYTE // arithmetic_dtype(embeddings).itemsize
        # A block keeps rows * scores_per_row values. A tile is a temporary of rows * columns values. At least 16 each,
        # or a huge batch would degrade to vector products.
        rows = block_mebibytes * scores_per_mebibyte // max(1, scores_per_row)
        rows = min(max_rows, max(16, rows))
        columns = tile_mebibytes * scores_per_mebibyte // rows
        return cls(rows, max(16, columns))


@dataclass(frozen=True)
class Guide:
    """A teacher that says which candidates are too good to be negatives."""

    vectors: TeacherVectors
    margin_below_positive: float
    """Exclude candidates with a score above the positive's score minus this margin, both by the teacher."""
    is_relative: bool
    """The margin is a fraction of the positive's score."""


@dataclass(frozen=True)
class Scoring:
    """Definition of a loss over scores: candidates, similarity, row loss and options."""

    plan: ScorePlan
    similarity: Similarity
    row_loss: type[RowLoss]
    """An instance holds the losses of a row block, for one dim and direction."""
    direction_factors: tuple[float, ...]
    """Factor of each direction (query to document, document to query), divided by R already: L is a mean over the rows."""
    margin_above_positive: float | None = None
    """Exclude candidates with a score above the positive's score plus this margin. None: no such limit."""
    guide: Guide | None = None
    teacher: TeacherVectors | None = None
    """Whose scores are the targets of the row losses."""
    row_loss_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `row_loss`."""


def tiled_loss(
    embeddings: Tensor,
    scoring: Scoring,
    logit_scale: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the sum over this rank's rows, dims and directions of dim weight * direction factor * row loss.

    `embeddings`: E [U, D]. Logits are logit_scale * score. The row loss adds the bias. Differentiable once, in
    embeddings, logit_scale and bias.
    """
    # Gradients are computed by hand. Autocast would run the products in 16 bits.
    with torch.no_grad(), torch.autocast(embeddings.device.type, enabled=False):
        score_pass = _ScorePass(embeddings, scoring, logit_scale, bias)
        score_pass.run()
        d_embeddings = score_pass.vector_table.gradient().to(embeddings.dtype)
    inputs = [embeddings, logit_scale]
    gradients = [d_embeddings, score_pass.d_logit_scale]
    if bias is not None:
        inputs.append(bias)
        gradients.append(score_pass.d_bias)
    loss: Tensor = KnownGradients.apply(score_pass.loss, gradients, *inputs)  # type: ignore[no-untyped-call]
    return loss


class _TeacherTable:
    """A teacher's vectors by entry, beside the embeddings in the VectorTable."""

    def __init__(
        self,
        teacher: TeacherVectors,
        plan: ScorePlan,
        like: Tensor,
    ) -> None:
        """`like`: has the device and dtype of the scores."""
        # [V, width] the teacher's vectors, and [N] the vector of each entry.
        self.vectors = teacher.vectors.to(like.device, like.dtype)
        self.index = teacher.occurrence_indices()[plan.occurrence]

    def at(self, entries: Entries) -> Tensor:
        """Return [n, width] vectors."""
        return self.vectors[self.index[entries]]

    def score(self, rows: slice, columns: slice, out: Tensor) -> None:
        """Write the scores of a tile to `out` [n, t]."""
        row_vectors = self.at(rows)
        torch.mm(row_vectors, self.at(columns).T, out=out)

    def pair_scores(self, left: Entries, right: Entries) -> Tensor:
        """Return [n] scores of pairs."""
        products = self.at(left) * self.at(right)
        return products.sum(1)


@dataclass(frozen=True)
class _Tile:
    """n rows against t columns of a column group."""

    row_vectors: RowVectors
    columns: slice
    """Entries of the columns."""
    direction: int
    """FORWARD_DIRECTION or REVERSE_DIRECTION."""
    logits: Tensor
    """[K, n, t]"""
    teacher_scores: Tensor | None
    """[n, t] the teacher's scores."""
    scratch: Tensor
    """[2, n, t] two temporaries, shared by all tiles."""


@dataclass(frozen=True)
class _ScoredPairs:
    """P single pairs of a row block: its positives, or negative pairs."""

    left: Entries
    """[P] entry of the row's query or positive."""
    right: Entries
    """[P] entry of the row's positive, or of the hard negative."""
    scores: Tensor
    """[K, P]"""
    candidates_by_dim: tuple[CandidateLogits, ...] = ()
    """Of negative pairs: the logits [P] that were added to the row losses, by dim. Positives are not candidates, so they have
    none."""


@dataclass(frozen=True)
class _RowBlock:
    """n rows of this rank, with the state of their losses."""

    positives: _ScoredPairs
    """The rows' queries and positives, with scores [K, n]."""
    losses: list[list[RowLoss]]
    """losses[k][direction], for each of the K dims."""
    logit_ceilings: Tensor | None
    """[K, n] logits above which candidates are excluded."""
    guide_ceilings: Tensor | None
    """[n] scores of the guide above which candidates are excluded."""


class _ScorePass:
    """One pass over all row blocks. Accumulates the loss and its gradients."""

    def __init__(
        self,
        embeddings: Tensor,
        scoring: Scoring,
        logit_scale: Tensor,
        bias: Tensor | None,
    ) -> None:
        plan = scoring.plan
        dtype = arithmetic_dtype(embeddings)
        self.scoring = scoring
        self.plan = plan
        self.logit_scale = logit_scale.detach().to(embeddings.device, dtype)
        self.bias = bias
        if bias is not None:
            self.bias = bias.detach().to(embeddings.device, dtype)
        self.num_dims = len(scoring.similarity.dims)
        self.vector_table = VectorTable(
            embeddings, plan.index, scoring.similarity, with_gradient=True
        )
        self.guide_table: _TeacherTable | None = None
        if scoring.guide is not None:
            self.guide_table = _TeacherTable(
                scoring.guide.vectors, plan, self.logit_scale
            )
        self.teacher_table: _TeacherTable | None = None
        if scoring.teacher is not None:
            self.teacher_table = _TeacherTable(scoring.teacher, plan, self.logit_scale)
        # A tile's logits at all dims, and the teacher's scores where there is one.
        self.num_matrices = self.num_dims + (self.teacher_table is not None)
        widths = [length_of(group.columns) for group in plan.column_groups]
        num_columns = sum(widths)
        scores_per_row = num_columns * self.num_matrices
        self.tiling = Tiling.for_scores(scores_per_row, embeddings)
        self.keeps_tiles = not scoring.row_loss.is_separable
        # Buffers for the largest row block: the logits of all tiles, or of one where none is kept, and two temporaries
        # of the size of a tile.
        widest_group = max(widths, default=0)
        widest_tile = min(widest_group, self.tiling.columns)
        max_rows = min(self.tiling.rows, length_of(plan.local_queries))
        width = num_columns if self.keeps_tiles else widest_tile
        num_logits = self.num_matrices * max_rows * width
        self.logits_buffer = self.logit_scale.new_empty(num_logits)
        self.scratch_buffer = self.logit_scale.new_empty(2, max_rows * widest_tile)
        self.loss = self.logit_scale.new_zeros(())
        self.d_logit_scale = self.logit_scale.new_zeros(())
        self.d_bias = self.logit_scale.new_zeros(())

    def run(self) -> None:
        """Accumulate `loss`, `d_logit_scale`, `d_bias` and the table's gradient."""
        num_rows = length_of(self.plan.local_queries)
        for rows in chunks(num_rows, self.tiling.rows):
            # The positives first: they start the online softmax and define the ceilings.
            block = self._start_block(rows)
            negative_pairs = self._score_negative_pairs(rows, block)
            row_vectors = []
            for group in self.plan.column_groups:
                entries = shifted(rows, group.row_entries.start)
                # Scale the n vectors [n, d] rather than the n * C scores.
                scaled_x = self.vector_table.x[entries] * self.logit_scale
                d_scaled_x = torch.zeros_like(scaled_x)
                row_vectors.append(RowVectors(entries, scaled_x, d_scaled_x))
            kept_tiles = []
            for tile in self._scored_tiles(rows, block, row_vectors):
                if self.keeps_tiles:
                    kept_tiles.append(tile)
                else:
                    self._differentiate_tile(tile, block)
            # The sums of the rows are complete.
            for by_direction in block.losses:
                for row_loss in by_direction:
                    self.loss += row_loss.total()
            self._differentiate_pairs(block, negative_pairs)
            for tile in kept_tiles:
                self._differentiate_tile(tile, block)
            for vectors in row_vectors:
                # scaled_x [n, d] is logit_scale * x. So dL/d(logit_scale) is the sum of d_scaled_x * x. Before
                # `add_row_gradient`, which overwrites d_scaled_x.
                x = self.vector_table.x[vectors.entries]
                self.d_logit_scale += (vectors.d_scaled_x * x).sum()
                self.vector_table.add_row_gradient(vectors, self.logit_scale)

    # ---- Single pairs: positives and negative pairs -----------------------------------

    def _start_block(self, rows: slice) -> _RowBlock:
        """Start the losses of a row block with its positives."""
        scoring = self.scoring
        queries = shifted(rows, self.plan.local_queries.start)
        positives = shifted(rows, self.plan.local_positives.start)
        positive_scores = self.vector_table.pair_scores(queries, positives)  # [K, n]
        teacher_scores = None
        if self.teacher_table is not None:
            teacher_scores = self.teacher_table.pair_scores(queries, positives)
        losses = []
        weights = scoring.similarity.weights
        # One row loss for each dim and direction. Each starts with the positives' logits [n].
        for scores, weight in zip(positive_scores.unbind(), weights, strict=True):
            by_direction = []
            for factor in scoring.direction_factors:
                logits = scores * self.logit_scale
                start = RowLossStart(logits, weight * factor, self.bias, teacher_scores)
                row_loss = scoring.row_loss(start, **scoring.row_loss_options)
                by_direction.append(row_loss)
            losses.append(by_direction)
        # Margins are in scores. Candidates are compared as logits, so these ceilings are scaled.
        logit_ceilings = None
        if scoring.margin_above_positive is not None:
            ceilings = positive_scores + scoring.margin_above_positive
            logit_ceilings = _with_tolerance(ceilings) * self.logit_scale
        guide_ceilings = None
        guide = scoring.guide
        if self.guide_table is not None and guide is not None:
            guide_scores = self.guide_table.pair_scores(queries, positives)
            unit = guide_scores.abs() if guide.is_relative else 1.0
            margin = guide.margin_below_positive * unit
            guide_ceilings = _with_tolerance(guide_scores - margin)
        pairs = _ScoredPairs(queries, positives, positive_scores)
        return _RowBlock(pairs, losses, logit_ceilings, guide_ceilings)

    def _score_negative_pairs(
        self, rows: slice, block: _RowBlock
    ) -> list[_ScoredPairs]:
        """Score the negative pairs of a row block, and add them to the row losses."""
        negative_pairs = []
        for pairs in self.plan.negative_pairs:
            # Pairs ascend by row: those of a block are adjacent.
            first = int(torch.searchsorted(pairs.host_row, rows.start))
            stop = int(torch.searchsorted(pairs.host_row, rows.stop))
            row = pairs.row[first:stop] - rows.start  # [P], in the block
            left = pairs.row_entries.start + pairs.row[first:stop]
            right = pairs.negative_entry[first:stop]
            # [K, P]. Excluded scores become EXCLUDED before they are scaled. `_differentiate_pairs` multiplies by them, so
            # they must be finite.
            scores = self.vector_table.pair_scores(left, right)
            if block.logit_ceilings is not None:
                is_above = scores * self.logit_scale > block.logit_ceilings[:, row]
                scores.masked_fill_(is_above, EXCLUDED)
            if block.guide_ceilings is not None:
                assert self.guide_table is not None
                guide_scores = self.guide_table.pair_scores(left, right)
                is_above = guide_scores > block.guide_ceilings[row]
                scores.masked_fill_(is_above, EXCLUDED)
            teacher_scores = None
            if self.teacher_table is not None:
                teacher_scores = self.teacher_table.pair_scores(left, right)
            by_dim = []
            all_logits = scores * self.logit_scale
            for logits, by_direction in zip(all_logits, block.losses, strict=True):
                candidates = CandidateLogits(logits, teacher_scores, row=row)
                by_direction[FORWARD_DIRECTION].add(candidates)
                by_dim.append(candidates)
            negative_pairs.append(_ScoredPairs(left, right, scores, tuple(by_dim)))
        return negative_pairs

    def _differentiate_pairs(
        self, block: _RowBlock, negative_pairs: list[_ScoredPairs]
    ) -> None:
        """Add the gradient of a block's positives and negative pairs."""
        for pairs in (block.positives, *negative_pairs):
            # The derivatives [P] of each dim with respect to the logits.
            d_by_dim = []
            for k, by_direction in enumerate(block.losses):
                if pairs is block.positives:
                    # Both directions share the positive's score, so their derivatives add up.
                    d_by_direction = [
                        row_loss.d_positives() for row_loss in by_direction
                    ]
                    gradient = torch.stack(d_by_direction).sum(0)
                else:
                    gradient = by_direction[FORWARD_DIRECTION].d_candidates(
                        pairs.candidates_by_dim[k]
                    )
                d_by_dim.append(gradient)
            d_logits = torch.stack(d_by_dim)  # [K, P]
            if self.bias is not None:
                self.d_bias += d_logits.sum()
            # logits = logit_scale * scores. An excluded pair has d_logits 0 and a finite score, so it adds 0 and not NaN.
            self.d_logit_scale += (d_logits * pairs.scores).sum()
            d_scores = d_logits * self.logit_scale
            self.vector_table.add_pair_gradient(
                pairs.left, pairs.right, pairs.scores, d_scores
            )

    # ---- Tiles ------------------------------------------------------------------------

    def _scored_tiles(
        self,
        rows: slice,
        block: _RowBlock,
        row_vectors: list[RowVectors],
    ) -> Iterator[_Tile]:
        """Yield the tiles of a row block, after their logits were added to the row losses.

        Unless tiles are kept, the next one overwrites the logits.
        """
        num_rows = length_of(rows)
        offset = 0
        groups = self.plan.column_groups
        tile_width = self.tiling.columns
        for group, vectors in zip(groups, row_vectors, strict=True):
            # Each mask yields its part of every tile, in the order of the loop below.
            masks = [mask.tiles(rows, tile_width) for mask in group.masks]
            for columns in chunks(length_of(group.columns), tile_width):
                num_columns = length_of(columns)
                num_scores = num_rows * num_columns
                num_logits = self.num_matrices * num_scores
                buffer = self.logits_buffer[offset : offset + num_logits]
                matrices = buffer.view(self.num_matrices, num_rows, num_columns)
                scratch = self.scratch_buffer[:, :num_scores]
                tile = _Tile(
                    row_vectors=vectors,
                    columns=shifted(columns, group.columns.start),
                    direction=group.direction,
                    logits=matrices[: self.num_dims],
                    teacher_scores=None if self.teacher_table is None else matrices[-1],
                    scratch=scratch.view(2, num_rows, num_columns),
                )
                excluded = [next(mask) for mask in masks]
                self._compute_logits(tile, block, excluded)
                yield tile
                if self.keeps_tiles:
                    offset += num_logits

    def _compute_logits(
        self,
        tile: _Tile,
        block: _RowBlock,
        excluded: list[Tensor],
    ) -> None:
        """Compute a tile's logits, from the smallest dim to the largest, and add them to the row losses.

        `excluded`: bool masks [n, t] of the scores that count at no dim. The mask of the guide is added to them here.
        """
        row_entries = tile.row_vectors.entries
        scratch = tile.scratch[0]
        if block.guide_ceilings is not None:
            assert self.guide_table is not None
            self.guide_table.score(row_entries, tile.columns, out=scratch)
            excluded.append(scratch > block.guide_ceilings[:, None])
        if tile.teacher_scores is not None:
            assert self.teacher_table is not None
            self.teacher_table.score(row_entries, tile.columns, out=tile.teacher_scores)
        # Each dim is masked as soon as it is computed. The buffer of the largest dim also holds the running product, so it
        # is masked last.
        for k in self.vector_table.fill_logits(
            tile.row_vectors, tile.columns, tile.logits
        ):
            logits = tile.logits[k]
            for mask in excluded:
                logits.masked_fill_(mask, EXCLUDED)
            if block.logit_ceilings is not None:
                is_above = logits > block.logit_ceilings[k, :, None]
                logits.masked_fill_(is_above, EXCLUDED)
            row_loss = block.losses[k][tile.direction]
            row_loss.add(CandidateLogits(logits, tile.teacher_scores, out=scratch))

    def _differentiate_tile(self, tile: _Tile, block: _RowBlock) -> None:
        """Add the gradient of a tile with respect to the block's rows and to the columns."""
        derivative_buffer, scale_buffer = tile.scratch
        for k in reversed(range(self.num_dims)):
            logits = tile.logits[k]
            # From the largest dim to the smallest. The derivative of the largest overwrites its logits, tile.logits[-1]. There
            # `add_gradient` adds up those of the smaller dims. So each segment of coordinates needs one matrix product,
            # whichever dims contain it.
            is_largest = k == self.num_dims - 1
            out = logits if is_largest else derivative_buffer
            row_loss = block.losses[k][tile.direction]
            d_logits = row_loss.d_candidates(
                CandidateLogits(logits, tile.teacher_scores, out=out)
            )
            if self.bias is not None:
                self.d_bias += d_logits.sum()
            self.vector_table.add_gradient(
                tile.row_vectors,
                tile.columns,
                k,
                tile.logits,
                d_logits,
                scale_buffer,
            )


def _with_tolerance(ceilings: Tensor) -> Tensor:
    """Return ceilings that are higher by rounding errors: scores within them are not above."""
    rounding = TIE_TOLERANCE * torch.finfo(ceilings.dtype).eps
    return ceilings + rounding * ceilings.abs().clamp(min=1.0)
