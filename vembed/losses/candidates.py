"""Candidates of each row: score blocks, explicit pairs and exclusion masks, from indices and contents alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vembed.config.schema import TrainConfig
from vembed.losses.batch import LossBatch

# Fill values of unused key slots. They differ, so that an empty row slot never equals an empty column slot.
NO_KEY_ROW = -1
NO_KEY_COLUMN = -2
FORWARD, REVERSE = 0, 1
Anchor = Literal["query", "positive"]


@dataclass(frozen=True, slots=True)
class ExclusionMask:
    """An exclusion mask in factored form: a column is left out for a row if any of their keys are equal."""

    row_keys: Tensor
    """[n, S] int32 keys of the own rows; unused slots are -1."""
    column_keys: Tensor
    """[C, S'] int32 keys of the columns; unused slots are -2."""

    def mask(self, rows: slice, columns: slice) -> Tensor:
        """Return a bool mask [rows, columns], true where the candidate is left out."""
        row_keys, column_keys = _trimmed(self.row_keys[rows]), _trimmed(self.column_keys[columns])
        # One [rows, columns] comparison per pair of slots. A single broadcast would need [rows, columns, S, S'].
        mask = row_keys[:, :1] == column_keys[:, 0]
        for slot in range(row_keys.shape[1]):
            for column_slot in range(column_keys.shape[1]):
                if slot or column_slot:
                    mask |= row_keys[:, slot, None] == column_keys[:, column_slot]
        return mask


@dataclass(frozen=True, slots=True)
class ScoreBlock:
    """A score block: every own row's anchor against a range of table columns, less what the exclusion masks leave out.

    The row's own pair is always left out here; it enters the loss separately.
    """

    anchor: Anchor
    columns: slice
    exclusion_masks: tuple[ExclusionMask, ...]
    direction: int


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

    def anchors(self, anchor: Anchor) -> slice:
        """Return the positions of the own rows' anchors of one kind."""
        return self.queries if anchor == "query" else self.positives

    @property
    def num_own_rows(self) -> int:
        """Number of rows whose loss terms this rank computes."""
        return int(self.queries.stop - self.queries.start)


def find_candidates(batch: LossBatch, config: TrainConfig, *, both_directions: bool) -> Candidates:
    """Lay out the table [negatives, positives, queries, own hard negatives] and the score blocks of the options."""
    own, own_negatives = batch.own(), batch.own_hard_negatives()
    rows, negatives = slice(0, batch.num_rows), slice(0, batch.negative.numel())
    if config.negatives_from == "own_rank":
        rows, negatives = own, own_negatives
    # Queries of other rows are needed only as columns; otherwise the own queries, as anchors, are enough.
    query_columns = config.query_query_negatives or both_directions
    query_rows = rows if query_columns else own

    explicit_row = explicit_position = used = batch.negative[:0]
    if config.hard_negatives_scope == "own":
        # With this scope hard negatives are explicit pairs and no columns of the score blocks, hence the empty range.
        explicit_row, explicit_negative = explicit_negatives(
            batch, own, negatives, mask_duplicates=config.mask_duplicates
        )
        used, explicit_position = torch.unique(explicit_negative, return_inverse=True)
        negatives = slice(0, 0)

    occurrence = occurrences_of(batch, negatives, rows, query_rows, used)
    num_negatives, num_rows = negatives.stop - negatives.start, rows.stop - rows.start
    # Negatives and positives are adjacent, so that one contiguous range holds all documents.
    documents = slice(0, num_negatives + num_rows)
    queries = slice(documents.stop, documents.stop + query_rows.stop - query_rows.start)

    keys = _Keys(batch, config.mask_duplicates, own, rows, negatives)
    score_blocks = [ScoreBlock("query", documents, keys.documents(), FORWARD)]
    if config.query_query_negatives:
        score_blocks.append(ScoreBlock("query", queries, keys.queries(), FORWARD))
    if config.document_document_negatives:
        score_blocks.append(ScoreBlock("positive", documents, keys.documents(), FORWARD))
    if both_directions:
        score_blocks.append(ScoreBlock("positive", queries, keys.queries_of_documents(), REVERSE))
    explicit: list[ExplicitPairs] = []
    if explicit_row.numel():
        position = queries.stop + explicit_position
        explicit.append(ExplicitPairs("query", explicit_row, position, FORWARD))
        if config.document_document_negatives:
            explicit.append(ExplicitPairs("positive", explicit_row, position, FORWARD))
    return Candidates(
        index=torch.cat((batch.query, batch.positive, batch.negative))[occurrence],
        occurrence=occurrence,
        # `own` counts rows of the global batch; the table may begin at another row (negatives_from: own_rank).
        queries=_shifted(own, queries.start - query_rows.start),
        positives=_shifted(own, num_negatives - rows.start),
        score_blocks=tuple(
            score_block for score_block in score_blocks if score_block.columns.stop > score_block.columns.start
        ),
        explicit=tuple(explicit),
    )


def occurrences_of(
    batch: LossBatch, negatives: slice, positives: slice, queries: slice, more_negatives: Tensor
) -> Tensor:
    """Numbers of occurrences: queries count from 0, positives from R, hard negatives from 2 R."""
    count = batch.num_rows
    numbers = torch.arange(2 * count + batch.negative.numel(), device=batch.query.device)
    return torch.cat(
        (
            numbers[2 * count :][negatives],
            numbers[count : 2 * count][positives],
            numbers[:count][queries],
            2 * count + more_negatives,
        )
    )


def explicit_negatives(
    batch: LossBatch, rows: slice, negatives: slice, *, mask_duplicates: bool
) -> tuple[Tensor, Tensor]:
    """Return rows [P] and hard negatives [P]: each row of the range with each of its example's hard negatives.

    Rows count from the range's start, ascending. With `mask_duplicates`, pairs are dropped whose negative has the
    content of the row's query or of one of its example's positives.
    """
    row, negative = join_equal(batch.example[rows], batch.negative_example[negatives])
    negative = negative + negatives.start
    if mask_duplicates and row.numel():
        sets = _content_sets(batch)[rows][row]
        content = batch.content[negative_parts(batch)[negative]]
        ranks = torch.searchsorted(torch.unique(batch.content), content).to(torch.int32)
        # sets: [P, S] contents that the row excludes; ranks: [P, 1 or 2] those of the negative's parts.
        keep = (sets[:, :, None] != ranks[:, None]).flatten(1).all(1)
        row, negative = row[keep], negative[keep]
    return row, negative


def negative_parts(batch: LossBatch) -> Tensor:
    """[H, 1 or 2] indices of the embeddings that each hard negative is made of: itself, or the parts of a mixture."""
    return batch.negative[:, None] if batch.negative_parts is None else batch.negative_parts


class _Keys:
    """Builder of the exclusion masks.

    With `mask_duplicates` keys are contents. Otherwise keys are example ids: a row leaves out only the query and
    positives of its own example.
    """

    def __init__(self, batch: LossBatch, by_content: bool, own: slice, rows: slice, negatives: slice) -> None:
        self.by_content = by_content
        if by_content:
            content = torch.unique(batch.content, return_inverse=True)[1].to(torch.int32)
            sets = _content_sets(batch)
            self.own_sets, self.sets = sets[own], sets[rows]
            self.own_query, self.own_positive = content[batch.query[own]], content[batch.positive[own]]
            self.query, positive = content[batch.query[rows]], content[batch.positive[rows]]
            negative = content[negative_parts(batch)[negatives]]
        else:
            example = torch.unique(batch.example, return_inverse=True)[1].to(torch.int32)
            self.own_sets, self.query = example[own, None], example[rows]
            positive = example[rows]
            # Hard negatives have no key: without mask_duplicates none of them is ever left out.
            negative = torch.full_like(batch.negative[negatives, None], NO_KEY_COLUMN, dtype=torch.int32)
        self.document = torch.cat((negative, positive[:, None].expand(-1, negative.shape[1])))

    def documents(self) -> tuple[ExclusionMask, ...]:
        """Return masks that exclude documents with the content of the row's query or of one of its positives."""
        return (ExclusionMask(self.own_sets, self.document),)

    def queries(self) -> tuple[ExclusionMask, ...]:
        """Return masks that exclude queries with the content of the row's query or of one of its positives."""
        return (ExclusionMask(self.own_sets, self.query[:, None]),)

    def queries_of_documents(self) -> tuple[ExclusionMask, ...]:
        """Return masks for the reverse direction.

        They exclude queries of examples with the row's positive (as positive or query), and queries with the
        content of the row's own query.
        """
        if not self.by_content:
            return self.queries()
        # The sets serve as columns here, so their fill value must become that of columns.
        columns = self.sets.where(self.sets != NO_KEY_ROW, NO_KEY_COLUMN)
        return ExclusionMask(self.own_positive[:, None], columns), ExclusionMask(
            self.own_query[:, None], self.query[:, None]
        )


def _content_sets(batch: LossBatch) -> Tensor:
    """Return [R, S] int32: contents (as ascending ranks) of each row's query and of its example's positives."""
    content = torch.unique(batch.content, return_inverse=True)[1].to(torch.int32)
    positive = content[batch.positive]
    example, size = torch.unique(batch.example, return_inverse=True, return_counts=True)[1:]
    order = torch.argsort(example, stable=True)
    # Scatter into [examples, width]: slot is the position among the positives of the same example, that is the
    # position in the sorted order less the example's exclusive prefix sum.
    slot = torch.arange(order.numel(), device=order.device) - (size.cumsum(0) - size)[example[order]]
    width = int(size.max()) if size.numel() else 0
    positives = positive.new_full((size.numel(), width), NO_KEY_ROW)
    positives[example[order], slot] = positive[order]
    return torch.cat((content[batch.query][:, None], positives[example]), dim=1)


def join_equal(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return i [P] and j [P] of all pairs with left[i] == right[j], ascending by i (a sort-merge join)."""
    ordered, order = torch.sort(right, stable=True)
    first = torch.searchsorted(ordered, left)
    count = torch.searchsorted(ordered, left, right=True) - first
    rows = torch.repeat_interleave(torch.arange(left.numel(), device=left.device), count)
    # Equal values of `right` are adjacent after sorting: match number w of left[i] is at first[i] + w.
    within = torch.arange(rows.numel(), device=left.device) - (count.cumsum(0) - count)[rows]
    return rows, order[first[rows] + within]


def _trimmed(keys: Tensor) -> Tensor:
    """Return the keys without slots that no row of this block uses. The check pays only with more than two slots."""
    if keys.shape[1] <= 2 or not keys.shape[0]:
        return keys
    return keys[:, : int((keys >= 0).sum(1).max())]


def _shifted(part: slice, offset: int) -> slice:
    return slice(part.start + offset, part.stop + offset)
