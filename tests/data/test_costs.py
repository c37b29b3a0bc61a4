"""Small files that stand for gigabytes, and texts of which a model reads only the beginning."""

import time

import numpy as np
import pytest

from tests import tiny
from tests.data.files import open_path, pair, refused, write_parquet
from tests.features.test_text_features import featuriser
from vembed.data import features
from vembed.data.formats.base import MAX_RECORD_BYTES


def test_the_limit_per_record_holds_for_parquet(tmp_path):
    draw = np.random.default_rng(0)
    long = draw.integers(97, 123, MAX_RECORD_BYTES + 1, np.uint8).tobytes().decode()
    path = tmp_path / "a.parquet"
    write_parquet(path, [pair(), pair(long), pair()])
    said = refused(path)
    assert "1 of 3 records" in said
    assert "a.parquet:2: a record of more than 33,554,432 bytes" in said
    assert len(open_path(path, on_bad_record="skip")) == 2


def encoded(make, texts):
    """The tokens of texts for a model, of which it reads 24."""
    count = len(texts)
    processing = featuriser(make, max_length=24).texts
    rows = processing.encode([""] * count, texts, [None] * count)
    return [row.tolist() for row in rows]


@pytest.mark.parametrize("make", [tiny.tiny_bert, tiny.tiny_qwen3, tiny.tiny_xlmr])
def test_the_beginning_of_a_long_text_gives_the_tokens_of_the_whole(make, monkeypatch):
    draw = np.random.default_rng(0)
    words = [str(word) for word in draw.choice(tiny.WORDS, 4_000)]
    texts = [
        " ".join(words),
        " " * 5_000 + " ".join(words[:30]),
        "x" * 9_000 + " " + " ".join(words),
        "".join(words),
        "\n".join(words[:7]),
    ]
    cut = encoded(make, texts)
    monkeypatch.setattr(features, "MAX_CHARACTERS_PER_TOKEN", 10**9)
    assert encoded(make, texts) == cut


def test_a_text_of_many_megabytes_takes_no_time():
    text = " ".join(tiny.WORDS[:50]) * 80_000
    assert len(text) > 20_000_000
    began = time.process_time()
    (ids,) = encoded(tiny.tiny_bert, [text])
    assert len(ids) == 24
    assert time.process_time() - began < 4
