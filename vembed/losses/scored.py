"""Losses for pairs with label scores: CoSENT uses their order, cosine regression their values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vembed.errors import UserError
from vembed.losses.batch import LossBatch
from vembed.losses.matryoshka import Similarity, arithmetic_dtype
from vembed.losses.pairs import pair_scores
from vembed.losses.temperature import ScoredLoss, TemperedLoss


class CoSENT(TemperedLoss):
    """The CoSENT loss (loss: cosent). With similarity s_i and label score y_i of row i of the global batch,

        L = log( 1 + sum over all (i, j) with y_i > y_j of exp((s_j - s_i) / T) )

    Only the order of the label scores matters. L is not a sum over rows, so every rank computes it whole and returns
    L * own rows / all rows. After sorting by y the inner sum is a running logsumexp: O(N log N) without a matrix.
    """

    def forward(self, batch: LossBatch) -> Tensor:
        """Return the own rows' part of L."""
        similarity = self.similarity_for(batch.embeddings)
        scores = self.scores_of(batch, similarity)
        explicit, order = torch.sort(
            batch.required_scores(self.config.objective.loss).to(scores.device)
        )
        logits = scores[:, order] * self.scale_for(batch.embeddings)
        # Number of rows with a strictly lower label score: ties compare with nothing.
        num_lower = torch.searchsorted(explicit, explicit)
        ranked = num_lower > 0
        below = torch.logcumsumexp(logits, dim=1)[:, num_lower[ranked] - 1]
        # The zero column is the "1 +" of the formula. logits: [K, N]; terms: [K, 1 + number of ranked rows].
        terms = torch.cat(
            (logits.new_zeros(len(logits), 1), below - logits[:, ranked]), dim=1
        )
        share = batch.num_own_rows / max(1, batch.num_rows)
        return similarity.total(torch.logsumexp(terms, dim=1)) * share

    def scores_of(self, batch: LossBatch, similarity: Similarity) -> Tensor:
        """Return the similarities [K, N] of all pairs at all sizes."""
        return pair_scores(batch.embeddings, batch.query, batch.positive, similarity)


class Angle(CoSENT):
    """The angle loss of AnglE (loss: angle): CoSENT on s_i = |sum of re(z) + im(z)| * |b| / |a|, z = a / b

    of a query and a document whose first halves are real and second halves imaginary parts: the quotient of complex
    numbers has the difference of their angles, without the saturation of the cosine. With J(x, y) = (y, -x) this is
    |(a + J a) . b| / (|a| |b|), the square root of 2 times the cosine of a + J a and b.
    """

    def scores_of(self, batch: LossBatch, similarity: Similarity) -> Tensor:
        """Return the sums of the parts [K, N] of all pairs at all sizes. O(N) memory."""
        found = []
        for dim in similarity.dims:
            if dim % 2:
                raise UserError(
                    f"loss: angle reads halves of a vector as real and imaginary parts, and {dim:,d} dimensions have "
                    "none: use an even size (mrl_dims), or loss: cosent"
                )
            # A prefix is split into halves of its own, so each size is a computation of its own.
            rows = batch.embeddings[:, :dim]
            real, imaginary = rows[batch.query].chunk(2, dim=1)
            turned = torch.cat((real + imaginary, imaginary - real), dim=1)
            both = torch.cat((turned, rows[batch.positive]))
            left, right = torch.arange(len(both), device=both.device).chunk(2)
            cosine = Similarity.at((dim,), (1.0,), cosine=True)
            found.append(pair_scores(both, left, right, cosine).abs() * math.sqrt(2))
        return torch.cat(found)


class CosineRegression(ScoredLoss):
    """Mean squared error of the similarity (loss: cosine): L = 1/N * sum_i (s_i - y_i)^2.

    For the cosine the label scores must lie in [-1, 1]. Ratings from 0 to 5, for example, must be rescaled first.
    """

    def forward(self, batch: LossBatch) -> Tensor:
        """Return the own rows' part of L."""
        own = batch.own()
        explicit = batch.required_scores("cosine")[own].to(
            batch.embeddings.device, arithmetic_dtype(batch.embeddings)
        )
        similarity = self.similarity_for(batch.embeddings)
        if (
            similarity.cosine
            and explicit.numel()
            and not bool((explicit.abs() <= 1).all())
        ):
            raise UserError(
                f"loss: cosine compares similarities with unscaled scores, and the data have scores from "
                f"{float(explicit.min()):g} to {float(explicit.max()):g}: scale them into [-1, 1], or use loss: cosent."
            )
        left, right = batch.places(batch.query[own]), batch.places(batch.positive[own])
        scores = pair_scores(batch.embeddings, left, right, similarity)
        errors = (scores - explicit).square().sum(1)
        return similarity.total(errors) / max(1, batch.num_rows)
