"""Listed pairs: a row's positive pair and the hard negatives of its example, in groups.

Losses on them need no matrix: their memory grows with the number of listed pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vembed.losses.batch import ListedScores, LossBatch, copied_together
from vembed.losses.candidates import explicit_negatives, join_equal
from vembed.losses.similarity import Similarity, pair_scores


class StudentScores:
    """The similarities of a batch, as listed scores at all K sizes."""

    def __init__(self, batch: LossBatch, similarity: Similarity) -> None:
        self.batch = batch
        self.similarity = similarity

    def listed(self, rows: Tensor, negative_row: Tensor, negative: Tensor) -> Tensor:
        """See ListedScores. Differentiable once."""
        batch = self.batch
        left = torch.cat((batch.query[rows], batch.query[negative_row]))
        right = torch.cat((batch.positive[rows], batch.negative[negative]))
        # One call for all pairs, so that their gradients are accumulated once.
        return pair_scores(
            batch.embeddings,
            left,
            right,
            self.similarity,
        )


class PairScores:
    """The scores of a reranker, which are the outputs of the model themselves."""

    def __init__(self, batch: LossBatch) -> None:
        self.batch = batch

    def listed(self, rows: Tensor, negative_row: Tensor, negative: Tensor) -> Tensor:
        """See ListedScores."""
        del negative_row  # a pair knows its query
        batch = self.batch
        pairs = torch.cat((batch.positive[rows], batch.negative[negative]))
        return batch.embeddings[pairs, 0][None]


def student_scores(batch: LossBatch, similarity: Similarity) -> ListedScores:
    """Return the scores of the model that is trained: similarities of vectors, or a reranker's own."""
    if batch.holds_scores:
        return PairScores(batch)
    return StudentScores(batch, similarity)


@dataclass(frozen=True, slots=True)
class ListedPairs:
    """n positive pairs of rows, then P pairs of a row's query and a hard negative."""

    rows: Tensor
    """[n] row of each positive pair."""
    negative_row: Tensor
    """[P] row whose query meets the hard negative."""
    negative: Tensor
    """[P] number of the hard negative."""
    group: Tensor
    """[n + P] group of each pair, counted from 0."""
    num_groups: int

    @classmethod
    def of_rank(cls, batch: LossBatch, *, mask_duplicates: bool) -> ListedPairs:
        """Return a group for each row of this rank, whose positive pairs come first."""
        rank_rows = batch.rank_rows
        device = batch.query.device
        batch = batch.on_host()
        row, negative = explicit_negatives(
            batch, rank_rows, batch.negative_numbers(), mask_duplicates=mask_duplicates
        )
        numbers = torch.arange(batch.num_rank_rows, device=row.device)
        columns = (
            numbers + rank_rows.start,
            row + rank_rows.start,
            negative,
            torch.cat((numbers, row)),
        )
        rows, negative_row, negative, group = copied_together(columns, device)
        return cls(rows, negative_row, negative, group, batch.num_rank_rows)

    @classmethod
    def of_examples(cls, batch: LossBatch, *, mask_duplicates: bool) -> ListedPairs:
        """Return a group for each example of the global batch."""
        examples, example = torch.unique(batch.example, return_inverse=True)
        rows = torch.arange(batch.num_rows, device=example.device)
        first_row = _first_rows(batch)
        row, negative = explicit_negatives(
            batch,
            slice(0, batch.num_rows),
            batch.negative_numbers(),
            mask_duplicates=mask_duplicates,
        )
        # Every row of an example has all of its negatives: take those of the first.
        is_first = first_row[example[row]] == row
        row = row[is_first]
        return cls(
            rows=rows,
            negative_row=row,
            negative=negative[is_first],
            group=torch.cat((example, example[row])),
            num_groups=examples.numel(),
        )

    def of_rank_examples(self, batch: LossBatch) -> ListedPairs:
        """Return the groups of `of_examples` whose first row this rank has.

        A list belongs to one rank, also where its rows lie on two: otherwise it would
        count twice.
        """
        rank_rows = batch.rank_rows
        first_row = _first_rows(batch)[self.group]
        is_of_rank = (first_row >= rank_rows.start) & (first_row < rank_rows.stop)
        num_rows = self.rows.numel()
        return ListedPairs(
            rows=self.rows[is_of_rank[:num_rows]],
            negative_row=self.negative_row[is_of_rank[num_rows:]],
            negative=self.negative[is_of_rank[num_rows:]],
            group=self.group[is_of_rank],
            num_groups=self.num_groups,
        )

    def scores(self, source: ListedScores) -> Tensor:
        """Return [K, n + P] scores of all pairs."""
        return source.listed(self.rows, self.negative_row, self.negative)


def num_listed_pairs(batch: LossBatch, *, mask_duplicates: bool) -> int:
    """Return the number of (row, hard negative) pairs of all ranks."""
    batch = batch.on_host()
    row, _ = explicit_negatives(
        batch,
        slice(0, batch.num_rows),
        batch.negative_numbers(),
        mask_duplicates=mask_duplicates,
    )
    return row.numel()


def grouped_log_softmax(logits: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Return [K, E] the log softmax of logits [K, E] within each group."""
    shape = len(logits), num_groups
    group = group.expand(len(logits), -1)
    # Relative to the largest logit of the group, so that no exp overflows. It cancels,
    # so it needs no gradient.
    largest = logits.new_full(shape, -torch.inf).scatter_reduce(
        1, group, logits.detach(), "amax"
    )
    shifted = logits - largest.gather(1, group)
    sums = logits.new_zeros(shape).scatter_add(1, group, shifted.exp())
    return shifted - sums.gather(1, group).log()


def ordered_pairs(group: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pairs [P], [P] of one group of which the first has the higher target.

    A target that is not a number is below all others.
    """
    left, right = join_equal(group, group)
    targets = targets.nan_to_num(nan=-torch.inf)
    is_higher = targets[left] > targets[right]
    return left[is_higher], right[is_higher]


def _first_rows(batch: LossBatch) -> Tensor:
    """Return [examples] the lowest row of each example."""
    examples, example = torch.unique(batch.example, return_inverse=True)
    rows = torch.arange(batch.num_rows, device=example.device)
    none = rows.new_full((examples.numel(),), batch.num_rows)
    return none.scatter_reduce(0, example, rows, "amin")
