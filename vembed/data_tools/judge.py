"""judge(): judges read the negatives that rows have. Relevant ones are left out or become positives."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vembed.data.columns import COLUMNS, as_fields, is_conversation, is_negative_name
from vembed.data.examples import distinct
from vembed.errors import UserError
from vembed.mining.choice import UNDECIDED
from vembed.mining.inputs import content_key, open_rows, row_value
from vembed.mining.judges import Cascade, Pair, text_of
from vembed.mining.mine import Log, open_session
from vembed.mining.options import JudgeConfig, Source, load_options
from vembed.mining.output import NEGATIVES_NAME, POSITIVE_NAME, check_output, write_rows
from vembed.progress import duration

JUDGEMENTS_NAME = "negative_judge_scores"
PER_NEGATIVE = ("negative_ids", JUDGEMENTS_NAME)
"""Fields with one entry per negative, as `vembed mine` writes them."""


@dataclass(frozen=True)
class JudgeResult:
    """Result: the file and counts."""

    output_path: Path
    num_rows: int
    num_negatives: int
    """Negatives of the rows that were read."""
    num_judged: int
    """Distinct pairs of a query and a negative."""
    num_relevant: int
    """Negatives that the judges call relevant, in all rows."""
    num_undecided: int
    """Negatives for which no judge gave a usable answer."""
    num_kept: int
    """Negatives that stay."""
    seconds: float


class RowNegatives:
    """The rows of `data_path`, and the distinct (query, negative) pairs of all of them."""

    def __init__(self, config: JudgeConfig) -> None:
        """Raise UserError if there is nothing to judge."""
        self.rows = open_rows(config)
        self.starts = [0]
        """Of each row, the index of its first negative among those of all rows."""
        places: list[tuple[int, int, tuple[int, int]]] = []
        for row in range(len(self.rows)):
            example = self.rows.example(row)
            items = (example.query, *example.negatives)
            if example.negatives and any(item.images for item in items):
                raise UserError(
                    f"{example.where}: judges read texts, and this row holds an image"
                )
            query = content_key(example.query)
            for index, item in enumerate(example.negatives):
                places.append((row, index, (query, content_key(item))))
            self.starts.append(len(places))
        # A pair that occurs in several rows is judged once.
        self.pairs, self.pair_of = distinct(places, key=lambda place: place[2])
        """The first negative of each distinct pair (row, index in the row, content), and the pair of each negative."""
        if not places:
            raise UserError(
                "data_path: no row has a negative to judge; `vembed mine` finds some, and judges them too"
            )

    def texts(self, pair: int) -> Pair:
        """Return a pair as judges read it."""
        row, index, _ = self.pairs[pair]
        example = self.rows.example(row)
        return text_of(example.query), text_of(example.negatives[index])

    def summary(self) -> str:
        """One line for the log."""
        return (
            f"data: {len(self.rows):,d} rows with {len(self.pair_of):,d} negatives, {len(self.pairs):,d} distinct pairs "
            "of a query and a negative"
        )


def judge(
    source: Source,
    overrides: Sequence[str] = (),
    *,
    log: Log | None = None,
) -> JudgeResult:
    """Judge the negatives of training data with the options of a YAML file, a dict or a `JudgeConfig`. Collective, as `mine`."""
    config = load_options(JudgeConfig, source, overrides)
    target = check_output(config.output_path)
    began = time.monotonic()
    with open_session(log) as (running, log_line):
        data = RowNegatives(config)
        log_line(data.summary())
        cascade = Cascade(config.judges, config, running)
        judgements = cascade.judge(len(data.pairs), data.texts)[data.pair_of]
        for line in cascade.summary():
            log_line(line)
        is_relevant = judgements >= cascade.decided_at
        is_undecided = judgements == UNDECIDED
        stays = ~(is_relevant | is_undecided)
        if config.false_negatives == "keep":
            stays[:] = True
        num_relabelled = 0
        if config.false_negatives == "relabel":
            for row in range(len(data.rows)):
                if data.rows.example(row).scores is None:
                    span = slice(data.starts[row], data.starts[row + 1])
                    num_relabelled += int(is_relevant[span].sum())
        if running.is_main:
            write_rows(
                target, _judged_rows(config, data, judgements, is_relevant, stays)
            )
        running.barrier()
        result = JudgeResult(
            target,
            len(data.rows),
            len(judgements),
            len(data.pairs),
            int(is_relevant.sum()),
            int(is_undecided.sum()),
            int(stays.sum()),
            time.monotonic() - began,
        )
        log_line(
            f"{target}: {result.num_rows:,d} rows; of {result.num_negatives:,d} negatives {result.num_relevant:,d} are "
            f"relevant and {result.num_undecided:,d} have no usable answer; {result.num_kept:,d} stay "
            f"({num_relabelled:,d} became positives), in {duration(result.seconds)}"
        )
    return result


def _judged_rows(
    config: JudgeConfig,
    data: RowNegatives,
    judgements: np.ndarray,
    is_relevant: np.ndarray,
    stays: np.ndarray,
) -> Iterator[dict[str, Any]]:
    """Yield the rows to write, in the order of the input. A row that loses no negative is written as it was read.

    Another one gets one list of the negatives that stay, with what stands beside them in the same order. With
    `relabel` the relevant ones become positives, unless the row has scores of its own.
    """
    mapping = config.column_mapping or {}

    def remove(fields: dict[str, Any], *roles: str) -> None:
        """Leave out the fields that are read as these parts of a record."""
        columns = set().union(*(COLUMNS[role] for role in roles))
        for name in list(fields):
            if mapping.get(name, name) in columns:
                del fields[name]

    for row in range(len(data.rows)):
        span = slice(data.starts[row], data.starts[row + 1])
        indices = np.flatnonzero(stays[span]).tolist()
        table, number = data.rows.locate(row)
        record = table.record(number)
        fields = dict(record)
        if len(indices) < span.stop - span.start:
            example = table.example(number)
            if is_conversation(record):
                fields = as_fields(record)
            for name in PER_NEGATIVE:
                # Only lists with one entry per negative: anything else of that name is the user's own.
                values = fields.get(name)
                if isinstance(values, list) and len(values) == len(example.negatives):
                    fields[name] = [values[index] for index in indices]
            remove(fields, "negative", "negative_image")
            for name in list(fields):
                if is_negative_name(name):
                    del fields[name]
            folder = table.image_folder
            fields[NEGATIVES_NAME] = [
                row_value(example.negatives[index], folder) for index in indices
            ]
            if example.negative_scores is not None:
                # One column may hold the scores of the positives too.
                remove(fields, "score", "negative_score")
                if example.scores is not None:
                    fields["positive_scores"] = list(example.scores)
                if indices:
                    scores = [example.negative_scores[index] for index in indices]
                    fields["negative_scores"] = scores
            relevant = np.flatnonzero(is_relevant[span]).tolist()
            relabels = config.false_negatives == "relabel" and example.scores is None
            if relabels and relevant:
                remove(fields, "positive", "positive_image")
                items = [
                    *example.positives,
                    *(example.negatives[index] for index in relevant),
                ]
                fields[POSITIVE_NAME] = [row_value(item, folder) for item in items]
        if config.scores and span.start < span.stop:
            fields[JUDGEMENTS_NAME] = [
                None if value == UNDECIDED else round(value, 6)
                for value in judgements[span][indices].tolist()
            ]
        yield fields
