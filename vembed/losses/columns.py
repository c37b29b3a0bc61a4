"""Columns of the score matrix: of this rank's table, or of other ranks in a ring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vembed.losses.batch import TeacherVectors
from vembed.losses.candidates import ForeignColumns, ScoreBlock
from vembed.losses.exchange import TravellingColumns, Visit
from vembed.losses.similarity import PrefixColumns, PrefixTable


class TeacherTable:
    """A teacher's vectors by position in the candidates' table."""

    def __init__(self, vectors: Tensor, index: Tensor | None) -> None:
        """`index`: the row of `vectors` for each position. None where they are in order."""
        self.vectors = vectors
        self.index = index

    @classmethod
    def of_occurrences(
        cls, teacher: TeacherVectors, occurrence: Tensor, like: Tensor
    ) -> TeacherTable:
        """Return the vectors of the occurrences, on the device and in the dtype of `like`."""
        index = teacher.positions(teacher.occurrences()[occurrence])
        return cls(teacher.vectors.to(like.device, like.dtype), index)

    def rows(self, positions: slice | Tensor) -> Tensor:
        """Return [n, E] vectors."""
        return self.vectors[positions if self.index is None else self.index[positions]]

    def pair_scores(self, left: slice | Tensor, right: slice | Tensor) -> Tensor:
        """Return [n] scores of pairs."""
        return (self.rows(left) * self.rows(right)).sum(1)


@dataclass(frozen=True, slots=True)
class LossColumns:
    """C columns, with everything that a tile reads of them."""

    score_blocks: tuple[ScoreBlock, ...]
    first: int
    """Number of the first of them, as the score blocks count."""
    count: int
    vectors: PrefixColumns
    """What the score table reads of them, and where their gradient goes."""
    guide: TeacherTable | None
    teacher: TeacherTable | None
    stays: bool = False
    """They may be kept until the end of the pass."""

    def ranges(self) -> Iterator[tuple[ScoreBlock, slice]]:
        """Yield each score block that has some of these columns, with their positions here."""
        for score_block in self.score_blocks:
            start = max(score_block.columns.start - self.first, 0)
            stop = min(score_block.columns.stop - self.first, self.count)
            if start < stop:
                yield score_block, slice(start, stop)


class _HomeColumns(TravellingColumns):
    """This rank's columns, as they travel: [x, prefix scales, guide's and teacher's vectors].

    They are the first rows of its table. Their gradient is that of x and of the norms.
    """

    def __init__(
        self,
        table: PrefixTable,
        foreign: ForeignColumns,
        guide: TeacherTable | None,
        teacher: TeacherTable | None,
    ) -> None:
        self.table = table
        self.counts = foreign.counts
        self.teachers = [
            teacher_table
            for teacher_table in (guide, teacher)
            if teacher_table is not None
        ]
        self.dim = table.x.shape[1]
        num_smaller = len(table.similarity.dims) - 1
        num_scales = 0 if table.prefix_scales is None else num_smaller
        teacher_widths = [
            teacher_table.vectors.shape[1] for teacher_table in self.teachers
        ]
        self.widths = [self.dim, num_scales, *teacher_widths]
        self.width = sum(self.widths)
        self.gradient_width = self.dim + num_smaller

    def packed(self, columns: slice) -> Tensor:
        """See TravellingColumns."""
        x = self.table.x[columns]
        # No prefix scales and no teacher: x travels as it is, without a copy.
        if self.width == self.dim:
            return x
        parts = [x]
        if self.table.prefix_scales is not None:
            parts.append(self.table.prefix_scales[:, columns].T)
        parts += [teacher.rows(columns) for teacher in self.teachers]
        return torch.cat(parts, dim=1)

    def add_gradient(self, columns: slice, gradient: Tensor) -> None:
        """See TravellingColumns."""
        self.table.dx[columns] += gradient[:, : self.dim]
        self.table.norm_grad[:, columns] += gradient[:, self.dim :].T


class StreamedColumns:
    """Columns of other ranks, which come block by block, in two rounds if necessary."""

    def __init__(
        self,
        foreign: ForeignColumns,
        table: PrefixTable,
        guide: TeacherTable | None,
        teacher: TeacherTable | None,
    ) -> None:
        self.foreign = foreign
        self.home = _HomeColumns(table, foreign, guide, teacher)
        self.has_guide = guide is not None
        self.has_teacher = teacher is not None
        self._last_gradient: Tensor | None = None

    def scored(self, *, keeps_last: bool) -> Iterator[LossColumns]:
        """Yield all columns, without room for gradients.

        `keeps_last`: the last block stays, with room for its gradient. It does not come
        again in the next round.
        """
        for visit in self.foreign.ring.visits(self.home, with_gradient=False):
            if visit.is_last and keeps_last:
                width = self.home.gradient_width
                gradient = visit.values.new_zeros(visit.values.shape[0], width)
                self._last_gradient = gradient
                yield self._columns(replace(visit, gradient=gradient), stays=True)
            else:
                yield self._columns(visit)

    def differentiated(self) -> Iterator[LossColumns]:
        """Yield all columns with room for gradients, less a block that was kept."""
        last = self._last_gradient
        for visit in self.foreign.ring.visits(self.home, with_gradient=True, held=last):
            yield self._columns(visit)

    def _columns(self, visit: Visit, *, stays: bool = False) -> LossColumns:
        """Return the columns of a block that another rank packed as this one does."""
        home = self.home
        x, scales, *teachers = torch.split(visit.values, home.widths, dim=1)
        tables = iter([TeacherTable(vectors, None) for vectors in teachers])
        gradient = visit.gradient
        vectors = PrefixColumns(
            x=x,
            # One small copy, so that a size's scales are adjacent: every tile reads them.
            prefix_scales=scales.T.contiguous() if home.widths[1] else None,
            dx=None if gradient is None else gradient[:, : home.dim],
            norm_grad=None if gradient is None else gradient[:, home.dim :].T,
        )
        return LossColumns(
            score_blocks=self.foreign.score_blocks(visit.owner),
            first=visit.columns.start,
            count=x.shape[0],
            vectors=vectors,
            guide=next(tables) if self.has_guide else None,
            teacher=next(tables) if self.has_teacher else None,
            stays=stays,
        )
