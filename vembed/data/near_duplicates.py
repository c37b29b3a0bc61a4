"""Equal and nearly equal contents.

Contents are equal if they have one normal form. Texts are near-duplicates if most of the features (words, word n-grams)
of one are in the other: `NearIndex` finds all of them, without comparing each text with each other one.
"""

import functools
import hashlib
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from vembed.data.examples import ImageRef, Item

NGRAM_WORDS = 3
MIN_FEATURES = 5
"""Features that the smaller of two texts needs. A phrase of a few words stands in many texts."""
COUNTERS = 2**22
"""Counters of features. Features that share one only make the order from rare to common less sharp."""
KEPT_TEXTS = 16_384
"""Texts whose features are kept as sets while pairs are verified."""

_LAST_MARK = 0xFFFF
"""Marks of rare scripts beyond it would make the regular expressions many times slower."""
# Thai and Lao, Myanmar, Khmer, Hiragana and Katakana, Chinese characters with extension A, Hangul syllables.
_LETTERS_ALONE = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
)


def normal_key(item: Item) -> int:
    """Return a 63-bit number that is equal for equal normalised texts and equal image files. Reads image files."""
    return item.key(normal_text, image_digest)


def image_digest(image: ImageRef) -> bytes:
    """Return a hash of the file's bytes; of the path where there is no file to read."""
    try:
        data = image.data
        if data is None:
            data = Path(str(image.path)).read_bytes()
    except OSError:
        return image.identity()
    return hashlib.blake2b(data, digest_size=16).digest()


def normal_text(text: str) -> str:
    """Return a text without differences of case, width, spaces and punctuation."""
    plain = unicodedata.normalize("NFKC", text)
    word, _ = _word_patterns()
    words = word.findall(plain.casefold())
    # A text without any word, of punctuation alone, is compared as it is.
    return " ".join(words) or " ".join(plain.split())


@functools.cache
def _word_patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return the pattern of a word, and of a word or, in scripts without spaces, a letter with its marks."""
    # The characters that belong to the letter before them, such as the vowel signs of Hindi and Thai: `\w` has none of
    # them. Variation selectors, which choose the look of an emoji, are not among them.
    marks = ""
    for code in range(0x300, _LAST_MARK + 1):
        is_mark = unicodedata.category(chr(code)) in ("Mn", "Mc")
        if is_mark and not 0xFE00 <= code <= 0xFE0F:
            marks += re.escape(chr(code))
    letter = rf"[^\W{_LETTERS_ALONE}]"
    several = rf"{letter}+(?:[{marks}]+{letter}*)*"
    alone = rf"(?=\w)[{_LETTERS_ALONE}][{marks}]*"
    return re.compile(rf"\w[\w{marks}]*"), re.compile(rf"{several}|{alone}")


def casefolded(text: str) -> str:
    """Return the text without differences of case, width and spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def comparable_text(item: Item) -> str:
    """Return the text by which an input is near to others. Empty for one with images, which is near to equal ones alone."""
    return "" if item.images else item.text or ""


def words(text: str) -> list[str]:
    """Return the words of a text. In scripts without spaces each letter is a word, with its marks."""
    _, pattern = _word_patterns()
    return pattern.findall(casefolded(text))


def ngrams(text: str) -> frozenset[int]:
    """Return the word 3-grams of a text, as numbers that are the same within one process."""
    text_words = words(text)
    if len(text_words) < NGRAM_WORDS:
        return frozenset({hash(tuple(text_words))} if text_words else ())
    shifted = (text_words[start:] for start in range(NGRAM_WORDS))
    return frozenset(map(hash, zip(*shifted, strict=False)))


def containment(first: frozenset[int], second: frozenset[int]) -> float:
    """Return the share of the smaller set that is in the larger one. Small sets have to be equal."""
    smaller, larger = sorted((first, second), key=len)
    if len(smaller) < MIN_FEATURES:
        return float(smaller == larger and bool(smaller))
    return len(smaller & larger) / len(smaller)


class NearIndex:
    """Texts in which near-duplicates of other texts are found. The search is exact: none is missed.

    Two texts are near if at least the share `threshold` of the smaller one's features are in the larger one. Let S
    be the smaller one and `needed` that number of features. In any common order of the features, two of the first
    |S| - needed + 2 features of S are then in the larger one as well. The order here is from rare to common, so that
    few texts share two of these first features, and only those are compared (Chaudhuri et al., 2006).
    """

    def __init__(
        self,
        features: Iterable[Iterable[Hashable]],
        threshold: float,
        *,
        min_features: int = MIN_FEATURES,
        min_size_ratio: float = 0.0,
    ) -> None:
        """`features`: those of all texts that may be added or searched for. `min_features`: the
        smaller text has at least so many. `min_size_ratio`: it has at least this share of the larger one's number.
        """
        self._threshold = threshold
        self._min_features = min_features
        self._min_size_ratio = min_size_ratio
        # Two only where a near text shares two at least.
        self._num_shared = min(2, self._needed(min_features))
        self._counts = np.zeros(COUNTERS, np.int32)
        self._features = []
        for different in map(frozenset, features):
            values = np.fromiter(map(hash, different), np.int64)
            self._counts[values % COUNTERS] += 1
            self._features.append(values)
        for text, values in enumerate(self._features):
            count = self._counts[values % COUNTERS]
            self._features[text] = values[np.lexsort((values, count))]
        self._containing: _Postings = {}
        self._beginning: _Postings = {}
        self._feature_set = functools.lru_cache(maxsize=KEPT_TEXTS)(
            lambda text: frozenset(self._features[text].tolist())
        )

    def __len__(self) -> int:
        return len(self._features)

    def add(self, text: int, group: int | None = None) -> None:
        """Add a text by its number. `group`: the number of a text of its group."""
        values = self._features[text]
        bucket = text if group is None else group
        # A feature of one text alone finds nothing.
        shared = values[self._counts[values % COUNTERS] > 1]
        _enter(self._containing, shared, bucket, text)
        if len(values) >= self._min_features:
            num_first = self._num_first(len(values))
            _enter(self._beginning, values[:num_first], bucket, text)

    def near(
        self, text: int, is_wanted: Callable[[int], bool] = lambda _: True
    ) -> Iterator[int]:
        """Yield the texts of the index that are near to a text. `is_wanted`: asked for each text, and for each group
        before its texts; it may answer differently once a text of the group was yielded."""
        values = self._features[text]
        if len(values) < self._min_features:
            return
        first = values[: self._num_first(len(values))]
        # The text is the smaller one, or else the larger one.
        yield from self._compare(text, self._containing, first, is_wanted)
        yield from self._compare(text, self._beginning, values, is_wanted)

    def _compare(
        self,
        text: int,
        postings: "_Postings",
        values: np.ndarray,
        is_wanted: Callable[[int], bool],
    ) -> Iterator[int]:
        # For each feature of the text that the index has: its texts by group.
        buckets_of_values = [
            postings[value] for value in values.tolist() if value in postings
        ]
        groups = Counter(chain.from_iterable(buckets_of_values))
        for group, count in groups.items():
            if count < self._num_shared:
                continue
            # One text of the group first: in a large group of copies this comparison is often enough.
            leader = next(
                buckets[group][0] for buckets in buckets_of_values if group in buckets
            )
            if not is_wanted(leader):
                continue
            if self._is_near(text, leader):
                yield leader
                if not is_wanted(leader):
                    continue
            members: Counter[int] = Counter()
            for buckets in buckets_of_values:
                members.update(buckets.get(group, ()))
            for other, shared in members.items():
                if shared < self._num_shared or other == leader:
                    continue
                if not is_wanted(other):
                    break
                if self._is_near(text, other):
                    yield other

    def _is_near(self, text: int, other: int) -> bool:
        first = self._feature_set(text)
        second = self._feature_set(other)
        smaller = min(len(first), len(second))
        if smaller < self._min_features:
            return False
        if smaller < self._min_size_ratio * max(len(first), len(second)):
            return False
        return len(first & second) >= self._needed(smaller)

    def _needed(self, size: int) -> int:
        return math.ceil(self._threshold * size - 1e-9)

    def _num_first(self, size: int) -> int:
        return size - self._needed(size) + self._num_shared


_Postings = dict[int, dict[int, list[int]]]
"""Feature -> group -> texts."""


def _enter(
    postings: _Postings,
    values: np.ndarray,
    group: int,
    text: int,
) -> None:
    for value in values.tolist():
        postings.setdefault(value, {}).setdefault(group, []).append(text)


class Groups:
    """Numbers that are joined into groups. A group is called by its smallest number."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def of(self, number: int) -> int:
        """Return the group of a number."""
        parents = self._parents
        while (parent := parents.get(number, number)) != number:
            parents[number] = parents.get(parent, parent)
            number = parent
        return number

    def join(self, number: int, other: int) -> None:
        """Join the groups of two numbers."""
        first, second = sorted((self.of(number), self.of(other)))
        if first != second:
            self._parents[second] = first


def near_links(
    features: Iterable[Iterable[Hashable]], **options: Any
) -> Iterator[tuple[int, int]]:
    """Yield pairs of near texts that connect each group of texts which are near-duplicates, or joined by a chain of them.
    `options`: of `NearIndex`."""
    index = NearIndex(features, **options)
    groups = Groups()

    def are_apart(text: int, other: int) -> bool:
        return groups.of(text) != groups.of(other)

    for text in range(len(index)):
        for other in index.near(text, functools.partial(are_apart, text)):
            groups.join(text, other)
            yield other, text
        index.add(text, groups.of(text))
