"""Losses for pairs with scores: CoSENT, which uses their order, and cosine regression, which uses their values."""

from __future__ import annotations

import torch
from torch import Tensor

from vembed.errors import UserError
from vembed.losses.batch import LossBatch
from vembed.losses.matryoshka import arithmetic_dtype
from vembed.losses.pairs import pair_scores
from vembed.losses.temperature import ScoredLoss, TemperedLoss


class CoSENT(TemperedLoss):
    """loss: cosent. With the similarity s_i and the given score y_i of the rows i of the global batch,

        L = log( 1 + sum over all (i, j) with y_i > y_j of exp((s_j - s_i) / T) )

    Only the order of the scores matters. L is one number of the whole batch, not a sum over rows; a rank's share is
    L * own rows / all rows. After sorting by y the inner sum over j is a running sum: O(N log N), and no matrix.
    """

    def forward(self, batch: LossBatch) -> Tensor:
        """The own rows' share of L."""
        similarity = self.similarity_for(batch.embeddings)
        scores = pair_scores(batch.embeddings, batch.query, batch.positive, similarity)
        given, order = torch.sort(batch.required_scores("cosent").to(scores.device))
        logits = scores[:, order] * self.scale_for(batch.embeddings)
        num_lower = torch.searchsorted(given, given)
        ranked = num_lower > 0
        below = torch.logcumsumexp(logits, dim=1)[:, num_lower[ranked] - 1]
        terms = torch.cat((logits.new_zeros(len(logits), 1), below - logits[:, ranked]), dim=1)
        share = batch.num_own_rows / max(1, batch.num_rows)
        return similarity.total(torch.logsumexp(terms, dim=1)) * share


class CosineRegression(ScoredLoss):
    """loss: cosine. L = 1/N * sum_i (s_i - y_i)^2: the similarity is to equal the given score as it stands.

    For the cosine the scores must therefore lie in [-1, 1]; ratings from 0 to 5 are to be divided by 5 beforehand.
    """

    def forward(self, batch: LossBatch) -> Tensor:
        """The own rows' share of L."""
        own = batch.own()
        given = batch.required_scores("cosine")[own].to(batch.embeddings.device, arithmetic_dtype(batch.embeddings))
        similarity = self.similarity_for(batch.embeddings)
        if similarity.cosine and given.numel() and not bool((given.abs() <= 1).all()):
            raise UserError(
                f"loss: cosine compares similarities with the scores as they stand, and the data have scores from "
                f"{float(given.min()):g} to {float(given.max()):g}: scale them into [-1, 1], or use loss: cosent."
            )
        scores = pair_scores(batch.embeddings, batch.query[own], batch.positive[own], similarity)
        errors = (scores - given).square().sum(1)
        return similarity.total(errors) / max(1, batch.num_rows)
