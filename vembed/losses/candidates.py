"""Candidates of each row: which scores a loss reads.

A loss compares the positive p_i of each row i = (q_i, p_i) with the row's candidates. This module decides which scores
that takes, from indices and contents alone. `tiles.py` computes them. A text has three numbers here:

index        of its vector in the embeddings E [U, D]. Equal texts of one rank share a vector.
occurrence   of the text in the global batch of R rows and H hard negatives: the R queries from 0, the R positives from
             R, the hard negatives from 2 R. Teachers know texts by this number.
entry        in the table of this loss, which has the occurrences that are scored, in this order:

    [ hard negatives | positives | queries | hard negatives of explicit pairs ]
      '------- documents -------'

So the documents, and the queries, are ranges of entries, and a tile of columns is a view of the table.

Example: R = 2 rows, H = 1 hard negative, one process. Row 0 is (a, b) with the hard negative c, row 1 is (d, e):

    text          a   b   c   d   e
    occurrence    0   2   4   1   3
    entry         3   1   0   4   2        row 0 has the columns c b e, its own positive b is masked: candidates c, e

A column group says: all rows of this rank, by their query or by their positive, against one range of entries. Exclusion
masks say which of these scores do not count. A mask is never stored as [rows, columns]. Each row has a few keys, each
column has a few keys, and a score is left out where a key of the row equals a key of the column. Keys are contents: a
row has those of its query and of its positives, a column has its own. In the example row 0 has the keys a and b, and
leaves out the column b.

With hard_negatives_scope: own a hard negative is a candidate for the rows of its own example only. Those are few, so
they are explicit pairs, scored one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vembed.losses.batch import LossBatch, copied_together
from vembed.losses.declaration import CandidateLoss

# Keys are filled up to a rectangle. The two values differ, so that an unused slot of a
# row never equals an unused slot of a column.
NO_KEY_ROW = -1
NO_KEY_COLUMN = -2
FORWARD = 0
REVERSE = 1
SPARSE_FRACTION = 0.25
"""A mask of which at most this part of the columns has a key of the rows is returned as places."""
ExcludedScores = Tensor | tuple[Tensor, Tensor]
"""A bool mask [n, t], or the places of its true values: their rows and their columns."""


@dataclass(frozen=True, slots=True)
class ExclusionMask:
    """Scores that do not count: those whose row and column have an equal key."""

    row_keys: Tensor
    """[n, S] int32 keys of this rank's rows. Unused slots are -1."""
    column_keys: Tensor
    """[C, S'] int32 keys of the columns. Unused slots are -2."""

    def tiles(self, rows: slice, tile_width: int) -> Iterator[ExcludedScores]:
        """Yield what is left out of the scores of some rows, tile by tile of `tile_width` columns."""
        row_keys = self.row_keys[rows]
        column_keys = self.column_keys
        num_columns = len(column_keys)
        # On a CPU a comparison of all keys takes almost as long as the scores, and most
        # columns have no key of any row. On a GPU it is cheap, and the host would have to
        # wait for the number of places.
        if row_keys.device.type == "cpu" and row_keys.numel():
            # Slots that none of these rows uses are at the end, and are cut off.
            num_used_slots = int((row_keys >= 0).sum(1).max())
            row_keys = row_keys[:, :num_used_slots]
            # A binary search for each key of the columns among all keys of the rows: [C, S'].
            ordered = row_keys.flatten().sort().values
            nearest = torch.searchsorted(ordered, column_keys.contiguous())
            nearest.clamp_(max=ordered.numel() - 1)
            is_shared = (ordered[nearest] == column_keys).any(1)
            # Only these columns are compared with each row.
            shared = is_shared.nonzero()[:, 0]
            if shared.numel() <= SPARSE_FRACTION * num_columns:
                # [shared columns, n], whose true places are listed column by column.
                mask = _any_equal(column_keys[shared], row_keys)
                column, row = mask.nonzero(as_tuple=True)
                column = shared[column]
                # `column` ascends, so that the places of each tile are adjacent.
                tile_starts = torch.arange(0, num_columns + tile_width, tile_width)
                bounds = torch.searchsorted(column, tile_starts).tolist()
                for tile, (first, stop) in enumerate(itertools.pairwise(bounds)):
                    yield row[first:stop], column[first:stop] - tile * tile_width
                return
        for tile_keys in torch.split(column_keys, tile_width):
            yield _any_equal(row_keys, tile_keys)


def _any_equal(left_keys: Tensor, right_keys: Tensor) -> Tensor:
    """Return a bool mask [n, t], true where any of the keys [n, S] and [t, S'] are equal."""
    # One [n, t] comparison for each pair of slots. A single broadcast would need
    # [n, t, S, S'].
    slots = itertools.product(left_keys.T, right_keys.T)
    left, right = next(slots)
    mask: Tensor = left[:, None] == right
    for left, right in slots:
        mask |= left[:, None] == right
    return mask


@dataclass(frozen=True, slots=True)
class ColumnGroup:
    """Scores of all rows of this rank against the columns of a range of entries.

    The row's own positive is always left out here. It enters the loss separately.
    """

    row_entries: slice
    """Entries of the rows' queries, or of their positives."""
    columns: slice
    """Entries of the columns."""
    masks: tuple[ExclusionMask, ...]
    direction: int = FORWARD

    @property
    def num_columns(self) -> int:
        """Number of columns."""
        return int(self.columns.stop - self.columns.start)


@dataclass(frozen=True, slots=True)
class ExplicitPairs:
    """P single scores: rows against hard negatives of their own example."""

    row_entries: slice
    """Entries of the rows' queries, or of their positives."""
    row: Tensor
    """[P] row, counted from this rank's first, in ascending order."""
    host_row: Tensor
    """`row` on the host, where it is known."""
    negative_entry: Tensor
    """[P] entry of the hard negative."""


@dataclass(frozen=True, slots=True)
class LossCandidates:
    """The table of N entries, and all scores of this rank's share of the loss."""

    index: Tensor
    """[N] index of each entry's vector in E."""
    occurrence: Tensor
    """[N] occurrence of each entry."""
    queries: slice
    """Entries of the queries of this rank's rows."""
    positives: slice
    """Entries of the positives of this rank's rows."""
    column_groups: tuple[ColumnGroup, ...]
    explicit: tuple[ExplicitPairs, ...] = ()

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
    lists_own_negatives: bool = False,
) -> LossCandidates:
    """Lay out the table, the column groups and the explicit pairs that the options ask for.

    `query_query`, `document_document`: queries against queries, and positives against documents, too.
    `both_directions`: positives against queries, for a reverse loss.
    `lists_own_negatives`: the hard negatives of a row's example are explicit pairs, also where those of other examples
    are columns.
    """
    device = batch.query.device
    # All of this is done on the host. It knows every integer there, and reads none from
    # a GPU, for which it would have to wait.
    batch = batch.on_host()
    num_rows = batch.num_rows
    rank_rows = batch.rank_rows
    # Which hard negatives are columns. All rows are.
    num_negatives = batch.negative.numel()
    no_pair = batch.negative[:0]
    explicit_row = no_pair
    explicit_negatives = no_pair
    explicit_place = no_pair
    is_own_only = options.hard_negatives_scope == "own"
    if is_own_only or lists_own_negatives:
        explicit_row, negative = example_negatives(batch, rank_rows)
        # A hard negative has one entry, also if it is paired with several rows. `explicit_place`: [P] the place of each
        # pair's hard negative among these entries.
        explicit_negatives, explicit_place = torch.unique(negative, return_inverse=True)
    if is_own_only:
        num_negatives = 0
    # Queries of other rows are needed only as columns.
    has_query_columns = query_query or both_directions
    query_rows = slice(0, num_rows) if has_query_columns else rank_rows

    # The table: hard negatives, positives, queries, hard negatives of explicit pairs.
    every_row = torch.arange(num_rows, device=batch.query.device)
    every_negative = torch.arange(num_negatives, device=batch.query.device)
    occurrence = torch.cat(
        (
            2 * num_rows + every_negative,
            num_rows + every_row,
            every_row[query_rows],
            2 * num_rows + explicit_negatives,
        )
    )
    first_query = num_negatives + num_rows
    first_explicit = first_query + query_rows.stop - query_rows.start
    documents = slice(0, first_query)
    queries = slice(first_query, first_explicit)
    row_positives = shifted(rank_rows, num_negatives)
    row_queries = shifted(rank_rows, first_query - query_rows.start)

    # Keys of the rows [R, S], queries [R], positives [R] and hard negatives [H, 1 or 2].
    content = compact_keys(batch.content)
    row_keys = _content_sets(batch, content)
    query_keys = content[batch.query]
    positive_keys = content[batch.positive]
    negative_keys = content[batch.parts_of_negatives()]
    # A mixture has the keys of both of its parts. A positive's key is repeated to their
    # number.
    num_slots = negative_keys.shape[1]
    document_keys = torch.cat(
        (
            negative_keys[:num_negatives],
            positive_keys[:, None].expand(-1, num_slots),
        )
    )
    host = {
        "index": batch.occurrences()[occurrence],
        "occurrence": occurrence,
        "row": explicit_row,
        "negative_entry": first_explicit + explicit_place,
        "row_keys": row_keys[rank_rows],
        "document_keys": document_keys,
        "query_keys": query_keys[query_rows, None],
    }
    if lists_own_negatives:
        # A second mask, by the example that a text comes from. Positives have no key in it.
        examples = torch.cat((batch.negative_example[:num_negatives], batch.example))
        example_keys = compact_keys(examples)
        of_negatives, of_rows = example_keys.split((num_negatives, num_rows))
        of_positives = torch.full_like(of_rows, NO_KEY_COLUMN)
        host["document_example"] = torch.cat((of_negatives, of_positives))[:, None]
        host["row_example"] = of_rows[rank_rows, None]
    if both_directions:
        column_keys = row_keys[query_rows]
        is_key = column_keys != NO_KEY_ROW
        host["query_row_keys"] = column_keys.where(is_key, NO_KEY_COLUMN)
        host["row_query_key"] = query_keys[rank_rows, None]
        host["row_positive_key"] = positive_keys[rank_rows, None]
    on_device = copied_together(host, device)

    # Documents, or queries, with the content of the row's query or of one of its
    # positives are left out.
    document_mask = ExclusionMask(on_device["row_keys"], on_device["document_keys"])
    document_masks: tuple[ExclusionMask, ...] = (document_mask,)
    if lists_own_negatives:
        own_mask = ExclusionMask(
            on_device["row_example"], on_device["document_example"]
        )
        document_masks = (document_mask, own_mask)
    groups = [ColumnGroup(row_queries, documents, document_masks)]
    if query_query:
        query_mask = ExclusionMask(on_device["row_keys"], on_device["query_keys"])
        groups.append(ColumnGroup(row_queries, queries, (query_mask,)))
    if document_document:
        groups.append(ColumnGroup(row_positives, documents, document_masks))
    if both_directions:
        # Left out: the queries of examples that have the row's positive as positive or as
        # query, and queries with the content of the row's query.
        masks = (
            ExclusionMask(on_device["row_positive_key"], on_device["query_row_keys"]),
            ExclusionMask(on_device["row_query_key"], on_device["query_keys"]),
        )
        groups.append(ColumnGroup(row_positives, queries, masks, REVERSE))
    explicit = []
    if explicit_row.numel():
        pairs = ExplicitPairs(
            row_entries=row_queries,
            row=on_device["row"],
            host_row=explicit_row,
            negative_entry=on_device["negative_entry"],
        )
        explicit.append(pairs)
        if document_document:
            explicit.append(replace(pairs, row_entries=row_positives))
    return LossCandidates(
        index=on_device["index"],
        occurrence=on_device["occurrence"],
        queries=row_queries,
        positives=row_positives,
        column_groups=tuple(group for group in groups if group.num_columns),
        explicit=tuple(explicit),
    )


def shifted(entries: slice, offset: int) -> slice:
    """Return a slice that begins and stops `offset` later."""
    return slice(entries.start + offset, entries.stop + offset)


def example_negatives(batch: LossBatch, rows: slice) -> tuple[Tensor, Tensor]:
    """Return rows [P] and hard negatives [P]: each row with each hard negative of its example.

    Rows count from the start of `rows`, ascending. Pairs are dropped whose negative has the content of the row's query
    or of one of its example's positives.
    """
    row, negative = join_equal(batch.example[rows], batch.negative_example)
    if not row.numel():
        return row, negative
    content = compact_keys(batch.content)
    row_keys = _content_sets(batch, content)[rows][row]  # [P, S]
    negative_keys = content[batch.parts_of_negatives()[negative]]
    # [P, S, 1 or 2]: every key of the row against every key of the negative.
    differs = (row_keys[:, :, None] != negative_keys[:, None]).flatten(1).all(1)
    return row[differs], negative[differs]


def compact_keys(values: Tensor) -> Tensor:
    """Return int32 keys that are equal where the int64 values are: the place of each value among the sorted distinct ones.

    They take half the memory.
    """
    inverse: Tensor = torch.unique(values, return_inverse=True)[1]
    return inverse.int()


def _content_sets(batch: LossBatch, content: Tensor) -> Tensor:
    """Return [R, S] the `content` of each row's query and of its example's positives."""
    positive = content[batch.positive]
    example, size = torch.unique(
        batch.example, return_inverse=True, return_counts=True
    )[1:]
    # `example` [R]: number of each row's example. `size` [examples]: its number of positives. Scatter the positives into
    # [examples, width]. The slot of a positive is its place in the sorted order minus that of the first positive of its
    # example.
    order = torch.argsort(example, stable=True)
    first = size.cumsum(0) - size
    slot = torch.arange(order.numel(), device=order.device) - first[example[order]]
    width = int(size.max()) if size.numel() else 0
    positives = positive.new_full((size.numel(), width), NO_KEY_ROW)
    positives[example[order], slot] = positive[order]
    return torch.cat((content[batch.query][:, None], positives[example]), dim=1)


def join_equal(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return i [P] and j [P] of all pairs with left[i] == right[j], ascending by i (a sort-merge join)."""
    # For each value of `left`: where its equal values begin in the sorted `right`, and how many there are.
    ordered, order = torch.sort(right, stable=True)
    first = torch.searchsorted(ordered, left)
    count = torch.searchsorted(ordered, left, right=True) - first
    i = torch.repeat_interleave(count)
    # Equal values of `right` are adjacent after sorting: match m of left[i] is at
    # first[i] + m.
    before = (count.cumsum(0) - count)[i]
    match = torch.arange(i.numel(), device=left.device) - before
    return i, order[first[i] + match]
