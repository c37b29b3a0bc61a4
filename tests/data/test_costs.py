"""Small files that stand for gigabytes, and texts of which a model reads only the beginning."""

import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import tiny
from tests.built import described
from tests.data.files import open_path
from vembed.config.schema import TrainConfig
from vembed.data import features
from vembed.data.features import TextProcessing
from vembed.data.formats import parquet as parquet_table
from vembed.data.formats.base import MAX_RECORD_BYTES
from vembed.errors import UserError


def test_dictionaries_inside_of_lists_may_differ_between_groups(tmp_path):
    """As pandas writes categories in a list."""
    kind = pa.list_(pa.dictionary(pa.int32(), pa.string()))
    path = tmp_path / "a.parquet"
    with pq.ParquetWriter(
        path, pa.schema([("query", pa.string()), ("negatives", kind)])
    ) as writer:
        for group in range(3):
            rows = {"query": [f"q {group}"], "negatives": [[f"n {group}", "n"]]}
            columns = [
                pa.array(rows["query"]),
                pa.ListArray.from_arrays(
                    [0, 2], pa.array(rows["negatives"][0]).dictionary_encode()
                ),
            ]
            writer.write_table(pa.table(columns, ["query", "negatives"]))
    form = parquet_table.ParquetFile(path)
    rows = [record for _, _, record in form.rows()]
    assert rows == [
        {"query": f"q {group}", "negatives": [f"n {group}", "n"]} for group in range(3)
    ]


def test_the_limit_per_record_holds_for_parquet(tmp_path):
    draw = np.random.default_rng(0)
    long = draw.integers(97, 123, MAX_RECORD_BYTES + 1, np.uint8).tobytes().decode()
    pq.write_table(
        pa.table({"query": ["a", long, "b"], "positive": ["p"] * 3}),
        tmp_path / "a.parquet",
    )
    with pytest.raises(
        UserError,
        match=r"1 of 3 records .*\n.*a.parquet:2: a record of more than 33,554,432 bytes",
    ):
        open_path(tmp_path / "a.parquet")
    assert len(open_path(tmp_path / "a.parquet", on_bad_record="skip")) == 2


@pytest.mark.parametrize("make", [tiny.tiny_bert, tiny.tiny_qwen3, tiny.tiny_xlmr])
def test_the_beginning_of_a_long_text_gives_the_tokens_of_the_whole(make, monkeypatch):
    description = described(
        TrainConfig(model_name=str(tiny.shared(make)), data_path=[], max_length=24)
    )
    draw = np.random.default_rng(0)
    words = [str(word) for word in draw.choice(tiny.WORDS, 4_000)]
    texts = [
        " ".join(words),
        " " * 5_000 + " ".join(words[:30]),
        "x" * 9_000 + " " + " ".join(words),
        "".join(words),
        "\n".join(words[:7]),
    ]
    count = len(texts)
    cut = TextProcessing(description).encode([""] * count, texts, [None] * count)
    monkeypatch.setattr(features, "MAX_CHARACTERS_PER_TOKEN", 10**9)
    whole = TextProcessing(description).encode([""] * count, texts, [None] * count)
    for row, expected in zip(cut, whole, strict=True):
        assert row.tolist() == expected.tolist()


def test_a_text_of_many_megabytes_takes_no_time():
    description = described(
        TrainConfig(
            model_name=str(tiny.shared(tiny.tiny_bert)), data_path=[], max_length=24
        )
    )
    texts = TextProcessing(description)
    text = " ".join(tiny.WORDS[:50]) * 80_000
    assert len(text) > 20_000_000
    began = time.process_time()
    (ids,) = texts.encode([""], [text], [None])
    assert len(ids) == 24 and time.process_time() - began < 4
