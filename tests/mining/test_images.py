"""Mining for captions of images: the same command, with image paths that training finds."""

import pytest

from tests.data.pictures import write
from tests.mining.data import pair, read_jsonl, run, training_examples, write_jsonl
from tests.tiny import shared, tiny_clip
from vembed import audit, generate

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


@pytest.fixture
def shards(options, tmp_path):
    """Two folders with a file and a picture each, of the same names."""
    for colour in ("red", "green"):
        folder = tmp_path / "shards" / colour
        picture = tmp_path / "images" / f"{colour}.png"
        write(folder / "1.png").write_bytes(picture.read_bytes())
        row = pair(f"a {colour} wall", {"image": "1.png"}, id="1.png")
        write_jsonl(folder / "data.jsonl", [row])
    return {**options, "data_path": str(tmp_path / "shards/*/data.jsonl")}


def test_images_of_another_folder_are_named_from_the_new_file(shards, tmp_path):
    """Below it by a relative path, elsewhere by the whole one. An id that looks like a path stays."""
    red = tmp_path / "shards/red"
    green = tmp_path / "shards/green"
    pictures = [str(green / "1.png"), str(red / "1.png")]
    (tmp_path / "elsewhere").mkdir()
    outputs = {
        red / "new.jsonl": [pictures[0], "1.png"],
        red.parent / "new.jsonl": ["green/1.png", "red/1.png"],
        tmp_path / "elsewhere/new.jsonl": pictures,
    }
    for path, names in outputs.items():
        expected = [{"image": name} for name in names]
        mined, _ = run(shards, output_path=str(path), num_negatives=1)
        assert [row["positive"] for row in mined] == expected
        assert [row["negatives"] for row in mined] == [[row] for row in expected[::-1]]
        assert [row["id"] for row in mined] == ["1.png"] * 2
        examples = training_examples(path)
        assert [example.positives[0].images[0].path for example in examples] == pictures
        page = str(tmp_path / "audit.html")
        data = {"data_path": shards["data_path"], "output_path": page}
        audit({**data, "cleaned_path": str(path)})
        assert [row["positive"] for row in read_jsonl(path)] == expected


def test_bare_paths_and_captions_are_named_from_the_new_file(options, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "elsewhere/new.jsonl"
    whole = str(tmp_path / "images/red.png")
    rows = [pair("images/red.png", "images/red.png", negatives=["images/red.png"])]
    data = str(write_jsonl(tmp_path / "bare.jsonl", rows))
    modes = {"retrieval_mode": "t2i", "data_path": data, "cleaned_path": str(path)}
    audit({**modes, "output_path": str(tmp_path / "audit.html")})
    assert read_jsonl(path) == [pair("images/red.png", whole, negatives=[whole])]
    corpus = [
        {"caption": f"a {name} wall", "image": f"images/{name}.png"} for name in COLOURS
    ]
    made = {
        "corpus_path": str(write_jsonl(tmp_path / "corpus.jsonl", corpus)),
        "output_path": str(path),
        "model_name": options["model_name"],
    }
    generate(made)
    images = [row["positive"]["image"] for row in read_jsonl(path)]
    assert images == [str(tmp_path / f"images/{name}.png") for name in COLOURS]


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
