"""kl, score_mse, margin_mse, mse, listwise, ranknet, lambda, bce: losses on the scores of listed documents.

C_i are the positive of row i and the hard negatives of its example, C_e all documents of example e: its positives and
hard negatives. s are the scores of the model: a reranker's own, or the similarities of vectors. t are the scores of a
teacher or of the data, T the temperature and T' that of the teacher. y are labels: t, and without a teacher or scores 1
for a positive and 0 for a negative. A negative without a score has the label 0.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Literal

from vembed.config.values import PositiveFloat
from vembed.errors import UserError
from vembed.losses.declaration import (
    SCORES,
    CandidateLoss,
    Negatives,
    TeacherLoss,
    Temperature,
)

if TYPE_CHECKING:
    from torch import Tensor

    from vembed.losses.batch import LossBatch
    from vembed.losses.build import TermLoss
    from vembed.losses.listed import ListedPairs

CLOSE_WEIGHT = 10.0
"""Of LambdaLoss: weight of NDCG-Loss2 beside LambdaRank, mu of the paper."""


class ListedLoss(TeacherLoss):
    """Base class of the losses on listed pairs."""

    reads_lists = True

    def targets(
        self,
        batch: LossBatch,
        term: TermLoss,
        pairs: ListedPairs,
        *,
        may_lack: bool = False,
    ) -> Tensor:
        """Return [1, n + P] the scores that the student's are compared with.

        `may_lack`: hard negatives without a score get NaN.
        """
        from vembed.losses.batch import TeacherScores
        from vembed.losses.similarity import arithmetic_dtype

        if term.teacher not in (None, SCORES):
            scores = batch.teacher(str(term.teacher)).scores_of(pairs)
        else:
            positive = batch.required_scores(self.name)
            negative = batch.negative_scores
            if negative is None:
                num_negatives = batch.negative.numel()
                if num_negatives and not may_lack:
                    raise UserError(
                        f"loss: {self.name} with teacher: scores needs a score for every positive and every negative of a "
                        "record; give as many scores as there are both, or name a model as teacher."
                    )
                negative = positive.new_full((num_negatives,), float("nan"))
            scores = TeacherScores(positive, negative).scores_of(pairs)
        return scores.to(batch.embeddings.device, arithmetic_dtype(batch.embeddings))

    def labels(self, batch: LossBatch, term: TermLoss, lists: ListedPairs) -> Tensor:
        """Return [n + P] the labels y."""
        import torch

        from vembed.losses.similarity import arithmetic_dtype

        if term.teacher in (None, SCORES) and batch.scores is None:
            labels = torch.zeros(len(lists.groups), device=batch.embeddings.device)
            labels[: len(lists.rows)] = 1.0
            return labels.to(arithmetic_dtype(batch.embeddings))
        return self.targets(batch, term, lists, may_lack=True)[0].nan_to_num(nan=0.0)


class SoftmaxLoss(ListedLoss, Temperature):
    """Base class of the losses that compare a softmax of scores with the teacher's."""

    teacher_temperature: PositiveFloat | None = None
    """loss: kl, score_mse, listwise: a teacher's scores are divided by it. Default: `temperature`."""

    def target_scale(self) -> float:
        """Return one over the teacher's temperature."""
        return 1.0 / (self.teacher_temperature or self.temperature)

    def log_softmaxes(
        self, batch: LossBatch, term: TermLoss, pairs: ListedPairs, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the log softmax within each group of the student [K, n + P] and of the teacher [1, n + P]."""
        logits = term.scores(batch, pairs) * term.scale(batch.embeddings)
        student = pairs.log_softmax(logits)
        return student, pairs.log_softmax(targets * self.target_scale())


class KL(SoftmaxLoss, CandidateLoss):
    """The divergence from the softmax of the teacher's scores, over C_i.

        L = 1/N * sum_i KL( softmax_{c in C_i}(t_ic / T') || softmax_{c in C_i}(s_ic / T) )

    distill_candidates: batch: C_i are the candidates D_i that infonce has for row i, and
    p_i itself. t are then dot products of the teacher's vectors.
    """

    name = "kl"
    summary = "the teacher's distribution over a row's documents"
    records = "pairs"
    negatives = "some"
    follows = "teacher"

    distill_candidates: Literal["listed", "batch"] = "listed"
    """loss: kl: whether a row's candidates are its positive and its example's hard negatives, or all of the batch."""

    def needed_negatives(self) -> Negatives:
        """See Loss."""
        return "optional" if self.distill_candidates == "batch" else "some"

    def needs_vectors(self) -> bool:
        """See Loss."""
        return self.distill_candidates == "batch"

    def share(self, batch: LossBatch, term: TermLoss) -> Tensor:
        """See Loss."""
        from vembed.losses.listed import ListedPairs

        if self.distill_candidates == "batch":
            return self._share_over_batch(batch, term)
        pairs = ListedPairs.of_rank(batch)
        targets = self.targets(batch, term, pairs)
        student, teacher = self.log_softmaxes(batch, term, pairs, targets)
        losses = teacher.exp() * (teacher - student)
        # Divided by the rows of all ranks, of which this rank adds up its own: the
        # shares of the ranks sum to L.
        return term.mean(losses, batch.num_rows)

    def _share_over_batch(self, batch: LossBatch, term: TermLoss) -> Tensor:
        from vembed.losses.candidates import find_candidates
        from vembed.losses.row_losses import DivergenceRows
        from vembed.losses.tiles import Scoring, tiled_loss

        scoring = Scoring(
            candidates=find_candidates(batch, self),
            similarity=term.similarity(batch.embeddings),
            row_loss=partial(DivergenceRows, target_scale=self.target_scale()),
            coefficients=(1.0 / max(1, batch.num_rows),),
            tiling=term.tiling,
            teacher=batch.teacher_vectors(
                str(term.teacher), "loss: kl with distill_candidates: batch"
            ),
        )
        return tiled_loss(batch.embeddings, scoring, term.scale(batch.embeddings))


class ScoreMSE(SoftmaxLoss):
    """The squared error of the softmax of the scores, over C_i.

    L = 1/N * sum_i 1/|C_i| * sum_{c in C_i} ( softmax(t_i / T')_c - softmax(s_i / T)_c )^2
    """

    name = "score_mse"
    summary = "the teacher's probabilities of a row's documents"
    records = "pairs"
    negatives = "some"
    follows = "teacher"

    def share(self, batch: LossBatch, term: TermLoss) -> Tensor:
        """See Loss."""
        from vembed.losses.listed import ListedPairs

        pairs = ListedPairs.of_rank(batch)
        targets = self.targets(batch, term, pairs)
        student, teacher = self.log_softmaxes(batch, term, pairs, targets)
        size = pairs.groups.bincount(minlength=pairs.num_groups).to(student.dtype)
        errors = (teacher.exp() - student.exp()).square() / size[pairs.groups]
        return term.mean(errors, batch.num_rows)


class MarginMSE(ListedLoss):
    """The squared error of the margins: the mean over all M pairs (row i, hard negative n).

    L = 1/M * sum ( (s(q_i,p_i) - s(q_i,n)) - (t(q_i,p_i) - t(q_i,n)) )^2
    """

    name = "margin_mse"
    summary = "the teacher's margins between a positive and its negatives"
    records = "pairs"
    negatives = "some"
    follows = "teacher"

    def share(self, batch: LossBatch, term: TermLoss) -> Tensor:
        """See Loss."""
        from vembed.losses.listed import ListedPairs

        pairs = ListedPairs.of_rank(batch)
        # Both differences of the formula at once: (s_p - t_p) - (s_n - t_n).
        errors = term.scores(batch, pairs) - self.targets(batch, term, pairs)
        # M counts the pairs of all ranks: each rank needs the same divisor.
        return term.mean(pairs.margins(errors).square(), pairs.num_negative_pairs)


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

        lists = ListedPairs.of_examples(batch, of_rank=True)
        errors = term.scores(batch, lists) - self.targets(batch, term, lists)
        return term.mean(errors.square(), batch.num_rows + lists.num_negative_pairs)


class Listwise(SoftmaxLoss):
    """ListNet, over the E examples of the global batch and the documents that have a score.

    L = 1/E * sum_e - sum_{c in C_e} softmax(t_e / T')_c * log softmax(s_e / T)_c
    """

    name = "listwise"
    summary = "the distribution of graded scores over a query's documents (ListNet)"
    records = "pairs"
    negatives = "optional"
    follows = "scores_or_teacher"

    def share(self, batch: LossBatch, term: TermLoss) -> Tensor:
        """See Loss."""
        from vembed.losses.listed import ListedPairs

        lists = ListedPairs.of_examples(batch, of_rank=True)
        targets = self.targets(batch, term, lists, may_lack=True)
        is_known = ~targets[0].isnan()
        known = lists.select(is_known)
        student, teacher = self.log_softmaxes(batch, term, known, targets[:, is_known])
        return -term.mean(teacher.exp() * student, lists.num_groups)


class RankNet(ListedLoss, Temperature):
    """The mean over all M pairs (a, b) of documents of one example with t_a > t_b.

        L = 1/M * sum log( 1 + exp((s_b - s_a) / T) )

    A hard negative without a score is below every document that has one.
    """

    name = "ranknet"
    summary = "the order of graded scores of a query's documents"
    records = "pairs"
    negatives = "optional"
    follows = "scores_or_teacher"

    def share(self, batch: LossBatch, term: TermLoss) -> Tensor:
        """See Loss."""
        import torch.nn.functional as F

        from vembed.losses.listed import ListedPairs

        lists = ListedPairs.of_examples(batch)
        targets = self.targets(batch, term, lists, may_lack=True)
        # Of all ranks, as the divisor. The student's scores are not needed for it.
        num_pairs = lists.ordered(targets[0])[0].numel()
        rank_lists = ListedPairs.of_examples(batch, of_rank=True)
        targets = self.targets(batch, term, rank_lists, may_lack=True)
        above, below = rank_lists.ordered(targets[0])
        logits = term.scores(batch, rank_lists) * term.scale(batch.embeddings)
        differences = logits[:, below] - logits[:, above]
        # Above 50, log(1 + exp(x)) is x to float64's precision. The default threshold
        # of torch, 20, is for float32.
        return term.mean(F.softplus(differences, threshold=50.0), num_pairs)


class Lambda(ListedLoss):
    """LambdaLoss (NDCG-Loss2++), over the M pairs (a, b) of documents of one example with y_a > y_b.

        L = 1/M * sum |G_a - G_b| (10 |1/D(d) - 1/D(d+1)| + |1/D(r_a) - 1/D(r_b)|) log2(1 + exp(s_b - s_a))

    with r the rank of a document by the model's scores, from 1, d = |r_a - r_b|, the
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
        import torch
        import torch.nn.functional as F

        from vembed.losses.listed import ListedPairs

        lists = ListedPairs.of_examples(batch)
        # Of all ranks, as the divisor. The model's scores are not needed for it.
        num_pairs = lists.ordered(self.labels(batch, term, lists))[0].numel()
        rank_lists = ListedPairs.of_examples(batch, of_rank=True)
        labels = self.labels(batch, term, rank_lists)
        above, below = rank_lists.ordered(labels)
        scores = term.scores(batch, rank_lists)  # [K, n + P]
        gain = 2.0 ** labels.clamp(min=0.0) - 1.0
        # The highest DCG of each list, by the order of the labels.
        discounted = gain / (1.0 + _ranks_in_lists(labels, rank_lists)).log2()
        ideal = discounted.new_zeros(rank_lists.num_groups)
        ideal = ideal.index_add(0, rank_lists.groups, discounted)
        gain = gain / ideal.clamp(min=1e-10)[rank_lists.groups]
        by_size = [_ranks_in_lists(row, rank_lists) for row in scores.detach()]
        ranks = torch.stack(by_size)  # [K, n + P]
        distance = (ranks[:, above] - ranks[:, below]).abs()
        close = 1.0 / (1.0 + distance).log2() - 1.0 / (2.0 + distance).log2()
        discount = 1.0 / (1.0 + ranks).log2()
        far = (discount[:, above] - discount[:, below]).abs()
        weight = (gain[above] - gain[below]).abs() * (CLOSE_WEIGHT * close + far)
        # Above 50, log(1 + exp(x)) is x to float64's precision.
        differences = scores[:, below] - scores[:, above]
        losses = weight * F.softplus(differences, threshold=50.0) / math.log(2.0)
        return term.mean(losses, num_pairs)


class BCE(ListedLoss):
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

        lists = ListedPairs.of_examples(batch, of_rank=True)
        scores = term.scores(batch, lists)  # [K, n + P]
        labels = self.labels(batch, term, lists).expand_as(scores)
        losses = F.binary_cross_entropy_with_logits(scores, labels, reduction="none")
        return term.mean(losses, batch.num_rows + lists.num_negative_pairs)


def _ranks_in_lists(scores: Tensor, lists: ListedPairs) -> Tensor:
    """Return [n + P] the rank of each document in its list by descending scores [n + P], from 1. Of equal scores the
    first comes first."""
    import torch

    # Not bincount, for which the host would wait: it looks for the largest group.
    sizes = lists.groups.new_zeros(lists.num_groups)
    sizes = sizes.index_add(0, lists.groups, torch.ones_like(lists.groups))
    starts = sizes.cumsum(0) - sizes
    by_score = torch.sort(scores, descending=True, stable=True).indices
    order = by_score[torch.sort(lists.groups[by_score], stable=True).indices]
    ranks = torch.empty_like(scores)
    counted = torch.arange(len(order), device=order.device)
    ranks[order] = (counted - starts[lists.groups[order]] + 1).to(ranks.dtype)
    return ranks
