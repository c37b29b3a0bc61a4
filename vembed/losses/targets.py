"""Teacher's answers for one global batch: vectors of its inputs or scores of its pairs; and scores from either."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PAIRS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class TeacherVectors:
    """A teacher's vectors for the inputs of one global batch. The teacher's score of a pair is their dot product."""

    vectors: Tensor
    """[V, E] float32 or float64, of length 1; a row of zeros stands for an input that the teacher does not know. In a
    ring those of this rank's inputs alone."""
    query: Tensor
    """[R] index of each row's query in `vectors`."""
    positive: Tensor
    """[R] index of each row's positive."""
    negative: Tensor
    """[H] index of each hard negative."""
    first: int = 0
    """The index of the first of `vectors`: in a ring indices count over all ranks."""

    def places(self, index: Tensor) -> Tensor:
        """Return where in `vectors` the vectors of these indices are."""
        return index - self.first if self.first else index

    def occurrences(self) -> Tensor:
        """[2 R + H] index of every occurrence: queries, positives, hard negatives."""
        return torch.cat((self.query, self.positive, self.negative))

    def own_scores(self, rows: slice) -> Tensor:
        """Scores of the own pairs of a range of rows."""
        return self._products(self.query[rows], self.positive[rows])

    def negative_scores(self, row: Tensor, negative: Tensor) -> Tensor:
        """[P] scores of the rows' queries with hard negatives."""
        return self._products(self.query[row], self.negative[negative])

    def _products(self, left: Tensor, right: Tensor) -> Tensor:
        left, right = self.places(left), self.places(right)
        scores = self.vectors.new_empty(left.numel())
        for start in range(0, left.numel(), PAIRS_AT_ONCE):
            some = slice(start, start + PAIRS_AT_ONCE)
            scores[some] = (self.vectors[left[some]] * self.vectors[right[some]]).sum(1)
        return scores


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """A reranker's scores, or scores from the data: one for each row's own pair and one for each hard negative."""

    positive: Tensor
    """[R]"""
    negative: Tensor
    """[H] score with the query of the example that brought the negative."""

    def own_scores(self, rows: slice) -> Tensor:
        """Scores of the own pairs of a range of rows."""
        return self.positive[rows]

    def negative_scores(self, _row: Tensor, negative: Tensor) -> Tensor:
        """[P] scores of the rows' queries with hard negatives."""
        return self.negative[negative]


Teaching = TeacherVectors | TeacherScores
"""Answers of one teacher for one batch."""


@dataclass(frozen=True, slots=True)
class Guide:
    """A teacher that says which candidates are too good to be negatives: those that it scores above the row's own pair
    less a margin, where `relative` margins are a share of the own pair's score."""

    vectors: TeacherVectors
    margin: float
    relative: bool

    def ceilings(self, own_scores: Tensor) -> Tensor:
        """The score of each row above which candidates are left out. Scores within rounding of it are not above it."""
        rounding = 64 * torch.finfo(own_scores.dtype).eps
        ceilings = own_scores - (
            own_scores.abs() * self.margin if self.relative else self.margin
        )
        return ceilings + rounding * ceilings.abs().clamp(min=1.0)
