"""Columns: the columns of the score matrix that are here now, from the own table or from another rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vembed.losses.candidates import ScoreBlock
from vembed.losses.exchange import TravellingColumns, Visit
from vembed.losses.matryoshka import PrefixTable
from vembed.losses.targets import TeacherVectors


class TeacherTable:
    """A teacher's vectors by position."""

    def __init__(self, vectors: Tensor, index: Tensor | None) -> None:
        """`index`: the row of `vectors` for each position; None where they are in order."""
        self.vectors = vectors
        self.index = index

    @classmethod
    def of_occurrences(
        cls, vectors: TeacherVectors, occurrence: Tensor, like: Tensor
    ) -> TeacherTable:
        """Return the vectors of the candidates' table."""
        index = vectors.places(vectors.occurrences()[occurrence])
        return cls(vectors.vectors.to(like.device, like.dtype), index)

    def rows(self, positions: slice | Tensor) -> Tensor:
        """[n, E] vectors."""
        return self.vectors[positions if self.index is None else self.index[positions]]

    def pair_scores(self, left: slice | Tensor, right: slice | Tensor) -> Tensor:
        """[n] scores of pairs."""
        return (self.rows(left) * self.rows(right)).sum(1)


@dataclass(frozen=True, slots=True)
class Columns:
    """Some columns, with everything that a tile reads of them, and where their gradient goes."""

    score_blocks: tuple[ScoreBlock, ...]
    first: int
    """Number of the first of them, as the score blocks count."""
    x: Tensor
    """[C, d]"""
    prefix_scales: Tensor | None
    """[K - 1, C]"""
    dx: Tensor | None
    """[C, d]; None in a pass without gradients, as the next."""
    norm_grad: Tensor | None
    """[K - 1, C]"""
    guide: TeacherTable | None
    teacher: TeacherTable | None

    @classmethod
    def of_table(
        cls,
        table: PrefixTable,
        score_blocks: tuple[ScoreBlock, ...],
        guide: TeacherTable | None,
        teacher: TeacherTable | None,
    ) -> Columns:
        """Return the columns of the own table."""
        dx, norm_grad = (
            (table.dx, table.norm_grad) if table.with_gradient else (None, None)
        )
        return cls(
            score_blocks, 0, table.x, table.prefix_scales, dx, norm_grad, guide, teacher
        )

    def ranges(self) -> Iterator[tuple[ScoreBlock, slice]]:
        """Yield each score block that has some of these columns, with their places among them."""
        here = slice(self.first, self.first + self.x.shape[0])
        for score_block in self.score_blocks:
            first, last = (
                max(score_block.columns.start, here.start),
                min(score_block.columns.stop, here.stop),
            )
            if first < last:
                yield score_block, slice(first - here.start, last - here.start)


class HomeColumns(TravellingColumns):
    """The own table's first rows, which travel: [x, prefix scales, guide's vectors, teacher's vectors]. Their gradient
    is that of x and of the norms."""

    def __init__(
        self,
        table: PrefixTable,
        counts: Sequence[int],
        guide: TeacherTable | None,
        teacher: TeacherTable | None,
    ) -> None:
        self.table = table
        self.counts = counts
        self.taught = [one for one in (guide, teacher) if one is not None]
        self.has_guide, self.has_teacher = guide is not None, teacher is not None
        self.dim = table.x.shape[1]
        self.num_smaller = len(table.similarity.dims) - 1
        scales = 0 if table.prefix_scales is None else self.num_smaller
        self.widths = [self.dim, scales, *(one.vectors.shape[1] for one in self.taught)]
        self.width = sum(self.widths)
        self.gradient_width = self.dim + self.num_smaller

    def packed(self, columns: slice) -> Tensor:
        """See TravellingColumns."""
        x, scales = self.table.x[columns], self.table.prefix_scales
        # No prefix scales and no teacher: x travels as it is, without a copy.
        if self.width == self.dim:
            return x
        parts = [] if scales is None else [scales[:, columns].T]
        return torch.cat(
            [x, *parts, *(one.rows(columns) for one in self.taught)], dim=1
        )

    def add_gradient(self, columns: slice, gradient: Tensor) -> None:
        """See TravellingColumns."""
        self.table.dx[columns] += gradient[:, : self.dim]
        self.table.norm_grad[:, columns] += gradient[:, self.dim :].T


def foreign_columns(
    visit: Visit, own: HomeColumns, score_blocks: tuple[ScoreBlock, ...]
) -> Columns:
    """Return the columns of a block that another rank packed as this one does."""
    x, scales, *taught = torch.split(visit.values, own.widths, dim=1)
    tables = iter([TeacherTable(one, None) for one in taught])
    gradient = visit.gradient
    return Columns(
        score_blocks=score_blocks,
        first=visit.columns.start,
        x=x,
        # One small copy, so that a size's scales are adjacent: they are read by every tile.
        prefix_scales=scales.T.contiguous() if own.widths[1] else None,
        dx=None if gradient is None else gradient[:, : own.dim],
        norm_grad=None if gradient is None else gradient[:, own.dim :].T,
        guide=next(tables) if own.has_guide else None,
        teacher=next(tables) if own.has_teacher else None,
    )
