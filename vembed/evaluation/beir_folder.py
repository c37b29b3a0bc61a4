"""BEIR-style folders: corpus, queries and qrels, as JSON Lines and TSV or, as on the Hub, as Parquet."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from vembed.config.options import join_words
from vembed.data.documents import DOCUMENT_FIELDS, open_document_reader
from vembed.data.formats.base import Format
from vembed.data.formats.opening import data_files
from vembed.data.messages import listed
from vembed.data.misreadings import judgement_column
from vembed.errors import UserError

TextPart = Literal["corpus", "queries"]
QRELS_ENDINGS = (".tsv", ".jsonl", ".parquet")
_FIELDS = (*DOCUMENT_FIELDS, "query-id", "corpus-id", "score")
_SHARD = "-00000-of-"
# At most 100 digits: Python refuses to read a number of thousands.
_WHOLE = re.compile(r"\s*[+-]?\d{1,100}(\.0{0,100})?\s*")
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")


def is_beir_folder(folder: Path) -> bool:
    """Return whether a folder has a corpus."""
    return texts_path(folder, "corpus") is not None


def texts_path(folder: Path, part: TextPart) -> Path | None:
    """Return the file of the documents or queries, or the folder of such files; None if there is none."""
    for path in (folder / f"{part}.jsonl", folder / f"{part}.parquet"):
        if path.is_file():
            return path
    path = folder / part
    return path if path.is_dir() and data_files(path) else None


def open_texts(folder: Path, part: TextPart) -> Format:
    """Return the reader of the documents or queries."""
    path = texts_path(folder, part)
    if path is None:
        raise UserError(
            f"{folder} has neither {part}.jsonl nor {part}.parquet, and no folder {part} with such files"
        )
    return open_records(path)


def open_records(path: Path) -> Format:
    """Return the reader of a file with documents, queries or judgements."""
    reader = open_document_reader(path)
    columns = reader.columns or ()
    # Of a table with other columns, such as vectors, these alone are copied.
    read = [name for name in columns if name in _FIELDS or judgement_column([name])]
    if read:
        reader.select(read)
    return reader


def qrels_files(folder: Path) -> dict[str, Path]:
    """Return the files of judgements by split. A shard such as test-00000-of-00001.parquet is that of its split."""
    files = {}
    for path in sorted((folder / "qrels").glob("*")):
        if path.suffix in QRELS_ENDINGS:
            files[path.stem.partition(_SHARD)[0]] = path
    return files


def choose_qrels(folder: Path, splits: Sequence[str]) -> Path:
    """Return the qrels of the first of some splits; the only ones of a folder, unless one split was asked for."""
    files = qrels_files(folder)
    for split in splits:
        if split in files:
            return files[split]
    # A split that was asked for is never replaced by another.
    if len(files) == 1 and len(splits) > 1:
        return next(iter(files.values()))
    place = folder / "qrels"
    if files:
        raise UserError(
            f"{place} holds {', '.join(sorted(files))}, and none of {', '.join(splits)}: give the split, or the path of "
            "the qrels file, that is meant"
        )
    others = listed(sorted(path.name for path in place.glob("*")))
    raise UserError(
        f"{place} holds {others or 'nothing'}, and no file that ends in {join_words(QRELS_ENDINGS)}"
    )


def folder_of_qrels(path: Path) -> Path | None:
    """Return the BEIR-style folder that a file of judgements belongs to; None for other files."""
    folder = path.parent.parent
    is_qrels = path.suffix == ".tsv" or (
        path.suffix in QRELS_ENDINGS and path.parent.name == "qrels"
    )
    return folder if is_qrels and is_beir_folder(folder) else None


def read_judgements(path: Path) -> Iterator[tuple[str, tuple[str, str, int] | str]]:
    """Yield where each line is, and its query, document and grade; or what is wrong with the line.

    Lines are BEIR's (query, document, grade) or trec_eval's (query, 0, document, grade).
    """
    if path.suffix in (".jsonl", ".parquet"):
        reader = open_records(path)
        for _, number, record in reader.rows():
            yield reader.where(number), _judgement_of_record(record)
        return
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                # Not strip: a field may be empty or end in blanks.
                fields = line.rstrip("\r\n").split("\t")
                if len(fields) == 1 and len(line.split()) == 4:
                    fields = line.split()  # only trec_eval's may have blanks
                if number == 1 and not _NUMBER.fullmatch(fields[-1]):
                    continue  # header line
                if len(fields) == 4:
                    del fields[1]
                where = f"{path}:{number}"
                if len(fields) == 3 and _WHOLE.fullmatch(fields[2]):
                    grade = int(fields[2].partition(".")[0])
                    yield where, (fields[0], fields[1], grade)
                else:
                    yield (
                        where,
                        "not query-id, corpus-id and a whole score, separated by tabs",
                    )
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start:,d}"
        ) from error


def _judgement_of_record(record: object) -> tuple[str, str, int] | str:
    judgement = record if isinstance(record, dict) else {}
    if "score" not in judgement:
        grade = judgement_column(judgement)
        if grade is not None:
            return f"no score, and {grade} is not read: call it score"
    query = judgement.get("query-id")
    document = judgement.get("corpus-id")
    score = judgement.get("score", 1)
    is_whole = isinstance(score, int) or (
        isinstance(score, float) and score.is_integer()
    )
    if query is None or document is None or not is_whole:
        return "not query-id, corpus-id and a whole score"
    return str(query), str(document), int(score)
