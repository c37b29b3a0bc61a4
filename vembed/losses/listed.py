"""Listed pairs: a row's positive pair and the hard negatives of its example, in groups.

Losses on them need no matrix: their memory grows with the number of listed pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vembed.losses.batch import LossBatch, TeacherVectors, copied_together
from vembed.losses.candidates import example_negatives, join_equal


@dataclass(frozen=True, slots=True)
class ListedPairs:
    """n positive pairs of rows, then P pairs of a row's query and a hard negative."""

    rows: Tensor
    """[n] row of each positive pair."""
    negative_rows: Tensor
    """[P] row whose query meets the hard negative."""
    negatives: Tensor
    """[P] number of the hard negative among those of the batch."""
    groups: Tensor
    """[n + P] group of each pair, counted from 0."""
    num_groups: int
    num_negative_pairs: int
    """Pairs with a hard negative on all ranks."""

    @classmethod
    def of_rank(cls, batch: LossBatch) -> ListedPairs:
        """Return a group for each row of this rank. Pair i of the n positive pairs is in group i."""
        rank_rows = batch.rank_rows
        # All ranks' pairs, since losses divide by their number.
        row, negative = example_negatives(batch.on_host(), slice(None))
        is_of_rank = (row >= rank_rows.start) & (row < rank_rows.stop)
        rows = torch.arange(rank_rows.start, rank_rows.stop, device=row.device)
        negative_rows = row[is_of_rank]
        tensors = {
            "rows": rows,
            "negative_rows": negative_rows,
            "negatives": negative[is_of_rank],
            "groups": torch.cat((rows, negative_rows)) - rank_rows.start,
        }
        return cls(
            **copied_together(tensors, batch.query.device),
            num_groups=rows.numel(),
            num_negative_pairs=row.numel(),
        )

    @classmethod
    def of_examples(cls, batch: LossBatch, *, of_rank: bool = False) -> ListedPairs:
        """Return a group for each example of the global batch.

        `of_rank`: only the pairs of examples whose first row this rank has. A list belongs to one rank, also where its
        rows lie on two: otherwise it would count twice. Groups keep their numbers.
        """
        host = batch.on_host()
        examples, example = torch.unique(host.example, return_inverse=True)
        rows = torch.arange(host.num_rows, device=example.device)
        first_row = rows.new_full((examples.numel(),), host.num_rows)
        first_row = first_row.scatter_reduce(0, example, rows, "amin")
        negative_rows, negatives = example_negatives(host, slice(None))
        # Every row of an example has all of its negatives: take those of the first.
        is_first = first_row[example[negative_rows]] == negative_rows
        negative_rows = negative_rows[is_first]
        negatives = negatives[is_first]
        num_negative_pairs = negative_rows.numel()
        if of_rank:
            rank_rows = batch.rank_rows
            is_of_rank = (first_row >= rank_rows.start) & (first_row < rank_rows.stop)
            is_of_rank = is_of_rank[example]
            negatives = negatives[is_of_rank[negative_rows]]
            negative_rows = negative_rows[is_of_rank[negative_rows]]
            rows = rows[is_of_rank]
        tensors = {
            "rows": rows,
            "negative_rows": negative_rows,
            "negatives": negatives,
            "groups": torch.cat((example[rows], example[negative_rows])),
        }
        return cls(
            **copied_together(tensors, batch.query.device),
            num_groups=examples.numel(),
            num_negative_pairs=num_negative_pairs,
        )

    def sides(self, of: LossBatch | TeacherVectors) -> tuple[Tensor, Tensor]:
        """Return [n + P] the index of each pair's query, and of its document, in the vectors of a batch or a teacher."""
        left = torch.cat((of.query[self.rows], of.query[self.negative_rows]))
        right = torch.cat((of.positive[self.rows], of.negative[self.negatives]))
        return left, right

    def select(self, is_selected: Tensor) -> ListedPairs:
        """Return the pairs for which a bool tensor [n + P] is true. Groups keep their numbers."""
        num_rows = len(self.rows)
        is_positive = is_selected[:num_rows]
        is_negative = is_selected[num_rows:]
        return ListedPairs(
            rows=self.rows[is_positive],
            negative_rows=self.negative_rows[is_negative],
            negatives=self.negatives[is_negative],
            groups=self.groups[is_selected],
            num_groups=self.num_groups,
            num_negative_pairs=self.num_negative_pairs,
        )

    def margins(self, scores: Tensor) -> Tensor:
        """Return [K, P] how far each hard negative of `of_rank` is below the positive of its row."""
        num_rows = len(self.rows)
        return scores[:, self.groups[num_rows:]] - scores[:, num_rows:]

    def log_softmax(self, logits: Tensor) -> Tensor:
        """Return [K, n + P] the log softmax of logits [K, n + P] within each group."""
        shape = len(logits), self.num_groups
        groups = self.groups.expand(len(logits), -1)
        # Relative to the largest logit of the group, so that no exp overflows. It cancels,
        # so it needs no gradient.
        largest = logits.new_full(shape, -torch.inf).scatter_reduce(
            1, groups, logits.detach(), "amax"
        )
        differences = logits - largest.gather(1, groups)
        sums = logits.new_zeros(shape).scatter_add(1, groups, differences.exp())
        return differences - sums.gather(1, groups).log()

    def ordered(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return two pairs [M], [M] of one group, of which the first has the higher target, for targets [n + P].

        A target that is not a number is below all others.
        """
        left, right = join_equal(self.groups, self.groups)
        targets = targets.nan_to_num(nan=-torch.inf)
        is_higher = targets[left] > targets[right]
        return left[is_higher], right[is_higher]
