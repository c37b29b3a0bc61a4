"""The featuriser on images and on conversations with images: lengths from headers, late decoding, own ids."""

import threading

import numpy as np
import pytest
import torch
from PIL import Image

from tests import tiny
from tests.data.pictures import encode, encoded
from tests.features.test_text_features import documents, featuriser
from vembed.data.batching.rank_batch import Feeder
from vembed.data.examples import ImageRef, Item
from vembed.data.features import Featuriser
from vembed.data.images import decoders, pixels
from vembed.errors import UserError

CELL = 32 * 32
"""Pixels that the tiny Qwen3-VL makes one token of."""


def image(width=24, height=16, seed=0, where=""):
    return ImageRef(data=encoded("PNG", (width, height), seed=seed), where=where)


def of_images(*images, text=None):
    return Item(text=text, images=images), "document"


@pytest.fixture
def decoded(monkeypatch):
    """The images that were decoded, in order."""
    recorded = []
    load = pixels.load_image

    def noting(ref):
        recorded.append(ref)
        return load(ref)

    for module in (decoders, pixels):
        monkeypatch.setattr(module, "load_image", noting)
    return recorded


@pytest.mark.parametrize(
    ("make", "patches"),
    [
        (tiny.tiny_vit, 17),
        (tiny.tiny_clip, 17),
        (tiny.tiny_dinov2, 17),
        (tiny.tiny_siglip2, 16),
        (tiny.tiny_convnext, 17),
    ],
)
def test_an_image_counts_its_patches_and_is_decoded_late(make, patches, decoded):
    mine = featuriser(make)
    images = [image(seed=1), image(200, 30, seed=2)]
    features = mine.features([of_images(picture) for picture in images])
    decoded.clear()  # the blank ones that tell how many patches there are
    for feature in features:
        assert (feature.modality, feature.length) == ("image", patches)
    first, second = mine.collate(features)["pixel_values"]
    assert decoded == images
    assert not torch.equal(first, second)


def test_both_phases_of_a_step_decode_each_image_once(decoded):
    """As with Gradient Cache."""
    mine = Featuriser(featuriser(tiny.tiny_vit).description, decoders=3)
    features = mine.features([of_images(image(seed=seed)) for seed in range(12)])
    decoded.clear()
    micro_batches = [[("image", [0, 1, 2, 3])], [("image", list(range(4, 12)))]]
    feeder = Feeder(mine, torch.device("cpu"))
    first = list(feeder.feed(micro_batches, features))
    second = list(feeder.feed(micro_batches, features))
    assert len(decoded) == 12
    for entry, other in zip(first, second, strict=True):
        assert torch.equal(entry[0][1]["pixel_values"], other[0][1]["pixel_values"])


def test_as_many_images_are_decoded_at_once_as_there_are_threads(monkeypatch):
    mine = Featuriser(featuriser(tiny.tiny_vit).description, decoders=4)
    features = mine.features([of_images(image(seed=seed)) for seed in range(4)])
    together = threading.Barrier(4, timeout=200)
    load = decoders.load_image

    def waiting(ref):
        together.wait()  # breaks unless four threads are here at once, although all are of one micro-batch
        return load(ref)

    monkeypatch.setattr(decoders, "load_image", waiting)
    assert len(mine.collate(features)["pixel_values"]) == 4


def test_pixels_are_kept_for_the_second_pass_and_bounded(decoded):
    description = featuriser(tiny.tiny_vit).description
    mine = Featuriser(description, image_cache_bytes=2 * 3 * 32 * 32)
    features = mine.features([of_images(image(seed=seed)) for seed in range(5)])
    decoded.clear()
    mine.collate(features)
    mine.collate(features[3:])
    assert len(decoded) == 5
    mine.collate(features[:1])
    assert len(decoded) == 6


def test_mixed_items_go_to_their_modalities_in_order():
    units = [
        of_images(image()),
        (Item(text="a cat"), "query"),
        of_images(image(seed=4)),
        (Item(images=(image(),)), "query"),
    ]
    features = featuriser(tiny.tiny_clip, query_prompt="find ").features(units)
    for feature, (item, _), modality in zip(
        features, units, ("image", "text", "image", "image"), strict=True
    ):
        assert feature.modality == modality
        assert feature.content == item.key()
    assert features[0].key == features[3].key != features[2].key, "no prompt"


@pytest.mark.parametrize(
    ("make", "item", "message"),
    [
        (
            tiny.tiny_bert,
            Item(images=(image(),)),
            "one text at a time, and got 1 image",
        ),
        (tiny.tiny_bert, Item(), "and got 0 image"),
        (
            tiny.tiny_vit,
            Item(text="a cat"),
            "one image .* 'a cat' and 0 .*: set retrieval_mode",
        ),
        (
            tiny.tiny_clip,
            Item(text="a cat", images=(image(),)),
            "one text or image .* 'a cat' and 1 image.*vision-language model",
        ),
        (
            tiny.tiny_bert,
            Item(text="a cat", images=(image(where="data.csv:7"),)),
            "^data.csv:7: .* embeds one text .*: take a model that reads images",
        ),
        (
            tiny.tiny_qwen3_vl,
            Item(text="look: <|image_pad|>"),
            "placeholder of an image",
        ),
        (
            tiny.tiny_qwen3_vl,
            Item(images=(image(900, 3),)),
            "900 x 3 pixels, cannot be used: absolute",
        ),
    ],
)
def test_what_a_model_cannot_embed_is_said(make, item, message):
    with pytest.raises(UserError, match=message):
        featuriser(make).features([(item, "query")])


@pytest.mark.parametrize(
    "make",
    [
        tiny.tiny_bert,
        tiny.tiny_clip,
        tiny.tiny_siglip,
        tiny.tiny_vit,
        tiny.tiny_qwen3_vl,
    ],
)
def test_every_modality_has_a_small_dummy(make):
    mine = featuriser(make)
    for modality in mine.description.modalities:
        dummy = mine.dummy(modality)
        assert dummy.modality == modality
        assert dummy.length <= 20
        batch = mine.collate([dummy])
        assert ("pixel_values" in batch) == (modality != "text")


def test_siglip_texts_are_padded_to_one_length_and_counted_so():
    mine = featuriser(tiny.tiny_siglip)
    features = mine.features(documents("a", "the cat and the dog"))
    assert [feature.length for feature in features] == [16, 16]
    batch = mine.collate(features[:1])
    assert batch["input_ids"].shape == (1, 16)
    assert "attention_mask" not in batch


# ---- conversations ---------------------------------------------------------------------------------------------


def test_image_tokens_are_counted_from_the_header(decoded):
    exif = Image.Exif()
    exif[0x0112] = 8
    turned = ImageRef(data=encode(Image.new("RGB", (96, 32)), "JPEG", exif=exif))
    images = [image(64, 32), image(64, 64), image(32, 96), turned]
    mine = featuriser(tiny.tiny_qwen3_vl)
    features = mine.features([of_images(picture) for picture in images])
    assert decoded == []
    lengths = [feature.length for feature in features]
    first, *others = lengths
    assert others == [first + 2, first + 1, first + 1]
    assert lengths == mine.collate(features)["attention_mask"].sum(dim=1).tolist()


def test_limits_of_the_image_area_change_the_number_of_tokens():
    units = [of_images(image(side, side)) for side in (40, 200)]
    lengths = []
    for limits in ({}, {"max_pixels": 4 * CELL}, {"min_pixels": 9 * CELL}):
        features = featuriser(tiny.tiny_qwen3_vl, **limits).features(units)
        lengths.append([feature.length for feature in features])
    assert np.diff(lengths, axis=0).tolist() == [[0, 4 - 16], [9 - 1, 16 - 4]]
    with pytest.raises(UserError, match=r"min_pixels is 16,384 and max_pixels 2,048"):
        featuriser(tiny.tiny_qwen3_vl, min_pixels=16 * CELL, max_pixels=2 * CELL)


def test_images_that_do_not_fit_are_an_error_and_never_cut():
    mine = featuriser(tiny.tiny_qwen3_vl, max_length=20)
    (feature,) = mine.features([of_images(image(32, 64), text="many words " * 20)])
    assert feature.length == 20
    with pytest.raises(UserError, match=r"1 image\(s\) of 16 tokens .*max_length 20"):
        mine.features([of_images(image(200, 200))])


def test_a_text_with_an_image_has_the_limit_of_its_source():
    mine = featuriser(tiny.tiny_qwen3_vl)
    long = Item("many words " * 20, (image(32, 64),), max_length=40)
    (feature,) = mine.features([(long, "document")])
    assert feature.length == 40


def test_an_image_that_changed_since_is_named(tmp_path):
    path = tmp_path / "moving.png"
    Image.new("RGB", (64, 64)).save(path)
    mine = featuriser(tiny.tiny_qwen3_vl)
    features = mine.features([of_images(ImageRef(path=str(path)))])
    Image.new("RGB", (64, 128)).save(path)
    with pytest.raises(UserError, match=r"changed its size .*moving\.png"):
        mine.collate(features)


def test_a_template_that_changes_its_text_is_rendered_for_each(tmp_path):
    folder = tiny.tiny_qwen3_vl(tmp_path)
    template = folder / "chat_template.jinja"
    plain = template.read_text()
    template.write_text(plain.replace("part['text']", "part['text'] | trim | upper"))
    loud, quiet = featuriser(folder).features(documents("THE CAT", "  the cat "))
    assert loud.key == quiet.key


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (tiny.tiny_qwen3_vl, "chat_template.jinja", "has no chat template"),
        (tiny.tiny_vit, "preprocessor_config.json", "cannot be loaded"),
    ],
)
def test_a_folder_without_a_file_is_refused(make, name, message, tmp_path):
    folder = make(tmp_path)
    (folder / name).unlink()
    with pytest.raises(UserError, match=rf"{tmp_path}.*{message}"):
        featuriser(folder)


def test_a_model_with_code_of_its_own_for_chats_is_read_as_a_chat_model(tmp_path):
    """As GME is published: its first module is code in the folder, which puts an end-of-text token behind each chat."""
    folder = tiny.tiny_qwen2_vl(tmp_path)
    tiny.add_sentence_transformers_files(folder, pooling="last")
    modules = folder / "modules.json"
    plain = modules.read_text()
    first = "sentence_transformers.models.Transformer"
    modules.write_text(plain.replace(first, "custom_st.MultiModalTransformer"))
    mine = featuriser(folder)
    assert mine.description.family == "vision_language"
    assert mine.description.pooling == "last"
    for feature in mine.features([*documents("a cat"), of_images(image())]):
        assert int(feature.token_ids[-1]) == 0  # <|endoftext|>, behind the answer
    tiny.write_json(folder / "config.json", {"model_type": "bert"})
    with pytest.raises(UserError, match=r"type custom_st\.MultiModalTransformer"):
        featuriser(folder)


def test_images_that_would_have_different_sizes_are_refused(tmp_path):
    folder = tiny.tiny_dinov2(tmp_path)
    options = {"size": {"shortest_edge": 32}, "do_center_crop": False}
    tiny.save_image_processor(folder, "BitImageProcessor", **options)
    mine = featuriser(folder)
    with pytest.raises(UserError, match=r"images of different sizes.*set crop_size"):
        mine.features([of_images(image())])
