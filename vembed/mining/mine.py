"""mine(): hard negatives for a file of training data. ExampleMiner: the same between epochs, by the trained model."""

import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vembed.config.schema import DataSection, EpochMining
from vembed.data.example_store import ExampleStore
from vembed.data.examples import Example, ImageRoot
from vembed.errors import require_package
from vembed.files import short_hash
from vembed.mining.candidates import (
    Calibration,
    CandidateSearch,
    Limits,
    choose_negatives,
    columns_by_row,
    open_candidates,
)
from vembed.mining.inputs import (
    Documents,
    KnownPositives,
    array_identity,
    open_command_session,
    read_mining_inputs,
)
from vembed.mining.judges import CandidateJudge
from vembed.mining.options import (
    BM25,
    CommandConfigSource,
    DataOptions,
    GenerateConfig,
    MineConfig,
    load_options,
)
from vembed.mining.output import RowMaker, check_output, write_rows
from vembed.mining.retrievers import DenseRetriever, EncodeItems
from vembed.parallel.session import Session
from vembed.progress import Log, duration

log = logging.getLogger("vembed")


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
    source: CommandConfigSource,
    overrides: Sequence[str] = (),
    *,
    log: Log | None = None,
) -> MineResult:
    """Mine hard negatives with the options of a YAML file, a dict or a `MineConfig`, and `key=value` overrides.

    Several processes may call it together. All of them encode and search, and the first one writes.
    """
    config = load_options(MineConfig, source, overrides)
    target = check_mine_config(config)
    began = time.monotonic()
    with open_command_session(log) as (running, log_line):
        inputs = read_mining_inputs(config)
        folder = work_folder(config)
        for line in inputs.summary():
            log_line(line)
        search = open_candidates(config, inputs, folder, running)
        for line in search.summary:
            log_line(line)
        judge = CandidateJudge(config, inputs, running)
        choice = choose_negatives(
            search,
            config.seed,
            inputs.documents,
            depth=config.depth,
            judge=judge.apply if config.judges else None,
        )
        if choice.note:
            log_line(choice.note)
        chosen = choice.chosen
        counts = choice.counts | judge.counts
        scores = chosen.scores[chosen.documents >= 0]
        mean = f", mean score {float(scores.mean()):.4f}" if len(scores) else ""
        log_line(
            f"candidates: {counts['candidates']:,d}; left out: {counts['skipped']:,d} as the first ones, "
            f"{counts['too_high']:,d} above the limit of their query, {counts['too_low']:,d} below min_score, "
            f"{counts['near_duplicates']:,d} near-duplicates of a positive, "
            f"{counts['judged_relevant']:,d} judged relevant; chosen for {inputs.known.num_queries:,d} queries: {len(scores):,d}{mean}"
        )
        for line in judge.summary():
            log_line(line)

        maker = RowMaker(
            config,
            inputs,
            chosen,
            judge.relabelled,
            search,
            ImageRoot.of(config, target.parent),
        )
        if running.is_main:
            write_rows(target, maker.rows())
        # The others wait here: none may clear the folder, or log that it is done, before the file is whole.
        running.barrier()
        seconds = time.monotonic() - began
        log_line(
            f"{target}: {maker.num_rows:,d} rows, {maker.num_negatives:,d} mined negatives in all of them together, "
            f"in {duration(seconds)} ({search.num_encoded:,d} vectors computed)"
        )
        if maker.num_short:
            log_line(
                f"warning: {maker.num_short:,d} of {len(inputs.rows):,d} rows got fewer than {config.num_negatives} "
                f"negatives, and {maker.num_dropped:,d} of them were dropped: give more documents (corpus_path), raise "
                "top_k if it is below their number, or loosen the limits that left candidates out (relative_margin, margin, "
                "max_score, near_duplicate)"
            )
        if config.keep_work:
            log_line(
                f"{folder}: vectors and candidates, which a run with other choices uses again (keep_work: false "
                "deletes it)"
            )
        else:
            clear_folder(folder, running)
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


def check_mine_config(config: MineConfig) -> Path:
    """Refuse what cannot work before anything is read; returns the file to write."""
    if any(retriever.model == BM25 for retriever in config.all_retrievers()):
        require_package("bm25s", "mine")
    return check_output(config, config.output_path)


def work_folder(config: MineConfig | GenerateConfig) -> Path:
    """Folder of vectors and intermediate results."""
    return Path(config.work_dir or f"{config.output_path}.work").expanduser()


def clear_folder(folder: Path, session: Session) -> None:
    """Delete a folder that no rank reads any more. Collective."""
    session.barrier()
    if session.is_main:
        shutil.rmtree(folder, ignore_errors=True)
    session.barrier()


@dataclass(frozen=True)
class Mined:
    """Result of one mining."""

    documents: np.ndarray
    """[num_examples, num_negatives] numbers of documents, -1 where there are fewer."""
    mean_score: float
    num_short: int
    """Examples that got fewer than `num_negatives`."""
    note: str
    """Result of `threshold: auto`, or nothing."""


@dataclass
class ExampleMiner:
    """Miner for the examples of one run. All ranks make one and call its methods together."""

    options: EpochMining
    data: DataSection
    examples: ExampleStore
    session: Session
    seed: int

    def __post_init__(self) -> None:
        """Read all examples, and the corpus if there is one."""
        options = DataOptions(
            data_path=[],
            corpus_path=self.options.corpus_path,
            image_root=self.data.image_root,
            allow_image_urls=self.data.allow_image_urls,
            on_bad_record=self.data.on_bad_record,
        )
        self.documents = Documents(options, self.examples)
        self._known = KnownPositives(self.examples, self.documents, options)
        self.notes = self.documents.notes + self._known.notes
        """Lines for the log."""
        self.fingerprint = short_hash(array_identity(self.documents.exact))
        """Hash of the documents in their order: numbers of documents mean the same only where it is the same."""

    def mine(
        self,
        encode: EncodeItems,
        folder: Path,
        epoch: int,
    ) -> Mined:
        """Encode queries and documents, search, and choose. Collective.

        `folder`: for vectors; all ranks see it, and it is empty before and gone afterwards. `epoch`: random choices
        differ between epochs.
        """
        session = self.session
        options = self.options
        known = self._known
        # Vectors of other weights must not be taken for those of now.
        clear_folder(folder, session)
        dense = DenseRetriever(
            folder,
            "run",
            self.documents,
            known,
            session,
        )

        # Ranks run together, as those of sharded weights must.
        dense.encode(encode, together=True)
        excluded = known.excluded(with_negatives=True)
        search = CandidateSearch(
            options,
            known,
            [dense],
            session,
            excluded=excluded,
            folder=folder / "candidates",
        )
        choice = choose_negatives(
            search,
            self.seed + epoch,
            self.documents,
            depth=options.negatives_per_query,
        )
        chosen = choice.chosen
        clear_folder(folder, session)
        scores = chosen.scores[chosen.documents >= 0]
        mean = float(scores.mean()) if len(scores) else float("nan")
        number = options.num_negatives
        by_example = np.full((len(self.examples), number), -1, np.int64)
        rows = columns_by_row(chosen, known.query_of_row, number)
        for row, columns in enumerate(rows):
            query = known.query_of_row[row]
            by_example[row, : len(columns)] = chosen.documents[query, columns]
        num_short = int((by_example < 0).any(axis=1).sum())
        return Mined(by_example, mean, num_short, choice.note)

    def example(
        self,
        index: int,
        documents: Sequence[int],
    ) -> Example:
        """Return an example with these documents after its own negatives."""
        example = self.examples[index]
        added = [self.documents.item(number) for number in documents if number >= 0]
        plain = (replace(item, prompt=None, max_length=None) for item in added)
        extended = replace(example, negatives=(*example.negatives, *plain))
        # With the prompts of the source of the example, not of that of the document.
        source = self.examples.sources[self.examples.source_of(index)]
        return source.read_as.apply(extended)
