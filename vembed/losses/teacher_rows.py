"""Row losses that follow a teacher, or that ask every score to be a given number."""

from __future__ import annotations

import torch
from torch import Tensor

from vembed.losses.rows import LEFT_OUT, RowLoss, is_left_out


class Divergence(RowLoss):
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
        super().__init__(positive, coefficient, bias, target * target_scale)
        self.target_scale = target_scale
        self.own_target = target * target_scale
        # The own pair is the first candidate: exp(0) = 1.
        self.largest, self.sum = positive, torch.ones_like(positive)
        self.target_largest, self.target_sum = (
            self.own_target,
            torch.ones_like(positive),
        )
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
        # The student's sum as in Softmax; then the teacher's sum and the weighted difference, rescaled alike.
        largest = torch.maximum(self.largest, logits.amax(1))
        self.sum = self.sum * torch.exp(self.largest - largest)
        self.sum = self.sum + torch.sub(
            logits, largest[:, None], out=scratch
        ).exp_().sum(1)
        self.largest = largest
        target_largest = torch.maximum(self.target_largest, targets.amax(1))
        before = torch.exp(self.target_largest - target_largest)
        torch.sub(targets, target_largest[:, None], out=scratch).exp_()
        self.target_sum = self.target_sum * before + scratch.sum(1)
        # An excluded candidate has weight exp(LEFT_OUT) = 0 and a finite difference, so it adds 0.
        self.difference = self.difference * before + scratch.mul_(
            targets.sub_(logits)
        ).sum(1)
        self.target_largest = target_largest

    def add_explicit(
        self, logits: Tensor, row: Tensor, target: Tensor | None = None
    ) -> None:
        """See RowLoss."""
        targets = self._targets(logits, target)
        largest = self.largest.scatter_reduce(0, row, logits, "amax")
        self.sum = (self.sum * torch.exp(self.largest - largest)).index_add(
            0, row, torch.exp(logits - largest[row])
        )
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
        losses = (
            self.difference / self.target_sum - self._target_log_sum() + self._log_sum()
        )
        return self.coefficient * losses.sum()

    def grad_of_logits(
        self, logits: Tensor, out: Tensor, target: Tensor | None = None
    ) -> Tensor:
        """See RowLoss."""
        wanted = (
            self._targets(logits, target).sub_(self._target_log_sum()[:, None]).exp_()
        )
        return (
            torch.sub(logits, self._log_sum()[:, None], out=out)
            .exp_()
            .sub_(wanted)
            .mul_(self.coefficient)
        )

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


class SquaredError(RowLoss):
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
        left_out = is_left_out(logits)  # first: `out` may be the tile itself
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
        self.sum = (
            self.sum
            + self._errors(logits, target, torch.empty_like(logits)).square_().sum()
        )

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
        return self._errors(logits, target, torch.empty_like(logits)).mul_(
            2 * self.coefficient
        )

    def grad_of_positive_logit(self) -> Tensor:
        """See RowLoss."""
        return torch.zeros_like(self.positive)
