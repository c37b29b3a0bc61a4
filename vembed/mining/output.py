"""Rows with their negatives, and the files of training data in which they are written."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vembed.config.schema import sources_of
from vembed.data.example_store import Rows
from vembed.data.examples import ImageRoot, Item
from vembed.data.formats.table import files_of_pattern
from vembed.data.records import ROLE_OF, Record, as_fields, role_of
from vembed.errors import UserError
from vembed.evaluation.dataset import is_beir_folder
from vembed.evaluation.top_k import NO_PAIRS, Pairs
from vembed.files import existing, is_pattern, replaced_file
from vembed.mining.candidates import UNDECIDED, CandidateSearch, Chosen, columns_by_row
from vembed.mining.inputs import MiningInputs, content_key, row_values
from vembed.mining.options import INPUT_OPTIONS, CommandConfig, MineConfig


@dataclass
class RowMaker:
    """Joins the rows with what was chosen for their queries."""

    config: MineConfig
    inputs: MiningInputs
    chosen: Chosen
    """For all queries."""
    relabelled: Mapping[int, Sequence[int]]
    """Query -> documents that become its positives."""
    search: CandidateSearch
    root: ImageRoot
    """Where the output's paths of images start."""
    num_negatives: int = 0
    num_short: int = 0
    num_dropped: int = 0
    num_rows: int = 0

    def __post_init__(self) -> None:
        self._documents = self.inputs.documents
        known = self.inputs.known
        pairs = NO_PAIRS
        if self.config.scores:
            added = []
            for query, query_documents in self.relabelled.items():
                added += [(query, document) for document in query_documents]
            table = np.array(added, np.int64).reshape(-1, 2)
            new = Pairs.of(table[:, 0], table[:, 1])
            # Every document that a row may hold in the output, so that each gets its score.
            pairs = Pairs.union([known.positives, known.negatives, new])
        self._pair_codes = pairs.codes
        self._pair_scores = self.search.scores_of(pairs)

    def rows(self) -> Iterator[Record]:
        """The rows to write, in the order of the input."""
        number = self.config.num_negatives
        query_of_row = self.inputs.known.query_of_row
        by_row = columns_by_row(self.chosen, query_of_row, number)
        for row, columns in enumerate(by_row):
            query = int(query_of_row[row])
            output_row = self._row(row, query, columns)
            self.num_short += len(columns) < number
            if output_row is None:
                self.num_dropped += 1
                continue
            self.num_rows += 1
            self.num_negatives += len(columns)
            yield output_row

    def _row(
        self,
        row: int,
        query: int,
        columns: np.ndarray,
    ) -> Record | None:
        """Return a row to write, or None for one to drop."""
        config = self.config
        example = self.inputs.rows[row]
        kept: Sequence[Item] = example.negatives if config.keep_negatives else ()
        if config.on_missing == "drop" and not len(kept) + len(columns):
            return None
        added = []
        if example.scores is None:  # a row with scores of its own gets no positives
            relabelled = self.relabelled.get(query, ())
            added = [self._documents.item(document) for document in relabelled]
        mined = self.chosen.documents[query, columns].tolist()
        items = [self._documents.item(document) for document in mined]
        output_row = row_with_negatives(
            self.inputs.rows,
            row,
            [*kept, *items],
            added,
            self.root,
        )
        if self._documents.has_ids:
            ids = [self._documents.identity(document) for document in mined]
            output_row["negative_ids"] = [None] * len(kept) + ids
        if config.scores:
            if example.scores is None:
                positives = [*example.positives, *added]
                output_row["positive_scores"] = self._known_scores(query, positives)
            scores = self._known_scores(query, kept)
            for score in self.chosen.scores[query, columns].tolist():
                scores.append(round(score, 6))
            output_row["negative_scores"] = scores
        if config.scores and config.judges:
            judgements = self.chosen.judgements[query, columns]
            undecided = [None] * len(kept)
            output_row[JUDGEMENTS_NAME] = undecided + written_judgements(judgements)
        return output_row

    def _known_scores(
        self,
        query: int,
        items: Sequence[Item],
    ) -> list[float]:
        codes = query << 32 | self._documents.find_contents(
            list(map(content_key, items))
        )
        places = np.searchsorted(self._pair_codes, codes)
        return [round(score, 6) for score in self._pair_scores[places].tolist()]


JUDGEMENTS_NAME = "negative_judge_scores"


def written_judgements(judgements: np.ndarray) -> list[float | None]:
    """Return judgements as rows hold them: None where no judge gave an answer."""
    return [
        None if value == UNDECIDED else round(value, 6) for value in judgements.tolist()
    ]


def row_with_negatives(
    rows: Rows,
    row: int,
    negatives: Sequence[Item],
    added: Sequence[Item],
    root: ImageRoot,
) -> Record:
    """Return the fields of a row with these negatives in place of its own, without their scores, and with positives
    added. All other fields stay. `root`: where paths of images start."""
    record = rows.row(row, root)
    example = rows[row]
    roles = {"negative", "negative_image", "negative_score"}
    if example.negative_scores is not None:
        roles.add("score")  # one column may hold the scores of both
    if added:
        roles |= {"positive", "positive_image"}
    mapping = rows.locate(row)[0].column_mapping or {}
    output_row = {}
    # A conversation is written as the fields that it is read as.
    for name, value in as_fields(record).items():
        if role_of(mapping.get(name, name)) not in roles:
            output_row[name] = value
    if example.negative_scores is not None and example.scores is not None:
        output_row["positive_scores"] = list(example.scores)
    if added:
        positives = [*example.positives, *added]
        output_row[column_of("positive", mapping)] = row_values(positives, root)
    output_row[column_of("negative", mapping)] = row_values(negatives, root)
    return output_row


def column_of(role: str, column_mapping: Mapping[str, str]) -> str:
    """Return the column to write: one that the mapping names stays, because the next reader has the mapping too."""
    for name, target in column_mapping.items():
        if ROLE_OF.get(target) == role:
            return name
    return {"positive": "positive", "negative": "negatives"}[role]


OUTPUT_ENDINGS = (".jsonl", ".ndjson", ".parquet", ".pq")
BEIR_PARTS = ("corpus", "queries", "qrels")
ROWS_PER_GROUP = 4096


def check_output(
    config: CommandConfig,
    path: str,
    endings: Sequence[str] = OUTPUT_ENDINGS,
    option: str = "output_path",
) -> Path:
    """The path of a file that can be written: by its ending, its folder, and what the command reads."""
    target = Path(path).expanduser()
    if target.suffix.lower() not in endings:
        raise UserError(f"{option}: {path} must end in {' or '.join(endings)}")
    if not target.absolute().parent.is_dir():
        raise UserError(
            f"{target.absolute().parent} is no folder, so {target.name} cannot be written there"
        )
    if not target.exists():
        return target
    for name, value in config:
        if name not in INPUT_OPTIONS or not value:
            continue
        for source in sources_of(value):
            if _is_read_from(source.path, target):
                raise UserError(
                    f"{option}: {target} is read as {name}: {source.path}, and would be replaced: give another file"
                )
    return target


def _is_read_from(path: str, file: Path) -> bool:
    """Return whether a file belongs to an input: a file, a folder or a pattern."""
    place = existing(path)
    if place is None:
        matches = files_of_pattern(path) if is_pattern(path) else []
        return any(match.samefile(file) for match in matches)
    if not place.is_dir():
        return place.samefile(file)
    folder = place.resolve()
    actual = file.resolve()
    if not actual.is_relative_to(folder):
        return False
    # Beside these parts such a folder may hold other files.
    part = actual.relative_to(folder).parts[0]
    return not is_beir_folder(folder) or Path(part).stem in BEIR_PARTS


def write_rows(target: Path, rows: Iterable[Record]) -> None:
    """Write beside the target and move it there at the end; nothing is left where an error ends it."""
    try:
        with replaced_file(target) as partial:
            if target.suffix.lower() not in (".jsonl", ".ndjson"):
                _write_parquet(partial, rows)
                return
            # A lone surrogate becomes its escape, as JSON has it.
            with partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
                for row in rows:
                    text = json.dumps(row, ensure_ascii=False, default=_no_json)
                    file.write(text + "\n")
    except OSError as error:
        raise UserError(
            f"{target} cannot be written: {error.strerror or error}"
        ) from error


def _write_parquet(path: Path, rows: Iterable[Record]) -> None:
    """Groups of rows are held as tables until the end: only then are the types of all columns known."""
    tables = [pa.table({})]
    remaining = iter(rows)
    try:
        while group := list(islice(remaining, ROWS_PER_GROUP)):
            columns = {}
            # As a set that keeps the order.
            for name in dict.fromkeys(chain.from_iterable(group)):
                columns[name] = pa.array([row.get(name) for row in group])
            tables.append(pa.table(columns))
        table = pa.concat_tables(tables, promote_options="permissive")
    # Several types in one column, a whole number beyond 64 bits, a lone surrogate.
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
        first = str(error).splitlines()[0]
        raise UserError(
            f"Parquet cannot hold the rows ({first}): write .jsonl"
        ) from error
    pq.write_table(table, path, compression="zstd")


def _no_json(value: Any) -> Any:
    if isinstance(value, bytes):
        raise UserError(
            "rows with images inside them cannot be written as JSON Lines: write .parquet"
        )
    return str(value)  # dates and decimals of Parquet
