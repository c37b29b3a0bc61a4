"""Candidates of each row: which scores a loss reads.

A loss compares the positive p_i of each row i = (q_i, p_i) with the row's candidates. This module plans which scores
that takes, from indices and contents alone. `tiles.py` computes them. A text is known by three kinds of numbers here:

index        of its vector in the embeddings E [U, D]. Equal texts of one rank share a vector, so they have one index.
occurrence   of the text in one of the R rows, or as one of the H hard negatives: queries count from 0, positives from R, hard
             negatives from 2 R. Teachers know texts by this number.
entry        in the table of this loss, which has the occurrences that are scored, in this order:

    [ hard negatives | positives | queries | hard negatives of negative pairs ]
      '------- documents -------'

So the documents, and the queries, are ranges of entries, and a tile of columns is a view of the table.

Example: R = 2 rows, H = 1 hard negative, one process. Row 0 is (a, b) with the hard negative c, row 1 is (d, e):

    text          a   b   c   d   e
    occurrence    0   2   4   1   3
    entry         3   1   0   4   2        row 0 has the columns c b e, its own positive b is masked: candidates c, e

A column group is a matrix of scores: all rows of this rank, by their query or by their positive, against one range of
entries. Its exclusion masks say which of these scores do not count. A mask is never stored as [rows, columns]. Each
row has a few keys, each column has a few keys, and a score does not count where a key of the row equals a key of the
column. Most keys stand for contents: a row has those of its query and of its positives, a column has its own. In the
example row 0 has the keys a and b, so its score with the column b does not count.

With hard_negatives_scope: own a hard negative is a candidate for the rows of its own example only. A row then has few of
them, which are negative pairs, scored one by one.

Shapes: R rows and H hard negatives of all ranks, n rows of this rank, t columns of a tile, P negative pairs, N entries,
C documents and C' queries as columns, S keys of a row, S' of a column.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vembed.losses.batch import NO_KEY_ROW, LossBatch, compact_keys, to_device_together
from vembed.losses.similarity import length_of

NO_KEY_COLUMN = -2
"""Fills the keys of columns up to a rectangle. Rows are filled with another number, NO_KEY_ROW, so that two unused slots
are never equal."""
FORWARD_DIRECTION = 0
"""Direction of the loss in which a row's query seeks its positive."""
REVERSE_DIRECTION = 1
"""Direction of the loss in which a row's positive seeks its query."""


@dataclass(frozen=True)
class ExclusionMask:
    """Scores that are excluded: those whose row and column have an equal key."""

    row_keys: Tensor
    """[n, S] int32 keys of this rank's rows. Unused slots are -1."""
    column_keys: Tensor
    """[C, S'] int32 keys of the columns. Unused slots are -2."""

    def tiles(self, rows: slice, tile_width: int) -> Iterator[Tensor]:
        """Yield for each tile of `tile_width` columns a bool mask [len(rows), t]: true is excluded."""
        row_slots = self.row_keys[rows, :, None].unbind(1)
        for tile_keys in torch.split(self.column_keys, tile_width):
            # One [n, t] comparison for each pair of slots. A single broadcast would need [n, t, S, S'].
            slots = itertools.product(row_slots, tile_keys.unbind(1))
            row_key, column_key = next(slots)
            mask = row_key == column_key
            for row_key, column_key in slots:
                mask |= row_key == column_key
            yield mask


@dataclass(frozen=True)
class ColumnGroup:
    """Scores of all rows of this rank against the columns of a range of entries.

    The row's own positive is always excluded here. It enters the loss separately.
    """

    row_entries: slice
    """Entries of the rows' queries, or of their positives."""
    columns: slice
    """Entries of the columns."""
    masks: tuple[ExclusionMask, ...]
    """A score is excluded where one of them is true."""
    direction: int = FORWARD_DIRECTION
    """Direction of the loss that the scores enter. Scores of two queries, or of two documents, enter the forward one."""


@dataclass(frozen=True)
class NegativePairs:
    """P single scores: rows against hard negatives of their own example. They enter the same row losses as the columns."""

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
    """The scores of this rank's share of the loss, by the entries of a table of N texts."""

    index: Tensor
    """[N] index of each entry's vector in E."""
    occurrence: Tensor
    """[N] occurrence of each entry."""
    local_queries: slice
    """Entries of the queries of this rank's rows."""
    local_positives: slice
    """Entries of the positives of this rank's rows."""
    column_groups: tuple[ColumnGroup, ...]
    negative_pairs: tuple[NegativePairs, ...] = ()


@dataclass(frozen=True)
class CandidateRule:
    """Which scores a loss reads, besides those of each query with the documents."""

    hard_negatives_scope: Literal["all", "own"] = "all"
    """As the option of this name. own: a hard negative is a candidate of its example's rows alone."""
    query_query: bool = False
    """Queries against queries, too."""
    document_document: bool = False
    """Positives against documents, too."""
    both_directions: bool = False
    """Positives against queries, for a reverse loss."""
    own_negatives_as_pairs: bool = False
    """Score the hard negatives of a row's own example as single pairs, also where all hard negatives are columns. In the
    columns they are then masked for these rows. Other rows still use them."""


@dataclass(frozen=True)
class _Layout:
    """Ranges of entries in the table of one batch. Only `rows_with_query` is a range of rows."""

    num_negative_columns: int
    """Hard negatives that are columns."""
    documents: slice
    queries: slice
    rows_with_query: slice
    """Rows, of all R, whose queries are in the table."""
    local_queries: slice
    """Queries of this rank's rows."""
    local_positives: slice
    """Positives of this rank's rows."""


def plan_scores(batch: LossBatch, rule: CandidateRule) -> ScorePlan:
    """Return the table, the column groups and the negative pairs that a rule asks for."""
    device = batch.query.device
    # The host knows every integer. It makes the table and the keys, which then go to the device together: the host would
    # have to wait for what it reads from a GPU.
    batch = batch.on_host()
    num_rows = batch.num_rows
    rank_rows = batch.rank_rows
    only_own = rule.hard_negatives_scope == "own"
    # All positives are columns. Hard negatives are columns too, unless only rows of their own example use them.
    num_negative_columns = 0 if only_own else batch.negative.numel()
    # Queries of other rows are needed only as columns.
    has_query_columns = rule.query_query or rule.both_directions
    rows_with_query = slice(0, num_rows) if has_query_columns else rank_rows
    first_query = num_negative_columns + num_rows
    first_paired_negative = first_query + length_of(rows_with_query)
    layout = _Layout(
        num_negative_columns=num_negative_columns,
        documents=slice(0, first_query),
        queries=slice(first_query, first_paired_negative),
        rows_with_query=rows_with_query,
        local_queries=shifted(rank_rows, first_query - rows_with_query.start),
        local_positives=shifted(rank_rows, num_negative_columns),
    )
    keys = _mask_keys(batch, rule, layout)
    tensors = {}
    # The distinct hard negatives that are in negative pairs, by their position among the H.
    paired_negatives = batch.negative[:0]
    if only_own or rule.own_negatives_as_pairs:
        # [P] the row of each pair, and the position of its hard negative among the H.
        tensors["pair_row"], negative_of_pair = batch.countable_negatives(rank_rows)
        # Rows of one example share its hard negatives, and the table has each of them once. `position` [P]: that of each
        # pair's negative in `paired_negatives`.
        paired_negatives, position = torch.unique(negative_of_pair, return_inverse=True)
        tensors["negative_entry"] = first_paired_negative + position
    # [N] the occurrence of each entry, in the order of the table. Occurrences count from 0 for queries, from R for
    # positives, from 2 R for hard negatives.
    all_occurrences = torch.arange(
        2 * num_rows + num_negative_columns, device=batch.query.device
    )
    parts = (
        all_occurrences[2 * num_rows :],
        all_occurrences[num_rows : 2 * num_rows],
        all_occurrences[rows_with_query],
        2 * num_rows + paired_negatives,
    )
    occurrence = torch.cat(parts)
    tensors["index"] = batch.occurrence_indices()[occurrence]
    tensors["occurrence"] = occurrence
    on_device = to_device_together(tensors, device)
    device_keys = _MaskKeys(**to_device_together(keys._asdict(), device))
    negative_pairs = []
    if paired_negatives.numel():
        pairs = NegativePairs(
            row_entries=layout.local_queries,
            row=on_device["pair_row"],
            host_row=tensors["pair_row"],
            negative_entry=on_device["negative_entry"],
        )
        negative_pairs.append(pairs)
        if rule.document_document:
            negative_pairs.append(replace(pairs, row_entries=layout.local_positives))
    return ScorePlan(
        index=on_device["index"],
        occurrence=on_device["occurrence"],
        local_queries=layout.local_queries,
        local_positives=layout.local_positives,
        column_groups=_column_groups(device_keys, rule, layout),
        negative_pairs=tuple(negative_pairs),
    )


class _MaskKeys(NamedTuple):
    """int32 keys of the exclusion masks, named by what they belong to and what they stand for. Those that a rule does not
    need are empty.

    Of n rows of this rank, C documents and C' queries as columns. S: 1 + the largest number of positives of an example.
    """

    row_contents: Tensor
    """[n, S] contents of the row's query, in the first slot, and of its example's positives."""
    row_contents_as_columns: Tensor
    """[C', S] row_contents of the row whose query the column is, with -2 in unused slots. A row's positive is compared with
    them."""
    document_contents: Tensor
    """[C, 1 or 2] content of each document. One that mixes two hard negatives (mix_negatives) has the contents of both."""
    query_contents: Tensor
    """[C', 1] content of each query."""
    row_examples: Tensor
    """[n, 1] example of each row."""
    document_examples: Tensor
    """[C, 1] example of each hard negative. Positives have no key."""


def _mask_keys(
    batch: LossBatch,
    rule: CandidateRule,
    layout: _Layout,
) -> _MaskKeys:
    """Return the keys of the masks that a rule needs."""
    rank_rows = batch.rank_rows
    num_negative_columns = layout.num_negative_columns
    content = compact_keys(batch.content)
    row_contents, negative_contents = batch.content_keys(content)  # [R, S], [H, 1 or 2]
    query_contents = content[batch.query][:, None]  # [R, 1]
    positive_contents = content[batch.positive][:, None]  # [R, 1]
    # A positive's key is repeated where a mixture has two, so that all documents have the same number of slots.
    repeated = positive_contents.expand(-1, negative_contents.shape[1])
    empty = query_contents[:0]
    row_contents_as_columns = empty
    if rule.both_directions:
        as_columns = row_contents[layout.rows_with_query]
        is_key = as_columns != NO_KEY_ROW
        row_contents_as_columns = as_columns.where(is_key, NO_KEY_COLUMN)
    row_examples = empty
    document_examples = empty
    if rule.own_negatives_as_pairs:
        row_examples = batch.example[rank_rows, None].int()
        of_negatives = batch.negative_example[:num_negative_columns]
        of_positives = torch.full_like(batch.example, NO_KEY_COLUMN)
        document_examples = torch.cat((of_negatives, of_positives))[:, None].int()
    return _MaskKeys(
        row_contents=row_contents[rank_rows],
        row_contents_as_columns=row_contents_as_columns,
        document_contents=torch.cat(
            (negative_contents[:num_negative_columns], repeated)
        ),
        query_contents=query_contents[layout.rows_with_query],
        row_examples=row_examples,
        document_examples=document_examples,
    )


def _column_groups(
    keys: _MaskKeys,
    rule: CandidateRule,
    layout: _Layout,
) -> tuple[ColumnGroup, ...]:
    """Return the column groups, without empty ones."""
    documents = layout.documents
    queries = layout.queries
    # Excluded: documents with the content of the row's query or of one of its positives.
    document_masks = [ExclusionMask(keys.row_contents, keys.document_contents)]
    if rule.own_negatives_as_pairs:
        # Excluded: hard negatives of the row's example. They are negative pairs.
        example_mask = ExclusionMask(keys.row_examples, keys.document_examples)
        document_masks.append(example_mask)
    masks = tuple(document_masks)
    groups = [ColumnGroup(layout.local_queries, documents, masks)]
    if rule.query_query:
        # Excluded: queries with the content of the row's query or of one of its positives.
        query_mask = ExclusionMask(keys.row_contents, keys.query_contents)
        groups.append(ColumnGroup(layout.local_queries, queries, (query_mask,)))
    if rule.document_document:
        groups.append(ColumnGroup(layout.local_positives, documents, masks))
    if rule.both_directions:
        # Excluded: queries that equal the row's positive, or have it as a positive, and queries that equal the row's query.
        row_positive = keys.document_contents[layout.local_positives, :1]  # [n, 1]
        row_query = keys.row_contents[:, :1]  # [n, 1]
        query_masks = (
            ExclusionMask(row_positive, keys.row_contents_as_columns),
            ExclusionMask(row_query, keys.query_contents),
        )
        group = ColumnGroup(
            layout.local_positives, queries, query_masks, REVERSE_DIRECTION
        )
        groups.append(group)
    return tuple(group for group in groups if length_of(group.columns))


def shifted(entries: slice, offset: int) -> slice:
    """Return a slice that begins and stops `offset` later."""
    return slice(entries.start + offset, entries.stop + offset)
