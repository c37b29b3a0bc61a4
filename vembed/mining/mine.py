"""mine(): from a config to a file of training data with hard negatives."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from vembed.evaluation.bm25 import check_bm25
from vembed.mining.candidates import open_candidates
from vembed.mining.choice import Calibration, Limits, choose_negatives
from vembed.mining.config import BM25, MineConfig
from vembed.mining.inputs import read_inputs
from vembed.mining.judges import CandidateJudge
from vembed.mining.merged import RowMaker
from vembed.mining.options import Source, load_options
from vembed.mining.output import check_output, write_rows
from vembed.parallel.session import Session, start_command_session
from vembed.progress import duration

log = logging.getLogger("vembed")

Log = Callable[[str], object]


@dataclass(frozen=True)
class MineResult:
    """Result: files and counts."""

    output_path: Path
    num_rows: int
    num_negatives: int
    num_short: int
    """Rows that got fewer than `num_negatives`."""
    counts: dict[str, int]
    """Candidates, and how many of them were left out for which reason."""
    limits: Limits
    calibration: Calibration | None
    """Result of `threshold: auto`."""
    num_encoded: int
    """Vectors that were computed; the others were on disk."""
    seconds: float


def mine(
    source: Source,
    overrides: Sequence[str] = (),
    *,
    session: Session | None = None,
    log: Log | None = None,
) -> MineResult:
    """Mine hard negatives with the options of a YAML file, a dict or a `MineConfig`, and `key=value` overrides.

    Several processes may call it together. All of them encode and search, and the first one writes.
    """
    config = load_options(MineConfig, source, overrides)
    target = check_config(config)
    began = time.monotonic()
    with open_session(session, log) as (running, log_line):
        inputs = read_inputs(config)
        folder = work_folder(config)
        for line in inputs.summary():
            log_line(line)
        search = open_candidates(config, inputs, folder, running)
        for line in search.summary:
            log_line(line)
        judge = CandidateJudge(config, inputs, running)
        choice = choose_negatives(
            search,
            config,
            config.seed,
            inputs.documents,
            running,
            depth=config.depth,
            judge=judge.apply if config.judges else None,
        )
        if choice.calibration is not None:
            log_line(choice.calibration.summary(config.max_false_negative_rate))
        chosen = choice.chosen
        counts = choice.counts | judge.counts
        scores = chosen.scores[chosen.documents >= 0]
        mean = f", mean score {float(scores.mean()):.4f}" if len(scores) else ""
        log_line(
            f"candidates: {counts['candidates']:,d}; left out: {counts['skipped']:,d} as the first ones, "
            f"{counts['too_high']:,d} above the limit of their query, {counts['too_low']:,d} below min_score, "
            f"{counts['near_duplicates']:,d} near-duplicates of a positive, "
            f"{counts['judged_relevant']:,d} judged relevant; chosen: {len(scores):,d}{mean}"
        )
        for line in judge.summary():
            log_line(line)

        maker = RowMaker(config, inputs, chosen, judge.relabelled, search)
        if running.is_main:
            write_rows(target, maker.rows())
        # The others wait here: none may clear the folder, or log that it is done, before the file is whole.
        running.barrier()
        seconds = time.monotonic() - began
        log_line(
            f"{target}: {maker.num_rows:,d} rows with {maker.num_negatives:,d} mined negatives, in "
            f"{duration(seconds)} ({search.num_encoded:,d} vectors computed)"
        )
        if maker.num_short:
            log_line(
                f"{maker.num_short:,d} rows got fewer than {config.num_negatives} negatives, "
                f"{maker.num_dropped:,d} of them dropped: raise top_k, or lower relative_margin"
            )
        if config.keep_work:
            log_line(
                f"{folder}: vectors and candidates, which a run with other choices uses again (keep_work: false "
                "deletes it)"
            )
        elif running.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        running.barrier()
    return MineResult(
        output_path=target,
        num_rows=maker.num_rows,
        num_negatives=maker.num_negatives,
        num_short=maker.num_short,
        counts=counts,
        limits=choice.limits,
        calibration=choice.calibration,
        num_encoded=search.num_encoded,
        seconds=seconds,
    )


@contextmanager
def open_session(
    session: Session | None, log_line: Log | None
) -> Iterator[tuple[Session, Log]]:
    """Yield the given session, or a new one that ends here, and what prints a line on the first process."""
    with ExitStack() as stack:
        if session is None:
            session = stack.enter_context(start_command_session())
        log_line = log_line or log.info
        yield session, log_line if session.is_main else lambda _: None


def check_config(config: MineConfig) -> Path:
    """Refuse what cannot work before anything is read; returns the file to write."""
    if any(retriever.model == BM25 for retriever in config.all_retrievers()):
        check_bm25()
    return check_output(config.output_path)


def work_folder(config: MineConfig) -> Path:
    """Folder of vectors and intermediate results."""
    return Path(config.work_dir or f"{config.output_path}.work").expanduser()
