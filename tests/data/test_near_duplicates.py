"""Near-duplicates are found completely: as by a comparison of all texts with all."""

import random
from itertools import combinations
from unittest.mock import Mock

import pytest

from tests.tiny import WORDS
from vembed.data.near_duplicates import (
    NearIndex,
    containment,
    near_links,
    ngrams,
    words,
)


def sentence(draw, length):
    return draw.choices(WORDS, k=length)


@pytest.fixture
def texts():
    """100 texts, then each of them inside one of twice and of four times its length, and with a word changed."""
    draw = random.Random(0)
    originals = [sentence(draw, draw.randint(30, 60)) for _ in range(100)]
    copies = []
    for number, text in enumerate(originals):
        if number % 3 == 0:
            copy = [*text, *sentence(draw, len(text))]
        elif number % 3 == 1:
            copy = [*sentence(draw, len(text)), *text, *sentence(draw, 2 * len(text))]
        else:
            copy = [*text[:20], "changed", *text[21:]]
        copies.append(copy)
    return [" ".join(text) for text in (*originals, *copies)]


@pytest.mark.parametrize("threshold", [0.5, 0.9, 1.0])
def test_the_pairs_are_those_of_a_full_comparison(texts, threshold):
    grams = [ngrams(text) for text in texts]
    expected = {
        (first, second)
        for first, second in combinations(range(len(texts)), 2)
        if containment(grams[first], grams[second]) >= threshold
    }
    index = NearIndex(list(grams), threshold)
    pairs = set()
    for number in range(len(texts)):
        pairs |= {(other, number) for other in index.near(number)}
        index.add(number)
    assert pairs == expected
    assert len(expected) >= 65, "copies of twice and of four times the length"


def test_a_large_group_of_copies_takes_linear_time():
    text = " ".join(sentence(random.Random(1), 60))
    copies = [ngrams(f"{text} number {number} here") for number in range(3000)]
    index = NearIndex(copies, 0.85)
    is_near = index._is_near = Mock(wraps=index._is_near)
    index.add(0)
    for number in range(1, 3000):
        assert next(index.near(number)) == 0
    assert is_near.call_count == 2999
    assert len(list(near_links(copies, threshold=0.85))) == 2999, "one group"


def test_a_chain_is_one_group():
    letters = [set(range(start, start + 10)) for start in range(0, 6, 2)]
    arrays = [*letters, set(range(100, 110))]
    assert list(near_links(arrays, threshold=0.8)) == [(0, 1), (1, 2)]
    assert not list(near_links(arrays, threshold=0.9))


def test_size_ratio_and_smallest_size():
    arrays = [range(6), range(20)]
    assert list(near_links(arrays, threshold=0.9)) == [(0, 1)]
    for options in ({"min_size_ratio": 0.5}, {"min_features": 7}):
        assert not list(near_links(arrays, threshold=0.9, **options)), options


def test_words_of_scripts_without_spaces_are_letters():
    assert words("\uff28ello World!") == ["hello", "world"]
    assert words("\u65e5\u672c go") == ["\u65e5", "\u672c", "go"]
