"""Circle loss with the candidates of InfoNCE.

    L = 1/N * sum_i log( 1 + exp(-a_i (s(q_i,p_i) - 1 + m) / T) * sum_{c in C_i} exp(b_ic (s(q_i,c) - m) / T) )
    a_i = max(0, 1 + m - s(q_i,p_i))        b_ic = max(0, s(q_i,c) + m)

a and b have no gradient: scores that are far from their optimum, 1 + m and -m, weigh more. C_i are the candidates that
InfoNCE has for row i, with all of its options. T is the temperature (1 / gamma of the paper), m is circle_margin.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from vembed.losses.batch import LossBatch
from vembed.losses.candidates import find_candidates
from vembed.losses.infonce import guide_for
from vembed.losses.matryoshka import arithmetic_dtype
from vembed.losses.rows import LEFT_OUT, Softmax, is_left_out
from vembed.losses.temperature import ScoredLoss
from vembed.losses.tiles import Scoring, Tiling, tiled_loss


class Circle(ScoredLoss):
    """The circle loss (loss: circle)."""

    tiling: Tiling | None = None

    def forward(self, batch: LossBatch) -> Tensor:
        """Return the own rows' part of L."""
        config, embeddings = self.config, batch.embeddings
        share, both = 1.0 / max(1, batch.num_rows), config.objective.bidirectional
        scoring = Scoring(
            candidates=find_candidates(batch, config, both_directions=both),
            similarity=self.similarity_for(embeddings),
            row_loss=partial(
                CircleRows,
                temperature=config.objective.temperature,
                margin=config.objective.circle_margin,
            ),
            coefficients=(share / 2, share / 2) if both else (share,),
            margin=config.objective.false_negative_margin,
            tiling=self.tiling,
            guide=guide_for(batch, config),
        )
        dtype = arithmetic_dtype(embeddings)
        return tiled_loss(
            embeddings,
            scoring,
            torch.tensor(
                1.0 / config.objective.temperature,
                dtype=dtype,
                device=embeddings.device,
            ),
        )


class CircleRows(Softmax):
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
        self.temperature, self.margin = temperature, margin
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
        left_out = is_left_out(logits)  # first: `out` may be the tile itself
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
