"""Candidates of each row: score blocks, explicit pairs and exclusion masks, from indices and contents alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from vembed.config.schema import TrainConfig
from vembed.losses.batch import LossBatch
from vembed.losses.exchange import Ring, RingParts

# Fill values of unused key slots. They differ, so that an empty row slot never equals an empty column slot.
NO_KEY_ROW = -1
NO_KEY_COLUMN = -2
FORWARD, REVERSE = 0, 1
Anchor = Literal["query", "positive"]
LeftOut = Tensor | tuple[Tensor, Tensor]
"""A bool mask of some rows and columns, or the rows and columns of single scores."""


@dataclass(frozen=True, slots=True)
class ExclusionMask:
    """An exclusion mask in factored form: a column is left out for a row if any of their keys are equal."""

    row_keys: Tensor
    """[n, S] int32 keys of the own rows; unused slots are -1."""
    column_keys: Tensor
    """[C, S'] int32 keys of the columns; unused slots are -2."""

    def left_out(self, rows: slice, columns: slice, size: int) -> Iterator[LeftOut]:
        """Yield what is left out of every `size` of the columns: a bool mask, or the places of what it holds if that is
        little."""
        row_keys, column_keys = (
            _trimmed(self.row_keys[rows]),
            _trimmed(self.column_keys[columns]),
        )
        num_columns = column_keys.shape[0]
        # On a CPU a comparison of all keys takes almost as long as the scores, and most columns have no key of any row.
        # On a GPU it is cheap, and the number of places would have to be waited for.
        if row_keys.device.type == "cpu" and row_keys.numel():
            ordered = row_keys.flatten().sort().values
            at = torch.searchsorted(ordered, column_keys.contiguous()).clamp_(
                max=ordered.numel() - 1
            )
            some = (ordered[at] == column_keys).any(1).nonzero()[:, 0]
            if 4 * some.numel() <= num_columns:
                yield from _places(
                    some, _any_equal(column_keys[some], row_keys), num_columns, size
                )
                return
        for part in torch.split(column_keys, size):
            yield _any_equal(row_keys, part)


@dataclass(frozen=True, slots=True)
class ScoreBlock:
    """A score block: every own row's anchor against a range of table columns, less what the exclusion masks leave out.

    The row's own pair is always left out here; it enters the loss separately.
    """

    anchor: Anchor
    columns: slice
    exclusion_masks: tuple[ExclusionMask, ...]
    direction: int

    def left_out(
        self, rows: slice, columns: slice, size: int
    ) -> Iterator[tuple[LeftOut, ...]]:
        """Yield what the masks leave out of every `size` of the columns, which count from the score block's first."""
        if self.exclusion_masks:
            return zip(
                *(mask.left_out(rows, columns, size) for mask in self.exclusion_masks),
                strict=True,
            )
        return itertools.repeat(())


@dataclass(frozen=True, slots=True)
class ExplicitPairs:
    """Explicit pairs, scored one by one: hard negatives that are candidates for the rows of their own example only."""

    anchor: Anchor
    row: Tensor
    """[P] own row, counted from the first own row, in ascending order."""
    position: Tensor
    """[P] position in the table."""
    direction: int


@dataclass(frozen=True, slots=True)
class ForeignColumns:
    """Columns of other ranks in a ring. The own ones are the first rows of the own table, in the same order."""

    ring: Ring
    counts: tuple[int, ...]
    """Number of columns of each rank."""
    score_blocks: Callable[[int], tuple[ScoreBlock, ...]]
    """The score blocks of the own rows against one rank's columns, whose positions count from its first column."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """All scores of this rank's part of the loss. Positions are rows of a table of N occurrences."""

    index: Tensor
    """[N] index into the batch's embeddings for each position."""
    occurrence: Tensor
    """[N] number of the occurrence at each position: the R queries, the R positives, then the hard negatives."""
    queries: slice
    """Positions of the own rows' queries."""
    positives: slice
    """Positions of the own rows' positives."""
    score_blocks: tuple[ScoreBlock, ...]
    explicit: tuple[ExplicitPairs, ...]
    foreign: ForeignColumns | None = None
    """Columns of other ranks, where the table holds the own ones alone."""

    def anchors(self, anchor: Anchor) -> slice:
        """Return the positions of the own rows' anchors of one kind."""
        return self.queries if anchor == "query" else self.positives

    @property
    def num_own_rows(self) -> int:
        """Number of rows whose loss terms this rank computes."""
        return int(self.queries.stop - self.queries.start)


def find_candidates(
    batch: LossBatch, config: TrainConfig, *, both_directions: bool
) -> Candidates:
    """Lay out the table [negatives, positives, queries, own hard negatives] and the score blocks of the options."""
    own = batch.own()
    all_ranks = config.objective.negatives_from != "own_rank"
    rows, negatives = (
        slice(0, batch.num_rows),
        numbers_of(slice(0, batch.negative.numel()), batch),
    )
    if batch.ring is not None:
        # The own columns only; those of other ranks come as visits (`foreign`).
        rows, negatives = (
            batch.ring.rows[batch.ring.rank],
            batch.ring.negatives[batch.ring.rank],
        )
    if not all_ranks:
        # Fewer candidates; the loss still divides by the rows of the global batch.
        rows, negatives = own, numbers_of(batch.own_hard_negatives(), batch)
    # Queries of other rows are needed only as columns; otherwise the own queries, as anchors, are enough.
    query_columns = config.objective.query_query_negatives or both_directions
    query_rows = rows if query_columns else own

    explicit_row = explicit_position = used = batch.negative[:0]
    has_negative_columns = config.objective.hard_negatives_scope == "all"
    if not has_negative_columns:
        # With this scope hard negatives are explicit pairs and no columns of the score blocks.
        explicit_row, explicit_negative = explicit_negatives(
            batch, own, negatives, mask_duplicates=config.objective.mask_duplicates
        )
        used, explicit_position = torch.unique(explicit_negative, return_inverse=True)
        negatives = negatives[:0]

    occurrence = occurrences_of(batch, negatives, rows, query_rows, used)
    # Negatives and positives are adjacent, so that one contiguous range holds all documents.
    num_documents = negatives.numel() + rows.stop - rows.start
    queries = slice(num_documents, num_documents + query_rows.stop - query_rows.start)
    keys = _Keys(batch, config, own, both_directions=both_directions)
    explicit: list[ExplicitPairs] = []
    if explicit_row.numel():
        position = queries.stop + explicit_position
        explicit.append(ExplicitPairs("query", explicit_row, position, FORWARD))
        if config.objective.document_document_negatives:
            explicit.append(ExplicitPairs("positive", explicit_row, position, FORWARD))
    foreign = None
    if batch.ring is not None and all_ranks:
        foreign = _foreign_columns(
            batch.ring,
            keys,
            with_negatives=has_negative_columns,
            with_queries=query_columns,
        )
    places = batch.places(
        torch.cat((batch.query, batch.positive, batch.negative))[occurrence]
    )
    return Candidates(
        index=places,
        occurrence=occurrence,
        # `own` counts rows of the global batch; the table may begin at another row.
        queries=_shifted(own, queries.start - query_rows.start),
        positives=_shifted(own, negatives.numel() - rows.start),
        score_blocks=keys.score_blocks(rows, negatives),
        explicit=tuple(explicit),
        foreign=foreign,
    )


def _foreign_columns(
    ring: RingParts, keys: _Keys, *, with_negatives: bool, with_queries: bool
) -> ForeignColumns:
    negatives = (
        ring.negatives if with_negatives else tuple(one[:0] for one in ring.negatives)
    )
    roles = 2 if with_queries else 1
    return ForeignColumns(
        ring=ring.ring,
        counts=tuple(
            some.numel() + roles * (rows.stop - rows.start)
            for rows, some in zip(ring.rows, negatives, strict=True)
        ),
        # Kept from the first pass for the second: keys of all columns, which are integers.
        score_blocks=cache(
            lambda rank: keys.score_blocks(ring.rows[rank], negatives[rank])
        ),
    )


def numbers_of(some: slice, batch: LossBatch) -> Tensor:
    """Return the numbers of a range, on the batch's device."""
    return torch.arange(some.start, some.stop, device=batch.query.device)


def occurrences_of(
    batch: LossBatch,
    negatives: Tensor,
    positives: slice,
    queries: slice,
    more_negatives: Tensor,
) -> Tensor:
    """Numbers of occurrences: queries count from 0, positives from R, hard negatives from 2 R."""
    count = batch.num_rows
    numbers = torch.arange(2 * count, device=batch.query.device)
    return torch.cat(
        (
            2 * count + negatives,
            numbers[count : 2 * count][positives],
            numbers[:count][queries],
            2 * count + more_negatives,
        )
    )


def explicit_negatives(
    batch: LossBatch, rows: slice, negatives: Tensor, *, mask_duplicates: bool
) -> tuple[Tensor, Tensor]:
    """Return rows [P] and hard negatives [P]: each row of the range with each of its example's hard negatives, of those
    whose numbers are given.

    Rows count from the range's start, ascending. With `mask_duplicates`, pairs are dropped whose negative has the
    content of the row's query or of one of its example's positives.
    """
    row, negative = join_equal(batch.example[rows], batch.negative_example[negatives])
    negative = negatives[negative]
    if mask_duplicates and row.numel():
        sets = _content_sets(batch)[rows][row]
        content = batch.content[negative_parts(batch)[negative]]
        # Places among the sorted distinct contents: the numbers that `_content_sets` uses.
        ranks = torch.searchsorted(torch.unique(batch.content), content).to(torch.int32)
        # sets: [P, S] contents that the row excludes; ranks: [P, 1 or 2] those of the negative's parts.
        keep = (sets[:, :, None] != ranks[:, None]).flatten(1).all(1)
        row, negative = row[keep], negative[keep]
    return row, negative


def negative_parts(batch: LossBatch) -> Tensor:
    """[H, 1 or 2] indices of the embeddings that each hard negative is made of: itself, or the parts of a mixture."""
    return (
        batch.negative[:, None]
        if batch.negative_parts is None
        else batch.negative_parts
    )


class _Keys:
    """Builder of the score blocks with their exclusion masks, for the own rows against any range of columns.

    With `mask_duplicates` keys are contents. Otherwise keys are example ids: a row leaves out only the query and
    positives of its own example.
    """

    def __init__(
        self,
        batch: LossBatch,
        config: TrainConfig,
        own: slice,
        *,
        both_directions: bool,
    ) -> None:
        self.config = config
        self.both_directions = both_directions
        self.by_content = config.objective.mask_duplicates
        if self.by_content:
            content = torch.unique(batch.content, return_inverse=True)[1].to(
                torch.int32
            )
            self.sets = _content_sets(batch)
            self.query, self.positive = content[batch.query], content[batch.positive]
            self.negative = content[negative_parts(batch)]
        else:
            example = torch.unique(batch.example, return_inverse=True)[1].to(
                torch.int32
            )
            self.sets, self.query, self.positive = example[:, None], example, example
            # Hard negatives have no key: without mask_duplicates none of them is ever left out.
            self.negative = torch.full_like(
                batch.negative[:, None], NO_KEY_COLUMN, dtype=torch.int32
            )
        self.own_sets, self.own_query, self.own_positive = (
            self.sets[own],
            self.query[own],
            self.positive[own],
        )

    def score_blocks(self, rows: slice, negatives: Tensor) -> tuple[ScoreBlock, ...]:
        """Return the score blocks against [negatives, positives, queries]: the hard negatives of these numbers, then
        the positives and queries of these rows. Empty ones are left out."""
        num_rows = rows.stop - rows.start
        documents = slice(0, negatives.numel() + num_rows)
        queries = slice(documents.stop, documents.stop + num_rows)
        negative, positive = self.negative[negatives], self.positive[rows]
        # A mixture has two keys, so a positive's single key is repeated to the same width.
        document = torch.cat(
            (negative, positive[:, None].expand(-1, negative.shape[1]))
        )
        # Documents, or queries, with the content of the row's query or of one of its positives are left out.
        of_documents = (ExclusionMask(self.own_sets, document),)
        of_queries = (ExclusionMask(self.own_sets, self.query[rows, None]),)
        found = [ScoreBlock("query", documents, of_documents, FORWARD)]
        if self.config.objective.query_query_negatives:
            found.append(ScoreBlock("query", queries, of_queries, FORWARD))
        if self.config.objective.document_document_negatives:
            found.append(ScoreBlock("positive", documents, of_documents, FORWARD))
        if self.both_directions:
            found.append(
                ScoreBlock(
                    "positive",
                    queries,
                    self._queries_of_documents(rows, of_queries),
                    REVERSE,
                )
            )
        return tuple(one for one in found if one.columns.stop > one.columns.start)

    def _queries_of_documents(
        self, rows: slice, of_queries: tuple[ExclusionMask, ...]
    ) -> tuple[ExclusionMask, ...]:
        """Return masks for the reverse direction.

        They exclude queries of examples with the row's positive (as positive or query), and queries with the
        content of the row's own query.
        """
        if not self.by_content:
            return of_queries
        # The sets serve as columns here, so their fill value must become that of columns.
        sets = self.sets[rows]
        columns = sets.where(sets != NO_KEY_ROW, NO_KEY_COLUMN)
        return ExclusionMask(self.own_positive[:, None], columns), ExclusionMask(
            self.own_query[:, None], self.query[rows, None]
        )


def _content_sets(batch: LossBatch) -> Tensor:
    """Return [R, S] int32: contents (as ascending ranks) of each row's query and of its example's positives."""
    content = torch.unique(batch.content, return_inverse=True)[1].to(torch.int32)
    positive = content[batch.positive]
    example, size = torch.unique(
        batch.example, return_inverse=True, return_counts=True
    )[1:]
    order = torch.argsort(example, stable=True)
    # Scatter into [examples, width]: slot is the position among the positives of the same example, that is the
    # position in the sorted order less the example's exclusive prefix sum.
    slot = (
        torch.arange(order.numel(), device=order.device)
        - (size.cumsum(0) - size)[example[order]]
    )
    width = int(size.max()) if size.numel() else 0
    positives = positive.new_full((size.numel(), width), NO_KEY_ROW)
    positives[example[order], slot] = positive[order]
    return torch.cat((content[batch.query][:, None], positives[example]), dim=1)


def join_equal(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return i [P] and j [P] of all pairs with left[i] == right[j], ascending by i (a sort-merge join)."""
    ordered, order = torch.sort(right, stable=True)
    first = torch.searchsorted(ordered, left)
    count = torch.searchsorted(ordered, left, right=True) - first
    rows = torch.repeat_interleave(
        torch.arange(left.numel(), device=left.device), count
    )
    # Equal values of `right` are adjacent after sorting: match number w of left[i] is at first[i] + w.
    within = (
        torch.arange(rows.numel(), device=left.device) - (count.cumsum(0) - count)[rows]
    )
    return rows, order[first[rows] + within]


def _places(
    columns: Tensor, mask: Tensor, num_columns: int, size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows and columns of a mask [columns, rows] for every `size` of all columns."""
    column, row = mask.nonzero(as_tuple=True)
    column = columns[column]
    # `columns` ascend, so that the places of each part are adjacent.
    bounds = torch.searchsorted(
        column, torch.arange(0, num_columns + size, size)
    ).tolist()
    for start, (first, last) in zip(
        range(0, num_columns, size), itertools.pairwise(bounds), strict=True
    ):
        yield row[first:last], column[first:last] - start


def _any_equal(row_keys: Tensor, column_keys: Tensor) -> Tensor:
    """Return a bool mask [rows, columns], true where any of the keys are equal."""
    # One [rows, columns] comparison per pair of slots. A single broadcast would need [rows, columns, S, S'].
    mask = row_keys[:, :1] == column_keys[:, 0]
    for slot in range(row_keys.shape[1]):
        for column_slot in range(column_keys.shape[1]):
            if slot or column_slot:
                mask |= row_keys[:, slot, None] == column_keys[:, column_slot]
    return mask


def _trimmed(keys: Tensor) -> Tensor:
    """Return the keys without slots that no row of this block uses. The check pays only with more than two slots."""
    if keys.shape[1] <= 2 or not keys.shape[0]:
        return keys
    return keys[:, : int((keys >= 0).sum(1).max())]


def _shifted(part: slice, offset: int) -> slice:
    return slice(part.start + offset, part.stop + offset)
