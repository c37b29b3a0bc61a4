"""What a starter config is made of: the first records of a data file, guesses of its columns, and values that fit.

Imports no torch.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import yaml

from vembed.config.decisions import epochs_for
from vembed.config.schema import ModelSection
from vembed.config.values import Task
from vembed.data.examples import BadRecord, ImageRoot, Item, NotUtf8
from vembed.data.formats.base import Format
from vembed.data.formats.table import open_reader
from vembed.data.images.files import IMAGE_PATH
from vembed.data.records import (
    Columns,
    Record,
    RecordFormat,
    as_fields,
    negative_columns,
)
from vembed.errors import UserError, printable
from vembed.files import is_address, is_pattern

if TYPE_CHECKING:
    from vembed.models.families.description import ModelDescription

NUM_RECORDS = 1000
"""Number of records to look at."""
OTHER_ENCODING_SHARE = 0.1
"""A larger share of records that are not UTF-8 is a file of another encoding, not a few damaged records."""
COUNTED_BYTES = 64 * 2**20
"""Records of larger files are not counted but estimated, from the size of the first ones."""


@dataclass(frozen=True)
class FileSample:
    """The first records of a file, without those that are no object. Conversations are the fields that they are read as."""

    records: list[Record] = field(default_factory=list)
    """Empty where there is nothing to look at: a name on the Hub, an address."""
    num_records: int = 0
    """Records in the whole file."""
    is_estimate: bool = False
    is_delimited: bool = False
    """CSV or TSV: the names are those of the first line, and all values are text."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of all columns, in order."""
        return tuple(dict.fromkeys(itertools.chain.from_iterable(self.records)))


def read_sample(path: Path) -> FileSample:
    """Read the first records of a file, or of a folder that is one source. Raise UserError if it cannot be read."""
    is_local_pattern = is_pattern(str(path)) and not is_address(str(path))
    if not path.exists() and not is_local_pattern:
        return FileSample()
    reader = open_reader(path)
    rows = itertools.islice(reader.rows(), NUM_RECORDS)
    records = []
    problems = []
    not_utf8 = []
    for _, line, record in rows:
        if isinstance(record, NotUtf8):
            not_utf8.append(reader.where(line))
        if isinstance(record, dict):
            fields = record
            # A conversation that cannot be read stays as it is.
            with suppress(BadRecord):
                fields = as_fields(record)
            records.append(fields)
            continue
        reason = record if isinstance(record, BadRecord) else "not an object"
        problems.append(f"{reader.where(line)}: {reason}")
    num_rows = len(records) + len(problems)
    if len(not_utf8) > OTHER_ENCODING_SHARE * num_rows:
        raise UserError(
            f"{path} is not encoded in UTF-8: {len(not_utf8):,d} of the first {num_rows:,d} records would be left out. The first "
            f"one is {not_utf8[0]}. Convert the file, as by iconv -f latin1 -t utf-8 {path} > {path.stem}-utf8{path.suffix}"
        )
    if not records:
        raise UserError(problems[0] if problems else f"{path}: has no records")
    counts = [_num_records(file) for file in reader.single_files]
    return FileSample(
        records,
        sum(count for count, _ in counts),
        any(is_estimate for _, is_estimate in counts),
        reader.numbers_are_text,
    )


def _num_records(reader: Format) -> tuple[int, bool]:
    """Return the number of records, and whether it is estimated, from the size of the first records."""
    count = reader.num_records()
    if count is not None:
        return count, False
    if reader.stop - reader.start <= COUNTED_BYTES:
        return sum(1 for _ in reader.rows()), False
    rows = list(itertools.islice(reader.rows(), NUM_RECORDS))
    seen_bytes = max(rows[-1][0] - reader.start, 1)
    # The last row that was read begins after `seen_bytes`, so these bytes hold all rows but that one.
    all_bytes = reader.stop - reader.start
    return round((len(rows) - 1) * all_bytes / seen_bytes), True


def sampled_items(
    sample: FileSample,
    mapping: Mapping[str, str] | None,
    max_negatives: int | None = None,
) -> tuple[list[Item], list[Item]]:
    """Return the queries and the documents of the records that training can use."""
    form = RecordFormat(
        Columns(mapping),
        # No image is opened, so it may be anywhere.
        ImageRoot("/", allow_urls=True),
        max_negatives=max_negatives,
        numbers_in_text=sample.is_delimited,
    )
    queries = []
    documents: list[Item] = []
    for record in sample.records:
        with suppress(BadRecord):
            example = form.example(record, "")
            queries.append(example.query)
            # The document of a text with a label is the text itself.
            if example.label is None:
                documents += example.documents
    return queries, documents


ROLE_WORDS = {
    role: set(words.split())
    for role, words in {
        "query": (
            "query question anchor search keyword request prompt instruction subject title caption frage "
            "anfrage suche suchbegriff betreff titel anliegen problem stichwort requete demande recherche "
            "sujet titre pregunta consulta busqueda asunto titulo domanda ricerca oggetto pergunta busca "
            "assunto vraag zoek onderwerp pytanie soru"
        ),
        "positive": (
            "positive answer response document passage solution resolution reply content context body "
            "description text target output article paragraph completion antwort loesung losung beschreibung "
            "inhalt artikel dokument absatz ergebnis reponse solucion respuesta contenido descripcion texte "
            "contenu texto risposta soluzione testo contenuto resposta solucao antwoord oplossing tekst "
            "odpowiedz cevap"
        ),
        "id": (
            "id ids uuid guid nr no num number nummer index idx key code url link date datum time zeit "
            "timestamp created updated author autor user lang language sprache category kategorie status tag "
            "tags numero fecha"
        ),
    }.items()
}
"""Words of column names. The content of those of `id` is not embedded."""
FEW_VALUES = 0.2
"""A column with a smaller share of different values is a category, unless its name says otherwise."""


@dataclass(frozen=True)
class ColumnFacts:
    """Figures of one column from the first records."""

    name: str
    mean_length: float
    """Characters."""
    unique: float
    """Share of different values."""
    questions: float
    """Share of values that end with a question mark."""
    has_paths: bool
    """More than half of the values look like paths of images."""


def guess(
    sample: FileSample,
    missing: Sequence[str],
    taken_columns: Sequence[str],
) -> tuple[dict[str, str], dict[str, str]]:
    """Return a column mapping for the missing parts (query, positive), of columns that are not taken, and the reason for
    each column."""
    candidates = []
    skipped = {*taken_columns, *negative_columns(sample.columns)}
    for name in sample.columns:
        column = _facts(name, [record.get(name) for record in sample.records])
        if name not in skipped and column is not None:
            candidates.append(column)
    longest = max((column.mean_length for column in candidates), default=1.0) or 1.0
    mapping = {}
    reasons = {}
    questions = {}
    unassigned = list(missing)
    # The part with the clearer evidence is chosen first, so that it does not lose its column to the other.
    while unassigned and candidates:
        pairs = [(column, role) for column in candidates for role in unassigned]
        # Of equal scores the earlier column.
        best, role = max(pairs, key=lambda pair: _score(pair[0], pair[1], longest))
        # A column of paths holds images.
        mapping[best.name] = f"{role}_image" if best.has_paths else role
        reasons[best.name] = (
            f"{best.mean_length:,.0f} characters on average, {best.questions:.0%} end with a question mark"
        )
        questions[role] = best.questions
        if questions.get("positive", 0.0) > 0.5 and questions.get("query", 1.0) < 0.1:
            reasons[best.name] += "; only queries usually do: are the columns swapped?"
        candidates.remove(best)
        unassigned.remove(role)
    in_file_order = {name: mapping[name] for name in sample.columns if name in mapping}
    return in_file_order, reasons


def _facts(name: str, values: Sequence[Any]) -> ColumnFacts | None:
    """Return figures of a column; None if it has numbers, dates or ids, not texts or paths."""
    texts = []
    for value in values:
        # Of a list the first entry.
        entry = (value or [None])[0] if isinstance(value, list) else value
        if isinstance(entry, Mapping):
            entry = entry.get("text") or entry.get("image") or entry.get("path")
        if isinstance(entry, str) and entry.strip():
            texts.append(entry.strip())
    if not texts:
        return None
    unique = len(set(texts)) / len(texts)
    has_paths = mean(IMAGE_PATH.fullmatch(text) is not None for text in texts) > 0.5
    questions = mean(text.rstrip(" \"')").endswith(("?", "\uff1f")) for text in texts)
    letters = mean(sum(map(str.isalpha, text)) / len(text) for text in texts)
    spaced = mean(any(map(str.isspace, text)) for text in texts)
    length = mean(map(len, texts))
    # From the CJK radicals on. Such texts have no blanks, so the next two lines cannot take them for ids or codes.
    wide = mean(max(text) > "\u2e7f" for text in texts)
    is_id = _words(name) & ROLE_WORDS["id"] and spaced < 0.5 and not wide
    is_code = (
        spaced < 0.1 and unique > 0.9 and letters < 0.8 and not wide and length < 64
    )
    if not has_paths and (letters <= 0.4 or is_id or is_code):
        return None
    return ColumnFacts(name, length, unique, questions, has_paths)


def _score(
    column: ColumnFacts,
    role: str,
    longest: float,
) -> float:
    other_role = "positive" if role == "query" else "query"
    # A name counts most, then whether values are questions, then their length: queries are the shorter of the two.
    score = 2.0 * _named(column.name, role) - _named(column.name, other_role)
    share = column.mean_length / longest
    score += column.questions - share if role == "query" else share - column.questions
    # Images are found by their captions more often than captions by images.
    if column.has_paths and role == "positive":
        score += 1.0
    if column.unique < FEW_VALUES:
        score -= 1.0
    if _words(column.name) & ROLE_WORDS["id"]:
        score -= 1.0
    return score


def _named(name: str, role: str) -> float:
    """Return 1 if a word of the name is one of the role's, 0.8 if it begins or ends with one (Kundenfrage), else 0."""
    parts = _words(name)
    words = ROLE_WORDS[role]
    if parts & words:
        return 1.0
    ends = tuple(word for word in words if len(word) > 4)
    is_inside = any(part.startswith(ends) or part.endswith(ends) for part in parts)
    return 0.8 if is_inside else 0.0


def _words(name: str) -> set[str]:
    # customerQuestion -> customer question; accents are taken off, as in the lists of words.
    split = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
    letters = unicodedata.normalize("NFKD", split.casefold())
    return set(re.findall(r"[^\W_]+", re.sub(r"[\u0300-\u036f]", "", letters)))


WORDS_OF_A_RECORD = 4
"""Words from which the name of a column looks like a text."""


def header_doubt(sample: FileSample) -> str | None:
    """Return a doubt about the first line of a CSV or TSV, which may be a record; None without one."""
    num_words = min(len(name.split()) for name in sample.columns)
    if not sample.is_delimited or num_words < WORDS_OF_A_RECORD:
        return None
    return (
        f"the first line is taken for the names of the columns ({printable(sample.columns[0])}); if it is a record, "
        "put a line with names before it, such as query,positive"
    )


SMALLEST_SPLIT = 50
"""Records from which a tenth can be held out."""
MOST_HELD_OUT = 2000
STEPS_PER_EPOCH = 20
"""Steps that an epoch should have: a larger batch is chosen only where the data fill it so often."""
FULL_SHARE = 0.99
"""Share of the texts that max_length should not cut."""
CHARACTERS_PER_TOKEN = 3.0
"""Cautious, for languages other than English."""


@dataclass(frozen=True)
class TextLengths:
    """Lengths of the texts in tokens."""

    full: int
    """Length that 99 % of the texts do not exceed."""
    longest: int
    is_measured: bool
    """False: estimated from the characters, because the model's tokenizer is not on this machine."""


def local_model(name: str) -> Path | None:
    """Return the folder of a model that is on this machine: a folder, or in the Hub's cache. Uses no network."""
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                name,
                local_files_only=True,
                allow_patterns=["*.json", "*.txt", "*.model"],
            )
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def is_of_english(name: str) -> bool:
    """Return whether the card of a model that is on this machine names English as its only language."""
    from huggingface_hub import metadata_load

    folder = local_model(name) or Path(name)
    try:
        card = metadata_load(folder / "README.md")
    except (OSError, ValueError, yaml.YAMLError):
        return False
    return card is not None and card.get("language") in ("en", ["en"])


def model_facts(name: str, task: Task) -> ModelDescription | None:
    """Return the description of a model that is on this machine, else None."""
    if local_model(name) is None:
        return None
    from vembed.models.families.description import (
        describe,  # imported late: transformers takes seconds
    )

    logging.getLogger("transformers").setLevel(logging.ERROR)
    return describe(ModelSection(model_name=name, task=task))


def measure_lengths(
    texts: Sequence[str], description: ModelDescription | None
) -> TextLengths | None:
    """Return the lengths of texts in tokens of a model; None without texts."""
    if not texts:
        return None
    is_measured = description is not None and description.modalities != ("image",)
    if description is not None and is_measured:
        from vembed.models.processors import load_tokenizer

        tokenizer = load_tokenizer(description)
        encoded = tokenizer(list(texts), truncation=False, verbose=False)
        lengths = sorted(map(len, encoded["input_ids"]))
    else:
        sizes = sorted(map(len, texts))
        # And two special tokens.
        lengths = [math.ceil(size / CHARACTERS_PER_TOKEN) + 2 for size in sizes]
    full = lengths[math.ceil(FULL_SHARE * len(lengths)) - 1]
    return TextLengths(full, lengths[-1], is_measured)


def fitting_length(
    lengths: TextLengths | None,
    limit: int | None,
    usual: int,
) -> int:
    """Return max_length: what 99 % of the texts need, in steps of 16, at most what the model can read."""
    most = usual if limit is None else limit
    if lengths is None:
        return most
    return min(max(16 * math.ceil(lengths.full / 16), 32), most)


def fitting_batch(num_records: int, usual: int) -> int:
    """Return the batch size: the usual one, or the power of two with which an epoch has enough steps."""
    if not num_records:
        return usual
    fits = max(num_records // STEPS_PER_EPOCH, 1)
    # Not above the number of records, since an incomplete batch is left out.
    return min(usual, max(1 << int(math.log2(fits)), 8), num_records)


def fitting_epochs(num_records: int, *, has_logit_scale: bool = False) -> int:
    """Return the passes over the data: more where there are few records, and for CLIP and SigLIP."""
    return (
        round(epochs_for(num_records, has_logit_scale=has_logit_scale))
        if num_records
        else 1
    )


def held_out_share(num_records: int) -> float | None:
    """Return val_split: a tenth, of large data less; None where there are too few records."""
    if num_records < SMALLEST_SPLIT:
        return None
    return min(0.1, float(f"{MOST_HELD_OUT / num_records:.1g}"))
