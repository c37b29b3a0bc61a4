"""Columns of a data file: guesses of query and positive, questions on a terminal, and doubts about the records."""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from vembed.data.columns import Columns
from vembed.data.examples import BadRecord
from vembed.data.images.files import IMAGE_PATH, ImageRoot
from vembed.data.messages import printable
from vembed.data.misreadings import (
    classes_as_scores,
    unread_judgement,
    unread_negatives,
    unread_prompt,
)
from vembed.data.records import Mode, RecordFormat
from vembed.data_tools.init.sample import FileSample
from vembed.errors import UserError

Record = Mapping[str, Any]

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


@dataclass(frozen=True, slots=True)
class ColumnFacts:
    """Figures of one column from the first records."""

    name: str
    example: str
    mean_length: float
    """Characters."""
    unique: float
    """Share of different values."""
    questions: float
    """Share of values that end with a question mark."""
    has_paths: bool
    """More than half of the values look like paths of images."""
    is_text: bool
    """Texts or paths, not numbers, dates or ids."""

    def part(self, role: str) -> str:
        """Return what the column is as the query or the positive. A column of paths holds images."""
        return f"{role}_image" if self.has_paths else role


@dataclass(frozen=True, slots=True)
class Guess:
    """A guessed assignment of the query's and the positive's columns."""

    mapping: dict[str, str]
    reasons: dict[str, str]
    """Column -> why."""
    candidates: tuple[ColumnFacts, ...]
    """Columns that can be embedded, the likeliest first."""


def guess(
    records: Sequence[Record], missing: Sequence[str], taken: Sequence[str] = ()
) -> Guess:
    """Return columns for the missing parts (query, positive) among those that are not taken."""
    candidates = []
    for name in dict.fromkeys(name for record in records for name in record):
        column = _facts(name, [record.get(name) for record in records])
        if name not in taken and column.is_text:
            candidates.append(column)
    longest = max((column.mean_length for column in candidates), default=1.0) or 1.0
    mapping: dict[str, str] = {}
    reasons: dict[str, str] = {}
    open_columns = list(candidates)
    unassigned = list(missing)
    # The part with the clearer evidence is chosen first, so that it does not lose its column to the other.
    while unassigned and open_columns:
        pairs = [(column, role) for column in open_columns for role in unassigned]
        # Of equal scores the earlier column.
        best, role = max(pairs, key=lambda pair: _score(pair[0], pair[1], longest))
        mapping[best.name] = best.part(role)
        why = ["the only text column left"] if len(open_columns) == 1 else []
        if _named(best.name, role):
            why.append("its name")
        if role == "query" and best.questions > 0.3:
            why.append(f"{best.questions:.0%} end with a question mark")
        if best.has_paths:
            why.append("paths of images")
        why.append(f"{best.mean_length:,.0f} characters on average")
        reasons[best.name] = ", ".join(why)
        open_columns.remove(best)
        unassigned.remove(role)
    names = [column.name for column in candidates if column.name in mapping]

    def best_score(column: ColumnFacts) -> float:
        return max(_score(column, role, longest) for role in ("query", "positive"))

    candidates.sort(key=best_score, reverse=True)
    in_file_order = {name: mapping[name] for name in names}
    return Guess(in_file_order, reasons, tuple(candidates))


def _facts(name: str, values: Sequence[Any]) -> ColumnFacts:
    texts = []
    for value in values:
        # Of a list the first entry.
        entry = (value or [None])[0] if isinstance(value, list) else value
        if isinstance(entry, Mapping):
            entry = entry.get("text") or entry.get("image") or entry.get("path")
        if isinstance(entry, str) and entry.strip():
            texts.append(entry.strip())
    if not texts:
        return ColumnFacts(name, "", 0.0, 0.0, 0.0, has_paths=False, is_text=False)
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
    is_text = has_paths or (letters > 0.4 and not is_id and not is_code)
    return ColumnFacts(name, texts[0], length, unique, questions, has_paths, is_text)


def _score(column: ColumnFacts, role: str, longest: float) -> float:
    other_role = "positive" if role == "query" else "query"
    # A name counts most, then whether values are questions, then their length: queries are the shorter of the two.
    score = 2.0 * _named(column.name, role) - _named(column.name, other_role)
    share = column.mean_length / longest
    score += column.questions - share if role == "query" else share - column.questions
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


MOST_SHOWN = 12


def is_terminal() -> bool:
    """Return whether somebody can answer."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def confirm(
    guess: Guess, missing: Sequence[str], read: Callable[[str], str] = input
) -> dict[str, str]:
    """Ask which column each missing part is; an empty answer takes the guess. Return the column mapping."""
    columns = guess.candidates[:MOST_SHOWN]
    mapping: dict[str, str] = {}
    for role in missing:
        what = "the query" if role == "query" else "what the query should find"
        lines = [f"Which column is {what}?"]
        default = ""
        for number, column in enumerate(columns, 1):
            short = " ".join(column.example.split())
            if len(short) > 60:
                short = f"{short[:57]}..."
            lines.append(f"  {number}  {column.name}: {short}")
            if not default and guess.mapping.get(column.name, "").startswith(role):
                default = str(number)
        lines.append(f"Number{f' [{default}]' if default else ''}: ")
        answer = read("\n".join(lines)).strip() or default
        while not (answer.isdecimal() and 1 <= int(answer) <= len(columns)):
            answer = read(f"A number from 1 to {len(columns)}: ").strip() or default
        chosen = columns[int(answer) - 1]
        mapping[chosen.name] = chosen.part(role)
    return mapping


WORDS_OF_A_RECORD = 4
"""Words from which the name of a column looks like a text."""


def doubts_about(sample: FileSample, mapping: Mapping[str, str]) -> list[str]:
    """Return sentences on what may be wrong with the columns."""
    layout = Columns(mapping).layout(sample.columns)
    doubts: list[str | None] = []
    num_words = min(len(name.split()) for name in sample.columns)
    if sample.is_delimited and num_words >= WORDS_OF_A_RECORD:
        doubts.append(
            f"the first line is taken for the names of the columns ({printable(sample.columns[0])}); if it is a record, "
            "put a line with names before it, such as query,positive"
        )
    if layout.score == "label":
        # Few whole numbers are classes. Beside sentence1 and sentence2 they are read as a score.
        values = {str(record.get("label")) for record in sample.records}
        if all(map(str.isdigit, values)):
            doubts.append(classes_as_scores([float(value) for value in values]))
    if layout.label is None:
        read = set(layout.read)
        unused = [name for name in sample.columns if name not in read]
        if layout.score is None:
            doubts.append(unread_judgement(unused))
        doubts += [unread_negatives(unused), unread_prompt(unused)]
    return [doubt for doubt in doubts if doubt is not None]


def bad_records(
    sample: FileSample,
    data: str,
    mapping: Mapping[str, str],
    loss: str,
    mode: Mode = "auto",
) -> tuple[int, str]:
    """Return how many of the first records are invalid, and what is wrong with the first column. No image is opened.

    Raise UserError if all are.
    """
    folder = data if Path(data).is_dir() else str(Path(data).parent)
    form = RecordFormat(
        Columns(mapping),
        ImageRoot(folder, allow_urls=True),
        mode=mode,
        losses=(loss,),
        numbers_in_text=sample.is_delimited,
    )
    problems = []
    for number, record in enumerate(sample.records, 1):
        try:
            form.example(record, "")
        except BadRecord as error:
            problems.append(f"record {number:,d}: {error}")
    if len(problems) == len(sample.records):
        raise UserError(
            f"{data}: none of the first {len(problems):,d} records can be used, {problems[0]}"
        )
    return len(problems), problems[0] if problems else ""
