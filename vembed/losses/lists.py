"""bce, lambda, mse: relevance of a query's documents, as label, as order by nDCG, and as a teacher's score.

C_e are all documents of example e: its positives and hard negatives. y are their labels: the scores of the data or of
a teacher, and without either 1 for a positive and 0 for a negative. A negative without a score has the label 0.
s are the scores of the model: a reranker's own, or the similarities of vectors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vembed.losses.teacher_scores import SCORES, ListedLoss

if TYPE_CHECKING:
    from torch import Tensor

    from vembed.losses.batch import LossBatch
    from vembed.losses.build import TermLoss
    from vembed.losses.listed import ListedPairs

CLOSE_WEIGHT = 10.0
"""Of LambdaLoss: weight of NDCG-Loss2 beside LambdaRank, mu of the paper."""


class LabelledLoss(ListedLoss):
    """Base class of the losses whose labels may be left out."""

    def labels(self, batch: LossBatch, term: TermLoss, lists: ListedPairs) -> Tensor:
        """Return [E] the labels of listed pairs."""
        import torch

        from vembed.losses.similarity import arithmetic_dtype

        if term.teacher in (None, SCORES) and batch.scores is None:
            labels = torch.zeros(len(lists.groups), device=batch.embeddings.device)
            labels[: len(lists.rows)] = 1.0
            return labels.to(arithmetic_dtype(batch.embeddings))
        return self.targets(batch, term, lists, may_lack=True)[0].nan_to_num(nan=0.0)


class BCE(LabelledLoss):
    """The binary cross-entropy of each document, over all M documents of the global batch.

    L = 1/M * sum_e sum_{c in C_e} log(1 + exp(s_c)) - y_c s_c
    """

    name = "bce"
    summary = "each document relevant or not, by the logistic function of its score"
    records = "pairs"
    negatives = "optional"
    follows = "scores_or_teacher"

    def share(self, batch: LossBatch, term: TermLoss) -> Tensor:
        """See Loss."""
        import torch.nn.functional as F

        from vembed.losses.listed import ListedPairs

        lists = ListedPairs.of_examples(batch)
        rank_lists = ListedPairs.of_examples(batch, of_rank=True)
        labels = self.labels(batch, term, rank_lists)
        similarity = term.similarity(batch.embeddings)
        scores = rank_lists.model_scores(batch, similarity)  # [K, E]
        losses = F.binary_cross_entropy_with_logits(
            scores, labels.expand_as(scores), reduction="none"
        )
        return similarity.total(losses.sum(1)) / max(1, len(lists.groups))


class Lambda(LabelledLoss):
    """LambdaLoss (NDCG-Loss2++), over the M pairs (a, b) of documents of one example with y_a > y_b.

        L = 1/M * sum |G_a - G_b| (10 |1/D(d) - 1/D(d+1)| + |1/D(r_a) - 1/D(r_b)|) log2(1 + exp(s_b - s_a))

    with r the place of a document by the model's scores, from 1, d = |r_a - r_b|, the
    discount D(r) = log2(1 + r) and the gain G = (2^y - 1) / the highest DCG of the list.
    The weights have no gradient.
    """

    name = "lambda"
    summary = "the order of a query's documents, weighted by what it changes in nDCG"
    records = "pairs"
    negatives = "optional"
    follows = "scores_or_teacher"

    def share(self, batch: LossBatch, term: TermLoss) -> Tensor:
        """See Loss."""
        import torch.nn.functional as F

        from vembed.losses.listed import ListedPairs, ordered_pairs

        lists = ListedPairs.of_examples(batch)
        # Of all ranks, as the divisor. The model's scores are not needed for it.
        all_labels = self.labels(batch, term, lists)
        num_pairs = ordered_pairs(lists.groups, all_labels)[0].numel()
        rank_lists = ListedPairs.of_examples(batch, of_rank=True)
        labels = self.labels(batch, term, rank_lists)
        above, below = ordered_pairs(rank_lists.groups, labels)
        similarity = term.similarity(batch.embeddings)
        scores = rank_lists.model_scores(batch, similarity)  # [K, E]
        gain = 2.0 ** labels.clamp(min=0.0) - 1.0
        ideal = _discounted(gain, _places(labels[None], rank_lists), rank_lists)
        gain = gain / ideal[0].clamp(min=1e-10)[rank_lists.groups]
        places = _places(scores.detach(), rank_lists)  # [K, E]
        distance = (places[:, above] - places[:, below]).abs()
        close = 1.0 / (1.0 + distance).log2() - 1.0 / (2.0 + distance).log2()
        discount = 1.0 / (1.0 + places).log2()
        far = (discount[:, above] - discount[:, below]).abs()
        weight = (gain[above] - gain[below]).abs() * (CLOSE_WEIGHT * close + far)
        # Above 50, log(1 + exp(x)) is x to float64's precision.
        differences = scores[:, below] - scores[:, above]
        losses = weight * F.softplus(differences, threshold=50.0) / math.log(2.0)
        return similarity.total(losses.sum(1)) / max(1, num_pairs)


class MSE(ListedLoss):
    """The squared error of the scores, over all M documents of the global batch.

    L = 1/M * sum_e sum_{c in C_e} (s_c - t_c)^2
    """

    name = "mse"
    summary = "a teacher's scores themselves"
    records = "pairs"
    negatives = "optional"
    follows = "teacher"

    def share(self, batch: LossBatch, term: TermLoss) -> Tensor:
        """See Loss."""
        from vembed.losses.listed import ListedPairs

        lists = ListedPairs.of_examples(batch)
        rank_lists = ListedPairs.of_examples(batch, of_rank=True)
        similarity = term.similarity(batch.embeddings)
        scores = rank_lists.model_scores(batch, similarity)  # [K, E]
        losses = (scores - self.targets(batch, term, rank_lists)).square().sum(1)
        return similarity.total(losses) / max(1, len(lists.groups))


def _places(scores: Tensor, lists: ListedPairs) -> Tensor:
    """Return [K, E] the place of each document in its list by descending scores [K, E], from 1. Of equal scores the
    first comes first."""
    import torch

    places = torch.empty_like(scores)
    num_before = torch.bincount(lists.groups, minlength=lists.num_groups).cumsum(0)
    starts = num_before - torch.bincount(lists.groups, minlength=lists.num_groups)
    for size, of_size in enumerate(scores):
        by_score = torch.sort(of_size, descending=True, stable=True).indices
        order = by_score[torch.sort(lists.groups[by_score], stable=True).indices]
        counted = torch.arange(len(order), device=order.device)
        place = counted - starts[lists.groups[order]] + 1
        places[size, order] = place.to(places.dtype)
    return places


def _discounted(gain: Tensor, places: Tensor, lists: ListedPairs) -> Tensor:
    """Return [K, groups] the sum of gains over log2(1 + place) of each list."""
    discounted = gain / (1.0 + places).log2()
    sums = discounted.new_zeros(len(places), lists.num_groups)
    return sums.index_add(1, lists.groups, discounted)
