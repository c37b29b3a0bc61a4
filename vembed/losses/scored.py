"""Losses on scores: of pairs of the data (cosent, angle, cosine), and of listed documents (the others).

For listed documents C_i are the positive of row i and the hard negatives of its example, C_e all documents of example e:
its positives and hard negatives. s are the scores of the model: a reranker's own, or the similarities of vectors. t are
the scores of a teacher or of the data, T the temperature and T' that of the teacher. y are labels: t, and without a
teacher or scores 1 for a positive and 0 for a negative. A negative without a score has the label 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from vembed.config.values import PositiveFloat
from vembed.losses.declaration import (
    CandidateLoss,
    Follows,
    LossDeclaration,
    Negatives,
    TeacherLoss,
    Temperature,
)

if TYPE_CHECKING:
    from torch import Tensor

    from vembed.losses.batch import ListedPairs, LossBatch
    from vembed.losses.build import TermModule
    from vembed.losses.similarity import Similarity

CLOSE_WEIGHT = 10.0
"""Of LambdaLoss: weight of NDCG-Loss2 beside LambdaRank, mu of the paper."""


# ---- Pairs with label scores, by their order or by their values ----------------------------


class CoSENT(Temperature):
    """The CoSENT loss, of the similarity s_i and the label score y_i of each row.

        L = log( 1 + sum over all (i, j) with y_i > y_j of exp((s_j - s_i) / T) )

    Only the order of the label scores matters. L is not a sum over rows, so every rank
    computes it whole and returns L * own rows / all rows. After sorting by y the inner
    sum is a running logsumexp: O(N log N) without a matrix.
    """

    name = "cosent"
    summary = "the order of the scores"
    records = "scores"
    negatives = "unread"
    # The sum runs over all comparisons of a batch, of which a smaller temperature leaves the few worst.
    default_temperature = 0.1
    ranks_pairs = True

    def share(self, batch: LossBatch, term: TermModule) -> Tensor:
        """See LossDeclaration."""
        import torch

        from vembed.losses.similarity import length_of

        scores = self.pair_scores(batch, term.similarity(batch.embeddings))
        labels = batch.required_label_scores(self.name).to(scores.device)
        labels, order = torch.sort(labels)
        logits = scores[:, order] * term.scale(batch.embeddings)  # [K, N]
        # Number of rows with a strictly lower label: ties compare with nothing.
        num_lower = torch.searchsorted(labels, labels)
        has_lower = num_lower > 0
        last_lower = num_lower[has_lower] - 1
        below = logits.logcumsumexp(dim=1)[:, last_lower]
        differences = below - logits[:, has_lower]
        # The zero column is the "1 +" of the formula. [K, 1 + rows with lower ones]
        zero_column = logits.new_zeros(len(logits), 1)
        terms = torch.cat((zero_column, differences), dim=1)
        total = term.run_similarity.total(terms.logsumexp(dim=1))
        share = length_of(batch.rank_rows) / max(1, batch.num_rows)
        return total * share

    def pair_scores(self, batch: LossBatch, similarity: Similarity) -> Tensor:
        """Return [K, N] the similarities of all pairs at all dims."""
        from vembed.losses.similarity import pair_scores

        return pair_scores(batch.embeddings, batch.query, batch.positive, similarity)


class Angle(CoSENT):
    """The loss of AnglE: CoSENT on s_i = |sum of re(z) + im(z)| * |b| / |a|, z = a / b

    of a query and a document whose first halves are real and second halves imaginary
    parts: the quotient of complex numbers has the difference of their angles, without
    the saturation of the cosine. With J(x, y) = (y, -x) this is |(a + J a) . b| /
    (|a| |b|), the square root of 2 times the cosine of a + J a and b.
    """

    name = "angle"
    summary = "the order of the scores, by the angle in the complex plane (AnglE)"

    def refusal(self, dims: Sequence[int]) -> str | None:
        """See LossDeclaration."""
        for dim in dims:
            if dim % 2:
                return (
                    "loss: angle reads halves of a vector as real and imaginary parts, and mrl_dims has "
                    f"{dim:,d}: give even dims"
                )
        return None

    def pair_scores(self, batch: LossBatch, similarity: Similarity) -> Tensor:
        """Return [K, N] the sums of the parts of all pairs at all dims. O(N) memory."""
        import torch

        from vembed.losses.similarity import Similarity, pair_scores

        scores = []
        for dim in similarity.dims:
            # A prefix is split into its own halves, so each dim is a new computation.
            prefixes = batch.embeddings[:, :dim]
            real, imaginary = prefixes[batch.query].chunk(2, dim=1)
            turned = torch.cat((real + imaginary, imaginary - real), dim=1)
            rows = torch.cat((turned, prefixes[batch.positive]))
            entries = torch.arange(len(rows), device=rows.device)
            left, right = entries.chunk(2)
            cosine = Similarity(cosine=True, dims=(dim,))
            angles = pair_scores(rows, left, right, cosine).abs()
            scores.append(angles * math.sqrt(2))
        return torch.cat(scores)


class Cosine(LossDeclaration):
    """The mean squared error of the similarity: L = 1/N * sum_i (s_i - y_i)^2.

    For the cosine the label scores must lie in [-1, 1], which is checked when they are
    read. Ratings from 0 to 5, for example, must be rescaled first.
    """

    name = "cosine"
    summary = "the scores themselves, within [-1, 1]"
    records = "scores"
    negatives = "unread"

    def score_range(self, similarity: str) -> tuple[float, float] | None:
        """See LossDeclaration."""
        return (-1.0, 1.0) if similarity == "cosine" else None

    def share(self, batch: LossBatch, term: TermModule) -> Tensor:
        """See LossDeclaration."""
        from vembed.losses.similarity import pair_scores

        rank_rows = batch.rank_rows
        embeddings = batch.embeddings
        labels = batch.required_label_scores(self.name)[rank_rows]
        labels = batch.like_scores(labels)
        left = batch.query[rank_rows]
        right = batch.positive[rank_rows]
        similarity = term.similarity(embeddings)
        scores = pair_scores(embeddings, left, right, similarity)  # [K, n]
        errors = scores - labels
        return term.mean(errors.square(), batch.num_rows)


# ---- Listed documents ----------------------------------------------------------------------


class ListedLoss(TeacherLoss):
    """Base class of the losses on listed pairs. They follow the scores of the data, or a teacher."""

    follows: ClassVar[Follows] = "scores_or_teacher"
    reads_lists = True

    def targets(
        self,
        batch: LossBatch,
        term: TermModule,
        pairs: ListedPairs,
    ) -> Tensor:
        """Return [1, n + P] the scores that the student's are compared with, NaN for hard negatives without one."""
        from vembed.losses.batch import TeacherScores

        if not term.follows_data:
            teaching = batch.teachers[str(term.teacher)]
            return batch.like_scores(teaching.scores_of(pairs))
        positive = batch.required_label_scores(self.name)
        negative = batch.negative_label_scores
        assert negative is not None, "the data give both or none"
        scores = TeacherScores(positive, negative)
        return batch.like_scores(scores.scores_of(pairs))

    def labels(
        self,
        batch: LossBatch,
        term: TermModule,
        lists: ListedPairs,
    ) -> Tensor:
        """Return [n + P] the labels y."""
        if term.follows_data and batch.label_scores is None:
            # Positives come first.
            labels = batch.embeddings.new_zeros(len(lists.groups))
            labels[: len(lists.rows)] = 1.0
            return batch.like_scores(labels)
        targets = self.targets(batch, term, lists)
        return targets[0].nan_to_num(nan=0.0)

    def num_ordered(self, batch: LossBatch, term: TermModule) -> int:
        """Return the number of ordered pairs of documents on all ranks, the divisor of a mean over them."""
        lists = batch.listed_by_example(of_rank=False)
        above, _ = lists.ordered(self.labels(batch, term, lists))
        return above.numel()


class SoftmaxLoss(ListedLoss, Temperature):
    """Base class of the losses that compare a softmax of scores with the teacher's."""

    teacher_temperature: PositiveFloat | None = None
    """loss: kl, score_mse, listwise: a teacher's scores are divided by it. Default: `temperature`."""

    def teacher_scale(self) -> float:
        """Return one over the teacher's temperature."""
        return 1.0 / (self.teacher_temperature or self.temperature)

    def log_softmaxes(
        self,
        batch: LossBatch,
        term: TermModule,
        pairs: ListedPairs,
        targets: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the log softmax within each group of the student [K, n + P] and of the teacher [1, n + P]."""
        student = pairs.log_softmax(term.logits(batch, pairs))
        teacher = pairs.log_softmax(targets * self.teacher_scale())
        return student, teacher


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
        """See LossDeclaration."""
        return "optional" if self.distill_candidates == "batch" else "some"

    def needs_vectors(self) -> bool:
        """See LossDeclaration."""
        return self.distill_candidates == "batch"

    def share(self, batch: LossBatch, term: TermModule) -> Tensor:
        """See LossDeclaration."""
        from vembed.losses.candidates import CandidateRule, plan_scores
        from vembed.losses.tiles import DivergenceRows, Scoring, tiled_loss

        if self.distill_candidates == "listed":
            pairs = batch.listed_by_row()
            targets = self.targets(batch, term, pairs)
            student, teacher = self.log_softmaxes(batch, term, pairs, targets)
            losses = teacher.exp() * (teacher - student)
            # Divided by the rows of all ranks, of which this rank adds up its own: the shares of the ranks sum to L.
            return term.mean(losses, batch.num_rows)
        rule = CandidateRule(self.hard_negatives_scope)
        scoring = Scoring(
            plan=plan_scores(batch, rule),
            similarity=term.similarity(batch.embeddings),
            row_loss=DivergenceRows,
            row_loss_options={"teacher_scale": self.teacher_scale()},
            direction_factors=(1.0 / max(1, batch.num_rows),),
            teacher=batch.teacher_vectors(term.teacher),
        )
        scale = term.scale(batch.embeddings)
        return tiled_loss(batch.embeddings, scoring, scale)


class ScoreMSE(SoftmaxLoss):
    """The squared error of the softmax of the scores, over C_i.

    L = 1/N * sum_i 1/|C_i| * sum_{c in C_i} ( softmax(t_i / T')_c - softmax(s_i / T)_c )^2
    """

    name = "score_mse"
    summary = "the teacher's probabilities of a row's documents"
    records = "pairs"
    negatives = "some"
    follows = "teacher"

    def share(self, batch: LossBatch, term: TermModule) -> Tensor:
        """See LossDeclaration."""
        pairs = batch.listed_by_row()
        targets = self.targets(batch, term, pairs)
        student, teacher = self.log_softmaxes(batch, term, pairs, targets)
        sizes = pairs.groups.bincount(minlength=pairs.num_groups)
        size = sizes.to(student.dtype)[pairs.groups]
        differences = teacher.exp() - student.exp()
        return term.mean(differences.square() / size, batch.num_rows)


class MarginMSE(ListedLoss):
    """The squared error of the margins: the mean over all M pairs (row i, hard negative n).

    L = 1/M * sum ( (s(q_i,p_i) - s(q_i,n)) - (t(q_i,p_i) - t(q_i,n)) )^2
    """

    name = "margin_mse"
    summary = "the teacher's margins between a positive and its negatives"
    records = "pairs"
    negatives = "some"
    follows = "teacher"

    def share(self, batch: LossBatch, term: TermModule) -> Tensor:
        """See LossDeclaration."""
        pairs = batch.listed_by_row()
        # Both differences of the formula at once: (s_p - t_p) - (s_n - t_n).
        targets = self.targets(batch, term, pairs)
        errors = pairs.margins(term.scores(batch, pairs) - targets)
        # M counts the pairs of all ranks: each rank needs the same divisor.
        return term.mean(errors.square(), pairs.num_negative_pairs)


class MSE(ListedLoss):
    """The squared error of the scores, over all M documents of the global batch.

    L = 1/M * sum_e sum_{c in C_e} (s_c - t_c)^2
    """

    name = "mse"
    summary = "a teacher's scores themselves"
    records = "pairs"
    negatives = "optional"
    follows = "teacher"

    def share(self, batch: LossBatch, term: TermModule) -> Tensor:
        """See LossDeclaration."""
        lists = batch.listed_by_example()
        targets = self.targets(batch, term, lists)
        errors = term.scores(batch, lists) - targets
        num_documents = batch.num_rows + lists.num_negative_pairs
        return term.mean(errors.square(), num_documents)


class Listwise(SoftmaxLoss):
    """ListNet, over the M examples of the global batch and the documents that have a score.

    L = 1/M * sum_e - sum_{c in C_e} softmax(t_e / T')_c * log softmax(s_e / T)_c
    """

    name = "listwise"
    summary = "the distribution of graded scores over a query's documents (ListNet)"
    records = "pairs"
    negatives = "optional"

    def share(self, batch: LossBatch, term: TermModule) -> Tensor:
        """See LossDeclaration."""
        lists = batch.listed_by_example()
        targets = self.targets(batch, term, lists)
        is_known = ~targets[0].isnan()
        known = lists.select(is_known)
        targets = targets[:, is_known]
        student, teacher = self.log_softmaxes(batch, term, known, targets)
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
    counts_unscored = True

    def labels(
        self,
        batch: LossBatch,
        term: TermModule,
        lists: ListedPairs,
    ) -> Tensor:
        """Return [n + P] the scores t, NaN where there is none."""
        return self.targets(batch, term, lists)[0]

    def share(self, batch: LossBatch, term: TermModule) -> Tensor:
        """See LossDeclaration."""
        from vembed.losses.similarity import softplus

        num_pairs = self.num_ordered(batch, term)
        lists = batch.listed_by_example()
        above, below = lists.ordered(self.labels(batch, term, lists))
        logits = term.logits(batch, lists)
        differences = logits[:, below] - logits[:, above]  # [K, M of this rank]
        return term.mean(softplus(differences), num_pairs)


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
    counts_unscored = True
    # 2**128 is infinite in float32, and a list adds up its gains.
    score_limits = (-math.inf, 100.0)

    def share(self, batch: LossBatch, term: TermModule) -> Tensor:
        """See LossDeclaration."""
        import torch

        from vembed.losses.similarity import softplus

        num_pairs = self.num_ordered(batch, term)
        lists = batch.listed_by_example()
        labels = self.labels(batch, term, lists)
        above, below = lists.ordered(labels)
        scores = term.scores(batch, lists)  # [K, n + P]
        gain = 2.0 ** labels.clamp(min=0.0) - 1.0
        # The highest DCG of each list, by the order of the labels.
        ideal_ranks = _ranks_in_lists(labels, lists)
        discounted = gain / (1.0 + ideal_ranks).log2()
        ideal = discounted.new_zeros(lists.num_groups)
        ideal = ideal.index_add(0, lists.groups, discounted)
        ideal = ideal.clamp(min=1e-10)
        gain = gain / ideal[lists.groups]
        by_dim = [_ranks_in_lists(row, lists) for row in scores.detach()]
        ranks = torch.stack(by_dim)  # [K, n + P]
        distance = (ranks[:, above] - ranks[:, below]).abs()
        nearer = 1.0 / (1.0 + distance).log2()
        farther = 1.0 / (2.0 + distance).log2()
        close = nearer - farther
        discount = 1.0 / (1.0 + ranks).log2()
        far = discount[:, above] - discount[:, below]
        gain_difference = gain[above] - gain[below]
        weight = gain_difference.abs() * (CLOSE_WEIGHT * close + far.abs())
        differences = scores[:, below] - scores[:, above]
        losses = weight * softplus(differences) / math.log(2.0)
        return term.mean(losses, num_pairs)


class BCE(ListedLoss):
    """The binary cross-entropy of each document, over all M documents of the global batch.

    L = 1/M * sum_e sum_{c in C_e} log(1 + exp(s_c)) - y_c s_c

    A label y outside [0, 1] would draw its score to infinity. Of a reranker's scores, which are logits, y is the
    logistic function.
    """

    name = "bce"
    summary = "each document relevant or not, by the logistic function of its score"
    records = "pairs"
    negatives = "optional"
    counts_unscored = True
    score_limits = (0.0, 1.0)

    def share(self, batch: LossBatch, term: TermModule) -> Tensor:
        """See LossDeclaration."""
        import torch.nn.functional as F

        lists = batch.listed_by_example()
        scores = term.scores(batch, lists)  # [K, n + P]
        labels = self.labels(batch, term, lists).expand_as(scores)
        if not term.follows_data:
            labels = labels.sigmoid()
        losses = F.binary_cross_entropy_with_logits(scores, labels, reduction="none")
        num_documents = batch.num_rows + lists.num_negative_pairs
        return term.mean(losses, num_documents)


def _ranks_in_lists(scores: Tensor, lists: ListedPairs) -> Tensor:
    """Return [n + P] the rank of each document in its list by descending scores [n + P], from 1. Of equal scores the
    first comes first."""
    import torch

    # Not bincount, for which the host would wait: it looks for the largest group.
    groups = lists.groups
    sizes = groups.new_zeros(lists.num_groups)
    sizes = sizes.index_add(0, groups, torch.ones_like(groups))
    starts = sizes.cumsum(0) - sizes
    by_score = torch.argsort(scores, descending=True, stable=True)
    order = by_score[torch.argsort(groups[by_score], stable=True)]
    ranks = torch.empty_like(scores)
    counted = torch.arange(len(order), device=order.device)
    start = starts[groups[order]]
    ranks[order] = (counted - start + 1).to(ranks.dtype)
    return ranks
