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


class Softmax(RowLoss):
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
        logits = (
            logits
            if self.stretch is None
            else torch.mul(logits, self.stretch, out=scratch)
        )
        largest = torch.maximum(self.largest, logits.amax(1))
        torch.sub(logits, largest[:, None], out=scratch).exp_()
        # Rescale the earlier sum to the new maximum before adding this tile's terms.
        self.rest = self.rest * torch.exp(self.largest - largest) + scratch.sum(1)
        self.largest = largest

    def add_explicit(
        self, logits: Tensor, row: Tensor, _target: Tensor | None = None
    ) -> None:
        """See RowLoss."""
        logits = logits if self.stretch is None else logits * self.stretch
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
        logits = (
            logits if self.stretch is None else torch.mul(logits, self.stretch, out=out)
        )
        return torch.sub(logits, shift[:, None], out=out).exp_()

    def grad_of_explicit_logits(
        self, logits: Tensor, row: Tensor, _target: Tensor | None = None
    ) -> Tensor:
        """See RowLoss."""
        coefficients = self._coefficients()
        by_pair = self.coefficient if coefficients is None else coefficients[row]
        logits = logits if self.stretch is None else logits * self.stretch
        return by_pair * torch.exp(logits - self._log_sum()[row])

    def grad_of_positive_logit(self) -> Tensor:
        """See RowLoss."""
        # coefficient * (softmax - 1); expm1 avoids the cancellation where the softmax is near 1.
        coefficients = self._coefficients()
        by_row = self.coefficient if coefficients is None else coefficients
        return by_row * torch.expm1(self.positive - self._log_sum())


class Sigmoid(RowLoss):
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
