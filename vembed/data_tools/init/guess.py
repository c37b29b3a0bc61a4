"""Guesses of the columns of query and positive, from names in several languages and from the content."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from vembed.data.images.files import IMAGE_PATH

Record = Mapping[str, Any]

QUERY_WORDS = (
    "query",
    "question",
    "anchor",
    "search",
    "keyword",
    "request",
    "prompt",
    "instruction",
    "subject",
    "title",
    "caption",
    "frage",
    "anfrage",
    "suche",
    "suchbegriff",
    "betreff",
    "titel",
    "anliegen",
    "problem",
    "stichwort",
    "requete",
    "demande",
    "recherche",
    "sujet",
    "titre",
    "pregunta",
    "consulta",
    "busqueda",
    "asunto",
    "titulo",
    "domanda",
    "ricerca",
    "oggetto",
    "pergunta",
    "busca",
    "assunto",
    "vraag",
    "zoek",
    "onderwerp",
    "pytanie",
    "soru",
)
POSITIVE_WORDS = (
    "positive",
    "answer",
    "response",
    "document",
    "passage",
    "solution",
    "resolution",
    "reply",
    "content",
    "context",
    "body",
    "description",
    "text",
    "target",
    "output",
    "article",
    "paragraph",
    "completion",
    "antwort",
    "loesung",
    "losung",
    "beschreibung",
    "inhalt",
    "artikel",
    "dokument",
    "absatz",
    "ergebnis",
    "reponse",
    "solucion",
    "respuesta",
    "contenido",
    "descripcion",
    "texte",
    "contenu",
    "texto",
    "risposta",
    "soluzione",
    "testo",
    "contenuto",
    "resposta",
    "solucao",
    "antwoord",
    "oplossing",
    "tekst",
    "odpowiedz",
    "cevap",
)
ID_WORDS = frozenset(
    {
        "id",
        "ids",
        "uuid",
        "guid",
        "nr",
        "no",
        "num",
        "number",
        "nummer",
        "index",
        "idx",
        "key",
        "code",
        "url",
        "link",
        "date",
        "datum",
        "time",
        "zeit",
        "timestamp",
        "created",
        "updated",
        "author",
        "autor",
        "user",
        "lang",
        "language",
        "sprache",
        "category",
        "kategorie",
        "status",
        "tag",
        "tags",
        "numero",
        "fecha",
    }
)
"""Words of column names whose content is not embedded."""
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
    paths: float
    """Share of values that look like paths of images."""
    is_text: bool
    """Texts or paths, not numbers, dates or ids."""

    @property
    def shown(self) -> str:
        """Return name and an example for a menu."""
        short = " ".join(self.example.split())
        return f"{self.name}: {short if len(short) <= 60 else short[:57] + '...'}"


@dataclass(frozen=True, slots=True)
class Guess:
    """A guessed assignment of the query's and the positive's columns."""

    mapping: dict[str, str]
    reasons: dict[str, str]
    """Column -> why."""
    candidates: tuple[ColumnFacts, ...]
    """Columns that can be embedded, the likeliest first."""


def column_facts(records: Sequence[Record]) -> list[ColumnFacts]:
    """Return the facts of each column, in order."""
    names = dict.fromkeys(name for record in records for name in record)
    return [_facts(name, [record.get(name) for record in records]) for name in names]


def guess(
    records: Sequence[Record], missing: Sequence[str], taken: Sequence[str] = ()
) -> Guess:
    """Return columns for the missing parts (query, positive) among those that are not taken."""
    free = [
        one for one in column_facts(records) if one.name not in taken and one.is_text
    ]
    mapping: dict[str, str] = {}
    reasons: dict[str, str] = {}
    longest = max((one.mean_length for one in free), default=1.0) or 1.0
    # The part with the clearer evidence is chosen first, so that it does not lose its column to the other.
    while left := [
        role
        for role in missing
        if not any(target.startswith(role) for target in mapping.values())
    ]:
        open_columns = [one for one in free if one.name not in mapping]
        if not open_columns:
            break
        scored = [
            (_score(one, role, longest), -place, role, one)
            for place, one in enumerate(open_columns)
            for role in left
        ]
        # Of equal scores the earlier column.
        _, _, role, best = max(scored, key=lambda entry: entry[:2])
        mapping[best.name] = f"{role}_image" if best.paths > 0.5 else role
        reasons[best.name] = _reason(best, role, len(open_columns))
    likely = sorted(
        free,
        key=lambda one: (
            -max(_score(one, role, longest) for role in ("query", "positive"))
        ),
    )
    ordered = {name: mapping[name] for one in free if (name := one.name) in mapping}
    return Guess(ordered, reasons, tuple(likely))


def _facts(name: str, values: Sequence[Any]) -> ColumnFacts:
    texts = [_text(value) for value in values]
    texts = [text for text in texts if text]
    if not texts:
        return ColumnFacts(name, "", 0.0, 0.0, 0.0, 0.0, is_text=False)
    unique = len(set(texts)) / len(texts)
    paths = mean(IMAGE_PATH.fullmatch(text) is not None for text in texts)
    questions = mean(text.rstrip(" \"')").endswith(("?", "\uff1f")) for text in texts)
    letters = mean(
        sum(character.isalpha() for character in text) / len(text) for text in texts
    )
    spaced = mean(
        any(character.isspace() for character in text.strip()) for text in texts
    )
    length = mean(map(len, texts))
    # From the CJK radicals on. Such texts have no blanks, so the next two lines cannot take them for ids or codes.
    wide = mean(
        any(ord(character) > 0x2E7F for character in text) for text in texts
    )  # scripts without spaces
    is_id = _words(name) & ID_WORDS and spaced < 0.5 and not wide
    is_code = (
        spaced < 0.1 and unique > 0.9 and letters < 0.8 and not wide and length < 64
    )
    is_text = paths > 0.5 or (letters > 0.4 and not is_id and not is_code)
    return ColumnFacts(name, texts[0], length, unique, questions, paths, is_text)


def _score(one: ColumnFacts, role: str, longest: float) -> float:
    own, other = (
        (QUERY_WORDS, POSITIVE_WORDS)
        if role == "query"
        else (POSITIVE_WORDS, QUERY_WORDS)
    )
    # A name counts most, then whether values are questions, then their length: queries are the shorter of the two.
    score = 2.0 * _named(one.name, own) - 1.0 * _named(one.name, other)
    share = one.mean_length / longest
    score += one.questions - share if role == "query" else share - one.questions
    if one.unique < FEW_VALUES:
        score -= 1.0
    if _words(one.name) & ID_WORDS:
        score -= 1.0
    return score


def _reason(one: ColumnFacts, role: str, num_open: int) -> str:
    found = ["the only text column left"] if num_open == 1 else []
    if _named(one.name, QUERY_WORDS if role == "query" else POSITIVE_WORDS):
        found.append("its name")
    if role == "query" and one.questions > 0.3:
        found.append(f"{one.questions:.0%} end with a question mark")
    if one.paths > 0.5:
        found.append("paths of images")
    found.append(f"{one.mean_length:,.0f} characters on average")
    return ", ".join(found)


def _named(name: str, words: Sequence[str]) -> float:
    """Return 1 if a word of the name is one of the words, 0.8 if it ends or begins with one (Kundenfrage), else 0."""
    parts = _words(name)
    if parts & set(words):
        return 1.0
    long = [word for word in words if len(word) > 4]
    return (
        0.8
        if any(
            part.endswith(word) or part.startswith(word)
            for part in parts
            for word in long
        )
        else 0.0
    )


def _words(name: str) -> set[str]:
    # customerQuestion -> customer question; accents are taken off, as in the lists of words.
    split = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
    plain = "".join(
        one
        for one in unicodedata.normalize("NFKD", split.casefold())
        if not unicodedata.combining(one)
    )
    return set(re.findall(r"[^\W_]+", plain))


def _text(value: Any) -> str:
    """Return the text of a value; for a list that of its first entry."""
    if isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, Mapping):
        value = value.get("text") or value.get("image") or value.get("path")
    return value.strip() if isinstance(value, str) else ""
