"""judge(): judges read the negatives that rows have. Relevant ones are left out or become positives."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vembed.data.columns import COLUMNS, as_fields, is_conversation, is_negative_name
from vembed.data_tools.config import JudgeConfig
from vembed.errors import UserError
from vembed.mining.choice import UNDECIDED
from vembed.mining.documents import content_key, row_value
from vembed.mining.judges import Cascade, Pair, text_of
from vembed.mining.merged import NEGATIVES_NAME, POSITIVE_NAME
from vembed.mining.mine import Log, open_session
from vembed.mining.options import Source, load_options
from vembed.mining.output import check_output, write_rows
from vembed.mining.record_tables import Rows, open_rows
from vembed.parallel.session import Session
from vembed.progress import duration

JUDGEMENTS_NAME = "negative_judge_scores"
BESIDE = ("negative_ids", JUDGEMENTS_NAME)
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


class NegativePairs:
    """The distinct (query, negative) pairs of all rows."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.starts = [0]
        """Place of the first negative of each row among those of all."""
        self._places: list[tuple[int, int]] = []
        number_of: dict[tuple[int, int], int] = {}
        which: list[int] = []
        for row in range(len(rows)):
            example = rows.example(row)
            items = (example.query, *example.negatives)
            if example.negatives and any(item.images for item in items):
                raise UserError(
                    f"{example.where}: judges read texts, and this row holds an image"
                )
            query = content_key(example.query)
            for position, item in enumerate(example.negatives):
                # A pair that occurs in several rows is judged once.
                key = (query, content_key(item))
                number = number_of.setdefault(key, len(self._places))
                if number == len(self._places):
                    self._places.append((row, position))
                which.append(number)
            self.starts.append(len(which))
        self.which = np.array(which, np.int64)
        """Number of the distinct pair that each negative is."""

    def __len__(self) -> int:
        return len(self._places)

    def texts(self, number: int) -> Pair:
        """Return a pair as judges read it."""
        row, position = self._places[number]
        example = self._rows.example(row)
        return text_of(example.query), text_of(example.negatives[position])

    def summary(self) -> str:
        """One line for the log."""
        return (
            f"data: {len(self._rows):,d} rows with {len(self.which):,d} negatives, {len(self):,d} distinct pairs of a "
            "query and a negative"
        )


def read_negatives(config: JudgeConfig) -> tuple[Rows, NegativePairs]:
    """Check and read the rows; UserError if there is nothing to judge."""
    rows = open_rows(config)
    pairs = NegativePairs(rows)
    if not len(pairs):
        raise UserError(
            "data_path: no row has a negative to judge; `vembed mine` finds some, and judges them too"
        )
    return rows, pairs


def judge(
    source: Source,
    overrides: Sequence[str] = (),
    *,
    session: Session | None = None,
    log: Log | None = None,
) -> JudgeResult:
    """Judge the negatives of training data with the options of a YAML file, a dict or a `JudgeConfig`. Collective, as `mine`."""
    config = load_options(JudgeConfig, source, overrides)
    target = check_output(config.output_path)
    began = time.monotonic()
    with open_session(session, log) as (running, log_line):
        rows, pairs = read_negatives(config)
        log_line(pairs.summary())
        cascade = Cascade(config.judges, config, running)
        judged = cascade.judge(len(pairs), pairs.texts)[pairs.which]
        for line in cascade.summary():
            log_line(line)
        is_relevant = judged >= cascade.decided_at
        is_undecided = judged == UNDECIDED
        is_kept = ~(is_relevant | is_undecided)
        if config.false_negatives == "keep":
            is_kept[:] = True
        num_relabelled = 0
        if config.false_negatives == "relabel":
            for row in range(len(rows)):
                if rows.example(row).scores is None:
                    span = slice(pairs.starts[row], pairs.starts[row + 1])
                    num_relabelled += int(is_relevant[span].sum())
        if running.is_main:
            made = _made_rows(config, rows, pairs.starts, judged, is_relevant, is_kept)
            write_rows(target, made)
        running.barrier()
        result = JudgeResult(
            target,
            len(rows),
            len(judged),
            len(pairs),
            int(is_relevant.sum()),
            int(is_undecided.sum()),
            int(is_kept.sum()),
            time.monotonic() - began,
        )
        log_line(
            f"{target}: {result.num_rows:,d} rows; of {result.num_negatives:,d} negatives {result.num_relevant:,d} are "
            f"relevant and {result.num_undecided:,d} have no usable answer; {result.num_kept:,d} stay "
            f"({num_relabelled:,d} became positives), in {duration(result.seconds)}"
        )
    return result


def _made_rows(
    config: JudgeConfig,
    rows: Rows,
    starts: Sequence[int],
    judged_N: np.ndarray,
    relevant_N: np.ndarray,
    kept_N: np.ndarray,
) -> Iterator[dict[str, Any]]:
    """Yield the rows to write, in the order of the input. A row that loses no negative is written as it was read."""
    for row in range(len(rows)):
        span = slice(starts[row], starts[row + 1])
        made = dict(rows.record(row))
        kept = np.flatnonzero(kept_N[span]).tolist()
        if len(kept) < span.stop - span.start:
            added: list[int] = []
            if config.false_negatives == "relabel":
                added = np.flatnonzero(relevant_N[span]).tolist()
            made = _without(config, rows, row, kept, added)
        if config.scores and span.start < span.stop:
            scores = judged_N[span][kept].tolist()
            made[JUDGEMENTS_NAME] = [
                None if score == UNDECIDED else round(score, 6) for score in scores
            ]
        yield made


def _without(
    config: JudgeConfig,
    rows: Rows,
    row: int,
    kept: Sequence[int],
    added: Sequence[int],
) -> dict[str, Any]:
    """A row that loses negatives: one list of those that stay, what stands beside them in their order, and those that
    become positives, unless the row has scores of its own."""
    table, number = rows.locate(row)
    record = table.record(number)
    example = table.example(number)
    made = as_fields(record) if is_conversation(record) else dict(record)
    mapping = config.column_mapping or {}

    def remove(*roles: str) -> None:
        """Leave out the fields that are read as these parts of a record."""
        columns = set().union(*(COLUMNS[role] for role in roles))
        for name in list(made):
            if mapping.get(name, name) in columns:
                del made[name]

    for name in BESIDE:
        # Only lists with one entry per negative: anything else of that name is the user's own.
        values = made.get(name)
        if isinstance(values, list) and len(values) == len(example.negatives):
            made[name] = [values[position] for position in kept]
    remove("negative", "negative_image")
    for name in list(made):
        if is_negative_name(name):
            del made[name]
    folder = table.image_folder
    negatives = [example.negatives[position] for position in kept]
    made[NEGATIVES_NAME] = [row_value(item, folder) for item in negatives]
    if example.negative_scores is not None:
        # One column may hold the scores of the positives too.
        remove("score", "negative_score")
        if example.scores is not None:
            made["positive_scores"] = list(example.scores)
        if kept:
            scores = [example.negative_scores[position] for position in kept]
            made["negative_scores"] = scores
    if added and example.scores is None:
        remove("positive", "positive_image")
        items = [*example.positives, *(example.negatives[index] for index in added)]
        made[POSITIVE_NAME] = [row_value(item, folder) for item in items]
    return made
