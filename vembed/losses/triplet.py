"""Triplet loss with explicit hard negatives."""

from __future__ import annotations

import torch
from torch import Tensor

from vembed.losses.batch import LossBatch
from vembed.losses.candidates import explicit_negatives, numbers_of
from vembed.losses.pairs import pair_scores
from vembed.losses.temperature import ScoredLoss


class Triplet(ScoredLoss):
    """The triplet loss (loss: triplet): the mean over all triplets (row i, hard negative n of its example).

        L = 1/M * sum over triplets of max(0, s(q_i,n) - s(q_i,p_i) + triplet_margin)

    M is the number of triplets of the global batch; rows without negatives have none. With mask_duplicates, negatives
    with the content of the row's query or of one of its positives are dropped.
    """

    def forward(self, batch: LossBatch) -> Tensor:
        """Return the own rows' part of L."""
        own = batch.own()
        everywhere = (
            slice(0, batch.num_rows),
            numbers_of(slice(0, batch.negative.numel()), batch),
        )
        row, negative = explicit_negatives(
            batch, *everywhere, mask_duplicates=self.config.objective.mask_duplicates
        )
        num_triplets = row.numel()
        mine = (row >= own.start) & (row < own.stop)
        row, negative = row[mine], negative[mine]
        similarity = self.similarity_for(batch.embeddings)
        left = batch.places(torch.cat((batch.query[own], batch.query[row])))
        right = batch.places(torch.cat((batch.positive[own], batch.negative[negative])))
        # One call for own pairs and negatives, so that gradients are accumulated once. [K, n] and [K, P]
        own_scores, negative_scores = pair_scores(
            batch.embeddings, left, right, similarity
        ).tensor_split([batch.num_own_rows], dim=1)
        losses = (
            (
                negative_scores
                - own_scores[:, row - own.start]
                + self.config.objective.triplet_margin
            )
            .relu()
            .sum(1)
        )
        return similarity.total(losses) / max(1, num_triplets)
