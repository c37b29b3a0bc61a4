"""Triplet loss with given negatives."""

from __future__ import annotations

import torch
from torch import Tensor

from vembed.losses.batch import LossBatch
from vembed.losses.candidates import given_negatives
from vembed.losses.pairs import pair_scores
from vembed.losses.temperature import ScoredLoss


class Triplet(ScoredLoss):
    """loss: triplet. The mean over all triplets (row i, hard negative n of row i's example) of the global batch:

        L = 1/M * sum over triplets of max(0, s(q_i,n) - s(q_i,p_i) + triplet_margin)

    M is the number of triplets; rows without negatives have none. With mask_duplicates a negative whose content is that
    of the row's query or of one of its positives makes no triplet.
    """

    def forward(self, batch: LossBatch) -> Tensor:
        """The own rows' share of L."""
        own = batch.own()
        everywhere = slice(0, batch.num_rows), slice(0, batch.negative.numel())
        row, negative = given_negatives(batch, *everywhere, mask_duplicates=self.config.mask_duplicates)
        num_triplets = row.numel()
        mine = (row >= own.start) & (row < own.stop)
        row, negative = row[mine], negative[mine]
        similarity = self.similarity_for(batch.embeddings)
        left = torch.cat((batch.query[own], batch.query[row]))
        right = torch.cat((batch.positive[own], batch.negative[negative]))
        own_scores, negative_scores = pair_scores(batch.embeddings, left, right, similarity).tensor_split(
            [batch.num_own_rows], dim=1
        )
        losses = (negative_scores - own_scores[:, row - own.start] + self.config.triplet_margin).relu().sum(1)
        return similarity.total(losses) / max(1, num_triplets)
