"""Language of texts, by their most frequent words and letters: for the model that `init` chooses, and the model card."""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

_WORDS = {
    "en": "the of and to in is that for it with are on how what you your can this do my be from or an as not have",
    "de": "der das und ist nicht wie mit den dem ein eine ich sie auf von zu im wird kann mein",
    "fr": "le la les des est et une un dans pour je que qui sur pas avec",
    "es": "el la los las una un por para como con del se mi que",
    "it": "il la che non per sono di da della un una con",
    "pt": "nao um uma os ao em meu para como que se por",
    "nl": "het een van ik niet mijn voor",
    "pl": "jak nie jest",
    "tr": "ve bir icin",
}
"""Frequent words by language, without accents. No word of another language is an English one."""
LANGUAGE_OF_SCRIPT = {
    "HIRAGANA": "ja",
    "KATAKANA": "ja",
    "HANGUL": "ko",
    "CJK": "zh",
    "GREEK": "el",
    "HEBREW": "he",
    "THAI": "th",
}
"""Scripts of one language. Chinese characters are Japanese beside kana."""
MIN_SHARE_OF_WORDS = 0.02
"""Share of the words that must be frequent ones of a language."""
MIN_SHARE_OF_LETTERS = 0.02
"""Share of letters outside ASCII from which texts are not taken for English."""
MIN_LEAD = 1.2
"""How many times as many frequent words a language must have as the next one."""
MAX_SAMPLED_TEXTS = 500


def is_english(texts: Sequence[str]) -> bool:
    """Return whether texts may be English. Texts that show no language are taken for English."""
    letters = list(filter(str.isalpha, "".join(texts[:MAX_SAMPLED_TEXTS])))
    # Accents and other scripts first: they decide without any list of words.
    num_foreign = sum(not letter.isascii() for letter in letters)
    is_ascii = num_foreign <= MIN_SHARE_OF_LETTERS * max(len(letters), 1)
    return is_ascii and language_of(texts) in ("en", None)


def language_of(texts: Sequence[str]) -> str | None:
    """Return the code of the language of texts; None where it is unclear."""
    text = " ".join(texts[:MAX_SAMPLED_TEXTS]).casefold()
    scripts: Counter[str] = Counter()
    for letter, count in Counter(filter(str.isalpha, text)).items():
        scripts[unicodedata.name(letter, "").partition(" ")[0]] += count
    if not scripts:
        return None
    script = scripts.most_common(1)[0][0]
    if script != "LATIN":
        has_kana = scripts["HIRAGANA"] + scripts["KATAKANA"] > 0
        return "ja" if script == "CJK" and has_kana else LANGUAGE_OF_SCRIPT.get(script)
    decomposed = unicodedata.normalize("NFKD", text)
    plain = "".join(
        letter for letter in decomposed if not unicodedata.combining(letter)
    )
    words = re.findall(r"[a-z]+", plain)
    counts: Counter[str] = Counter()
    for language, text_of_words in _WORDS.items():
        frequent = text_of_words.split()
        counts[language] = sum(word in frequent for word in words)
    (likeliest, most), (_, next_most) = counts.most_common(2)
    is_clear = most >= MIN_LEAD * next_most
    if most < MIN_SHARE_OF_WORDS * len(words) or not is_clear:
        return None
    return likeliest
