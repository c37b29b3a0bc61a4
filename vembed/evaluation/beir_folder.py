"""BEIR-style folders: where corpus, queries and qrels are, as JSON Lines and TSV or, as on the Hub, as Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from vembed.data.documents import DOCUMENT_FIELDS, open_document_reader
from vembed.data.formats.base import Format
from vembed.data.formats.opening import data_files
from vembed.data.misreadings import judgement_column
from vembed.errors import UserError

TextPart = Literal["corpus", "queries"]
QRELS_ENDINGS = (".tsv", ".jsonl", ".parquet")
_FIELDS = (*DOCUMENT_FIELDS, "query-id", "corpus-id", "score")
_SHARD = "-00000-of-"


def is_beir_folder(folder: Path) -> bool:
    """Return whether a folder has a corpus."""
    return texts_path(folder, "corpus") is not None


def texts_path(folder: Path, part: TextPart) -> Path | None:
    """Return the file of the documents or queries, or the folder of such files; None if there is none."""
    files = [folder / f"{part}.jsonl", folder / f"{part}.parquet"]
    paths = next((path for path in files if path.is_file()), None)
    if paths is None and (folder / part).is_dir() and data_files(folder / part):
        return folder / part
    return paths


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
    files = [
        path
        for path in sorted((folder / "qrels").glob("*"))
        if path.suffix in QRELS_ENDINGS
    ]
    return {path.stem.partition(_SHARD)[0]: path for path in files}


def folder_of_qrels(path: Path) -> Path | None:
    """Return the BEIR-style folder that a file of judgements belongs to; None for other files."""
    folder = path.parent.parent
    is_qrels = path.suffix == ".tsv" or (
        path.suffix in QRELS_ENDINGS and path.parent.name == "qrels"
    )
    return folder if is_qrels and is_beir_folder(folder) else None
