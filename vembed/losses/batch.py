"""LossBatch, the gathered embeddings of one global batch with its row indices, and the base class of all losses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vembed.errors import UserError
from vembed.losses.exchange import RingParts
from vembed.losses.targets import TeacherVectors, Teaching


@dataclass(frozen=True, slots=True)
class LossBatch:
    """One global batch as input of a loss: U distinct embeddings, R rows (query-positive pairs), H hard negatives.

    All tensors are on one device. Every rank holds the same values; only `own_rows` and `own_negatives` differ. A text
    that occurs in several roles or rows has one embedding and several indices.

    In a ring (`ring` is given) the integers are those of the whole batch too, but `embeddings` and teachers' vectors
    are those of this rank's inputs alone.
    """

    embeddings: Tensor
    """[U, D] float32 or float64, not normalised; a leaf that requires grad in training. In a ring the own ones."""
    content: Tensor
    """[U] int64 content id. Equal ids mean equal content. One text may have two embeddings, from two ranks."""
    query: Tensor
    """[R] index of each row's query in `embeddings`."""
    positive: Tensor
    """[R] index of each row's positive."""
    example: Tensor
    """[R] int64 id of the example that each row comes from. An example with several positives has several rows."""
    negative: Tensor
    """[H] index of each hard negative occurrence; may be empty."""
    negative_example: Tensor
    """[H] int64 id of the example that each hard negative comes from."""
    scores: Tensor | None
    """[R] label score of each row's pair; None if the data have no scores."""
    own_rows: slice
    """Rows whose loss terms this rank computes."""
    own_negatives: slice
    """Hard negatives of this rank's examples."""
    world_size: int = 1
    negative_scores: Tensor | None = None
    """[H] score of each hard negative, where the data have scores for them."""
    negative_parts: Tensor | None = None
    """[H, 2] indices of what each hard negative is made of, where some are mixtures; twice its own otherwise."""
    teachers: Mapping[str, Teaching] = field(default_factory=dict)
    """Answers of each teacher for this batch, by the teacher's name."""
    source: int = 0
    """Number of the source of the batch; of the first example, where sources are mixed."""
    number: int = 0
    """Number of the batch in the run: random draws of a loss depend on it and on nothing else."""
    ring: RingParts | None = None
    """Source of other ranks' embeddings where they were not gathered."""

    def places(self, numbers: Tensor) -> Tensor:
        """Return where in `embeddings` the inputs of these numbers are. In a ring they must be own inputs."""
        if self.ring is None:
            return numbers
        ring = self.ring
        # Numbers from num_inputs on are those of mixtures, which stand behind the own embeddings.
        return torch.where(
            numbers < ring.num_inputs,
            numbers - ring.first_input,
            numbers - ring.first_mixture,
        )

    @property
    def num_rows(self) -> int:
        """Number of rows R of the global batch."""
        return int(self.query.numel())

    def own(self) -> slice:
        """Return `own_rows` with plain bounds: 0 <= start <= stop <= R."""
        start, stop, _ = self.own_rows.indices(self.num_rows)
        return slice(start, max(start, stop))

    @property
    def num_own_rows(self) -> int:
        """Number of rows in `own_rows`."""
        own = self.own()
        return int(own.stop - own.start)

    def own_hard_negatives(self) -> slice:
        """Return `own_negatives` with plain bounds: 0 <= start <= stop <= H."""
        start, stop, _ = self.own_negatives.indices(self.negative.numel())
        return slice(start, max(start, stop))

    def required_scores(self, loss: str) -> Tensor:
        """Return the label scores. Raise UserError if the data have none."""
        if self.scores is None:
            raise UserError(
                f"loss: {loss} needs a score for every pair, and the training data have none; "
                "add them (sentence1, sentence2, score) or use loss: infonce."
            )
        return self.scores

    def teacher(self, name: str) -> Teaching:
        """Return the answers of a teacher. Raise UserError if it has none for this batch."""
        if name not in self.teachers:
            raise UserError(
                f"teacher {name} says nothing about this batch (there are {', '.join(self.teachers) or 'none'}): "
                "name a model under teacher, or scores for every positive and negative in the data."
            )
        return self.teachers[name]

    def teacher_vectors(self, name: str, wanted_by: str) -> TeacherVectors:
        """The vectors of a teacher, for what needs more than the scores of listed pairs."""
        teaching = self.teacher(name)
        if not isinstance(teaching, TeacherVectors):
            raise UserError(
                f"{wanted_by} needs the teacher's vectors, and {name} gives scores of listed pairs only: "
                "use an embedding model as teacher, or candidates: listed."
            )
        return teaching


class EmbeddingLoss(nn.Module):
    """Base class of losses on embeddings.

    `forward` returns one rank's part. The parts of all ranks add up to the loss L of the global batch, and so do their
    gradients; a caller whose gradients are averaged over ranks must therefore multiply by the world size.
    """

    @abstractmethod
    def forward(self, batch: LossBatch) -> Tensor:
        """Return this rank's part of L, a scalar."""

    def project_parameters(self) -> None:
        """Clamp learned parameters to their ranges. Called after every optimizer step."""

    def term_shares(self, source: int) -> dict[str, Tensor]:
        """Return this rank's part of each term of the newest batch, which was of this source, without the term's
        weight. Empty for losses of one term."""
        del source
        return {}

    def scale_and_bias(self) -> tuple[float, float] | None:
        """Return the learned scale and bias of the logits, or None. They are saved with CLIP and SigLIP models."""
        return None


class NoLoss(EmbeddingLoss):
    """loss: none, for runs that train by the model's own losses alone."""

    def forward(self, batch: LossBatch) -> Tensor:
        """Return zero, with a zero gradient."""
        return batch.embeddings[:0].sum()
