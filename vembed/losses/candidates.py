"""Who is a candidate of whom: the rows, columns and masks of one batch's scores, from indices and contents alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vembed.config.schema import TrainConfig
from vembed.losses.batch import LossBatch

NO_KEY_ROW = -1
NO_KEY_COLUMN = -2
FORWARD, REVERSE = 0, 1
Anchor = Literal["query", "positive"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A row and a column are no match for each other where any key of the row equals any key of the column."""

    row_keys: Tensor
    """[n, S] int32 for the own rows; -1 fills up."""
    column_keys: Tensor
    """[C, S'] int32; -2 fills up."""

    def mask(self, rows: slice, columns: slice) -> Tensor:
        """[rows, columns] true where the candidate is left out."""
        row_keys, column_keys = _trimmed(self.row_keys[rows]), _trimmed(self.column_keys[columns])
        mask = row_keys[:, :1] == column_keys[:, 0]
        for slot in range(row_keys.shape[1]):
            for column_slot in range(column_keys.shape[1]):
                if slot or column_slot:
                    mask |= row_keys[:, slot, None] == column_keys[:, column_slot]
        return mask


@dataclass(frozen=True, slots=True)
class Panel:
    """A matrix of scores: every own row's anchor against a range of the table, less what the rules leave out. The
    row's own pair is always left out here, since it enters by itself."""

    anchor: Anchor
    columns: slice
    rules: tuple[Rule, ...]
    direction: int


@dataclass(frozen=True, slots=True)
class GivenPairs:
    """Single scores: the hard negatives that count for their own rows alone."""

    anchor: Anchor
    row: Tensor
    """[P] own row, counted from the first own row; ascending."""
    position: Tensor
    """[P] row of the table."""
    direction: int


@dataclass(frozen=True, slots=True)
class Candidates:
    """All scores that this rank's share of the loss consists of. Positions are rows of a table of occurrences."""

    index: Tensor
    """[N] row of the table -> index into the batch's embeddings."""
    queries: slice
    """Positions of the own rows' queries."""
    positives: slice
    """Positions of the own rows' positives."""
    panels: tuple[Panel, ...]
    given: tuple[GivenPairs, ...]

    def anchors(self, anchor: Anchor) -> slice:
        """Positions of the own rows' anchors of a kind."""
        return self.queries if anchor == "query" else self.positives

    @property
    def num_own_rows(self) -> int:
        """Rows that this rank is responsible for."""
        return int(self.queries.stop - self.queries.start)


def find_candidates(batch: LossBatch, config: TrainConfig, *, both_directions: bool) -> Candidates:
    """Lay out the table [negatives, positives, queries, own hard negatives] and the panels that the options ask for."""
    own, own_negatives = batch.own(), batch.own_hard_negatives()
    rows, negatives = slice(0, batch.num_rows), slice(0, batch.negative.numel())
    if config.negatives_from == "own_rank":
        rows, negatives = own, own_negatives
    query_columns = config.query_query_negatives or both_directions
    query_rows = rows if query_columns else own

    given_row = given_position = used = batch.negative[:0]
    if config.hard_negatives_scope == "own":
        given_row, given_negative = given_negatives(batch, own, negatives, mask_duplicates=config.mask_duplicates)
        used, given_position = torch.unique(given_negative, return_inverse=True)
        negatives = slice(0, 0)

    index = torch.cat((batch.negative[negatives], batch.positive[rows], batch.query[query_rows], batch.negative[used]))
    num_negatives, num_rows = negatives.stop - negatives.start, rows.stop - rows.start
    documents = slice(0, num_negatives + num_rows)
    queries = slice(documents.stop, documents.stop + query_rows.stop - query_rows.start)

    keys = _Keys(batch, config.mask_duplicates, own, rows, negatives)
    panels = [Panel("query", documents, keys.documents(), FORWARD)]
    if config.query_query_negatives:
        panels.append(Panel("query", queries, keys.queries(), FORWARD))
    if config.document_document_negatives:
        panels.append(Panel("positive", documents, keys.documents(), FORWARD))
    if both_directions:
        panels.append(Panel("positive", queries, keys.queries_of_documents(), REVERSE))
    given: list[GivenPairs] = []
    if given_row.numel():
        position = queries.stop + given_position
        given.append(GivenPairs("query", given_row, position, FORWARD))
        if config.document_document_negatives:
            given.append(GivenPairs("positive", given_row, position, FORWARD))
    return Candidates(
        index=index,
        queries=_shifted(own, queries.start - query_rows.start),
        positives=_shifted(own, num_negatives - rows.start),
        panels=tuple(panel for panel in panels if panel.columns.stop > panel.columns.start),
        given=tuple(given),
    )


def given_negatives(batch: LossBatch, rows: slice, negatives: slice, *, mask_duplicates: bool) -> tuple[Tensor, Tensor]:
    """[P], [P]: each row of the range (counted from its start, ascending) with each hard negative of the range that its
    example brought; with `mask_duplicates` less those whose content is that of the row's query or of a positive."""
    row, negative = _join(batch.example[rows], batch.negative_example[negatives])
    negative = negative + negatives.start
    if mask_duplicates and row.numel():
        sets = _content_sets(batch)[rows][row]
        content = batch.content[batch.negative[negative]]
        ranks = torch.searchsorted(torch.unique(batch.content), content).to(torch.int32)
        keep = (sets != ranks[:, None]).all(1)
        row, negative = row[keep], negative[keep]
    return row, negative


class _Keys:
    """The rules of the panels. With `mask_duplicates` keys are contents, otherwise numbers of examples, so that a row
    leaves out its example's own occurrences and nothing else."""

    def __init__(self, batch: LossBatch, by_content: bool, own: slice, rows: slice, negatives: slice) -> None:
        self.by_content = by_content
        if by_content:
            content = torch.unique(batch.content, return_inverse=True)[1].to(torch.int32)
            sets = _content_sets(batch)
            self.own_sets, self.sets = sets[own], sets[rows]
            self.own_query, self.own_positive = content[batch.query[own]], content[batch.positive[own]]
            self.query, positive = content[batch.query[rows]], content[batch.positive[rows]]
            negative = content[batch.negative[negatives]]
        else:
            example = torch.unique(batch.example, return_inverse=True)[1].to(torch.int32)
            self.own_sets, self.query = example[own, None], example[rows]
            positive = example[rows]
            negative = torch.full_like(batch.negative[negatives], NO_KEY_COLUMN, dtype=torch.int32)
        self.document = torch.cat((negative, positive))

    def documents(self) -> tuple[Rule, ...]:
        """No document whose content is that of the row's query or of one of its positives."""
        return (Rule(self.own_sets, self.document[:, None]),)

    def queries(self) -> tuple[Rule, ...]:
        """The same for queries."""
        return (Rule(self.own_sets, self.query[:, None]),)

    def queries_of_documents(self) -> tuple[Rule, ...]:
        """No query that the row's positive belongs to, or is; and none with the content of the row's own query."""
        if not self.by_content:
            return self.queries()
        columns = self.sets.where(self.sets != NO_KEY_ROW, NO_KEY_COLUMN)
        return Rule(self.own_positive[:, None], columns), Rule(self.own_query[:, None], self.query[:, None])


def _content_sets(batch: LossBatch) -> Tensor:
    """[R, S] int32: the contents (numbered in ascending order) of a row's query and of all its example's positives."""
    content = torch.unique(batch.content, return_inverse=True)[1].to(torch.int32)
    positive = content[batch.positive]
    example, size = torch.unique(batch.example, return_inverse=True, return_counts=True)[1:]
    order = torch.argsort(example, stable=True)
    slot = torch.arange(order.numel(), device=order.device) - (size.cumsum(0) - size)[example[order]]
    width = int(size.max()) if size.numel() else 0
    positives = positive.new_full((size.numel(), width), NO_KEY_ROW)
    positives[example[order], slot] = positive[order]
    return torch.cat((content[batch.query][:, None], positives[example]), dim=1)


def _join(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """[P], [P]: all pairs (i, j) with left[i] == right[j], ascending by i."""
    ordered, order = torch.sort(right, stable=True)
    first = torch.searchsorted(ordered, left)
    count = torch.searchsorted(ordered, left, right=True) - first
    rows = torch.repeat_interleave(torch.arange(left.numel(), device=left.device), count)
    within = torch.arange(rows.numel(), device=left.device) - (count.cumsum(0) - count)[rows]
    return rows, order[first[rows] + within]


def _trimmed(keys: Tensor) -> Tensor:
    """Keys without the slots that nobody in this block uses; worth a look only where there are several."""
    if keys.shape[1] <= 2 or not keys.shape[0]:
        return keys
    return keys[:, : int((keys >= 0).sum(1).max())]


def _shifted(part: slice, offset: int) -> slice:
    return slice(part.start + offset, part.stop + offset)
