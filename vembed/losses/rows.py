"""What becomes of a block of rows' scores: the loss of each row and its derivatives, fed tile by tile.

A row has the logit of its own pair and those of its candidates. Candidates that are left out have the logit LEFT_OUT.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

LEFT_OUT = -1e30
"""Finite, so that a weight of 0 times it is 0."""


class RowLoss(ABC):
    """The losses of n rows: create with the own pairs' logits, add all candidates, then ask for derivatives."""

    def __init__(self, positive: Tensor, coefficient: float, bias: Tensor | None) -> None:
        self.positive = positive
        self.coefficient = coefficient
        self.bias = bias

    @abstractmethod
    def add(self, logits: Tensor, scratch: Tensor) -> None:
        """Take in a tile [n, t]; `scratch` has the same size."""

    @abstractmethod
    def add_given(self, logits: Tensor, row: Tensor) -> None:
        """Take in single logits [P] of the rows named."""

    @abstractmethod
    def total(self) -> Tensor:
        """coefficient * the sum of the rows' losses, after all candidates."""

    @abstractmethod
    def weigh(self, logits: Tensor, out: Tensor) -> Tensor:
        """d(total)/d(logits) of a tile, written to `out`, which may be the tile itself."""

    @abstractmethod
    def weigh_given(self, logits: Tensor, row: Tensor) -> Tensor:
        """d(total)/d(logits) of single logits."""

    @abstractmethod
    def weigh_positive(self) -> Tensor:
        """d(total)/d(positive)."""


class Softmax(RowLoss):
    """-log of the share that the own pair has of the sum of exp(logit) over itself and all candidates.

    Keeps the largest logit so far and the sum of the candidates' exp(logit - largest); the own pair's part of the sum
    is added at the end by expm1 and log1p, so that small losses keep their digits.
    """

    def __init__(self, positive: Tensor, coefficient: float, bias: Tensor | None) -> None:
        assert bias is None, "a bias cancels in a softmax"
        super().__init__(positive, coefficient, bias)
        self.largest = positive
        self.rest = torch.zeros_like(positive)

    def add(self, logits: Tensor, scratch: Tensor) -> None:
        """See RowLoss."""
        largest = torch.maximum(self.largest, logits.amax(1))
        torch.sub(logits, largest[:, None], out=scratch).exp_()
        self.rest = self.rest * torch.exp(self.largest - largest) + scratch.sum(1)
        self.largest = largest

    def add_given(self, logits: Tensor, row: Tensor) -> None:
        """See RowLoss."""
        largest = self.largest.scatter_reduce(0, row, logits, "amax")
        self.rest = self.rest * torch.exp(self.largest - largest)
        self.rest = self.rest.index_add(0, row, torch.exp(logits - largest[row]))
        self.largest = largest

    def _surplus(self) -> Tensor:
        """log of the sum, less the largest logit."""
        return torch.log1p(self.rest + torch.expm1(self.positive - self.largest))

    def total(self) -> Tensor:
        """See RowLoss."""
        return self.coefficient * (self._surplus() + (self.largest - self.positive)).sum()

    def _log_sum(self) -> Tensor:
        return self._surplus() + self.largest

    def weigh(self, logits: Tensor, out: Tensor) -> Tensor:
        """See RowLoss."""
        shift = self._log_sum() - math.log(self.coefficient)
        return torch.sub(logits, shift[:, None], out=out).exp_()

    def weigh_given(self, logits: Tensor, row: Tensor) -> Tensor:
        """See RowLoss."""
        return self.coefficient * torch.exp(logits - self._log_sum()[row])

    def weigh_positive(self) -> Tensor:
        """See RowLoss."""
        return self.coefficient * torch.expm1(self.positive - self._log_sum())


class Sigmoid(RowLoss):
    """-log sigmoid(logit + bias) of the own pair and -log sigmoid(-(logit + bias)) of every candidate, summed."""

    def __init__(self, positive: Tensor, coefficient: float, bias: Tensor | None) -> None:
        super().__init__(positive, coefficient, bias)
        self.shift = positive.new_zeros(()) if bias is None else bias
        self.sum = _softplus(-(positive + self.shift)).sum()

    def add(self, logits: Tensor, scratch: Tensor) -> None:
        """See RowLoss."""
        torch.add(logits, self.shift, out=scratch)
        self.sum = self.sum + _softplus(scratch).sum()

    def add_given(self, logits: Tensor, _row: Tensor) -> None:
        """See RowLoss."""
        self.sum = self.sum + _softplus(logits + self.shift).sum()

    def total(self) -> Tensor:
        """See RowLoss."""
        return self.coefficient * self.sum

    def weigh(self, logits: Tensor, out: Tensor) -> Tensor:
        """See RowLoss."""
        return torch.add(logits, self.shift, out=out).sigmoid_().mul_(self.coefficient)

    def weigh_given(self, logits: Tensor, _row: Tensor) -> Tensor:
        """See RowLoss."""
        return self.coefficient * torch.sigmoid(logits + self.shift)

    def weigh_positive(self) -> Tensor:
        """See RowLoss."""
        return -self.coefficient * torch.sigmoid(-(self.positive + self.shift))


def _softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)). The usual threshold of 20, above which it is taken as x, costs digits in float64."""
    return F.softplus(x, threshold=50.0)
