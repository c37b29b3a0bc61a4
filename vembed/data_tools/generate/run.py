"""generate(): from documents alone to pairs of a query and the document that it should find."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np

from vembed.data.cache import short_hash
from vembed.data.documents import document_id
from vembed.data.examples import Item
from vembed.data.near_duplicates import casefolded
from vembed.data_tools.config import GenerateConfig, ModelFreeKind
from vembed.data_tools.generate.kinds import pairs_of
from vembed.data_tools.generate.writers import (
    TextWriter,
    cleaned,
    load_writer,
    prompt_for,
    writer_identity,
)
from vembed.errors import UserError
from vembed.mining.candidates import CandidateStore
from vembed.mining.config import DataOptions, MineConfig
from vembed.mining.documents import CorpusFile, content_key
from vembed.mining.mine import Log, open_session, read_inputs
from vembed.mining.options import Source, load_options
from vembed.mining.output import check_output, row_writer
from vembed.mining.record_tables import open_rows
from vembed.parallel import collectives
from vembed.parallel.session import Session
from vembed.progress import ProgressReport, duration

BLOCK = 64
"""Documents that are written down together."""


@dataclass(frozen=True)
class GenerateResult:
    """Result: files and counts."""

    output_path: Path
    num_rows: int
    kept: dict[str, int]
    """Rows by kind."""
    left_out: dict[str, int]
    """Pairs and documents that were left out, by reason."""
    seconds: float


@dataclass(frozen=True)
class _Place:
    """Position of a document."""

    file: int
    number: int
    """Of its record in the file."""
    key: int


def generate(
    source: Source,
    overrides: Sequence[str] = (),
    *,
    session: Session | None = None,
    log: Log | None = None,
) -> GenerateResult:
    """Make pairs from documents with the options of a YAML file, a dict or a `GenerateConfig`. Collective, as `mine`."""
    config = load_options(GenerateConfig, source, overrides)
    target = check_output(config.output_path)
    began = time.monotonic()
    with open_session(session, log) as (running, log_line):
        made = _Generator(config, running)
        log_line(f"documents: {len(made.places):,d}")
        made.write_blocks()
        left_out: Counter[str] = Counter()
        rows = list(_distinct(made.rows(), left_out))
        log_line(f"pairs: {len(rows):,d} made" + _reasons(left_out))
        if config.model_name is not None and rows:
            rows = _round_trip(config, rows, made.folder, running, left_out)
            log_line(f"round trip: {len(rows):,d} pairs kept" + _reasons(left_out))
        if running.is_main:
            with row_writer(target) as writer:
                for row in rows:
                    writer.write(row)
        running.barrier()
        if running.is_main and not config.keep_work:
            shutil.rmtree(made.folder, ignore_errors=True)
        running.barrier()
        kept = dict(Counter(str(row["kind"]) for row in rows))
        seconds = time.monotonic() - began
        by_kind = ", ".join(
            f"{kind} {count:,d}" for kind, count in sorted(kept.items())
        )
        log_line(f"{target}: {len(rows):,d} rows ({by_kind}), in {duration(seconds)}")
    return GenerateResult(target, len(rows), kept, dict(left_out), seconds)


class _Generator:
    """Makes the pairs of all documents, block by block; the ranks share the blocks."""

    def __init__(self, config: GenerateConfig, session: Session) -> None:
        self._config = config
        self._session = session
        paths = (
            [config.corpus_path]
            if isinstance(config.corpus_path, str)
            else config.corpus_path
        )
        self._files = [CorpusFile(path, _data_options(config)) for path in paths]
        self.places = _places(self._files, config)
        self.folder = Path(config.work_dir or f"{config.output_path}.work").expanduser()
        self._free: list[str] = [
            kind for kind in config.kinds if kind in get_args(ModelFreeKind)
        ]
        self._written = config.written_kinds()
        self._examples = _examples(config)
        self._identity = short_hash(
            self._free,
            self._written,
            writer_identity(config),
            config.seed,
            self._examples,
        )
        self._writer: Callable[[], TextWriter] = cache(
            lambda: load_writer(config, session.device)
        )

    def write_blocks(self) -> None:
        """Make what is not on disk yet. Collective."""
        blocks = range(self._session.rank, self._num_blocks, self._session.world_size)
        with ProgressReport("generating", active=self._session.is_main) as progress:
            for done, block in enumerate(blocks, 1):
                path = self._path(block)
                if not path.exists():
                    rows = self._of_block(block)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    partial = path.with_suffix(f".{os.getpid()}.part")
                    partial.write_text(
                        "".join(json.dumps(row) + "\n" for row in rows),
                        encoding="utf-8",
                    )
                    partial.replace(path)
                    # The block is whole now: answers that were kept for a restart are in it.
                    path.with_suffix(".answers").unlink(missing_ok=True)
                progress(
                    min(done * BLOCK * self._session.world_size, len(self.places)),
                    len(self.places),
                )
        self._session.barrier()
        if not all(self._path(block).exists() for block in range(self._num_blocks)):
            raise UserError(
                f"{self.folder} must be a folder that all machines see: set work_dir"
            )

    def rows(self) -> Iterator[dict[str, Any]]:
        """All pairs, in the order of the documents."""
        for block in range(self._num_blocks):
            for line in self._path(block).read_text(encoding="utf-8").splitlines():
                yield json.loads(line)

    @property
    def _num_blocks(self) -> int:
        return -(-len(self.places) // BLOCK)

    def _path(self, block: int) -> Path:
        keys = short_hash(
            [place.key for place in self.places[block * BLOCK : (block + 1) * BLOCK]]
        )
        return self.folder / "generated" / self._identity / f"{block:06d}-{keys}.jsonl"

    def _of_block(self, block: int) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        prompts: list[tuple[str, dict[str, Any], str]] = []
        for number in range(block * BLOCK, min((block + 1) * BLOCK, len(self.places))):
            record, item = self._read(self.places[number])
            identity = document_id(record)
            identity_column: dict[str, Any] = (
                {} if identity is None else {"document_id": identity}
            )
            if self._free or not self._written:
                # By content: a document gets the same pairs wherever it stands in the files.
                random = np.random.default_rng(
                    [self._config.seed, self.places[number].key]
                )
                pairs = pairs_of(record, item, self._free, random)
                rows += [
                    {
                        "query": query,
                        "positive": positive,
                        "kind": kind,
                        **identity_column,
                    }
                    for kind, (query, positive) in pairs
                ]
                if not pairs:
                    rows.append({"kind": "no kind fits", **identity_column})
            if item.text:
                for kind in self._written:
                    row = {"positive": item.text, "kind": kind, **identity_column}
                    prompts.append(
                        (
                            prompt_for(
                                kind, item.text, self._config, self._examples, number
                            ),
                            row,
                            kind,
                        )
                    )
        if prompts:
            written = self._answers(block, [prompt for prompt, _, _ in prompts])
            for place, (_, row, kind) in enumerate(prompts):
                text = cleaned(written[place])
                rows.append(
                    {"query": text, **row}
                    if text
                    else {"kind": f"{kind}: nothing usable was written"}
                )
        return rows

    def _answers(self, block: int, prompts: Sequence[str]) -> dict[int, str]:
        """Return what the language model writes for each prompt of a block. Answers of an endpoint are written down as
        they come in, so that one that dies loses none."""
        path = self._path(block).with_suffix(".answers")
        known = _kept_answers(path)
        places = [place for place in range(len(prompts)) if place not in known]
        if not places:
            return known
        # The seed of a block, so that its text does not depend on the rank that writes it.
        written = self._writer().write(
            [prompts[place] for place in places], self._config.seed + block
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")  # the last line may be half of one
            for number, text in written:
                known[places[number]] = text
                file.write(json.dumps([places[number], text]) + "\n")
                file.flush()
        return known

    def _read(self, place: _Place) -> tuple[Any, Item]:
        file = self._files[place.file]
        record = file.reader.read(place.number)
        return record, file.item(record)


def _kept_answers(path: Path) -> dict[int, str]:
    """Return the answers of an earlier run to prompts of a block, by the place of the prompt."""
    answers: dict[int, str] = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                place, text = json.loads(line)
            except ValueError:  # the last line of a process that was killed
                continue
            answers[int(place)] = str(text)
    return answers


def _data_options(config: GenerateConfig) -> DataOptions:
    return DataOptions(
        data_path=[],
        image_root=config.image_root,
        allow_image_urls=config.allow_image_urls,
        on_bad_record=config.on_bad_record,
    )


def _places(files: Sequence[CorpusFile], config: GenerateConfig) -> list[_Place]:
    """Distinct documents, in the order of the files."""
    by_key: dict[int, _Place] = {}
    problems: list[str] = []
    for number, file in enumerate(files):
        for place, line, record in file.reader.rows():
            try:
                key = file.item(record).key()
            except UserError as error:
                problems.append(f"{file.reader.where(line)}: {error}")
                continue
            by_key.setdefault(key, _Place(number, place, key))
    if problems and config.on_bad_record == "stop":
        raise UserError(
            f"{len(problems):,d} documents cannot be used, fix them, or set on_bad_record: skip to leave them out:\n  "
            + "\n  ".join(problems[:10])
        )
    places = list(by_key.values())
    if not places:
        raise UserError(
            f"{', '.join(file.reader.name for file in files)} holds no documents"
        )
    if config.max_documents is not None and config.max_documents < len(places):
        chosen = np.random.default_rng([config.seed, 3]).choice(
            len(places), config.max_documents, replace=False
        )
        places = [places[number] for number in np.sort(chosen)]
    return places


def _examples(config: GenerateConfig) -> list[tuple[str, str]]:
    """(query, positive) of the user's own rows, for the writer."""
    if config.examples_path is None or config.writer is None:
        return []
    rows = open_rows(DataOptions(data_path=config.examples_path))
    examples = [rows.example(row) for row in range(min(len(rows), 1000))]
    return [
        (example.query.text, example.positives[0].text)
        for example in examples
        if example.query.text and example.positives[0].text
    ]


def _distinct(
    rows: Iterator[dict[str, Any]], left_out: Counter[str]
) -> Iterator[dict[str, Any]]:
    """Pairs without those that say nothing: no query, a copy of the document, a pair that is there already."""
    seen: set[tuple[str, str]] = set()
    for row in rows:
        if "query" not in row:
            left_out[str(row["kind"])] += 1
            continue
        query = casefolded(str(row["query"]))
        positive = json.dumps(row["positive"])
        if query == casefolded(str(row["positive"])):
            left_out["the query is the document"] += 1
        elif (query, positive) in seen:
            left_out["a pair that is there already"] += 1
        else:
            seen.add((query, positive))
            yield row


def _round_trip(
    config: GenerateConfig,
    rows: list[dict[str, Any]],
    folder: Path,
    session: Session,
    left_out: Counter[str],
) -> list[dict[str, Any]]:
    """Keep the pairs whose document is among the first for its query. Collective."""
    path = folder / "pairs.jsonl"
    if session.is_main:
        with row_writer(path) as writer:
            for row in rows:
                writer.write(row)
    session.barrier()
    mining = MineConfig.model_validate(
        config.model_dump(
            include={
                "model_name",
                "corpus_path",
                "image_root",
                "torch_dtype",
                "max_length",
                "trust_remote_code",
                "batch_tokens",
                "vector_dtype",
                "on_bad_record",
                "output_path",
            },
            exclude_unset=True,
        )
        | {
            "data_path": str(path),
            "top_k": config.round_trip_top_k,
            "num_negatives": 1,
            "relative_margin": None,
            "positive_id_field": "document_id"
            if any("document_id" in row for row in rows)
            else None,
        }
    )
    inputs = read_inputs(mining)
    store = CandidateStore(mining, inputs.documents, inputs.known, folder, session)
    store.find_all()
    positives = store.scores_of(inputs.known.positives)
    known = inputs.known
    codes = known.positives.queries << 32 | known.positives.documents
    scores = np.concatenate([chunk.scores for chunk in store.chunks()])
    kept = []
    for number, row in enumerate(rows):
        query = int(known.query_of_row[number])
        document = inputs.documents.find_contents(
            [content_key(inputs.rows.example(number).positives[0])]
        )[0]
        # `codes` is ascending, as pairs are, and holds every positive of the rows.
        positive_scores = positives[np.searchsorted(codes, query << 32 | int(document))]
        # The candidates leave out the known positives, so that those above it are counted by score.
        if int((scores[query] > positive_scores).sum()) < config.round_trip_top_k:
            kept.append(row)
        else:
            left_out[f"round trip: not among the first {config.round_trip_top_k}"] += 1
    collectives.barrier()
    return kept


def _reasons(left_out: Counter[str]) -> str:
    return "".join(
        f"; {count:,d} left out: {reason}" for reason, count in left_out.most_common()
    )
