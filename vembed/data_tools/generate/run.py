"""generate(): from documents alone to pairs of a query and the document that it should find."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vembed.data.cache import short_hash
from vembed.data.documents import document_id
from vembed.data.near_duplicates import casefolded
from vembed.data_tools.config import GenerateConfig
from vembed.data_tools.generate.kinds import pairs_of
from vembed.data_tools.generate.writers import (
    WriteTexts,
    cleaned,
    load_writer,
    prompt_for,
    writer_identity,
)
from vembed.errors import UserError
from vembed.mining.candidates import open_candidates
from vembed.mining.config import MineConfig, RowOptions, paths_of
from vembed.mining.documents import (
    EXACT,
    FILE,
    START,
    CorpusFile,
    content_key,
    distinct_by,
    read_corpus,
)
from vembed.mining.known_positives import read_inputs
from vembed.mining.mine import Log, open_session
from vembed.mining.options import Source, load_options
from vembed.mining.output import check_output, write_rows
from vembed.mining.record_tables import open_rows
from vembed.parallel.session import Session
from vembed.progress import ProgressReport, duration

BLOCK = 64
"""Documents whose queries are written together."""
MAX_EXAMPLES = 1000
"""Rows of the user from which examples are drawn."""


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
    folder = Path(config.work_dir or f"{config.output_path}.work").expanduser()
    left_out: Counter[str] = Counter()
    with open_session(session, log) as (running, log_line):
        files = []
        for path in paths_of(config.corpus_path):
            allows = config.allow_image_urls
            files.append(CorpusFile(path, config.image_root, allow_image_urls=allows))
        documents = _documents(files, config)
        log_line(f"documents: {len(documents):,d}")
        texts: dict[str, str] = {}
        if config.written_kinds():
            texts = _written_texts(config, files, documents, folder, running)
        rows = list(_distinct(_rows(config, files, documents, texts), left_out))
        log_line(f"pairs: {len(rows):,d} made" + _reasons(left_out))
        if config.model_name is not None and rows:
            rows = _round_trip(config, rows, folder, running, left_out)
            log_line(f"round trip: {len(rows):,d} pairs kept" + _reasons(left_out))
        if running.is_main:
            write_rows(target, rows)
        running.barrier()
        if running.is_main and not config.keep_work:
            shutil.rmtree(folder, ignore_errors=True)
        running.barrier()
        kept = dict(Counter(str(row["kind"]) for row in rows))
        seconds = time.monotonic() - began
        by_kind = ", ".join(
            f"{kind} {count:,d}" for kind, count in sorted(kept.items())
        )
        log_line(f"{target}: {len(rows):,d} rows ({by_kind}), in {duration(seconds)}")
    return GenerateResult(target, len(rows), kept, dict(left_out), seconds)


def _documents(files: Sequence[CorpusFile], config: GenerateConfig) -> np.ndarray:
    """The table of the distinct documents, in the order of the files."""
    table, _ = read_corpus(files, config.on_bad_record)
    documents = distinct_by(table, EXACT)
    if config.max_documents is not None and config.max_documents < len(documents):
        random = np.random.default_rng([config.seed, 3])
        chosen = random.choice(len(documents), config.max_documents, replace=False)
        documents = documents[np.sort(chosen)]
    return documents


def _rows(
    config: GenerateConfig,
    files: Sequence[CorpusFile],
    documents: np.ndarray,
    texts: Mapping[str, str],
) -> Iterator[dict[str, Any]]:
    """Yield all pairs, in the order of the documents. A row without a query says by its kind what was left out."""
    written = config.written_kinds()
    free = [kind for kind in config.kinds if kind not in written]
    for document in documents:
        record, item = files[document[FILE]].read(int(document[START]))
        identity = document_id(record)
        columns = {} if identity is None else {"document_id": identity}
        if free or not written:
            # By content: a document gets the same pairs wherever it stands in the files.
            random = np.random.default_rng([config.seed, int(document[EXACT])])
            pairs = pairs_of(record, item, free, random)
            for kind, (query, positive) in pairs:
                row = {"query": query, "positive": positive, "kind": kind}
                yield row | columns
            if not pairs:
                yield {"kind": "no kind fits"}
        for kind in written if item.text else ():
            key = f"{document[EXACT]} {kind}"
            if key not in texts:
                raise UserError(
                    "another rank has written queries that are not here: set work_dir to a folder that all machines see"
                )
            text = cleaned(texts[key])
            if text:
                row = {"query": text, "positive": item.text, "kind": kind}
                yield row | columns
            else:
                yield {"kind": f"{kind}: nothing usable was written"}


def _written_texts(
    config: GenerateConfig,
    files: Sequence[CorpusFile],
    documents: np.ndarray,
    folder: Path,
    session: Session,
) -> dict[str, str]:
    """Return what the language model writes, by content of the document and kind of query.

    Collective: the ranks share the blocks of documents. Answers are written down as they come in, so that one that dies
    loses none.
    """
    examples = _examples(config)
    identity = short_hash(writer_identity(config), config.seed, examples)
    answers = folder / "written" / identity
    answers.mkdir(parents=True, exist_ok=True)
    texts = _read_answers(answers)
    write: WriteTexts | None = None
    num_documents = len(documents)
    blocks = range(session.rank * BLOCK, num_documents, session.world_size * BLOCK)
    with ProgressReport("generating", active=session.is_main) as progress:
        for first in blocks:
            last = min(first + BLOCK, num_documents)
            keys: list[str] = []
            prompts: list[str] = []
            for number in range(first, last):
                document = documents[number]
                item = files[document[FILE]].read(int(document[START]))[1]
                for kind in config.written_kinds() if item.text else ():
                    key = f"{document[EXACT]} {kind}"
                    if key not in texts:
                        prompt = prompt_for(kind, item.text, config, examples, number)
                        keys.append(key)
                        prompts.append(prompt)
            if prompts:
                write = write or load_writer(config, session.device)
                # The seed of a block, so that its text does not depend on the rank that writes it.
                seed = config.seed + first // BLOCK
                path = answers / f"{os.uname().nodename}-{os.getpid()}.answers"
                with path.open("a", encoding="utf-8") as file:
                    for place, text in write(prompts, seed):
                        # Behind a line end: the last line of a process that was killed may be half of one.
                        file.write("\n" + json.dumps([keys[place], text]))
                        file.flush()
            progress(last, num_documents)
    session.barrier()
    return _read_answers(answers)


def _read_answers(folder: Path) -> dict[str, str]:
    texts: dict[str, str] = {}
    for path in sorted(folder.glob("*.answers")):
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):  # half of a line
                key, text = json.loads(line)
                texts[key] = text
    return texts


def _examples(config: GenerateConfig) -> list[tuple[str, str]]:
    """(query, positive) of the user's own rows, for the writer."""
    if config.examples_path is None or config.writer is None:
        return []
    rows = open_rows(RowOptions(data_path=config.examples_path))
    examples = []
    for row in range(min(len(rows), MAX_EXAMPLES)):
        example = rows.example(row)
        positive = example.positives[0].text
        if example.query.text and positive:
            examples.append((example.query.text, positive))
    return examples


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
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pairs.jsonl"
    if session.is_main:
        write_rows(path, rows)
    session.barrier()
    has_ids = any("document_id" in row for row in rows)
    mining = MineConfig.shared(
        config,
        data_path=str(path),
        top_k=config.round_trip_top_k,
        num_negatives=1,
        relative_margin=None,
        positive_id_field="document_id" if has_ids else None,
    )
    inputs = read_inputs(mining)
    store = open_candidates(mining, inputs, folder, session)
    store.find_all()
    positives = store.scores_of(inputs.known.positives)
    known = inputs.known
    codes = known.positives.codes
    scores = np.concatenate([chunk.scores for chunk in store.chunks()])
    kept = []
    for number, row in enumerate(rows):
        query = int(known.query_of_row[number])
        positive = inputs.rows.example(number).positives[0]
        document = inputs.documents.find_contents([content_key(positive)])
        # `codes` is ascending, as pairs are, and holds every positive of the rows.
        place = np.searchsorted(codes, query << 32 | document)
        # The candidates leave out the known positives, so that those above it are counted by score.
        num_above = int((scores[query] > positives[place]).sum())
        if num_above < config.round_trip_top_k:
            kept.append(row)
        else:
            left_out[f"round trip: not among the first {config.round_trip_top_k}"] += 1
    session.barrier()
    return kept


def _reasons(left_out: Counter[str]) -> str:
    return "".join(
        f"; {count:,d} left out: {reason}" for reason, count in left_out.most_common()
    )
