"""A folder of images by class is labelled data."""

from pathlib import Path

import pytest
from PIL import Image

import vembed
from tests.data.files import config, open_examples
from tests.tiny import shared, tiny_vit
from vembed.data.formats.table import class_records
from vembed.data_tools.starter import read_sample
from vembed.errors import UserError


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pictures"
    for number, name in enumerate(("cat", "dog/small", "dog", "\u9ce5")):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for entry in range(4):
            picture = Image.new("RGB", (20, 20), (60 * number, 60 * entry, 0))
            picture.save(folder / name / (f"{entry}.PNG" if entry else "0.jpg"))
    (folder / "empty").mkdir()
    (folder / "cat" / "notes.txt").write_text("no image")
    (folder / "cat" / ".hidden.png").write_bytes(b"")
    return folder


def test_each_image_has_the_class_of_its_folder(pictures, tmp_path):
    store = open_examples(config(), str(pictures))
    actual = {
        Path(store[number].query.images[0].path or "").relative_to(pictures): store[
            number
        ].label
        for number in range(len(store))
    }
    assert (
        len(actual) == 16
        and actual[Path("dog/small/1.PNG")] == "dog"
        and actual[Path("\u9ce5/0.jpg")] == "\u9ce5"
    )
    assert sorted(set(actual.values()), key=str) == ["cat", "dog", "\u9ce5"]
    assert all(
        store[number].positives[0] != store[number].query
        for number in range(len(store))
    )
    sample = read_sample(pictures)
    assert sample.num_records == 16 and sample.columns == ("image", "label")
    (pictures / "cat" / "1.PNG").unlink()
    assert len(open_examples(config(), str(pictures))) == 15, (
        "the folder is looked at anew"
    )


@pytest.mark.parametrize("ending", ["ppm", "jp2", "avif"])
def test_every_format_that_is_read_is_found_in_folders(pictures, tmp_path, ending):
    Image.new("RGB", (20, 20), (9, 9, 9)).save(pictures / "cat" / f"more.{ending}")
    assert len(open_examples(config(), str(pictures))) == 17
    (tmp_path / "a.csv").write_text(f"query,positive\na text,cat/more.{ending}\n")
    (warning,) = open_examples(config(), str(tmp_path / "a.csv")).warnings()
    assert "set retrieval_mode" in warning


def test_splits_are_no_classes(pictures, tmp_path):
    (pictures.parent / "all").mkdir()
    pictures.rename(pictures.parent / "all" / "train")
    with pytest.raises(
        UserError, match=r"train is the name of a split.* give .*all/train itself"
    ):
        open_examples(config(), str(pictures.parent / "all"))
    assert len(open_examples(config(), str(pictures.parent / "all" / "train"))) == 16


def test_a_folder_of_images_without_classes_is_none(pictures, tmp_path):
    assert class_records(pictures / "cat") is None
    with pytest.raises(
        UserError, match=r"cat is a folder without data files .* it holds .*0.jpg"
    ):
        open_examples(config(), str(pictures / "cat"))


def test_an_image_encoder_learns_from_it(pictures, tmp_path):
    result = vembed.train(
        {
            "model_name": str(shared(tiny_vit)),
            "data_path": str(pictures),
            "val_data_path": str(pictures),
            "output_dir": str(tmp_path / "run"),
            "batch_size": 4,
            "max_steps": 2,
            "report_to": [],
        }
    )
    assert result.steps == 2 and 0 < result.metrics["ndcg@10"] <= 1
