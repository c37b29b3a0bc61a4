"""Row losses: the loss of each row of a score matrix and its derivatives, computed tile by tile.

A row has the logit of its positive and the logits of its candidates. Excluded candidates have the logit EXCLUDED.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

EXCLUDED = -1e30
"""Logit of an excluded candidate. Finite, since 0 * -inf would be NaN."""


def is_excluded(logits: Tensor) -> Tensor:
    """Return true where a candidate is excluded."""
    # Explicit pairs are excluded before they are scaled: their logit is EXCLUDED times any scale.
    return logits <= EXCLUDED * 1e-6


@dataclass(frozen=True, slots=True)
class RowStart:
    """What the losses of n rows begin with."""

    logits: Tensor
    """[n] of the positives."""
    coefficient: float
    """Factor of the losses."""
    bias: Tensor | None = None
    """Added to every logit."""
    target: Tensor | None = None
    """[n] a teacher's scores of the positives."""


@dataclass(frozen=True, slots=True)
class CandidateLogits:
    """Logits of candidates of n rows: those of a tile, or single ones."""

    logits: Tensor
    """[n, t], or [P] with `row`."""
    target: Tensor | None = None
    """A teacher's scores of the same pairs, for losses that follow one."""
    row: Tensor | None = None
    """[P] the row of each single logit. Rows may repeat."""
    out: Tensor | None = None
    """Like the logits: overwritten in place of a new tensor."""


class RowLoss(ABC):
    """Losses of n rows.

    Create it with the positives' logits, add all candidates, call `total`, then ask for the derivatives. Where the
    derivatives do not depend on the other scores (`Scoring.is_separable`), `grad` may come before `total`.
    """

    def __init__(self, start: RowStart) -> None:
        self.positive = start.logits
        self.coefficient = start.coefficient

    @abstractmethod
    def add(self, candidates: CandidateLogits) -> None:
        """Add candidates. `candidates.out` must not be the logits."""

    @abstractmethod
    def total(self) -> Tensor:
        """Return coefficient * sum of the rows' losses. Call it once, after all candidates have been added."""

    @abstractmethod
    def grad(self, candidates: CandidateLogits) -> Tensor:
        """Return the gradient of the total with respect to the candidates' logits. `out` may be the logits."""

    @abstractmethod
    def d_positive(self) -> Tensor:
        """Return the gradient of the total with respect to the positives' logits [n]."""


def for_each(values: Tensor, row: Tensor | None) -> Tensor:
    """Return a value of each row [n] in a shape that meets its logits: [n, 1] for a tile, [P] for single logits."""
    return values[:, None] if row is None else values[row]


def _add_to_rows(sums: Tensor, values: Tensor, row: Tensor | None) -> Tensor:
    """Return the sums of rows [n] plus the values of a tile [n, t], or of single logits [P]."""
    return sums + values.sum(1) if row is None else sums.index_add(0, row, values)


class OnlineSum:
    """Sum of exp(logit) of each row, relative to the row's largest logit so far.

    No exp has a positive exponent. When a tile raises the maximum, what was summed before is rescaled to it.
    """

    def __init__(self, largest: Tensor, total: Tensor) -> None:
        self.largest = largest
        self.sum = total

    def add(
        self, logits: Tensor, row: Tensor | None, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Add logits. Return their exp(logit - largest), and [n] the factor of what was summed before."""
        if row is None:
            largest = torch.maximum(self.largest, logits.amax(1))
        else:
            largest = self.largest.scatter_reduce(0, row, logits, "amax")
        terms = torch.sub(logits, for_each(largest, row), out=out).exp_()
        rescale = torch.exp(self.largest - largest)
        self.sum = _add_to_rows(self.sum * rescale, terms, row)
        self.largest = largest
        return terms, rescale

    def log(self) -> Tensor:
        """Return [n] the logarithm of the sums."""
        return self.largest + self.sum.log()


class SoftmaxRows(RowLoss):
    """Negative log softmax of the positive among itself and all candidates, as an online softmax.

    `rest` sums the candidates alone. The positive's term is added at the end by expm1 and log1p, which keeps the
    precision of small losses.

    `stretch`: candidates enter as stretch * logit, and the difference to the logit has no gradient (hardness_alpha).
    `stretches_pairs_only`: only single logits do, which are those of the row's own hard negatives (hardness_scope: own).
    `focal_gamma`: a row's loss l is multiplied by (1 - exp(-l)) ** focal_gamma.
    """

    def __init__(
        self,
        start: RowStart,
        *,
        stretch: Tensor | None = None,
        stretches_pairs_only: bool = False,
        focal_gamma: float = 0.0,
    ) -> None:
        assert start.bias is None, "a bias cancels in a softmax"
        super().__init__(start)
        self.stretch = stretch
        self.stretches_pairs_only = stretches_pairs_only
        self.focal_gamma = focal_gamma
        # The positive is part of the maximum from the start.
        self.rest = OnlineSum(self.positive, torch.zeros_like(self.positive))

    def add(self, candidates: CandidateLogits) -> None:
        """See RowLoss."""
        self.rest.add(self._stretched(candidates), candidates.row, candidates.out)

    def _stretched(self, candidates: CandidateLogits) -> Tensor:
        is_tile = candidates.row is None
        if self.stretch is None or (is_tile and self.stretches_pairs_only):
            return candidates.logits
        return torch.mul(candidates.logits, self.stretch, out=candidates.out)

    def total(self) -> Tensor:
        """See RowLoss."""
        largest = self.rest.largest
        # log(sum of all exp(logit)) - largest. expm1 and log1p keep precision if the positive dominates.
        surplus = torch.log1p(self.rest.sum + torch.expm1(self.positive - largest))
        losses = surplus + (largest - self.positive)
        self.log_sum = surplus + largest  # [n]
        # `focus` [n]: derivative of the focal loss by the loss of the row.
        self.focus: Tensor | float = 1.0
        shift = self.log_sum - math.log(self.coefficient)
        if self.focal_gamma:
            # 1 - exp(-l) without cancellation for small l.
            rest = -torch.expm1(-losses)
            weights = rest**self.focal_gamma
            # d/dl of rest^g * l; l / rest is 1 in the limit of l = 0.
            ratio = torch.where(rest > 0, losses / rest, torch.ones_like(rest))
            self.focus = weights * (1 + self.focal_gamma * (1 - rest) * ratio)
            shift = shift - torch.log(self.focus)
            losses = losses * weights
        self.shift = shift
        return self.coefficient * losses.sum()

    def grad(self, candidates: CandidateLogits) -> Tensor:
        """See RowLoss."""
        # coefficient * focus * softmax = exp(logit - shift): one subtraction and one exp over the tile.
        logits = self._stretched(candidates)
        shift = for_each(self.shift, candidates.row)
        return torch.sub(logits, shift, out=candidates.out).exp_()

    def d_positive(self) -> Tensor:
        """See RowLoss."""
        # coefficient * (softmax - 1). expm1 avoids the cancellation where the softmax is near 1.
        slope = torch.expm1(self.positive - self.log_sum)
        return self.coefficient * self.focus * slope


class CircleRows(SoftmaxRows):
    """Softmax over weighted logits: that of the positive is a (s - 1 + m) / T, that of a candidate b (s - m) / T, with
    s = T * logit. Their derivatives by the logit are a and b."""

    def __init__(self, start: RowStart, *, temperature: float, margin: float) -> None:
        self.temperature = temperature
        self.margin = margin
        score = start.logits * temperature
        # a_i of the formula. It has no gradient: `d_positive` multiplies by it.
        self.positive_weight = (1.0 + margin - score).clamp_(min=0.0)
        weighted = self.positive_weight * (score - (1.0 - margin)) / temperature
        super().__init__(replace(start, logits=weighted))

    def _weights(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        """Return b, 0 for excluded candidates."""
        scores = torch.mul(logits, self.temperature, out=out)
        return scores.add_(self.margin).clamp_(min=0.0)

    def _weighted(self, candidates: CandidateLogits) -> CandidateLogits:
        """Return b (s - m) / T as ((s + m) - 2 m) (s + m) / T, and EXCLUDED for excluded candidates."""
        excluded = is_excluded(candidates.logits)  # first, since `out` may be the tile
        weights = self._weights(candidates.logits, candidates.out)
        weighted = weights.mul_(weights - 2.0 * self.margin).div_(self.temperature)
        return replace(candidates, logits=weighted.masked_fill_(excluded, EXCLUDED))

    def add(self, candidates: CandidateLogits) -> None:
        """See RowLoss."""
        super().add(self._weighted(candidates))

    def grad(self, candidates: CandidateLogits) -> Tensor:
        """See RowLoss."""
        # d(b (s - m) / T) / d(logit) is b here: the paper's weight b has no gradient of its own. Before `out`, which may
        # be the tile itself, is written.
        weights = self._weights(candidates.logits)
        return super().grad(self._weighted(candidates)).mul_(weights)

    def d_positive(self) -> Tensor:
        """See RowLoss."""
        return super().d_positive() * self.positive_weight


class SigmoidRows(RowLoss):
    """Sum of -log sigmoid(logit + bias) of the positive and -log sigmoid(-(logit + bias)) of every candidate."""

    def __init__(self, start: RowStart) -> None:
        super().__init__(start)
        self.bias = self.positive.new_zeros(()) if start.bias is None else start.bias
        self.sum = _softplus(-(self.positive + self.bias)).sum()

    def add(self, candidates: CandidateLogits) -> None:
        """See RowLoss."""
        # No mask: softplus and sigmoid of EXCLUDED are exactly 0.
        logits = torch.add(candidates.logits, self.bias, out=candidates.out)
        self.sum = self.sum + _softplus(logits).sum()

    def total(self) -> Tensor:
        """See RowLoss."""
        return self.coefficient * self.sum

    def grad(self, candidates: CandidateLogits) -> Tensor:
        """See RowLoss."""
        logits = torch.add(candidates.logits, self.bias, out=candidates.out)
        return logits.sigmoid_().mul_(self.coefficient)

    def d_positive(self) -> Tensor:
        """See RowLoss."""
        return -self.coefficient * torch.sigmoid(-(self.positive + self.bias))


def _softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)). torch returns x itself above 20 by default, which is too coarse in float64."""
    return F.softplus(x, threshold=50.0)


class DivergenceRows(RowLoss):
    """KL(softmax(teacher) || softmax(student)) over the positive and all candidates of a row.

    With t and s the logits of teacher and student it is sum_c softmax(t)_c * (t_c - s_c) - log sum exp(t) + log sum
    exp(s). Each of the three is summed up relative to the largest logit so far.
    """

    def __init__(self, start: RowStart, *, target_scale: float = 1.0) -> None:
        """`target_scale`: one over the teacher's temperature."""
        assert start.bias is None, "a bias cancels in a softmax"
        assert start.target is not None, "a divergence needs a teacher's scores"
        super().__init__(start)
        self.target_scale = target_scale
        self.positive_target = start.target * target_scale
        # The positive is the first candidate: exp(0) = 1.
        self.student = OnlineSum(self.positive, torch.ones_like(self.positive))
        self.teacher = OnlineSum(self.positive_target, torch.ones_like(self.positive))
        self.difference = self.positive_target - self.positive
        """[n] sum of exp(t - largest t) * (t - s)"""

    def _targets(self, candidates: CandidateLogits) -> Tensor:
        """Return the teacher's logits, with what the student leaves out left out too."""
        assert candidates.target is not None
        targets = candidates.target * self.target_scale
        return targets.masked_fill_(is_excluded(candidates.logits), EXCLUDED)

    def add(self, candidates: CandidateLogits) -> None:
        """See RowLoss."""
        targets = self._targets(candidates)
        row = candidates.row
        self.student.add(candidates.logits, row, candidates.out)
        weights, rescale = self.teacher.add(targets, row, candidates.out)
        # An excluded candidate has weight exp(EXCLUDED) = 0 and a finite difference, so it adds 0.
        weighted = weights.mul_(targets.sub_(candidates.logits))
        self.difference = _add_to_rows(self.difference * rescale, weighted, row)

    def total(self) -> Tensor:
        """See RowLoss."""
        self.student_log_sum = self.student.log()
        self.teacher_log_sum = self.teacher.log()
        cross = self.difference / self.teacher.sum
        losses = cross - self.teacher_log_sum + self.student_log_sum
        return self.coefficient * losses.sum()

    def grad(self, candidates: CandidateLogits) -> Tensor:
        """See RowLoss."""
        # coefficient * (softmax of the student - softmax of the teacher)
        row = candidates.row
        teacher = self._targets(candidates)
        teacher.sub_(for_each(self.teacher_log_sum, row)).exp_()
        log_sum = for_each(self.student_log_sum, row)
        student = torch.sub(candidates.logits, log_sum, out=candidates.out).exp_()
        return student.sub_(teacher).mul_(self.coefficient)

    def d_positive(self) -> Tensor:
        """See RowLoss."""
        student = torch.exp(self.positive - self.student_log_sum)
        teacher = torch.exp(self.positive_target - self.teacher_log_sum)
        return self.coefficient * (student - teacher)


class SquaredErrorRows(RowLoss):
    """(logit - target)^2 summed over all candidates, with 0 for the target where there is no teacher. The positive does
    not count."""

    def __init__(self, start: RowStart) -> None:
        super().__init__(start)
        self.sum = self.positive.new_zeros(())

    def _errors(self, candidates: CandidateLogits) -> Tensor:
        excluded = is_excluded(candidates.logits)  # first, since `out` may be the tile
        target = 0.0 if candidates.target is None else candidates.target
        errors = torch.sub(candidates.logits, target, out=candidates.out)
        return errors.masked_fill_(excluded, 0.0)

    def add(self, candidates: CandidateLogits) -> None:
        """See RowLoss."""
        self.sum = self.sum + self._errors(candidates).square_().sum()

    def total(self) -> Tensor:
        """See RowLoss."""
        return self.coefficient * self.sum

    def grad(self, candidates: CandidateLogits) -> Tensor:
        """See RowLoss."""
        return self._errors(candidates).mul_(2 * self.coefficient)

    def d_positive(self) -> Tensor:
        """See RowLoss."""
        return torch.zeros_like(self.positive)
