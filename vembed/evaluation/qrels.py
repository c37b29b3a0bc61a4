"""Qrels: the lines of a file of judgements, in the format of BEIR or of trec_eval, or its records."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vembed.data.misreadings import judgement_column
from vembed.errors import UserError
from vembed.evaluation.beir_folder import open_records

MOST_DIGITS = 100
"""Characters of a score. Python refuses to read a number of thousands of digits."""
_WHOLE = re.compile(r"[+-]?\d+(\.0*)?")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def read_judgements(path: Path) -> Iterator[tuple[str, tuple[str, str, int] | str]]:
    """Yield where each line is, and its query, document and grade; or what is wrong with the line."""
    if path.suffix in (".jsonl", ".parquet"):
        yield from _of_records(path)
        return
    with readable(path), path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            # Not strip: a field may be empty or end in blanks.
            fields = line.rstrip("\r\n").split("\t")
            words = line.split() if len(fields) == 1 else fields
            if len(words) == 4:
                fields = [
                    words[0],
                    words[2],
                    words[3],
                ]  # trec_eval's format: query, 0, document, grade
            if number == 1 and not _NUMBER.fullmatch(fields[-1].strip()):
                continue  # header line
            where = f"{path}:{number}"
            if (
                len(fields) != 3
                or not _is_whole(fields[2])
                or len(fields[2]) > MOST_DIGITS
            ):
                yield (
                    where,
                    "not query-id, corpus-id and a whole score, separated by tabs",
                )
            else:
                yield where, (fields[0], fields[1], int(fields[2].partition(".")[0]))


def _of_records(path: Path) -> Iterator[tuple[str, tuple[str, str, int] | str]]:
    reader = open_records(path)
    for _, line, record in reader.rows():
        judgement = record if isinstance(record, dict) else {}
        query = judgement.get("query-id")
        document = judgement.get("corpus-id")
        score = judgement.get("score", 1)
        is_whole = isinstance(score, int) or (
            isinstance(score, float) and score.is_integer()
        )
        grade = None if "score" in judgement else judgement_column(judgement)
        if grade is not None:
            yield (
                reader.where(line),
                f"no score, and {grade} is not read: call it score",
            )
        elif query is None or document is None or not is_whole:
            yield reader.where(line), "not query-id, corpus-id and a whole score"
        else:
            yield reader.where(line), (str(query), str(document), int(score))


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise UserError where a file cannot be opened, or is not text."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start:,d}"
        ) from error


def _is_whole(text: str) -> bool:
    return _WHOLE.fullmatch(text.strip()) is not None
