"""Listed pairs: a row's positive pair and the hard negatives of its example, in groups.

Losses on them need no matrix: their memory grows with the number of listed pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vembed.losses.batch import LossBatch, copied_together
from vembed.losses.candidates import example_negatives, join_equal
from vembed.losses.similarity import Similarity, pair_scores


@dataclass(frozen=True, slots=True)
class ListedPairs:
    """n positive pairs of rows, then P pairs of a row's query and a hard negative."""

    rows: Tensor
    """[n] row of each positive pair."""
    negative_rows: Tensor
    """[P] row whose query meets the hard negative."""
    negatives: Tensor
    """[P] the hard negative, as an index into those of the batch."""
    groups: Tensor
    """[n + P] group of each pair, counted from 0."""
    num_groups: int
    num_negative_pairs: int
    """Pairs with a hard negative on all ranks."""

    @classmethod
    def of_rank(cls, batch: LossBatch) -> ListedPairs:
        """Return a group for each row of this rank, whose positive pairs come first."""
        device = batch.query.device
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
            **copied_together(tensors, device),
            num_groups=rows.numel(),
            num_negative_pairs=row.numel(),
        )

    @classmethod
    def of_examples(cls, batch: LossBatch, *, of_rank: bool = False) -> ListedPairs:
        """Return a group for each example of the global batch.

        `of_rank`: only the pairs of examples whose first row this rank has. A list belongs to one rank, also where its
        rows lie on two: otherwise it would count twice. Groups keep their numbers.
        """
        device = batch.query.device
        rank_rows = batch.rank_rows
        batch = batch.on_host()
        examples, example = torch.unique(batch.example, return_inverse=True)
        rows = torch.arange(batch.num_rows, device=example.device)
        first_row = rows.new_full((examples.numel(),), batch.num_rows)
        first_row = first_row.scatter_reduce(0, example, rows, "amin")
        negative_rows, negatives = example_negatives(batch, slice(None))
        # Every row of an example has all of its negatives: take those of the first.
        is_first = first_row[example[negative_rows]] == negative_rows
        negative_rows = negative_rows[is_first]
        negatives = negatives[is_first]
        num_negative_pairs = negative_rows.numel()
        if of_rank:
            is_of_rank = (first_row >= rank_rows.start) & (first_row < rank_rows.stop)
            rows = rows[is_of_rank[example]]
            is_negative_of_rank = is_of_rank[example[negative_rows]]
            negative_rows = negative_rows[is_negative_of_rank]
            negatives = negatives[is_negative_of_rank]
        tensors = {
            "rows": rows,
            "negative_rows": negative_rows,
            "negatives": negatives,
            "groups": torch.cat((example[rows], example[negative_rows])),
        }
        return cls(
            **copied_together(tensors, device),
            num_groups=examples.numel(),
            num_negative_pairs=num_negative_pairs,
        )

    def select(self, is_selected: Tensor) -> ListedPairs:
        """Return the pairs for which a bool tensor [n + P] is true. Groups keep their numbers."""
        num_rows = self.rows.numel()
        is_negative_selected = is_selected[num_rows:]
        return ListedPairs(
            rows=self.rows[is_selected[:num_rows]],
            negative_rows=self.negative_rows[is_negative_selected],
            negatives=self.negatives[is_negative_selected],
            groups=self.groups[is_selected],
            num_groups=self.num_groups,
            num_negative_pairs=self.num_negative_pairs,
        )

    def model_scores(self, batch: LossBatch, similarity: Similarity) -> Tensor:
        """Return [K, n + P] the scores of all pairs: similarities of vectors, or a reranker's own. Differentiable once."""
        if batch.holds_scores:
            pairs = torch.cat(
                (batch.positive[self.rows], batch.negative[self.negatives])
            )
            return batch.embeddings[pairs, 0][None]
        # One call for all pairs, so that their gradients are accumulated once.
        return pair_scores(
            batch.embeddings,
            torch.cat((batch.query[self.rows], batch.query[self.negative_rows])),
            torch.cat((batch.positive[self.rows], batch.negative[self.negatives])),
            similarity,
        )

    def margins(self, scores: Tensor) -> Tensor:
        """Return [K, P] how far each hard negative of `of_rank` is below the positive of its row."""
        num_rows = self.rows.numel()
        return scores[:, self.groups[num_rows:]] - scores[:, num_rows:]


def grouped_log_softmax(logits: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Return [K, E] the log softmax of logits [K, E] within each group."""
    shape = len(logits), num_groups
    groups = groups.expand(len(logits), -1)
    # Relative to the largest logit of the group, so that no exp overflows. It cancels,
    # so it needs no gradient.
    largest = logits.new_full(shape, -torch.inf).scatter_reduce(
        1, groups, logits.detach(), "amax"
    )
    differences = logits - largest.gather(1, groups)
    sums = logits.new_zeros(shape).scatter_add(1, groups, differences.exp())
    return differences - sums.gather(1, groups).log()


def ordered_pairs(groups: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pairs [P], [P] of one group of which the first has the higher target.

    A target that is not a number is below all others.
    """
    left, right = join_equal(groups, groups)
    targets = targets.nan_to_num(nan=-torch.inf)
    is_higher = targets[left] > targets[right]
    return left[is_higher], right[is_higher]
