"""BEIR-style folders: corpus, queries and qrels, as JSON Lines and TSV or, as on the Hub, as Parquet. Corpus: the documents of a
file, each content once, whose texts stay in the file."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from vembed.config.options import join_words
from vembed.data.columns import judgement_column
from vembed.data.examples import (
    LONE_SURROGATE,
    BadRecord,
    Item,
    KeyIndex,
    ReadAs,
    has_lone_surrogate,
)
from vembed.data.formats.base import Format
from vembed.data.formats.table import data_files, open_document_reader
from vembed.data.records import (
    DOCUMENT_FIELDS,
    ID_FIELDS,
    document_id,
    document_text,
)
from vembed.errors import UserError, listed

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
    return open_beir_file(path)


def open_beir_file(path: Path) -> Format:
    """Return the reader of a file with documents, queries or judgements."""
    reader = open_document_reader(path)
    columns = reader.columns or ()
    # A table may have other columns too, such as vectors. They are not read.
    read = []
    for name in columns:
        if name in _FIELDS or judgement_column([name]):
            read.append(name)
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
    is_in_qrels = path.suffix in QRELS_ENDINGS and path.parent.name == "qrels"
    if path.suffix != ".tsv" and not is_in_qrels:
        return None
    return folder if is_beir_folder(folder) else None


def read_judgements(path: Path) -> Iterator[tuple[str, tuple[str, str, int] | str]]:
    """Yield where each line is, and its query, document and grade; or what is wrong with the line.

    Lines are BEIR's (query, document, grade) or trec_eval's (query, 0, document, grade).
    """
    if path.suffix in (".jsonl", ".parquet"):
        reader = open_beir_file(path)
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


class Corpus(Sequence[Item]):
    """Documents that are read when they are asked for; 20 bytes are held for each."""

    def __init__(
        self,
        reader: Format,
        numbers: np.ndarray,
        lengths: np.ndarray,
        keys: np.ndarray,
        settings: ReadAs | None = None,
    ) -> None:
        self._reader = reader
        self._numbers = numbers
        """Numbers of the records, int64 [n]."""
        self.lengths = lengths
        """Lengths of the texts in characters, int32 [n]."""
        self.keys = keys
        """Keys of the contents, int64 [n]."""
        self._settings = settings or ReadAs()

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Corpus: ...
    def __getitem__(self, index: int | slice) -> Item | Corpus:
        if isinstance(index, slice):
            return Corpus(
                self._reader,
                self._numbers[index],
                self.lengths[index],
                self.keys[index],
                self._settings,
            )
        record = self._reader.read(int(self._numbers[index]))
        item = Item(text=document_text(record)) if isinstance(record, dict) else Item()
        # The text was checked at opening and is read again only now; its key tells whether it is still the same.
        if item.key() != self.keys[index]:
            raise UserError(
                f"{self._reader.name} has changed since it was opened: start again"
            )
        return self._settings.document(item)

    def read_as(self, settings: ReadAs) -> Corpus:
        """Return the documents with the prompt and the length of a source."""
        return Corpus(self._reader, self._numbers, self.lengths, self.keys, settings)


@dataclass(frozen=True, slots=True)
class IdentifiedCorpus:
    """Documents of a file, by number and by `_id`."""

    documents: Corpus
    num_joined: int
    """Records with the content of an earlier one."""
    identities: KeyIndex
    """The records by `_id`, as hashes of 63 bits."""
    document_of: np.ndarray
    """Of each record, the index of its document."""

    def find(self, identity: str) -> int | None:
        """Return the index of a document; None: there is none of this name."""
        record = int(self.identities.find(np.array([_hash(identity)]))[0])
        return None if record < 0 else int(self.document_of[record])


def read_beir_corpus(reader: Format, problems: list[str]) -> IdentifiedCorpus:
    """Read a corpus once, without holding its texts. What is wrong with records is added to `problems`."""
    # 28 bytes for each document. Its line is not kept: lines are counted again for the few that a message names.
    # Plain arrays grow in place. Lists of Python numbers would take 30 to 40 bytes for each number.
    # Number of the record, length of its text, key of its content, hash of its `_id`.
    columns = [array("q"), array("i"), array("q"), array("q")]
    problem_lines: list[tuple[int, str]] = []
    for number, _, identity, text in identified_texts(reader, problem_lines):
        values = (number, len(text), Item(text=text).key(), _hash(identity))
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    # Shares the arrays' memory. frombuffer takes no empty array.
    arrays = []
    for column in columns:
        empty = np.zeros(0, column.typecode)
        arrays.append(np.frombuffer(column, column.typecode) if column else empty)
    numbers, lengths, keys, hashes = arrays
    is_first = _first_occurrences(hashes)
    # Records with the `_id` of an earlier one are left out. The file is read once more for their lines.
    if not is_first.all():
        repeated = set(numbers[~is_first].tolist())
        for number, line, record in reader.rows():
            if number in repeated:
                reason = f"_id {document_id(record)} occurs twice"
                problem_lines.append((line, reason))
        numbers = numbers[is_first]
        lengths = lengths[is_first]
        keys = keys[is_first]
        hashes = hashes[is_first]
    for line, reason in sorted(problem_lines):
        problems.append(f"{reader.where(line)}: {reason}")
    # Records with the content of an earlier one are joined with it.
    is_first = _first_occurrences(keys)
    document_of = np.arange(len(keys), dtype=np.int32)
    num_joined = len(keys) - int(is_first.sum())
    if num_joined:  # most corpora have none, and their columns are not copied
        document_of = KeyIndex(keys[is_first]).find(keys).astype(np.int32)
        numbers = numbers[is_first]
        lengths = lengths[is_first]
        keys = keys[is_first]
    documents = Corpus(reader, numbers, lengths, keys)
    return IdentifiedCorpus(documents, num_joined, KeyIndex(hashes), document_of)


def identified_texts(
    reader: Format, problems: list[tuple[int, str]]
) -> Iterator[tuple[int, int, str, str]]:
    """Yield number, line, `_id` and text of the records. The line of another one, and the reason, go to `problems`."""
    for number, line, record in reader.rows():
        identity = document_id(record)
        text = document_text(record)
        if isinstance(record, BadRecord):
            problems.append((line, str(record)))
        elif identity is None:
            problems.append((line, f"no id ({', '.join(ID_FIELDS)} are read)"))
        elif has_lone_surrogate(text):
            problems.append((line, f"{identity} {LONE_SURROGATE}"))
        elif not text:
            problems.append((line, f"{identity} has no text"))
        else:
            yield number, line, identity, text


def _hash(identity: str) -> int:
    return Item(text=identity).key()


def _first_occurrences(keys: np.ndarray) -> Any:
    """Return, per key, whether none before it is equal (bool [n])."""
    is_first = np.zeros(len(keys), bool)
    is_first[np.unique(keys, return_index=True)[1]] = True
    return is_first
