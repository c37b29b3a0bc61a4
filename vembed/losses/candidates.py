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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from vembed.losses.batch import (
    NO_KEY_ROW,
    LossBatch,
    compact_keys,
    copied_together,
)
from vembed.losses.similarity import length_of

NO_KEY_COLUMN = -2
"""Fills the keys of columns up to a rectangle. It is not that of rows, so that unused slots never meet."""
FORWARD = 0
REVERSE = 1


@dataclass(frozen=True)
class ExclusionMask:
    """Scores that do not count: those whose row and column have an equal key."""

    row_keys: Tensor
    """[n, S] int32 keys of this rank's rows. Unused slots are -1."""
    column_keys: Tensor
    """[C, S'] int32 keys of the columns. Unused slots are -2."""

    def tiles(self, rows: slice, tile_width: int) -> Iterator[Tensor]:
        """Yield a bool mask [n, t] of some rows for each tile of `tile_width` columns: true is left out."""
        row_slots = self.row_keys[rows].T[:, :, None]
        for tile_keys in torch.split(self.column_keys, tile_width):
            # One [n, t] comparison for each pair of slots. A single broadcast would need [n, t, S, S'].
            slots = itertools.product(row_slots, tile_keys.T)
            row_key, column_key = next(slots)
            mask = row_key == column_key
            for row_key, column_key in slots:
                mask |= row_key == column_key
            yield mask


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class ExplicitPairs:
    """P single scores: rows against hard negatives of their own example."""

    row_entries: slice
    """Entries of the rows' queries, or of their positives."""
    row: Tensor
    """[P] row, counted from this rank's first, in ascending order."""
    host_row: Tensor
    """`row` in host memory, so that searching it does not wait for the device."""
    negative_entry: Tensor
    """[P] entry of the hard negative."""


@dataclass(frozen=True)
class ScorePlan:
    """The table of N entries, and all scores of this rank's share of the loss."""

    index: Tensor
    """[N] index of each entry's vector in E."""
    occurrence: Tensor
    """[N] occurrence of each entry."""
    rank_queries: slice
    """Entries of the queries of this rank's rows."""
    rank_positives: slice
    """Entries of the positives of this rank's rows."""
    column_groups: tuple[ColumnGroup, ...]
    explicit: tuple[ExplicitPairs, ...] = ()


@dataclass(frozen=True)
class CandidateRule:
    """Which scores a loss reads, besides those of each query with the documents."""

    hard_negatives_scope: Literal["all", "own"] = "all"
    """As the option of this name."""
    query_query: bool = False
    """Queries against queries, too."""
    document_document: bool = False
    """Positives against documents, too."""
    both_directions: bool = False
    """Positives against queries, for a reverse loss."""
    lists_own_negatives: bool = False
    """The hard negatives of a row's example are explicit pairs, also where those of other examples are columns."""


@dataclass(frozen=True)
class _Layout:
    """Ranges of entries in the table of one batch."""

    num_negatives: int
    """Hard negatives that are columns."""
    documents: slice
    queries: slice
    tabled_rows: slice
    """Rows whose queries are in the table."""
    rank_queries: slice
    """Queries of this rank's rows."""
    rank_positives: slice
    """Positives of this rank's rows."""


def plan_scores(batch: LossBatch, rule: CandidateRule) -> ScorePlan:
    """Lay out the table, the column groups and the explicit pairs that a rule asks for."""
    device = batch.query.device
    # The host knows every integer. It makes the table and the keys, which are then copied at once: what is read from a
    # GPU would have to be waited for.
    batch = batch.on_host()
    num_rows = batch.num_rows
    rank_rows = batch.rank_rows
    is_own = rule.hard_negatives_scope == "own"
    # All positives are columns, and so are all hard negatives, or none.
    num_negatives = 0 if is_own else batch.negative.numel()
    # Queries of other rows are needed only as columns.
    has_query_columns = rule.query_query or rule.both_directions
    tabled_rows = slice(0, num_rows) if has_query_columns else rank_rows
    first_query = num_negatives + num_rows
    first_explicit = first_query + length_of(tabled_rows)
    layout = _Layout(
        num_negatives=num_negatives,
        documents=slice(0, first_query),
        queries=slice(first_query, first_explicit),
        tabled_rows=tabled_rows,
        rank_queries=shifted(rank_rows, first_query - tabled_rows.start),
        rank_positives=shifted(rank_rows, num_negatives),
    )
    tensors = _keys(batch, rule, layout)
    explicit_negatives = batch.negative[:0]
    if is_own or rule.lists_own_negatives:
        tensors["explicit_row"], negative = batch.example_negatives(rank_rows)
        # [P] the place of each pair's hard negative among the distinct ones: a negative of several rows has one entry.
        explicit_negatives, place = torch.unique(negative, return_inverse=True)
        tensors["negative_entry"] = first_explicit + place
    # Occurrences count from 0 for queries, from R for positives, from 2 R for hard negatives.
    occurrences = torch.arange(2 * num_rows + num_negatives, device=batch.query.device)
    parts = (
        occurrences[2 * num_rows :],
        occurrences[num_rows : 2 * num_rows],
        occurrences[tabled_rows],
        2 * num_rows + explicit_negatives,
    )
    occurrence = torch.cat(parts)
    tensors["index"] = batch.occurrences()[occurrence]
    tensors["occurrence"] = occurrence
    copies = copied_together(tensors, device)
    explicit = []
    if explicit_negatives.numel():
        pairs = ExplicitPairs(
            row_entries=layout.rank_queries,
            row=copies["explicit_row"],
            host_row=tensors["explicit_row"],
            negative_entry=copies["negative_entry"],
        )
        explicit.append(pairs)
        if rule.document_document:
            explicit.append(replace(pairs, row_entries=layout.rank_positives))
    return ScorePlan(
        index=copies["index"],
        occurrence=copies["occurrence"],
        rank_queries=layout.rank_queries,
        rank_positives=layout.rank_positives,
        column_groups=_column_groups(copies, rule, layout),
        explicit=tuple(explicit),
    )


def _keys(
    batch: LossBatch,
    rule: CandidateRule,
    layout: _Layout,
) -> dict[str, Tensor]:
    """Return the keys of this rank's rows [n, S] and of the columns, [documents, 1 or 2] and [queries, 1]."""
    rank_rows = batch.rank_rows
    num_negatives = layout.num_negatives
    content = compact_keys(batch.content)
    row_keys, negative_keys = batch.content_keys(content)
    query_keys = content[batch.query][:, None]
    positive_keys = content[batch.positive][:, None]
    # A synthetic negative mixed from two has the keys of both. A positive's key is repeated, so that both have
    # the same number of slots.
    repeated = positive_keys.expand(-1, negative_keys.shape[1])
    keys = {
        "row": row_keys[rank_rows],
        "document": torch.cat((negative_keys[:num_negatives], repeated)),
        "query": query_keys[layout.tabled_rows],
    }
    if rule.lists_own_negatives:
        # A second mask, by the example that a text comes from. Positives have no key in it.
        of_negatives = batch.negative_example[:num_negatives]
        of_positives = torch.full_like(batch.example, NO_KEY_COLUMN)
        document_example = torch.cat((of_negatives, of_positives))
        keys["document_example"] = document_example[:, None].int()
        keys["row_example"] = batch.example[rank_rows, None].int()
    if rule.both_directions:
        column_keys = row_keys[layout.tabled_rows]
        is_key = column_keys != NO_KEY_ROW
        keys["column_row"] = column_keys.where(is_key, NO_KEY_COLUMN)
        keys["row_query"] = query_keys[rank_rows]
        keys["row_positive"] = positive_keys[rank_rows]
    return keys


def _column_groups(
    keys: Mapping[str, Tensor],
    rule: CandidateRule,
    layout: _Layout,
) -> tuple[ColumnGroup, ...]:
    """Return the column groups, without empty ones."""
    documents = layout.documents
    queries = layout.queries
    # Documents, or queries, with the content of the row's query or of one of its positives are left out.
    document_masks = [ExclusionMask(keys["row"], keys["document"])]
    if rule.lists_own_negatives:
        own_mask = ExclusionMask(keys["row_example"], keys["document_example"])
        document_masks.append(own_mask)
    masks = tuple(document_masks)
    groups = [ColumnGroup(layout.rank_queries, documents, masks)]
    if rule.query_query:
        query_mask = ExclusionMask(keys["row"], keys["query"])
        groups.append(ColumnGroup(layout.rank_queries, queries, (query_mask,)))
    if rule.document_document:
        groups.append(ColumnGroup(layout.rank_positives, documents, masks))
    if rule.both_directions:
        # Left out: the queries of examples that have the row's positive as positive or as query, and queries with the
        # content of the row's query.
        query_masks = (
            ExclusionMask(keys["row_positive"], keys["column_row"]),
            ExclusionMask(keys["row_query"], keys["query"]),
        )
        group = ColumnGroup(layout.rank_positives, queries, query_masks, REVERSE)
        groups.append(group)
    return tuple(group for group in groups if length_of(group.columns))


def shifted(entries: slice, offset: int) -> slice:
    """Return a slice that begins and stops `offset` later."""
    return slice(entries.start + offset, entries.stop + offset)
