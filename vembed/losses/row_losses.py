"""Row losses: the loss of each row of a score matrix and its derivatives, computed tile by tile.

A row has the logit of its own pair and the logits of its candidates. Excluded candidates have the logit LEFT_OUT.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

LEFT_OUT = -1e30
"""Logit of an excluded candidate. Finite, since 0 * -inf would be NaN."""


def is_left_out(logits: Tensor) -> Tensor:
    """Return true where a candidate is excluded."""
    # Explicit pairs are excluded before they are scaled: their logit is LEFT_OUT times any scale.
    return logits <= LEFT_OUT * 1e-6


class RowLoss(ABC):
    """Losses of n rows. Create it with the own pairs' logits, add all candidates, then ask for the derivatives.

    `target`: a teacher's scores of the same pairs, for losses that follow one.
    """

    def __init__(
        self,
        positive: Tensor,
        coefficient: float,
        bias: Tensor | None,
        target: Tensor | None = None,
    ) -> None:
        self.positive = positive
        self.coefficient = coefficient
        self.bias = bias
        self.target = target

    @abstractmethod
    def add(
        self, logits: Tensor, scratch: Tensor, target: Tensor | None = None
    ) -> None:
        """Add a tile of logits [n, t]; `scratch` has the same shape and is overwritten."""

    @abstractmethod
    def add_explicit(
        self, logits: Tensor, row: Tensor, target: Tensor | None = None
    ) -> None:
        """Add single logits [P] of the rows `row` [P]."""

    @abstractmethod
    def total(self) -> Tensor:
        """Return coefficient * sum of the rows' losses. Call it after all candidates have been added."""

    @abstractmethod
    def grad_of_logits(
        self, logits: Tensor, out: Tensor, target: Tensor | None = None
    ) -> Tensor:
        """Write the gradient of the total with respect to a tile's logits to `out`, which may be the tile itself."""

    @abstractmethod
    def grad_of_explicit_logits(
        self, logits: Tensor, row: Tensor, target: Tensor | None = None
    ) -> Tensor:
        """Return the gradient of the total with respect to single logits [P]."""

    @abstractmethod
    def grad_of_positive_logit(self) -> Tensor:
        """Return the gradient of the total with respect to the own pairs' logits [n]."""


class SoftmaxRows(RowLoss):
    """Negative log softmax of the own pair among itself and all candidates, as an online softmax.

    State per row: the largest logit so far and the sum of the candidates' exp(logit - largest). The own pair's term is
    added at the end by expm1 and log1p, which keeps the precision of small losses.

    `stretch`: candidates enter as stretch * logit, and the difference to the logit has no gradient (hardness_alpha).
    `focal_gamma`: a row's loss l is multiplied by (1 - exp(-l)) ** focal_gamma.
    """

    def __init__(
        self,
        positive: Tensor,
        coefficient: float,
        bias: Tensor | None,
        target: Tensor | None = None,
        *,
        stretch: Tensor | None = None,
        focal_gamma: float = 0.0,
    ) -> None:
        assert bias is None, "a bias cancels in a softmax"
        super().__init__(positive, coefficient, bias, target)
        self.stretch = stretch
        self.focal_gamma = focal_gamma
        # The own pair is part of the maximum from the start: no exp below has a positive exponent.
        self.largest = positive
        self.rest = torch.zeros_like(positive)

    def add(
        self, logits: Tensor, scratch: Tensor, _target: Tensor | None = None
    ) -> None:
        """See RowLoss."""
        if self.stretch is not None:
            logits = torch.mul(logits, self.stretch, out=scratch)
        largest = torch.maximum(self.largest, logits.amax(1))
        torch.sub(logits, largest[:, None], out=scratch).exp_()
        # Rescale the earlier sum to the new maximum before adding this tile's terms.
        self.rest = self.rest * torch.exp(self.largest - largest) + scratch.sum(1)
        self.largest = largest

    def add_explicit(
        self, logits: Tensor, row: Tensor, _target: Tensor | None = None
    ) -> None:
        """See RowLoss."""
        if self.stretch is not None:
            logits = logits * self.stretch
        # A row may occur several times in `row`; the reduction includes the old maximum.
        largest = self.largest.scatter_reduce(0, row, logits, "amax")
        self.rest = self.rest * torch.exp(self.largest - largest)
        self.rest = self.rest.index_add(0, row, torch.exp(logits - largest[row]))
        self.largest = largest

    def _surplus(self) -> Tensor:
        """Return log(sum of all exp(logit)) - largest. expm1 and log1p keep precision if the own pair dominates."""
        return torch.log1p(self.rest + torch.expm1(self.positive - self.largest))

    def _losses(self) -> Tensor:
        return self._surplus() + (self.largest - self.positive)

    def total(self) -> Tensor:
        """See RowLoss."""
        losses = self._losses()
        if self.focal_gamma:
            # -expm1(-l) is 1 - exp(-l) without cancellation for small l.
            losses = losses * (-torch.expm1(-losses)) ** self.focal_gamma
        return self.coefficient * losses.sum()

    def _log_sum(self) -> Tensor:
        return self._surplus() + self.largest

    def _coefficients(self) -> Tensor | None:
        """[n] d(total)/d(loss of the row), where that is not the same for all."""
        if not self.focal_gamma:
            return None
        losses = self._losses()
        rest = -torch.expm1(-losses)
        # d/dl of rest^g * l; l / rest is 1 in the limit of l = 0.
        ratio = torch.where(rest > 0, losses / rest, torch.ones_like(rest))
        return (
            self.coefficient
            * rest**self.focal_gamma
            * (1 + self.focal_gamma * (1 - rest) * ratio)
        )

    def grad_of_logits(
        self, logits: Tensor, out: Tensor, _target: Tensor | None = None
    ) -> Tensor:
        """See RowLoss."""
        # coefficient * softmax = exp(logit - log_sum + log(coefficient)): one subtraction and one exp over the tile.
        coefficients = self._coefficients()
        log = (
            math.log(self.coefficient)
            if coefficients is None
            else torch.log(coefficients)
        )
        shift = self._log_sum() - log
        if self.stretch is not None:
            logits = torch.mul(logits, self.stretch, out=out)
        return torch.sub(logits, shift[:, None], out=out).exp_()

    def grad_of_explicit_logits(
        self, logits: Tensor, row: Tensor, _target: Tensor | None = None
    ) -> Tensor:
        """See RowLoss."""
        coefficients = self._coefficients()
        by_pair = self.coefficient if coefficients is None else coefficients[row]
        if self.stretch is not None:
            logits = logits * self.stretch
        return by_pair * torch.exp(logits - self._log_sum()[row])

    def grad_of_positive_logit(self) -> Tensor:
        """See RowLoss."""
        # coefficient * (softmax - 1); expm1 avoids the cancellation where the softmax is near 1.
        coefficients = self._coefficients()
        by_row = self.coefficient if coefficients is None else coefficients
        return by_row * torch.expm1(self.positive - self._log_sum())


class SigmoidRows(RowLoss):
    """Sum of -log sigmoid(logit + bias) of the own pair and -log sigmoid(-(logit + bias)) of every candidate."""

    def __init__(
        self,
        positive: Tensor,
        coefficient: float,
        bias: Tensor | None,
        target: Tensor | None = None,
    ) -> None:
        super().__init__(positive, coefficient, bias, target)
        self.shift = positive.new_zeros(()) if bias is None else bias
        self.sum = _softplus(-(positive + self.shift)).sum()

    def add(
        self, logits: Tensor, scratch: Tensor, _target: Tensor | None = None
    ) -> None:
        """See RowLoss."""
        # No mask: softplus and sigmoid of LEFT_OUT are exactly 0.
        torch.add(logits, self.shift, out=scratch)
        self.sum = self.sum + _softplus(scratch).sum()

    def add_explicit(
        self, logits: Tensor, _row: Tensor, _target: Tensor | None = None
    ) -> None:
        """See RowLoss."""
        self.sum = self.sum + _softplus(logits + self.shift).sum()

    def total(self) -> Tensor:
        """See RowLoss."""
        return self.coefficient * self.sum

    def grad_of_logits(
        self, logits: Tensor, out: Tensor, _target: Tensor | None = None
    ) -> Tensor:
        """See RowLoss."""
        return torch.add(logits, self.shift, out=out).sigmoid_().mul_(self.coefficient)

    def grad_of_explicit_logits(
        self, logits: Tensor, _row: Tensor, _target: Tensor | None = None
    ) -> Tensor:
        """See RowLoss."""
        return self.coefficient * torch.sigmoid(logits + self.shift)

    def grad_of_positive_logit(self) -> Tensor:
        """See RowLoss."""
        return -self.coefficient * torch.sigmoid(-(self.positive + self.shift))


def _softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)). torch returns x itself above 20 by default, which is too coarse in float64."""
    return F.softplus(x, threshold=50.0)


class CircleRows(SoftmaxRows):
    """Softmax over weighted logits: that of the own pair is a (s - 1 + m) / T, that of a candidate b (s - m) / T, with
    s = T * logit. Their derivatives by the logit are a and b."""

    def __init__(
        self,
        positive: Tensor,
        coefficient: float,
        bias: Tensor | None,
        target: Tensor | None = None,
        *,
        temperature: float,
        margin: float,
    ) -> None:
        self.temperature = temperature
        self.margin = margin
        score = positive * temperature
        # a_i of the formula. It has no gradient: `grad_of_positive_logit` multiplies by it.
        self.positive_weight = (1.0 + margin - score).clamp_(min=0.0)
        weighted = self.positive_weight * (score - (1.0 - margin)) / temperature
        super().__init__(weighted, coefficient, bias, target)

    def _weights(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        """Return b, 0 for excluded candidates."""
        return (
            torch.mul(logits, self.temperature, out=out)
            .add_(self.margin)
            .clamp_(min=0.0)
        )

    def _weighted(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        """Return b (s - m) / T as ((s + m) - 2 m) (s + m) / T, and LEFT_OUT for excluded candidates."""
        left_out = is_left_out(logits)  # first, since `out` may be the tile itself
        weights = self._weights(logits, out)
        weighted = weights.mul_(weights - 2.0 * self.margin).div_(self.temperature)
        return weighted.masked_fill_(left_out, LEFT_OUT)

    def add(
        self, logits: Tensor, scratch: Tensor, _target: Tensor | None = None
    ) -> None:
        """See RowLoss."""
        super().add(self._weighted(logits, scratch), scratch)

    def add_explicit(
        self, logits: Tensor, row: Tensor, _target: Tensor | None = None
    ) -> None:
        """See RowLoss."""
        super().add_explicit(self._weighted(logits), row)

    def grad_of_logits(
        self, logits: Tensor, out: Tensor, _target: Tensor | None = None
    ) -> Tensor:
        """See RowLoss."""
        # d(b (s - m) / T) / d(logit) is b here: the paper's weight b has no gradient of its own.
        weights = self._weights(
            logits
        )  # before `out`, which may be the tile itself, is written
        return super().grad_of_logits(self._weighted(logits, out), out).mul_(weights)

    def grad_of_explicit_logits(
        self, logits: Tensor, row: Tensor, _target: Tensor | None = None
    ) -> Tensor:
        """See RowLoss."""
        return super().grad_of_explicit_logits(
            self._weighted(logits), row
        ) * self._weights(logits)

    def grad_of_positive_logit(self) -> Tensor:
        """See RowLoss."""
        return super().grad_of_positive_logit() * self.positive_weight


class DivergenceRows(RowLoss):
    """KL(softmax(teacher) || softmax(student)) over the own pair and all candidates of a row.

    With t and s the logits of teacher and student it is sum_c softmax(t)_c * (t_c - s_c) - log sum exp(t) + log sum
    exp(s). Each of the three is summed up relative to the largest logit so far.
    """

    def __init__(
        self,
        positive: Tensor,
        coefficient: float,
        bias: Tensor | None,
        target: Tensor | None = None,
        *,
        target_scale: float = 1.0,
    ) -> None:
        """`target_scale`: one over the teacher's temperature."""
        assert bias is None, "a bias cancels in a softmax"
        assert target is not None, "a divergence needs a teacher's scores"
        super().__init__(positive, coefficient, bias, target)
        self.target_scale = target_scale
        self.own_target = target * target_scale
        # The own pair is the first candidate: exp(0) = 1.
        self.largest = positive
        self.sum = torch.ones_like(positive)
        self.target_largest = self.own_target
        self.target_sum = torch.ones_like(positive)
        self.difference = self.own_target - positive
        """sum of exp(t - target_largest) * (t - s)"""

    def _targets(self, logits: Tensor, target: Tensor | None) -> Tensor:
        """The teacher's logits, with what the student leaves out left out too."""
        assert target is not None
        return (target * self.target_scale).masked_fill_(is_left_out(logits), LEFT_OUT)

    def add(
        self, logits: Tensor, scratch: Tensor, target: Tensor | None = None
    ) -> None:
        """See RowLoss."""
        targets = self._targets(logits, target)
        # The student's sum as in SoftmaxRows; then the teacher's sum and the weighted difference, rescaled alike.
        largest = torch.maximum(self.largest, logits.amax(1))
        self.sum = self.sum * torch.exp(self.largest - largest)
        torch.sub(logits, largest[:, None], out=scratch).exp_()
        self.sum = self.sum + scratch.sum(1)
        self.largest = largest
        target_largest = torch.maximum(self.target_largest, targets.amax(1))
        before = torch.exp(self.target_largest - target_largest)
        torch.sub(targets, target_largest[:, None], out=scratch).exp_()
        self.target_sum = self.target_sum * before + scratch.sum(1)
        # An excluded candidate has weight exp(LEFT_OUT) = 0 and a finite difference, so it adds 0.
        scratch.mul_(targets.sub_(logits))
        self.difference = self.difference * before + scratch.sum(1)
        self.target_largest = target_largest

    def add_explicit(
        self, logits: Tensor, row: Tensor, target: Tensor | None = None
    ) -> None:
        """See RowLoss."""
        targets = self._targets(logits, target)
        largest = self.largest.scatter_reduce(0, row, logits, "amax")
        self.sum = self.sum * torch.exp(self.largest - largest)
        self.sum = self.sum.index_add(0, row, torch.exp(logits - largest[row]))
        self.largest = largest
        target_largest = self.target_largest.scatter_reduce(0, row, targets, "amax")
        before = torch.exp(self.target_largest - target_largest)
        weights = torch.exp(targets - target_largest[row])
        self.target_sum = (self.target_sum * before).index_add(0, row, weights)
        self.difference = (self.difference * before).index_add(
            0, row, weights * (targets - logits)
        )
        self.target_largest = target_largest

    def _log_sum(self) -> Tensor:
        return self.largest + self.sum.log()

    def _target_log_sum(self) -> Tensor:
        return self.target_largest + self.target_sum.log()

    def total(self) -> Tensor:
        """See RowLoss."""
        cross = self.difference / self.target_sum
        losses = cross - self._target_log_sum() + self._log_sum()
        return self.coefficient * losses.sum()

    def grad_of_logits(
        self, logits: Tensor, out: Tensor, target: Tensor | None = None
    ) -> Tensor:
        """See RowLoss."""
        wanted = self._targets(logits, target)
        wanted.sub_(self._target_log_sum()[:, None]).exp_()
        torch.sub(logits, self._log_sum()[:, None], out=out).exp_()
        return out.sub_(wanted).mul_(self.coefficient)

    def grad_of_explicit_logits(
        self, logits: Tensor, row: Tensor, target: Tensor | None = None
    ) -> Tensor:
        """See RowLoss."""
        wanted = torch.exp(self._targets(logits, target) - self._target_log_sum()[row])
        return self.coefficient * (torch.exp(logits - self._log_sum()[row]) - wanted)

    def grad_of_positive_logit(self) -> Tensor:
        """See RowLoss."""
        wanted = torch.exp(self.own_target - self._target_log_sum())
        return self.coefficient * (torch.exp(self.positive - self._log_sum()) - wanted)


class SquaredErrorRows(RowLoss):
    """(logit - target)^2 summed over all candidates, with 0 for the target where there is no teacher. The own pair does
    not count."""

    def __init__(
        self,
        positive: Tensor,
        coefficient: float,
        bias: Tensor | None,
        target: Tensor | None = None,
    ) -> None:
        super().__init__(positive, coefficient, bias, target)
        self.sum = positive.new_zeros(())

    def _errors(self, logits: Tensor, target: Tensor | None, out: Tensor) -> Tensor:
        left_out = is_left_out(logits)  # first, since `out` may be the tile itself
        if target is None:
            out.copy_(logits)
        else:
            torch.sub(logits, target, out=out)
        return out.masked_fill_(left_out, 0.0)

    def add(
        self, logits: Tensor, scratch: Tensor, target: Tensor | None = None
    ) -> None:
        """See RowLoss."""
        self.sum = self.sum + self._errors(logits, target, scratch).square_().sum()

    def add_explicit(
        self, logits: Tensor, _row: Tensor, target: Tensor | None = None
    ) -> None:
        """See RowLoss."""
        errors = self._errors(logits, target, torch.empty_like(logits))
        self.sum = self.sum + errors.square_().sum()

    def total(self) -> Tensor:
        """See RowLoss."""
        return self.coefficient * self.sum

    def grad_of_logits(
        self, logits: Tensor, out: Tensor, target: Tensor | None = None
    ) -> Tensor:
        """See RowLoss."""
        return self._errors(logits, target, out).mul_(2 * self.coefficient)

    def grad_of_explicit_logits(
        self, logits: Tensor, _row: Tensor, target: Tensor | None = None
    ) -> Tensor:
        """See RowLoss."""
        errors = self._errors(logits, target, torch.empty_like(logits))
        return errors.mul_(2 * self.coefficient)

    def grad_of_positive_logit(self) -> Tensor:
        """See RowLoss."""
        return torch.zeros_like(self.positive)
