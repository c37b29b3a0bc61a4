"""LossBatch: the embeddings of one global batch, with its rows and its teachers' answers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vembed.errors import UserError
from vembed.losses.similarity import PAIRS_AT_ONCE, chunks

if TYPE_CHECKING:
    from vembed.losses.listed import ListedPairs

INDEX_FIELDS = (
    "content",
    "query",
    "positive",
    "example",
    "negative",
    "negative_example",
)
"""Fields of a LossBatch that hold integers."""


def copied_together(
    tensors: Mapping[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """Return host tensors on a device, by one copy for each dtype, which the host does not wait for."""
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in tensors.items()}
    copies = {}
    for dtype in {tensor.dtype for tensor in tensors.values()}:
        same = {name: x for name, x in tensors.items() if x.dtype == dtype}
        flat = torch.cat([tensor.reshape(-1) for tensor in same.values()])
        if flat.numel() and flat.device != device:
            flat = flat.pin_memory()
        sizes = [tensor.numel() for tensor in same.values()]
        pieces = torch.split(flat.to(device, non_blocking=True), sizes)
        for name, piece in zip(same, pieces, strict=True):
            copies[name] = piece.view(same[name].shape)
    return copies


@dataclass(frozen=True, slots=True)
class TeacherVectors:
    """A teacher's vectors of the inputs of one global batch.

    The teacher's score of a pair is the dot product of its vectors.
    """

    vectors: Tensor
    """[V, E] float32 or float64, of length 1. A vector of zeros stands for an input that the teacher does not know."""
    query: Tensor
    """[R] index of each row's query in `vectors`."""
    positive: Tensor
    """[R] index of each row's positive."""
    negative: Tensor
    """[H] index of each hard negative."""

    def occurrences(self) -> Tensor:
        """Return [2 R + H] the index of each query, positive and hard negative in `vectors`."""
        return torch.cat((self.query, self.positive, self.negative))

    def scores_of(self, pairs: ListedPairs) -> Tensor:
        """Return [1, n + P] scores."""
        left, right = pairs.sides(self)
        scores = self.vectors.new_empty(1, left.numel())
        # In chunks, so that the gathered vectors [n + P, E] never exist at once.
        for chunk in chunks(left.numel(), PAIRS_AT_ONCE):
            products = self.vectors[left[chunk]] * self.vectors[right[chunk]]
            scores[0, chunk] = products.sum(1)
        return scores


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """Scores of a reranker or of the data, for every positive pair and hard negative."""

    positive: Tensor
    """[R]"""
    negative: Tensor
    """[H] score with the query of the example that brought the negative."""

    def scores_of(self, pairs: ListedPairs) -> Tensor:
        """Return [1, n + P] scores."""
        negative = self.negative[pairs.negatives]
        return torch.cat((self.positive[pairs.rows], negative))[None]


Teaching = TeacherVectors | TeacherScores
"""Answers of one teacher for one batch."""


@dataclass(frozen=True, slots=True)
class LossBatch:
    """One global batch as input of a loss: U distinct embeddings, R rows, H hard negatives.

    A row is a (query, positive) pair. All tensors are on one device. Every rank holds
    the same values. Only `rank_rows` and `rank_negatives` differ. A text that occurs in
    several roles or rows has one embedding and several indices.
    """

    embeddings: Tensor
    """[T, D] float32 or float64, not normalised. A leaf that requires grad in training. T is U for dense vectors."""
    content: Tensor
    """[U] int64 content id. Equal ids mean equal content. One text may have two embeddings, from two ranks."""
    query: Tensor
    """[R] index of each row's query in `embeddings`."""
    positive: Tensor
    """[R] index of each row's positive."""
    example: Tensor
    """[R] int64 id of the example that each row comes from. An example with several positives has several rows."""
    negative: Tensor
    """[H] index of each hard negative occurrence. May be empty."""
    negative_example: Tensor
    """[H] int64 id of the example that each hard negative comes from."""
    scores: Tensor | None
    """[R] label score of each row's pair. None if the data have no scores."""
    rank_rows: slice
    """Rows whose loss terms this rank computes."""
    rank_negatives: slice
    """Hard negatives of this rank's examples."""
    negative_scores: Tensor | None = None
    """[H] score of each hard negative, where the data have scores for them."""
    negative_parts: Tensor | None = None
    """[H, 2] indices of what each hard negative is made of, where some are mixtures. Twice its own otherwise."""
    teachers: Mapping[str, Teaching] = field(default_factory=dict)
    """Answers of each teacher for this batch, by the teacher's name."""
    source: int = 0
    """Number of the source of the batch. That of the first example, where sources are mixed."""
    number: int = 0
    """Number of the batch in the run: random draws of a loss depend on it and on nothing else."""
    holds_scores: bool = False
    """True: of a reranker. Each of the `embeddings` [U, 1] is the score of a pair, to which both query and positive
    point, and so does a hard negative with the query of its example."""
    starts: Tensor | None = None
    """[U + 1] where the vectors of each input begin in `embeddings`, and T. None where each has one."""
    host_indices: Mapping[str, Tensor] | None = None
    """The integer fields on the host, by name, where the batch is on a GPU: to read them there would wait for it."""

    def __post_init__(self) -> None:
        """Give both slices plain bounds."""
        rows = range(self.num_rows)[self.rank_rows]
        negatives = range(self.negative.numel())[self.rank_negatives]
        object.__setattr__(self, "rank_rows", slice(rows.start, rows.stop))
        object.__setattr__(
            self, "rank_negatives", slice(negatives.start, negatives.stop)
        )

    def on_host(self) -> LossBatch:
        """Return the batch with its integers on the host, where they are known."""
        if self.host_indices is None:
            return self
        return replace(self, **self.host_indices, host_indices=None)  # type: ignore[arg-type]

    @property
    def num_rows(self) -> int:
        """Number of rows R of the global batch."""
        return int(self.query.numel())

    @property
    def num_occurrences(self) -> int:
        """Number of occurrences 2 R + H."""
        return 2 * self.num_rows + self.negative.numel()

    def occurrences(self) -> Tensor:
        """Return [2 R + H] the index of each query, positive and hard negative in `embeddings`."""
        return torch.cat((self.query, self.positive, self.negative))

    def rank_occurrences(self) -> Tensor:
        """Return which of the occurrences are of this rank's rows and hard negatives."""
        num_rows = self.num_rows
        sizes = [num_rows, num_rows, self.negative.numel()]
        numbers = torch.arange(sum(sizes), device=self.query.device)
        queries, positives, negatives = torch.split(numbers, sizes)
        rows = self.rank_rows
        return torch.cat(
            (queries[rows], positives[rows], negatives[self.rank_negatives])
        )

    def parts_of_negatives(self) -> Tensor:
        """Return [H, 1 or 2] indices of the embeddings that each hard negative is made of."""
        if self.negative_parts is None:
            return self.negative[:, None]
        return self.negative_parts

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

    def teacher_vectors(self, name: str, needed_by: str) -> TeacherVectors:
        """Return the vectors of a teacher, for what needs more than scores of listed pairs."""
        answers = self.teacher(name)
        if not isinstance(answers, TeacherVectors):
            raise UserError(
                f"{needed_by} needs the teacher's vectors, and {name} gives scores of listed pairs only: "
                "use an embedding model as teacher, or candidates: listed."
            )
        return answers


class EmbeddingLoss(nn.Module):
    """Base class of the modules that compute a loss of embeddings.

    `forward` returns the share of one rank. The shares of all ranks add up to the loss L
    of the global batch, and so do their gradients. A caller whose gradients are averaged
    over ranks must therefore multiply by the world size.
    """

    @abstractmethod
    def forward(self, batch: LossBatch) -> Tensor:
        """Return this rank's share of L, a scalar."""

    def project_parameters(self) -> None:
        """Clamp learned parameters to their ranges. Called after every optimizer step."""
        for part in self._parts():
            part.project_parameters()

    def term_shares(self, source: int) -> dict[str, Tensor]:
        """Return this rank's share of each term of the newest batch, without its weight.

        The batch was of this source. Empty for losses of one term.
        """
        del source
        return {}

    def scale_and_bias(self) -> tuple[float, float] | None:
        """Return the learned scale and bias of the logits, or None. They are saved with CLIP and SigLIP models.

        Of several losses those of the first that has some.
        """
        learned = (part.scale_and_bias() for part in self._parts())
        return next((pair for pair in learned if pair is not None), None)

    def _parts(self) -> list[EmbeddingLoss]:
        """Return the losses that this one is made of."""
        others = [module for module in self.modules() if module is not self]
        return [module for module in others if isinstance(module, EmbeddingLoss)]
