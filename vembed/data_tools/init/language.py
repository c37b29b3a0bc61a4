"""Recognition of English texts by their most frequent words and letters: `vembed init` chooses its model by it."""

from __future__ import annotations

import re
from collections.abc import Sequence

ENGLISH = frozenset(
    {
        "the",
        "of",
        "and",
        "to",
        "in",
        "is",
        "that",
        "for",
        "it",
        "with",
        "are",
        "on",
        "how",
        "what",
        "you",
        "your",
        "can",
        "this",
        "do",
        "my",
        "be",
        "from",
        "or",
        "an",
        "as",
        "not",
        "have",
    }
)
OTHERS = frozenset(
    {
        "der",
        "das",
        "und",
        "ist",
        "nicht",
        "wie",
        "mit",
        "den",
        "dem",
        "ein",
        "eine",
        "ich",
        "sie",
        "auf",
        "von",
        "zu",
        "im",
        "wird",
        "kann",
        "mein",
        "le",
        "la",
        "les",
        "des",
        "est",
        "et",
        "une",
        "un",
        "dans",
        "pour",
        "je",
        "que",
        "qui",
        "sur",
        "pas",
        "avec",
        "el",
        "los",
        "las",
        "una",
        "por",
        "para",
        "como",
        "con",
        "del",
        "se",
        "mi",
        "il",
        "che",
        "non",
        "per",
        "sono",
        "di",
        "da",
        "della",
        "nao",
        "um",
        "uma",
        "os",
        "ao",
        "em",
        "meu",
        "het",
        "een",
        "van",
        "ik",
        "niet",
        "mijn",
        "voor",
        "jak",
        "nie",
        "jest",
        "ve",
        "bir",
        "icin",
    }
)
"""Frequent words of German, French, Spanish, Italian, Portuguese, Dutch, Polish and Turkish, without accents."""
LEAST_WORDS = 0.02
"""Share of the words that must be frequent ones of another language."""
LEAST_LETTERS = 0.02
"""Share of letters outside ASCII from which texts are not taken for English."""
MOST_READ = 500


def is_english(texts: Sequence[str]) -> bool:
    """Return whether texts may be English. Texts that show no language are taken for English."""
    whole = " ".join(texts[:MOST_READ]).casefold()
    # Accents and other scripts first: they decide without any list of words.
    letters = [one for one in whole if one.isalpha()]
    if sum(not one.isascii() for one in letters) > LEAST_LETTERS * max(len(letters), 1):
        return False
    words = re.findall(r"[a-z]+", whole)
    other = sum(word in OTHERS for word in words)
    return other < LEAST_WORDS * max(len(words), 1) or other <= sum(
        word in ENGLISH for word in words
    )
