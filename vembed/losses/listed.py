"""Losses on listed pairs: a row's own pair and the hard negatives of its example, and lists of graded documents.

t are the scores of a teacher or of the data, s the student's similarities, T the temperature and T' the teacher's.
None of them needs a matrix: their memory grows with the number of listed pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vembed.config.schema import TrainConfig
from vembed.config.terms import SCORES, followed_teacher
from vembed.errors import UserError
from vembed.losses.batch import LossBatch
from vembed.losses.candidates import explicit_negatives, join_equal, numbers_of
from vembed.losses.matryoshka import Similarity, arithmetic_dtype
from vembed.losses.pairs import pair_scores
from vembed.losses.targets import TeacherScores, Teaching
from vembed.losses.temperature import TemperedLoss


@dataclass(frozen=True, slots=True)
class Entries:
    """Scored pairs in groups: of each entry its group, the student's score and the wanted one."""

    group: Tensor
    """[E] number of the entry's group, counted from 0."""
    scores: Tensor
    """[K, E] the student's, at all sizes."""
    targets: Tensor
    """[E]"""
    num_groups: int


class ListedLoss(TemperedLoss):
    """Base of the losses on listed pairs."""

    def __init__(
        self, config: TrainConfig, mrl_dims: Sequence[int], start_scale: float | None
    ) -> None:
        super().__init__(config, mrl_dims, start_scale)
        self.teacher_name = followed_teacher(config)

    def teaching(self, batch: LossBatch) -> Teaching:
        """Targets that the scores are compared with."""
        if self.teacher_name not in (None, SCORES):
            return batch.teacher(str(self.teacher_name))
        positive = batch.required_scores(self.config.objective.loss)
        if batch.negative_scores is None:
            # Without scores of their own, hard negatives are below everything that has one.
            lowest = positive.new_full((batch.negative.numel(),), float("nan"))
            return TeacherScores(positive, lowest)
        return TeacherScores(positive, batch.negative_scores)

    def scored_teaching(self, batch: LossBatch) -> Teaching:
        """The same, for losses that need a score for every hard negative too."""
        if (
            self.teacher_name in (None, SCORES)
            and batch.negative_scores is None
            and batch.negative.numel()
        ):
            raise UserError(
                f"loss: {self.config.objective.loss} with teacher: scores needs a score for every positive and every negative of "
                "a record; give as many scores as there are both, or name a model as teacher."
            )
        return self.teaching(batch)

    def rows(self, batch: LossBatch, similarity: Similarity) -> Entries:
        """A group for each own row: its own pair, then the hard negatives of its example."""
        own, everywhere = (
            batch.own(),
            numbers_of(slice(0, batch.negative.numel()), batch),
        )
        # Each row with each hard negative of its example; with mask_duplicates less those that equal a positive of it.
        row, negative = explicit_negatives(
            batch,
            own,
            everywhere,
            mask_duplicates=self.config.objective.mask_duplicates,
        )
        teaching = self.scored_teaching(batch)
        left = torch.cat((batch.query[own], batch.query[own][row]))
        right = torch.cat((batch.positive[own], batch.negative[negative]))
        targets = torch.cat(
            (
                teaching.own_scores(own),
                teaching.negative_scores(row + own.start, negative),
            )
        )
        return Entries(
            group=torch.cat((torch.arange(batch.num_own_rows, device=row.device), row)),
            scores=pair_scores(
                batch.embeddings, batch.places(left), batch.places(right), similarity
            ),
            targets=targets.to(
                batch.embeddings.device, arithmetic_dtype(batch.embeddings)
            ),
            num_groups=batch.num_own_rows,
        )

    def target_scale(self) -> float:
        """One over the teacher's temperature."""
        return 1.0 / (
            self.config.objective.teacher_temperature
            or self.config.objective.temperature
        )


class ListedDivergence(ListedLoss):
    """loss: kl, distill_candidates: listed. With C_i the positive of row i and the hard negatives of its example,

    L = 1/N * sum_i KL( softmax_{c in C_i}(t_ic / T') || softmax_{c in C_i}(s_ic / T) )
    """

    def forward(self, batch: LossBatch) -> Tensor:
        """Return the own rows' part of L."""
        similarity = self.similarity_for(batch.embeddings)
        entries = self.rows(batch, similarity)
        student = grouped_log_softmax(
            entries.scores * self.scale_for(batch.embeddings), entries
        )
        teacher = grouped_log_softmax(
            entries.targets[None] * self.target_scale(), entries
        )
        losses = (teacher.exp() * (teacher - student)).sum(1)
        # Divided by the rows of all ranks, of which this rank adds up its own: the ranks' parts sum to L.
        return similarity.total(losses) / max(1, batch.num_rows)


class ScoreError(ListedLoss):
    """loss: score_mse. With C_i as in kl,

    L = 1/N * sum_i 1/|C_i| * sum_{c in C_i} ( softmax(t_i / T')_c - softmax(s_i / T)_c )^2
    """

    def forward(self, batch: LossBatch) -> Tensor:
        """Return the own rows' part of L."""
        similarity = self.similarity_for(batch.embeddings)
        entries = self.rows(batch, similarity)
        student = grouped_log_softmax(
            entries.scores * self.scale_for(batch.embeddings), entries
        ).exp()
        teacher = grouped_log_softmax(
            entries.targets[None] * self.target_scale(), entries
        ).exp()
        size = torch.bincount(entries.group, minlength=entries.num_groups).to(
            student.dtype
        )
        losses = ((teacher - student).square() / size[entries.group]).sum(1)
        return similarity.total(losses) / max(1, batch.num_rows)


class MarginError(ListedLoss):
    """loss: margin_mse. The mean over all (row i, hard negative n of row i's example) of the global batch:

    L = 1/M * sum ( (s(q_i,p_i) - s(q_i,n)) - (t(q_i,p_i) - t(q_i,n)) )^2
    """

    def forward(self, batch: LossBatch) -> Tensor:
        """Return the own rows' part of L."""
        everywhere = (
            slice(0, batch.num_rows),
            numbers_of(slice(0, batch.negative.numel()), batch),
        )
        # M counts the pairs of all ranks, although only the own ones are scored: each rank needs the same divisor.
        num_pairs = explicit_negatives(
            batch, *everywhere, mask_duplicates=self.config.objective.mask_duplicates
        )[0].numel()
        similarity = self.similarity_for(batch.embeddings)
        entries = self.rows(batch, similarity)
        errors = entries.scores - entries.targets
        own, row = errors[:, : entries.num_groups], entries.group[entries.num_groups :]
        # Both differences of the formula at once: (s_p - t_p) - (s_n - t_n).
        margins = own[:, row] - errors[:, entries.num_groups :]
        return similarity.total(margins.square().sum(1)) / max(1, num_pairs)


class GradedLoss(ListedLoss):
    """Base of the losses on lists: all positives of one example, each with a score, and its hard negatives."""

    def lists(self, batch: LossBatch, similarity: Similarity | None) -> Entries:
        """A group for each example; without `similarity` of all ranks' examples and without the student's scores.
        A rank has the examples whose first row it has."""
        number, first = _examples(batch)
        every_row, negative = explicit_negatives(
            batch,
            slice(0, batch.num_rows),
            numbers_of(slice(0, batch.negative.numel()), batch),
            mask_duplicates=self.config.objective.mask_duplicates,
        )
        # Every row of an example with several positives has all its negatives: take those of the first row.
        of_first = first[number[every_row]] == every_row
        every_row, negative = every_row[of_first], negative[of_first]
        teaching = self.teaching(batch)
        group = torch.cat((number, number[every_row]))
        query = torch.cat((batch.query, batch.query[every_row]))
        document = torch.cat((batch.positive, batch.negative[negative]))
        targets = torch.cat(
            (
                teaching.own_scores(slice(None)),
                teaching.negative_scores(every_row, negative),
            )
        )
        if similarity is None:
            return Entries(
                group, targets.new_empty(0, group.numel()), targets, first.numel()
            )
        own = batch.own()
        # A list belongs to one rank, also where its rows lie on two: otherwise it would count twice.
        mine = (first[group] >= own.start) & (first[group] < own.stop)
        return Entries(
            group=group[mine],
            scores=pair_scores(
                batch.embeddings, query[mine], document[mine], similarity
            ),
            targets=targets[mine].to(
                batch.embeddings.device, arithmetic_dtype(batch.embeddings)
            ),
            num_groups=first.numel(),
        )


class Listwise(GradedLoss):
    """loss: listwise (ListNet). Over the E examples of the global batch, with C_e the documents that have a score,

    L = 1/E * sum_e - sum_{c in C_e} softmax(t_e / T')_c * log softmax(s_e / T)_c
    """

    def forward(self, batch: LossBatch) -> Tensor:
        """Return the own examples' part of L."""
        similarity = self.similarity_for(batch.embeddings)
        entries = self.lists(batch, similarity)
        known = ~entries.targets.isnan()
        entries = Entries(
            entries.group[known],
            entries.scores[:, known],
            entries.targets[known],
            entries.num_groups,
        )
        student = grouped_log_softmax(
            entries.scores * self.scale_for(batch.embeddings), entries
        )
        teacher = grouped_log_softmax(
            entries.targets[None] * self.target_scale(), entries
        )
        losses = -(teacher.exp() * student).sum(1)
        return similarity.total(losses) / max(1, entries.num_groups)


class RankNet(GradedLoss):
    """loss: ranknet. The mean over all pairs (a, b) of documents of one example with t_a > t_b of the global batch:

    L = 1/M * sum log( 1 + exp((s_b - s_a) / T) )

    A hard negative without a score is below every document that has one.
    """

    def forward(self, batch: LossBatch) -> Tensor:
        """Return the own examples' part of L."""
        similarity = self.similarity_for(batch.embeddings)
        # Of all ranks, as the divisor; the scores are not needed for it.
        num_pairs = ordered_pairs(self.lists(batch, None))[0].numel()
        entries = self.lists(batch, similarity)
        above, below = ordered_pairs(entries)
        logits = entries.scores * self.scale_for(batch.embeddings)
        # Above 50, log(1 + exp(x)) is x to float64's precision; torch's own threshold of 20 is for float32.
        losses = F.softplus(logits[:, below] - logits[:, above], threshold=50.0).sum(1)
        return similarity.total(losses) / max(1, num_pairs)


def grouped_log_softmax(logits: Tensor, entries: Entries) -> Tensor:
    """[K, E] log softmax within each group."""
    shape = len(logits), entries.num_groups
    group = entries.group.expand(len(logits), -1)
    # Relative to the largest logit of the group, so that no exp overflows. It cancels, so it needs no gradient.
    largest = logits.new_full(shape, -torch.inf).scatter_reduce(
        1, group, logits.detach(), "amax"
    )
    shifted = logits - largest.gather(1, group)
    sums = logits.new_zeros(shape).scatter_add(1, group, shifted.exp())
    return shifted - sums.gather(1, group).log()


def ordered_pairs(entries: Entries) -> tuple[Tensor, Tensor]:
    """[P], [P] numbers of entries of one group, of which the first has the higher target. NaN is below all others."""
    left, right = join_equal(entries.group, entries.group)
    targets = entries.targets.nan_to_num(nan=-torch.inf)
    higher = targets[left] > targets[right]
    return left[higher], right[higher]


def _examples(batch: LossBatch) -> tuple[Tensor, Tensor]:
    """[R] number of each row's example, counted from 0, and [E] the first row of each example."""
    examples, number = torch.unique(batch.example, return_inverse=True)
    rows = torch.arange(batch.num_rows, device=number.device)
    # The lowest row of each example: where its rows lie on two ranks, one of them has it.
    first = rows.new_full((examples.numel(),), batch.num_rows).scatter_reduce(
        0, number, rows, "amin"
    )
    return number, first
