"""Mining for captions of images: the same command, with image paths that training finds."""

import pytest

from tests.data.pictures import write
from tests.mining.data import pair, run, training_examples, write_jsonl
from tests.tiny import shared, tiny_clip

COLOURS = ("red", "green", "blue", "white", "black", "yellow", "orange", "purple")


@pytest.fixture
def options(tmp_path):
    rows = []
    for number, colour in enumerate(COLOURS):
        path = f"images/{colour}.png"
        write(tmp_path / path, "PNG", seed=number)
        rows.append(pair(f"a {colour} wall", {"image": path}))
    return {
        "model_name": str(shared(tiny_clip)),
        "data_path": str(write_jsonl(tmp_path / "captions.jsonl", rows)),
        "output_path": str(tmp_path / "mined.jsonl"),
        "relative_margin": None,
        "num_negatives": 3,
    }


def test_captions_get_images_as_negatives(options, tmp_path):
    rows, _ = run(options)
    images = [row["positive"] for row in rows]
    for row in rows:
        assert len(row["negatives"]) == 3
        assert row["positive"] not in row["negatives"]
        assert all(negative in images for negative in row["negatives"])
    examples = training_examples(tmp_path / "mined.jsonl")
    assert [len(example.negatives) for example in examples] == [3] * len(COLOURS)


def test_a_corpus_of_images_and_bare_paths(options, tmp_path):
    corpus = []
    rows = []
    for colour in COLOURS:
        path = f"images/{colour}.png"
        corpus.append({"_id": colour, "image": path})
        rows.append(pair(f"a {colour} wall", path))
    options |= {
        "data_path": str(write_jsonl(tmp_path / "bare.jsonl", rows)),
        "corpus_path": str(write_jsonl(tmp_path / "corpus.jsonl", corpus)),
        "retrieval_mode": "t2i",
    }
    built, _ = run(options)
    for row, colour in zip(built, COLOURS, strict=True):
        assert len(row["negative_ids"]) == 3
        assert colour not in row["negative_ids"]
