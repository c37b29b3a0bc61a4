"""Saved models that see give the same embeddings in Sentence Transformers as here, for texts, images and both."""

import itertools

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import vembed
from tests import tiny
from tests.built import model_of
from tests.files.saving import (
    assert_alike,
    assert_same,
    config_of,
    load_in_sentence_transformers,
    ours,
    save,
    without_torchvision,
)
from tests.models.families import IMAGE_ENCODERS, TWO_TOWERS, VISION_LANGUAGE
from vembed.data.examples import ImageRef, Item
from vembed.models.building import load_embedder, stored_scale_and_bias
from vembed.saving.files import save_model
from vembed.training.setup import decide_rates

TEXTS = [
    "a cat",
    "the dog and the house of the river over the mountain and under the bridge",
    "photo.jpg",
    "a/b.png",
]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Images of many kinds and shapes: one is turned by its EXIF data, one is grey, one has transparency."""
    folder = tmp_path_factory.mktemp("pictures")
    draw = np.random.default_rng(3)

    def picture(width, height):
        small = draw.integers(0, 255, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
        return Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST)

    exif = Image.Exif()
    exif[0x0112] = 6
    picture(64, 40).save(folder / "plain.png")
    picture(90, 40).save(folder / "turned.jpg", exif=exif)
    picture(33, 70).convert("L").save(folder / "grey.png")
    transparent = picture(48, 48)
    transparent.putalpha(picture(48, 48).convert("L"))
    transparent.save(folder / "transparent.png")
    return [str(path) for path in sorted(folder.iterdir())]


def of_image(path, text=None):
    return Item(text=text, images=(ImageRef(path=path),))


@pytest.mark.parametrize("make", [*TWO_TOWERS, *IMAGE_ENCODERS])
def test_images_are_embedded_alike(make, pictures, tmp_path):
    folder = save(make, tmp_path / "final")
    theirs = load_in_sentence_transformers(folder).encode(pictures)
    assert_same(ours(folder, [of_image(path) for path in pictures]), theirs)
    alone = ours(folder, [of_image(pictures[0])], "document")
    np.testing.assert_allclose(alone, theirs[:1], atol=1e-5)


@pytest.mark.parametrize("make", TWO_TOWERS)
def test_texts_of_two_towers_are_embedded_alike(make, tmp_path):
    folder = save(make, tmp_path / "final", query_prompt="a photo of ")
    model = assert_alike(folder, TEXTS)
    alone = np.concatenate([model.encode([text]) for text in TEXTS])
    assert_same(ours(folder, TEXTS, "document"), alone)


def test_a_projection_of_clip_is_a_dense_module(pictures, tmp_path):
    folder = save(tiny.tiny_clip, tmp_path / "final", mrl_dims=[12, 6])
    model = assert_alike(folder, TEXTS)
    images = [of_image(path) for path in pictures]
    assert_same(ours(folder, images), model.encode(pictures))
    # Transparent pixels of opened images are white, and those of files have the colour that is stored.
    opened = list(map(Image.open, pictures))
    assert_same(vembed.Embedder(folder).encode(opened), model.encode(opened))


def test_clip_has_the_module_that_versions_before_5_4_know(tmp_path):
    folder = save(tiny.tiny_clip, tmp_path / "final")
    first, *_ = tiny.read_json(folder / "modules.json")
    assert first["type"] == "sentence_transformers.models.CLIPModel"
    assert first["path"] == ""
    assert "modality_config" in tiny.read_json(folder / "sentence_bert_config.json")


@pytest.mark.parametrize(
    ("make", "side"), [*zip(VISION_LANGUAGE, itertools.cycle(["left", "right"]))]
)
def test_vision_language_models_are_alike(make, side, pictures, tmp_path, monkeypatch):
    without_torchvision(monkeypatch)
    folder = save(
        tiny.shared(make, padding_side=side),
        tmp_path / "final",
        query_prompt="Represent it.",
        max_length=60,
    )
    grey, plain, *_ = pictures
    grey_image = Image.open(grey)
    plain_image = Image.open(plain)
    both = (ImageRef(path=grey), ImageRef(path=plain))
    items = [
        of_image(grey),
        of_image(plain, "a cat"),
        Item(text="two of them", images=both),
        Item(text="no image at all"),
        of_image(grey, "a text that is cut " * 5),
    ]
    inputs = [
        {"image": grey_image},
        {"image": plain_image, "text": "a cat"},
        {"image": [grey_image, plain_image], "text": "two of them"},
        "no image at all",
        {"image": grey_image, "text": "a text that is cut " * 5},
    ]
    long = [*TEXTS, " ".join(TEXTS * 5)]
    model = assert_alike(folder, long)
    for kind in ("query", "document"):
        mine = ours(folder, items, kind)
        assert_same(mine, model.encode(inputs, prompt_name=kind))
        alone = [model.encode([entry], prompt_name=kind) for entry in inputs]
        np.testing.assert_allclose(mine, np.concatenate(alone), atol=1e-5)


@pytest.mark.parametrize("nested", [False, True])
def test_limits_of_the_image_area_are_saved(nested, pictures, tmp_path, monkeypatch):
    without_torchvision(monkeypatch)
    source = tiny.tiny_qwen3_vl(tmp_path / "source")
    name = "preprocessor_config.json"
    settings = tiny.read_json(source / name) | {"max_pixels": 16 * 32 * 32}
    if nested:  # as version 5 of Transformers writes it
        (source / name).unlink()
        name = "processor_config.json"
        settings = {"image_processor": settings, "processor_class": "Qwen3VLProcessor"}
    tiny.write_json(source / name, settings)
    limits = {"min_pixels": 2 * 32 * 32, "max_pixels": 4 * 32 * 32}
    folder = save(source, tmp_path / "final", **limits)
    saved = tiny.read_json(folder / name)
    saved = saved["image_processor"] if nested else saved
    assert saved["size"] == {"shortest_edge": 2048, "longest_edge": 4096}
    assert "max_pixels" not in saved
    image = Image.open(pictures[1])
    theirs = load_in_sentence_transformers(folder).encode([{"image": image}])
    assert_same(ours(folder, [of_image(pictures[1])], "document"), theirs)


def test_a_folder_of_sentence_transformers_keeps_its_chat_template(
    pictures, tmp_path, monkeypatch
):
    without_torchvision(monkeypatch)
    once = save(tiny.tiny_qwen3_vl, tmp_path / "once")
    path = once / "sentence_bert_config.json"
    settings = tiny.read_json(path)
    settings["processing_kwargs"]["chat_template"] = {}  # no opened answer
    tiny.write_json(path, settings)
    (once / "vembed.json").unlink()
    twice = save(once, tmp_path / "twice")
    templates = {(path / "chat_template.jinja").read_text() for path in (once, twice)}
    assert len(templates) == 1
    inputs = [{"image": Image.open(pictures[0])}, "a text"]
    theirs = load_in_sentence_transformers(once).encode(inputs)
    assert_same(ours(once, [of_image(pictures[0]), "a text"], "document"), theirs)
    assert_same(load_in_sentence_transformers(twice).encode(inputs), theirs)


def test_learned_scale_and_bias_are_in_the_saved_file(tmp_path):
    model = model_of(config_of(tiny.tiny_siglip))
    state = dict(model.state_dict())
    model.write_logit_scale_and_bias(12.5, -7.0, state)
    folder = save_model(tmp_path / "final", model, state)
    stored = load_file(folder / "model.safetensors")
    assert stored["logit_scale"].exp().item() == pytest.approx(12.5)
    assert stored["logit_bias"].item() == -7.0
    described = load_embedder(folder).description
    assert stored_scale_and_bias(described) == pytest.approx((12.5, -7.0))


def test_a_composed_model_is_read_here_and_refused_by_sentence_transformers(
    pictures, tmp_path
):
    dinov2 = str(tiny.shared(tiny.tiny_dinov2))
    options = {"image_model_name": dinov2, "mrl_dims": [20]}
    folder = save(tiny.tiny_bert, tmp_path / "final", **options)
    again = save(folder, tmp_path / "again")
    images = [of_image(path) for path in pictures]
    assert ours(folder, images, "document").shape == (4, 20)
    for items in (images, TEXTS):
        before = ours(folder, items)
        np.testing.assert_allclose(ours(again, items), before, atol=1e-6)
    with pytest.raises(Exception, match=r"TwoTowers|load"):
        load_in_sentence_transformers(folder)
    card = (folder / "README.md").read_text()
    assert "Sentence Transformers cannot load this model" in card
    assert "from sentence_transformers" not in card
    # Projections of another model leave none of this model's at their first values.
    path = again / "projections.safetensors"
    save_file({"other.weight": torch.ones(2, 2)}, path)
    (again / "checksums.json").unlink()
    with pytest.raises(KeyError, match="text_projection"):
        load_embedder(again)


def test_trained_projections_of_a_composed_model_go_on_at_its_rate(tmp_path):
    """Only new ones get a head_learning_rate of their own."""
    new = config_of(tiny.tiny_bert, image_model_name=str(tiny.shared(tiny.tiny_dinov2)))
    folder = save_model(tmp_path, model_of(new), model_of(new).state_dict())
    rates = []
    for config in (new, config_of(folder)):
        decided = decide_rates(config, model_of(config), total_steps=50)
        rates.append(decided.optimizer.head_learning_rate)
    assert rates == [2e-3, None]


def test_a_frozen_tower_in_another_dtype_costs_no_digits(tmp_path):
    model = model_of(config_of(tiny.tiny_clip))
    state = {}
    for name, tensor in model.state_dict().items():
        is_frozen = "vision_model" in name and tensor.is_floating_point()
        state[name] = tensor.to(torch.bfloat16) if is_frozen else tensor
    folder = save_model(tmp_path / "final", model, state)
    assert tiny.read_json(folder / "config.json")["dtype"] == "float32"
    text = load_embedder(folder).backbone.get_parameter("text_projection.weight")
    assert torch.equal(text, state["backbone.text_projection.weight"])
