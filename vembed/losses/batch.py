"""LossBatch: the gathered embeddings of one global batch and how its rows refer to them; and what every loss is."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor, nn

from vembed.errors import UserError


@dataclass(frozen=True, slots=True)
class LossBatch:
    """One global batch as the loss sees it. U distinct embeddings, R rows (one per query-positive pair), H negatives.
    All tensors are on one device.

    Every rank holds the same values, except for the rows it owns. A text that occurs in several roles or rows has one
    embedding and several indices.
    """

    embeddings: Tensor
    """[U, D] float32 or float64, not normalised; a leaf that requires grad in training."""
    content: Tensor
    """[U] int64: equal numbers are equal content (the same text may have two embeddings, from two ranks)."""
    query: Tensor
    """[R] index of each row's query in `embeddings`."""
    positive: Tensor
    """[R] index of each row's positive."""
    example: Tensor
    """[R] int64 number of the example that the row comes from; an example with several positives has several rows."""
    negative: Tensor
    """[H] index of each hard negative occurrence; may be empty."""
    negative_example: Tensor
    """[H] number of the example that brought it."""
    scores: Tensor | None
    """[R] score of each row's pair, where the data have scores."""
    own_rows: slice
    """The rows that this rank is responsible for."""
    own_negatives: slice
    """The hard negatives that this rank's examples brought."""
    world_size: int = 1

    @property
    def num_rows(self) -> int:
        """R, the number of rows of the global batch."""
        return int(self.query.numel())

    def own(self) -> slice:
        """`own_rows` with plain bounds: 0 <= start <= stop <= R."""
        start, stop, _ = self.own_rows.indices(self.num_rows)
        return slice(start, max(start, stop))

    @property
    def num_own_rows(self) -> int:
        """How many rows `own_rows` are."""
        own = self.own()
        return int(own.stop - own.start)

    def own_hard_negatives(self) -> slice:
        """`own_negatives` with plain bounds."""
        start, stop, _ = self.own_negatives.indices(self.negative.numel())
        return slice(start, max(start, stop))

    def required_scores(self, loss: str) -> Tensor:
        """The scores, for a loss that cannot do without."""
        if self.scores is None:
            raise UserError(
                f"loss: {loss} needs a score for every pair, and the training data have none; "
                "add them (sentence1, sentence2, score) or use loss: infonce."
            )
        return self.scores


class EmbeddingLoss(nn.Module):
    """A loss on embeddings. The sum over ranks of what `forward` returns is the loss L of the global batch, and so is
    the sum of the gradients: nothing in here communicates."""

    @abstractmethod
    def forward(self, batch: LossBatch) -> Tensor:
        """This rank's share of L, a scalar."""

    def project_parameters(self) -> None:
        """Bring learned parameters back into their range; called after every optimizer step."""

    def scale_and_bias(self) -> tuple[float, float] | None:
        """What similarities are multiplied by and what is added, where they are learned; saved with CLIP and SigLIP."""
        return None
