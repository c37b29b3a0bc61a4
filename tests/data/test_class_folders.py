"""A folder of images by class is labelled data."""

import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.data.files import open_path, open_rows, pair, refused
from vembed.data_tools.starter import read_sample


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


def test_each_image_has_the_class_of_its_folder(pictures):
    store = open_path(pictures)
    classes = {}
    for example in store:
        (image,) = example.query.images
        classes[Path(image.path).relative_to(pictures)] = example.label
        assert example.positives[0] != example.query
    assert len(classes) == 16
    assert classes[Path("dog/small/1.PNG")] == "dog"
    assert classes[Path("\u9ce5/0.jpg")] == "\u9ce5"
    assert set(classes.values()) == {"cat", "dog", "\u9ce5"}
    sample = read_sample(pictures)
    assert sample.num_records == 16
    assert sample.columns == ("image", "label")
    (pictures / "cat" / "1.PNG").unlink()
    assert len(open_path(pictures)) == 15, "the folder is looked at anew"


@pytest.mark.parametrize("ending", ["ppm", "jp2", "avif"])
def test_every_format_that_is_read_is_found_in_folders(pictures, tmp_path, ending):
    Image.new("RGB", (20, 20), (9, 9, 9)).save(pictures / "cat" / f"more.{ending}")
    assert len(open_path(pictures)) == 17
    rows = [pair(positive=f"cat/more.{ending}")]
    (warning,) = open_rows(tmp_path, rows).warnings()
    assert "set retrieval_mode" in warning


def test_copies_in_hidden_folders_are_left_out(pictures):
    for folder in (".ipynb_checkpoints", "cat/.ipynb_checkpoints", "__MACOSX"):
        shutil.copytree(pictures / "dog", pictures / folder)
    store = open_path(pictures)
    assert len(store) == 16
    assert {store[number].label for number in range(16)} == {"cat", "dog", "\u9ce5"}


def test_splits_are_no_classes(pictures, tmp_path):
    (tmp_path / "all").mkdir()
    train = pictures.rename(tmp_path / "all" / "train")
    said = refused(tmp_path / "all")
    assert "train is the name of a split" in said
    assert f"{train} itself" in said
    assert len(open_path(train)) == 16


def test_a_folder_of_images_without_classes_is_none(pictures):
    said = refused(pictures / "cat")
    assert "cat is a folder without data files" in said
    assert "0.jpg" in said
