"""judge(): judges read the negatives that rows have. Relevant ones are left out or become positives."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vembed.data.columns import COLUMNS, is_negative_name
from vembed.data.conversations import as_fields, is_conversation
from vembed.data.examples import Example
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
        counts = np.zeros(len(rows), np.int64)
        keys: list[tuple[int, int]] = []
        for row in range(len(rows)):
            example = rows.example(row)
            counts[row] = len(example.negatives)
            if example.negatives:
                if any(item.images for item in (example.query, *example.negatives)):
                    raise UserError(
                        f"{example.where}: judges read texts, and this row holds an image"
                    )
                query = content_key(example.query)
                keys += [(query, content_key(item)) for item in example.negatives]
        self.starts = np.concatenate([[0], np.cumsum(counts)])
        """[rows + 1] place of the first negative of each row among those of all."""
        table = np.array(keys, np.int64).reshape(-1, 2)
        # A pair that occurs in several rows is judged once.
        _, first, which = np.unique(
            table, axis=0, return_index=True, return_inverse=True
        )
        # numpy 2.0 gives the inverse of axis=0 another shape than other versions do.
        self._first = first
        self.which = which.reshape(-1)
        """Number of the distinct pair that each negative is."""

    def __len__(self) -> int:
        return len(self._first)

    def texts(self, number: int) -> Pair:
        """Return a pair as judges read it."""
        place = int(self._first[number])
        row = int(np.searchsorted(self.starts, place, side="right")) - 1
        example = self._rows.example(row)
        return text_of(example.query), text_of(
            example.negatives[place - int(self.starts[row])]
        )

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
        maker = _RowMaker(
            config, rows, judged, judged >= cascade.decided_at, pairs.starts
        )
        if running.is_main:
            write_rows(target, maker.rows())
        running.barrier()
        result = JudgeResult(
            target,
            len(rows),
            len(judged),
            len(pairs),
            int(maker.relevant.sum()),
            int(maker.undecided.sum()),
            int(maker.kept.sum()),
            time.monotonic() - began,
        )
        log_line(
            f"{target}: {result.num_rows:,d} rows; of {result.num_negatives:,d} negatives {result.num_relevant:,d} are "
            f"relevant and {result.num_undecided:,d} have no usable answer; {result.num_kept:,d} stay "
            f"({maker.num_relabelled:,d} became positives), in {duration(result.seconds)}"
        )
    return result


class _RowMaker:
    """Rows with the negatives that stay. A row that loses none is written as it was read."""

    def __init__(
        self,
        config: JudgeConfig,
        rows: Rows,
        judged_N: np.ndarray,
        relevant_N: np.ndarray,
        starts: np.ndarray,
    ) -> None:
        self._config = config
        self._rows = rows
        self._judged = judged_N
        self._starts = starts
        self.relevant = relevant_N
        self.undecided = judged_N == UNDECIDED
        keeps_all = config.false_negatives == "keep"
        self.kept = (
            np.ones(len(judged_N), bool)
            if keeps_all
            else ~(self.relevant | self.undecided)
        )
        self.num_relabelled = 0
        """Negatives of the rows so far that became positives."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows to write, in the order of the input."""
        for row in range(len(self._rows)):
            span = slice(int(self._starts[row]), int(self._starts[row + 1]))
            if span.start == span.stop:
                yield self._rows.record(row)
                continue
            made = (
                self._row(row, span)
                if not self.kept[span].all()
                else dict(self._rows.record(row))
            )
            if self._config.scores:
                made[JUDGEMENTS_NAME] = [
                    None if score == UNDECIDED else round(float(score), 6)
                    for score in self._judged[span][self.kept[span]]
                ]
            yield made

    def _row(self, row: int, span: slice) -> dict[str, Any]:
        """A row that loses a negative: one list of those that stay, and what stands beside them in their order."""
        table, number = self._rows.locate(row)
        record = table.record(number)
        example = table.example(number)
        made = as_fields(record) if is_conversation(record) else dict(record)
        kept = np.flatnonzero(self.kept[span]).tolist()
        for name in BESIDE:
            # Only lists with one entry per negative: anything else of that name is the user's own.
            if isinstance(made.get(name), list) and len(made[name]) == len(
                example.negatives
            ):
                made[name] = [made[name][position] for position in kept]
        read = [
            name
            for name in made
            if is_negative_name(name) or self._reads(name, "negative", "negative_image")
        ]
        for name in read:
            del made[name]
        made[NEGATIVES_NAME] = [
            row_value(example.negatives[position], table.image_folder)
            for position in kept
        ]
        self._keep_scores(made, example, kept)
        if self._config.false_negatives == "relabel" and example.scores is None:
            self._relabel(
                made,
                example,
                np.flatnonzero(self.relevant[span]).tolist(),
                table.image_folder,
            )
        return made

    def _relabel(
        self, made: dict[str, Any], example: Example, added: Sequence[int], folder: str
    ) -> None:
        """Make negatives positives, in a row without scores of its own."""
        if not added:
            return
        for name in [
            name for name in made if self._reads(name, "positive", "positive_image")
        ]:
            del made[name]
        items = [*example.positives, *(example.negatives[index] for index in added)]
        made[POSITIVE_NAME] = [row_value(item, folder) for item in items]
        self.num_relabelled += len(added)

    def _keep_scores(
        self, made: dict[str, Any], example: Example, kept: Sequence[int]
    ) -> None:
        """Leave out the scores of the negatives that go. One column may hold those of the positives too."""
        if example.negative_scores is None:
            return
        for name in [
            name for name in made if self._reads(name, "score", "negative_score")
        ]:
            del made[name]
        if example.scores is not None:
            made["positive_scores"] = list(example.scores)
        if kept:
            made["negative_scores"] = [example.negative_scores[index] for index in kept]

    def _reads(self, name: str, *roles: str) -> bool:
        """True for a field that is read as one of these parts of a record."""
        meant = (self._config.column_mapping or {}).get(name, name)
        return any(meant in COLUMNS[role] for role in roles)
