"""Candidates of each row: score blocks, explicit pairs and exclusion masks.

A loss compares the positive p_i of each row (q_i, p_i) with the row's candidates. Which
scores that takes is decided here, from indices and contents alone; `tiles.py` computes
them. The candidates' table has one position for each occurrence of a text:

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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from vembed.losses.batch import LossBatch, copied_together
from vembed.losses.declaration import CandidateLoss

# Fill values of unused key slots. They differ, so that an empty row slot never equals an
# empty column slot.
NO_KEY_ROW = -1
NO_KEY_COLUMN = -2
FORWARD = 0
REVERSE = 1
SPARSE_SHARE = 4
"""A mask with keys in at most one of so many columns is kept as single scores."""
Anchor = Literal["query", "positive"]
ExcludedScores = Tensor | tuple[Tensor, Tensor]
"""A bool mask of some rows and columns, or the rows and columns of single scores."""


@dataclass(frozen=True, slots=True)
class ExclusionMask:
    """Scores that do not count: those whose row and column have an equal key."""

    row_keys: Tensor
    """[n, S] int32 keys of this rank's rows. Unused slots are -1."""
    column_keys: Tensor
    """[C, S'] int32 keys of the columns. Unused slots are -2."""

    def excluded(self, rows: slice, size: int) -> Iterator[ExcludedScores]:
        """Yield what is left out of every `size` of the columns.

        It is a bool mask, or the places of its true values if these are few.
        """
        row_keys = self.row_keys[rows]
        column_keys = self.column_keys
        num_columns = column_keys.shape[0]
        # On a CPU a comparison of all keys takes almost as long as the scores, and most
        # columns have no key of any row. On a GPU it is cheap, and the number of places
        # would have to be waited for.
        if row_keys.device.type == "cpu" and row_keys.numel():
            row_keys = row_keys[:, : int((row_keys >= 0).sum(1).max())]
            ordered = row_keys.flatten().sort().values
            nearest = torch.searchsorted(ordered, column_keys.contiguous())
            nearest.clamp_(max=ordered.numel() - 1)
            has_key = (ordered[nearest] == column_keys).any(1).nonzero()[:, 0]
            if SPARSE_SHARE * has_key.numel() <= num_columns:
                mask = _any_equal(column_keys[has_key], row_keys)
                column, row = mask.nonzero(as_tuple=True)
                column = has_key[column]
                # `column` ascends, so that the places of each part are adjacent.
                limits = torch.arange(0, num_columns + size, size)
                bounds = torch.searchsorted(column, limits).tolist()
                for part, (first, last) in enumerate(itertools.pairwise(bounds)):
                    yield row[first:last], column[first:last] - part * size
                return
        for tile_keys in torch.split(column_keys, size):
            yield _any_equal(row_keys, tile_keys)


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


@dataclass(frozen=True, slots=True)
class ScoreBlock:
    """The anchors of all rows of this rank against a range of columns.

    The row's positive is always left out here. It enters the loss separately.
    """

    anchor: Anchor
    columns: slice
    exclusion_masks: tuple[ExclusionMask, ...]
    direction: int

    @property
    def num_columns(self) -> int:
        """Number of columns."""
        return int(self.columns.stop - self.columns.start)

    def excluded(self, rows: slice, size: int) -> Iterator[tuple[ExcludedScores, ...]]:
        """Yield what the masks leave out of every `size` of the columns."""
        if not self.exclusion_masks:
            return itertools.repeat(())
        masks = (mask.excluded(rows, size) for mask in self.exclusion_masks)
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

    @property
    def num_rows(self) -> int:
        """Number of rows whose loss terms this rank computes."""
        return int(self.queries.stop - self.queries.start)


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
    num_rows = batch.num_rows
    rank_rows = batch.rank_rows
    # The rows and hard negatives that are columns.
    rows = slice(0, num_rows)
    negatives = torch.arange(batch.negative.numel(), device=batch.negative.device)
    if options.negatives_from == "own_rank":
        # Fewer candidates. The loss still divides by the rows of the global batch.
        rows = rank_rows
        negatives = negatives[batch.rank_negatives]
    explicit_row = batch.negative[:0]
    explicit_position = batch.negative[:0]
    explicit_negative = batch.negative[:0]
    if options.hard_negatives_scope == "own":
        explicit_row, explicit_negative = explicit_negatives(
            batch, rank_rows, negatives, mask_duplicates=options.mask_duplicates
        )
        explicit_negative, explicit_position = torch.unique(
            explicit_negative, return_inverse=True
        )
        negatives = negatives[:0]
    # Queries of other rows are needed only as columns. Otherwise the queries of this
    # rank's rows are enough, as anchors.
    query_rows = rows if query_query or both_directions else rank_rows

    # Occurrences are numbered: queries from 0, positives from R, hard negatives from 2 R.
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

    # Keys are contents, as ranks among the distinct ones. Without mask_duplicates they
    # are example ids: a row leaves out only the query and positives of its own example.
    if options.mask_duplicates:
        content = _ranks(batch.content)
        row_keys = _content_sets(batch)
        query_keys = content[batch.query]
        positive_keys = content[batch.positive]
        negative_keys = content[negative_parts(batch)]
    else:
        query_keys = _ranks(batch.example)
        positive_keys = query_keys
        row_keys = query_keys[:, None]
        # Hard negatives have no key: none is ever left out.
        negative_keys = torch.full_like(
            batch.negative[:, None], NO_KEY_COLUMN, dtype=torch.int32
        )
    negative_keys = negative_keys[negatives]
    # A mixture has two keys, so a positive's single key is repeated to that width.
    width = negative_keys.shape[1]
    document_keys = torch.cat(
        (negative_keys, positive_keys[rows, None].expand(-1, width))
    )
    # The keys of rows serve as columns in the reverse direction, so their fill value must
    # become that of columns.
    keys_of_rows = row_keys[rows]
    keys_of_rows = keys_of_rows.where(keys_of_rows != NO_KEY_ROW, NO_KEY_COLUMN)

    tensors = (
        inputs[occurrence],
        occurrence,
        explicit_row,
        first_explicit + explicit_position,
        row_keys[rank_rows],
        document_keys,
        query_keys[query_rows, None],
        positive_keys[rank_rows, None],
        query_keys[rank_rows, None],
        keys_of_rows if both_directions else keys_of_rows[:0],
    )
    copies = copied_together(tensors, device)
    index, occurrence, explicit_rows, position, row_keys, *column_keys = copies
    document_keys, query_keys, row_positive, row_query, keys_of_rows = column_keys

    # Documents, or queries, with the content of the row's query or of one of its
    # positives are left out.
    documents = slice(0, num_documents)
    queries = slice(num_documents, first_explicit)
    of_documents = (ExclusionMask(row_keys, document_keys),)
    of_queries: tuple[ExclusionMask, ...] = (ExclusionMask(row_keys, query_keys),)
    blocks = [ScoreBlock("query", documents, of_documents, FORWARD)]
    if query_query:
        blocks.append(ScoreBlock("query", queries, of_queries, FORWARD))
    if document_document:
        blocks.append(ScoreBlock("positive", documents, of_documents, FORWARD))
    if both_directions:
        if options.mask_duplicates:
            # Queries of examples that have the row's positive (as positive or query), and
            # queries with the content of the row's own query.
            of_queries = (
                ExclusionMask(row_positive, keys_of_rows),
                ExclusionMask(row_query, query_keys),
            )
        blocks.append(ScoreBlock("positive", queries, of_queries, REVERSE))
    explicit = []
    if explicit_row.numel():
        pairs = ExplicitPairs("query", explicit_rows, position, FORWARD, explicit_row)
        explicit.append(pairs)
        if document_document:
            explicit.append(replace(pairs, anchor="positive"))
    # `rank_rows` counts rows of the global batch. The table may begin at another row.
    first_query = num_documents - query_rows.start
    first_positive = negatives.numel() - rows.start
    return LossCandidates(
        index=index,
        occurrence=occurrence,
        queries=slice(rank_rows.start + first_query, rank_rows.stop + first_query),
        positives=slice(
            rank_rows.start + first_positive, rank_rows.stop + first_positive
        ),
        score_blocks=tuple(block for block in blocks if block.num_columns),
        explicit=tuple(explicit),
    )


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
    row_contents = _content_sets(batch)[rows][row]  # [P, S]
    # Ranks among the sorted distinct contents, the numbers that `_content_sets` uses.
    contents = _ranks(batch.content)[negative_parts(batch)[negative]]  # [P, 1 or 2]
    differs = (row_contents[:, :, None] != contents[:, None]).flatten(1).all(1)
    return row[differs], negative[differs]


def negative_parts(batch: LossBatch) -> Tensor:
    """Return [H, 1 or 2] indices of the embeddings that each hard negative is made of."""
    if batch.negative_parts is None:
        return batch.negative[:, None]
    return batch.negative_parts


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
