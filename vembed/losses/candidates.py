"""Candidates of each row: score blocks, explicit pairs and exclusion masks.

A loss compares the own pair of each row (q_i, p_i) with its candidates. Which scores that
takes is decided here, from indices and contents alone; `tiles.py` computes them. The
candidates' table has one position for each occurrence of a text:

    [ hard negatives | positives | queries | hard negatives of explicit pairs ]
      '------- documents -------'

A score block says: all rows of this rank, anchored at their query or their positive,
against one range of positions. An exclusion mask says which of these scores do not count.
It is never stored as [rows, columns]. Each row has a few keys, each column has a few keys,
and a score is left out where any of them are equal: a row's keys are the contents of its
query and positives, a column's key is its content. With hard_negatives_scope: own each
hard negative meets the rows of its own example only, as explicit pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from vembed.losses.batch import LossBatch, copied_together
from vembed.losses.declaration import CandidateLoss
from vembed.losses.exchange import Ring, RingParts

# Fill values of unused key slots. They differ, so that an empty row slot never equals an
# empty column slot.
NO_KEY_ROW = -1
NO_KEY_COLUMN = -2
FORWARD = 0
REVERSE = 1
SPARSE_SHARE = 4
"""A mask with keys in fewer than one of so many columns is kept as single scores."""
Anchor = Literal["query", "positive"]
LeftOut = Tensor | tuple[Tensor, Tensor]
"""A bool mask of some rows and columns, or the rows and columns of single scores."""


@dataclass(frozen=True, slots=True)
class ExclusionMask:
    """Scores that do not count: those whose row and column have an equal key."""

    row_keys: Tensor
    """[n, S] int32 keys of this rank's rows. Unused slots are -1."""
    column_keys: Tensor
    """[C, S'] int32 keys of the columns. Unused slots are -2."""

    def left_out(self, rows: slice, columns: slice, size: int) -> Iterator[LeftOut]:
        """Yield what is left out of every `size` of the columns.

        It is a bool mask, or the places of its true values if these are few.
        """
        row_keys = _trimmed(self.row_keys[rows])
        column_keys = _trimmed(self.column_keys[columns])
        num_columns = column_keys.shape[0]
        # On a CPU a comparison of all keys takes almost as long as the scores, and most
        # columns have no key of any row. On a GPU it is cheap, and the number of places
        # would have to be waited for.
        if row_keys.device.type == "cpu" and row_keys.numel():
            ordered = row_keys.flatten().sort().values
            nearest = torch.searchsorted(ordered, column_keys.contiguous())
            nearest.clamp_(max=ordered.numel() - 1)
            has_key = (ordered[nearest] == column_keys).any(1).nonzero()[:, 0]
            if SPARSE_SHARE * has_key.numel() <= num_columns:
                mask = _any_equal(column_keys[has_key], row_keys)
                yield from _places(has_key, mask, num_columns, size)
                return
        for tile_keys in torch.split(column_keys, size):
            yield _any_equal(row_keys, tile_keys)


@dataclass(frozen=True, slots=True)
class ScoreBlock:
    """The anchors of all rows of this rank against a range of columns.

    The row's own pair is always left out here. It enters the loss separately.
    """

    anchor: Anchor
    columns: slice
    exclusion_masks: tuple[ExclusionMask, ...]
    direction: int

    def left_out(
        self, rows: slice, columns: slice, size: int
    ) -> Iterator[tuple[LeftOut, ...]]:
        """Yield what the masks leave out of every `size` of the columns.

        Columns count from the score block's first.
        """
        if not self.exclusion_masks:
            return itertools.repeat(())
        masks = (mask.left_out(rows, columns, size) for mask in self.exclusion_masks)
        return zip(*masks, strict=True)


@dataclass(frozen=True, slots=True)
class ExplicitPairs:
    """Pairs that are scored one by one: hard negatives for rows of their own example."""

    anchor: Anchor
    row: Tensor
    """[P] row, counted from this rank's first, in ascending order."""
    position: Tensor
    """[P] position of the hard negative in the table."""
    direction: int
    host_row: Tensor
    """`row`, on the host where it is known there."""

    def of_rows(self, rows: slice) -> slice:
        """Return the pairs of a range of rows, which are next to each other."""
        first = int(torch.searchsorted(self.host_row, rows.start))
        last = int(torch.searchsorted(self.host_row, rows.stop))
        return slice(first, last)


@dataclass(frozen=True, slots=True)
class ForeignColumns:
    """Columns of other ranks that are not in the table.

    This rank's are the first rows of its table, in the same order.
    """

    ring: Ring
    counts: tuple[int, ...]
    """Number of columns of each rank."""
    score_blocks: Callable[[int], tuple[ScoreBlock, ...]]
    """The score blocks of this rank's rows against one rank's columns, whose positions count from its first column."""


@dataclass(frozen=True, slots=True)
class LossCandidates:
    """All scores of this rank's share of the loss. Positions are rows of a table of N occurrences."""

    index: Tensor
    """[N] index into the batch's embeddings for each position."""
    occurrence: Tensor
    """[N] number of the occurrence at each position: the R queries, the R positives, then the hard negatives."""
    queries: slice
    """Positions of the queries of this rank's rows."""
    positives: slice
    """Positions of the positives of this rank's rows."""
    score_blocks: tuple[ScoreBlock, ...]
    explicit: tuple[ExplicitPairs, ...]
    foreign: ForeignColumns | None = None
    """Columns of other ranks, where the table holds only this rank's."""

    def anchors(self, anchor: Anchor) -> slice:
        """Return the positions of the rows' anchors of one kind."""
        return self.queries if anchor == "query" else self.positives

    @property
    def num_own_rows(self) -> int:
        """Number of rows whose loss terms this rank computes."""
        return int(self.queries.stop - self.queries.start)

    def to(self, device: torch.device) -> LossCandidates:
        """Return the candidates on a device, copied together."""
        if self.index.device == device:
            return self
        tensors = [self.index, self.occurrence]
        for pairs in self.explicit:
            tensors += [pairs.row, pairs.position]
        for block in self.score_blocks:
            for mask in block.exclusion_masks:
                tensors += [mask.row_keys, mask.column_keys]
        distinct = {id(tensor): tensor for tensor in tensors}
        copies = copied_together(list(distinct.values()), device)
        copy_of = dict(zip(distinct, copies, strict=True))
        explicit = []
        for pairs in self.explicit:
            row = copy_of[id(pairs.row)]
            position = copy_of[id(pairs.position)]
            explicit.append(replace(pairs, row=row, position=position))
        blocks = []
        for block in self.score_blocks:
            masks = []
            for mask in block.exclusion_masks:
                row_keys = copy_of[id(mask.row_keys)]
                masks.append(ExclusionMask(row_keys, copy_of[id(mask.column_keys)]))
            blocks.append(replace(block, exclusion_masks=tuple(masks)))
        return replace(
            self,
            index=copy_of[id(self.index)],
            occurrence=copy_of[id(self.occurrence)],
            score_blocks=tuple(blocks),
            explicit=tuple(explicit),
        )


def find_candidates(
    batch: LossBatch,
    options: CandidateLoss,
    *,
    query_query: bool = False,
    document_document: bool = False,
    both_directions: bool = False,
) -> LossCandidates:
    """Lay out the table and the score blocks that the options ask for.

    `query_query`, `document_document`: queries against queries, and positives against
    documents, too. `both_directions`: positives against queries, for a reverse loss.
    """
    device = batch.query.device
    # On the host, where nothing waits for a GPU to tell how many there are of something.
    batch = batch.on_host()
    rank_rows = batch.own()
    # The rows and hard negatives whose columns are in the table.
    rows = slice(0, batch.num_rows)
    negatives = batch.negative_numbers()
    all_ranks = options.negatives_from == "all_ranks"
    if not all_ranks:
        # Fewer candidates. The loss still divides by the rows of the global batch.
        rows = rank_rows
        own_negatives = batch.own_hard_negatives()
        negatives = negatives[own_negatives]
    elif batch.ring is not None:
        # Columns of other ranks come later (`foreign`).
        rows = batch.ring.rows[batch.ring.rank]
        negatives = batch.ring.negatives[batch.ring.rank]
    # Queries of other rows are needed only as columns. Otherwise the queries of this
    # rank's rows are enough, as anchors.
    has_query_columns = query_query or both_directions
    query_rows = rows if has_query_columns else rank_rows

    has_negative_columns = options.hard_negatives_scope == "all"
    explicit_row = batch.negative[:0]
    explicit_position = batch.negative[:0]
    explicit_negative = batch.negative[:0]
    if not has_negative_columns:
        explicit_row, negative = explicit_negatives(
            batch, rank_rows, negatives, mask_duplicates=options.mask_duplicates
        )
        explicit_negative, explicit_position = torch.unique(
            negative, return_inverse=True
        )
        negatives = negatives[:0]

    # Occurrences are numbered: queries from 0, positives from R, hard negatives from 2 R.
    num_rows = batch.num_rows
    numbers = torch.arange(2 * num_rows, device=batch.query.device)
    occurrence = torch.cat(
        (
            2 * num_rows + negatives,
            numbers[num_rows:][rows],
            numbers[:num_rows][query_rows],
            2 * num_rows + explicit_negative,
        )
    )
    inputs = torch.cat((batch.query, batch.positive, batch.negative))
    num_documents = negatives.numel() + rows.stop - rows.start
    first_explicit = num_documents + query_rows.stop - query_rows.start

    explicit = []
    if explicit_row.numel():
        position = first_explicit + explicit_position
        explicit.append(
            ExplicitPairs("query", explicit_row, position, FORWARD, explicit_row)
        )
        if document_document:
            explicit.append(replace(explicit[0], anchor="positive"))
    blocks = _BlockBuilder(
        batch,
        rank_rows,
        by_content=options.mask_duplicates,
        query_query=query_query,
        document_document=document_document,
        both_directions=both_directions,
    )
    foreign = None
    if batch.ring is not None and all_ranks:
        foreign = _foreign_columns(
            batch.ring,
            blocks,
            with_negatives=has_negative_columns,
            with_queries=has_query_columns,
        )
    candidates = LossCandidates(
        index=batch.positions(inputs[occurrence]),
        occurrence=occurrence,
        # `own` counts rows of the global batch. The table may begin at another row.
        queries=_shifted(rank_rows, num_documents - query_rows.start),
        positives=_shifted(rank_rows, negatives.numel() - rows.start),
        score_blocks=blocks.build(rows, negatives),
        explicit=tuple(explicit),
        foreign=foreign,
    )
    return candidates.to(device)


def _foreign_columns(
    ring: RingParts,
    blocks: _BlockBuilder,
    *,
    with_negatives: bool,
    with_queries: bool,
) -> ForeignColumns:
    negatives = ring.negatives
    if not with_negatives:
        negatives = tuple(numbers[:0] for numbers in ring.negatives)
    roles = 2 if with_queries else 1
    counts = []
    for rows, numbers in zip(ring.rows, negatives, strict=True):
        counts.append(numbers.numel() + roles * (rows.stop - rows.start))

    # Kept from the first round for the second: keys of all columns, which are integers.
    @cache
    def score_blocks(rank: int) -> tuple[ScoreBlock, ...]:
        return blocks.build(ring.rows[rank], negatives[rank])

    return ForeignColumns(ring.ring, tuple(counts), score_blocks)


def explicit_negatives(
    batch: LossBatch, rows: slice, negatives: Tensor, *, mask_duplicates: bool
) -> tuple[Tensor, Tensor]:
    """Return rows [P] and hard negatives [P]: each row with each of its example's.

    `negatives` are the numbers of those that are looked at. Rows count from the range's
    start, ascending. With `mask_duplicates`, pairs are dropped whose negative has the
    content of the row's query or of one of its example's positives.
    """
    row, negative = join_equal(batch.example[rows], batch.negative_example[negatives])
    negative = negatives[negative]
    if not mask_duplicates or not row.numel():
        return row, negative
    excluded = _content_sets(batch)[rows][row]  # [P, S]
    content = batch.content[negative_parts(batch)[negative]]  # [P, 1 or 2]
    # Ranks among the sorted distinct contents, the numbers that `_content_sets` uses.
    ranks = torch.searchsorted(torch.unique(batch.content), content).to(torch.int32)
    is_kept = (excluded[:, :, None] != ranks[:, None]).flatten(1).all(1)
    return row[is_kept], negative[is_kept]


def negative_parts(batch: LossBatch) -> Tensor:
    """Return [H, 1 or 2] indices of the embeddings that each hard negative is made of."""
    if batch.negative_parts is None:
        return batch.negative[:, None]
    return batch.negative_parts


class _BlockBuilder:
    """Builder of score blocks with their masks: this rank's rows against any columns.

    With `by_content` (mask_duplicates) keys are contents. Otherwise keys are example ids:
    a row leaves out only the query and positives of its own example.
    """

    def __init__(
        self,
        batch: LossBatch,
        rank_rows: slice,
        *,
        by_content: bool,
        query_query: bool,
        document_document: bool,
        both_directions: bool,
    ) -> None:
        self.by_content = by_content
        self.query_query = query_query
        self.document_document = document_document
        self.both_directions = both_directions
        if by_content:
            content = _ranks(batch.content)
            self.excluded = _content_sets(batch)
            self.query = content[batch.query]
            self.positive = content[batch.positive]
            self.negative = content[negative_parts(batch)]
        else:
            example = _ranks(batch.example)
            self.excluded = example[:, None]
            self.query = example
            self.positive = example
            # Hard negatives have no key: without mask_duplicates none is ever left out.
            self.negative = torch.full_like(
                batch.negative[:, None], NO_KEY_COLUMN, dtype=torch.int32
            )
        self.row_excluded = self.excluded[rank_rows]
        self.row_query = self.query[rank_rows]
        self.row_positive = self.positive[rank_rows]

    def build(self, rows: slice, negatives: Tensor) -> tuple[ScoreBlock, ...]:
        """Return the score blocks against [negatives, positives, queries].

        The columns are the hard negatives of these numbers, then the positives and the
        queries of these rows. Empty blocks are left out.
        """
        num_rows = rows.stop - rows.start
        documents = slice(0, negatives.numel() + num_rows)
        queries = slice(documents.stop, documents.stop + num_rows)
        negative = self.negative[negatives]
        # A mixture has two keys, so a positive's single key is repeated to that width.
        positive = self.positive[rows, None].expand(-1, negative.shape[1])
        document = torch.cat((negative, positive))
        # Documents, or queries, with the content of the row's query or of one of its
        # positives are left out.
        of_documents = (ExclusionMask(self.row_excluded, document),)
        of_queries = (ExclusionMask(self.row_excluded, self.query[rows, None]),)
        blocks = [ScoreBlock("query", documents, of_documents, FORWARD)]
        if self.query_query:
            blocks.append(ScoreBlock("query", queries, of_queries, FORWARD))
        if self.document_document:
            blocks.append(ScoreBlock("positive", documents, of_documents, FORWARD))
        if self.both_directions:
            masks = self._reverse_masks(rows) if self.by_content else of_queries
            blocks.append(ScoreBlock("positive", queries, masks, REVERSE))
        return tuple(
            block for block in blocks if block.columns.stop > block.columns.start
        )

    def _reverse_masks(self, rows: slice) -> tuple[ExclusionMask, ...]:
        """Return masks of queries against the positives of this rank's rows.

        They leave out queries of examples that have the row's positive (as positive or
        query), and queries with the content of the row's own query.
        """
        # The excluded contents serve as columns here, so their fill value must become
        # that of columns.
        excluded = self.excluded[rows]
        column_keys = excluded.where(excluded != NO_KEY_ROW, NO_KEY_COLUMN)
        knows_positive = ExclusionMask(self.row_positive[:, None], column_keys)
        same_query = ExclusionMask(self.row_query[:, None], self.query[rows, None])
        return knows_positive, same_query


def _ranks(values: Tensor) -> Tensor:
    """Return each value's rank among the sorted distinct values, as int32."""
    ranks: Tensor = torch.unique(values, return_inverse=True)[1]
    return ranks.to(torch.int32)


def _content_sets(batch: LossBatch) -> Tensor:
    """Return [R, S] int32: contents, as ranks, of each row's query and of its example's positives."""
    content = _ranks(batch.content)
    positive = content[batch.positive]
    example, size = torch.unique(
        batch.example, return_inverse=True, return_counts=True
    )[1:]
    order = torch.argsort(example, stable=True)
    # Scatter into [examples, width]. The slot is the position among the positives of the
    # same example: the position in the sorted order less the exclusive prefix sum of the
    # example sizes.
    first = size.cumsum(0) - size
    slot = torch.arange(order.numel(), device=order.device) - first[example[order]]
    width = int(size.max()) if size.numel() else 0
    positives = positive.new_full((size.numel(), width), NO_KEY_ROW)
    positives[example[order], slot] = positive[order]
    return torch.cat((content[batch.query][:, None], positives[example]), dim=1)


def join_equal(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return i [P] and j [P] of all pairs with left[i] == right[j], ascending by i (a sort-merge join)."""
    ordered, order = torch.sort(right, stable=True)
    first = torch.searchsorted(ordered, left)
    count = torch.searchsorted(ordered, left, right=True) - first
    numbers = torch.arange(left.numel(), device=left.device)
    rows = torch.repeat_interleave(numbers, count)
    # Equal values of `right` are adjacent after sorting: match number w of left[i] is at
    # first[i] + w.
    before = (count.cumsum(0) - count)[rows]
    within = torch.arange(rows.numel(), device=left.device) - before
    return rows, order[first[rows] + within]


def _places(
    columns: Tensor, mask: Tensor, num_columns: int, size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows and columns of a mask [columns, rows] for every `size` of all columns."""
    column, row = mask.nonzero(as_tuple=True)
    column = columns[column]
    # `columns` ascend, so that the places of each part are adjacent.
    limits = torch.arange(0, num_columns + size, size)
    bounds = torch.searchsorted(column, limits).tolist()
    starts = range(0, num_columns, size)
    for start, (first, last) in zip(starts, itertools.pairwise(bounds), strict=True):
        yield row[first:last], column[first:last] - start


def _any_equal(row_keys: Tensor, column_keys: Tensor) -> Tensor:
    """Return a bool mask [rows, columns], true where any of the keys are equal."""
    # One [rows, columns] comparison per pair of slots. A single broadcast would need
    # [rows, columns, S, S'].
    mask = row_keys[:, :1] == column_keys[:, 0]
    for row_slot in range(row_keys.shape[1]):
        for column_slot in range(column_keys.shape[1]):
            if row_slot or column_slot:
                mask |= row_keys[:, row_slot, None] == column_keys[:, column_slot]
    return mask


def _trimmed(keys: Tensor) -> Tensor:
    """Return the keys without slots that no row of this block uses."""
    # The check pays only with more than two slots, and where nothing waits for it.
    if keys.shape[1] <= 2 or not keys.shape[0] or keys.device.type != "cpu":
        return keys
    num_used = int((keys >= 0).sum(1).max())
    return keys[:, :num_used]


def _shifted(positions: slice, offset: int) -> slice:
    return slice(positions.start + offset, positions.stop + offset)
