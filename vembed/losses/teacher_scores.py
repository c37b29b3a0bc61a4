"""kl, score_mse, margin_mse, listwise, ranknet: scores of a teacher or of the data.

t are the scores of a teacher or of the data, s the similarities of the student, T the
temperature and T' that of the teacher. C_i are the positive of row i and the hard
negatives of its example, C_e all documents of example e.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from vembed.config.values import PositiveFloat
from vembed.errors import UserError
from vembed.losses.declaration import (
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

SCORES = "scores"
"""Name of the teacher whose scores are in the data."""


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
        """Return [1, E] the scores that the student's are compared with.

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
        """Return the log softmax within each group of the student [K, E] and of the teacher [1, E]."""
        from vembed.losses.listed import grouped_log_softmax

        scores = pairs.model_scores(batch, term.similarity(batch.embeddings))
        logits = scores * term.scale(batch.embeddings)
        student = grouped_log_softmax(logits, pairs.groups, pairs.num_groups)
        teacher = grouped_log_softmax(
            targets * self.target_scale(), pairs.groups, pairs.num_groups
        )
        return student, teacher

    def row_log_softmaxes(
        self, batch: LossBatch, term: TermLoss
    ) -> tuple[ListedPairs, Tensor, Tensor]:
        """Return the pairs of this rank's rows, and `log_softmaxes` of them."""
        from vembed.losses.listed import ListedPairs

        pairs = ListedPairs.of_rank(batch)
        targets = self.targets(batch, term, pairs)
        student, teacher = self.log_softmaxes(batch, term, pairs, targets)
        return pairs, student, teacher


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
        if self.distill_candidates == "batch":
            return self._share_over_batch(batch, term)
        _, student, teacher = self.row_log_softmaxes(batch, term)
        losses = (teacher.exp() * (teacher - student)).sum(1)
        # Divided by the rows of all ranks, of which this rank adds up its own: the
        # shares of the ranks sum to L.
        return term.similarity(batch.embeddings).total(losses) / max(1, batch.num_rows)

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
        pairs, student, teacher = self.row_log_softmaxes(batch, term)
        size = pairs.groups.bincount(minlength=pairs.num_groups).to(student.dtype)
        errors = (teacher.exp() - student.exp()).square() / size[pairs.groups]
        similarity = term.similarity(batch.embeddings)
        return similarity.total(errors.sum(1)) / max(1, batch.num_rows)


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
        similarity = term.similarity(batch.embeddings)
        scores = pairs.model_scores(batch, similarity)
        # Both differences of the formula at once: (s_p - t_p) - (s_n - t_n).
        errors = pairs.margins(scores - self.targets(batch, term, pairs))
        losses = errors.square().sum(1)
        # M counts the pairs of all ranks: each rank needs the same divisor.
        return similarity.total(losses) / max(1, pairs.num_negative_pairs)


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
        losses = -(teacher.exp() * student).sum(1)
        similarity = term.similarity(batch.embeddings)
        return similarity.total(losses) / max(1, lists.num_groups)


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

        from vembed.losses.listed import ListedPairs, ordered_pairs

        lists = ListedPairs.of_examples(batch)
        targets = self.targets(batch, term, lists, may_lack=True)
        # Of all ranks, as the divisor. The student's scores are not needed for it.
        num_pairs = ordered_pairs(lists.groups, targets[0])[0].numel()
        rank_lists = ListedPairs.of_examples(batch, of_rank=True)
        targets = self.targets(batch, term, rank_lists, may_lack=True)
        above, below = ordered_pairs(rank_lists.groups, targets[0])
        similarity = term.similarity(batch.embeddings)
        scores = rank_lists.model_scores(batch, similarity)
        logits = scores * term.scale(batch.embeddings)
        differences = logits[:, below] - logits[:, above]
        # Above 50, log(1 + exp(x)) is x to float64's precision. The default threshold
        # of torch, 20, is for float32.
        losses = F.softplus(differences, threshold=50.0).sum(1)
        return similarity.total(losses) / max(1, num_pairs)
