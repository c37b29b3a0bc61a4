"""cosent, angle, cosine: pairs with label scores, by their order or by their values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vembed.errors import UserError
from vembed.losses.declaration import Loss, Temperature

if TYPE_CHECKING:
    from torch import Tensor

    from vembed.losses.batch import LossBatch
    from vembed.losses.build import TermLoss
    from vembed.losses.similarity import Similarity


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
    # The sum runs over all comparisons of a batch, of which a smaller temperature leaves
    # the few worst.
    default_temperature = 0.1
    ranks_pairs = True

    def share(self, batch: LossBatch, term: TermLoss) -> Tensor:
        """See Loss."""
        import torch

        scores = self.pair_scores(batch, term.similarity(batch.embeddings))
        labels, order = torch.sort(batch.required_scores(self.name).to(scores.device))
        logits = scores[:, order] * term.scale(batch.embeddings)  # [K, N]
        # Number of rows with a strictly lower label: ties compare with nothing.
        num_lower = torch.searchsorted(labels, labels)
        has_lower = num_lower > 0
        below = logits.logcumsumexp(dim=1)[:, num_lower[has_lower] - 1]
        # The zero column is the "1 +" of the formula. [K, 1 + rows with lower ones]
        zero_column = logits.new_zeros(len(logits), 1)
        terms = torch.cat((zero_column, below - logits[:, has_lower]), dim=1)
        num_rank_rows = batch.rank_rows.stop - batch.rank_rows.start
        share: float = num_rank_rows / max(1, batch.num_rows)
        return term.configured.total(terms.logsumexp(dim=1)) * share

    def pair_scores(self, batch: LossBatch, similarity: Similarity) -> Tensor:
        """Return [K, N] the similarities of all pairs at all sizes."""
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

    def refusal(self, sizes: Sequence[int]) -> str | None:
        """See Loss."""
        for size in sizes:
            if size % 2:
                return (
                    "loss: angle reads halves of a vector as real and imaginary parts, and mrl_dims has "
                    f"{size:,d}: give even sizes"
                )
        return None

    def pair_scores(self, batch: LossBatch, similarity: Similarity) -> Tensor:
        """Return [K, N] the sums of the parts of all pairs at all sizes. O(N) memory."""
        import torch

        from vembed.losses.similarity import Similarity, pair_scores

        scores = []
        for dim in similarity.dims:
            if dim % 2:
                raise UserError(
                    f"loss: angle reads halves of a vector as real and imaginary parts, and {dim:,d} dimensions have "
                    "none: use an even size (mrl_dims), or loss: cosent"
                )
            # A prefix is split into its own halves, so each size is a new computation.
            prefixes = batch.embeddings[:, :dim]
            real, imaginary = prefixes[batch.query].chunk(2, dim=1)
            turned = torch.cat((real + imaginary, imaginary - real), dim=1)
            rows = torch.cat((turned, prefixes[batch.positive]))
            left, right = torch.arange(len(rows), device=rows.device).chunk(2)
            cosine = Similarity.at((dim,), (1.0,), cosine=True)
            scores.append(pair_scores(rows, left, right, cosine).abs() * math.sqrt(2))
        return torch.cat(scores)


class Cosine(Loss):
    """The mean squared error of the similarity: L = 1/N * sum_i (s_i - y_i)^2.

    For the cosine the label scores must lie in [-1, 1]. Ratings from 0 to 5, for
    example, must be rescaled first.
    """

    name = "cosine"
    summary = "the scores themselves, within [-1, 1]"
    records = "scores"
    negatives = "unread"
    needs_cosine_scores = True

    def share(self, batch: LossBatch, term: TermLoss) -> Tensor:
        """See Loss."""
        from vembed.losses.similarity import arithmetic_dtype, pair_scores

        rank_rows = batch.rank_rows
        embeddings = batch.embeddings
        labels = batch.required_scores(self.name)[rank_rows]
        labels = labels.to(embeddings.device, arithmetic_dtype(embeddings))
        similarity = term.similarity(embeddings)
        if similarity.cosine and labels.numel() and not bool((labels.abs() <= 1).all()):
            raise UserError(
                f"loss: cosine compares similarities with unscaled scores, and the data have scores from "
                f"{float(labels.min()):g} to {float(labels.max()):g}: scale them into [-1, 1], or use loss: cosent."
            )
        left = batch.query[rank_rows]
        right = batch.positive[rank_rows]
        scores = pair_scores(embeddings, left, right, similarity)  # [K, n]
        return term.mean((scores - labels).square(), batch.num_rows)
