"""The featuriser on images and on conversations with images: lengths from headers, late decoding, own ids."""

import numpy as np
import pytest
import torch
from PIL import Image

from tests import tiny
from tests.data.pictures import encode, encoded
from tests.features.test_text_features import featuriser
from tests.files.saving import load_in_sentence_transformers, save, without_torchvision
from vembed.data.examples import ImageRef, Item
from vembed.data.features import Featuriser
from vembed.data.images import decoders, pixels
from vembed.data.images.files import load_image
from vembed.errors import UserError

CELL = 32 * 32
"""Pixels that the tiny Qwen3-VL makes one token of."""


def image(width=24, height=16, seed=0):
    return ImageRef(data=encoded("PNG", (width, height), seed=seed))


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
    mine = featuriser(tiny.shared(make))
    first = image(seed=1)
    second = image(200, 30, seed=2)
    features = mine.features([of_images(first), of_images(second)])
    decoded.clear()  # the blank ones that tell how many patches there are
    for feature in features:
        assert (feature.modality, feature.length) == ("image", patches)
    pixels = mine.collate(features)["pixel_values"]
    assert decoded == [first, second]
    assert not torch.equal(pixels[0], pixels[1])


def test_pixels_are_kept_for_the_second_pass_and_bounded(decoded):
    mine = featuriser(tiny.shared(tiny.tiny_vit))
    features = mine.features([of_images(image(seed=seed)) for seed in range(5)])
    decoded.clear()
    first = mine.collate(features)
    second = mine.collate(features)
    assert len(decoded) == 5
    assert torch.equal(first["pixel_values"], second["pixel_values"])
    size = 3 * 32 * 32
    small = Featuriser(mine.description, image_cache_bytes=2 * size)
    features = small.features([of_images(image(seed=seed)) for seed in range(5)])
    decoded.clear()
    small.collate(features)
    small.collate(features[3:])
    assert len(decoded) == 5
    small.collate(features[:1])
    assert len(decoded) == 6


def test_mixed_items_go_to_their_modalities_in_order():
    mine = featuriser(tiny.shared(tiny.tiny_clip), query_prompt="find ")
    items = [
        of_images(image()),
        (Item(text="a cat"), "query"),
        of_images(image(seed=4)),
        (Item(images=(image(),)), "query"),
    ]
    features = mine.features(items)
    modalities = [feature.modality for feature in features]
    assert modalities == ["image", "text", "image", "image"]
    assert [feature.content for feature in features] == [
        item.key() for item, _ in items
    ]
    assert features[0].key == features[3].key != features[2].key, "no prompt"


@pytest.mark.parametrize(
    ("make", "item", "message"),
    [
        (
            tiny.tiny_vit,
            Item(text="a cat"),
            "embeds one image at a time, and got the text 'a cat' and 0 .*: set retrieval_mode",
        ),
        (
            tiny.tiny_clip,
            Item(text="a cat", images=(image(),)),
            "embeds one text or image at a time, and got the text 'a cat' and 1 image.*vision-language model",
        ),
    ],
)
def test_what_a_model_cannot_embed_is_said(make, item, message):
    with pytest.raises(UserError, match=message):
        featuriser(tiny.shared(make)).features([(item, "query")])


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
    mine = featuriser(tiny.shared(make))
    for modality in mine.description.modalities:
        dummy = mine.dummy(modality)
        assert dummy.modality == modality
        assert dummy.length <= 20
        batch = mine.collate([dummy])
        assert ("pixel_values" in batch) == (modality != "text")


def test_siglip_texts_are_padded_to_one_length_and_counted_so():
    mine = featuriser(tiny.shared(tiny.tiny_siglip))
    features = mine.features(
        [(Item(text="a"), "query"), (Item(text="the cat and the dog"), "query")]
    )
    assert [feature.length for feature in features] == [16, 16]
    batch = mine.collate(features[:1])
    assert batch["input_ids"].shape == (1, 16)
    assert "attention_mask" not in batch


# ---- conversations ---------------------------------------------------------------------------------------------


def test_conversations_are_those_of_sentence_transformers(tmp_path, monkeypatch):
    without_torchvision(monkeypatch)
    folder = save(tiny.shared(tiny.tiny_qwen3_vl), tmp_path / "final", max_length=50)
    theirs = load_in_sentence_transformers(folder)
    mine = featuriser(folder)
    wide, square, small = image(100, 40), image(64, 64), image(20, 20)
    long = "word " * 60
    features = mine.features(
        [
            of_images(wide),
            of_images(square, small, text="both"),
            of_images(small, text=long),
        ]
    )
    batch = mine.collate(features)
    expected = theirs.preprocess(
        [
            {"image": load_image(wide)},
            {"image": [load_image(square), load_image(small)], "text": "both"},
            {"image": load_image(small), "text": long},
        ]
    )
    lengths = [feature.length for feature in features]
    assert lengths == expected["attention_mask"].sum(dim=1).tolist()
    assert {feature.modality for feature in features} == {"multimodal"}
    names = "input_ids attention_mask mm_token_type_ids image_grid_thw pixel_values"
    for name in names.split():
        assert torch.equal(batch[name], expected[name]), name


def test_image_tokens_are_counted_from_the_header(decoded):
    mine = featuriser(tiny.shared(tiny.tiny_qwen3_vl))
    sizes = [(64, 64), (64, 32), (32, 96)]
    lengths = [mine.features([of_images(image(*size))])[0].length for size in sizes]
    assert [length - lengths[1] for length in lengths] == [2, 0, 1]
    exif = Image.Exif()
    exif[0x0112] = 8
    turned = ImageRef(data=encode(Image.new("RGB", (96, 32)), "JPEG", exif=exif))
    (feature,) = mine.features([of_images(turned)])
    assert decoded == []
    assert feature.length == lengths[2]


def test_limits_of_the_image_area_change_the_number_of_tokens():
    qwen = tiny.shared(tiny.tiny_qwen3_vl)
    items = [of_images(image(side, side)) for side in (40, 200)]
    lengths = []
    for limits in ({}, {"max_pixels": 4 * CELL}, {"min_pixels": 9 * CELL}):
        features = featuriser(qwen, **limits).features(items)
        lengths.append([feature.length for feature in features])
    assert np.diff(lengths, axis=0).tolist() == [[0, 4 - 16], [9 - 1, 16 - 4]]
    with pytest.raises(UserError, match=r"min_pixels is 16,384 and max_pixels 2,048"):
        featuriser(qwen, min_pixels=16 * CELL, max_pixels=2 * CELL)


def test_images_that_do_not_fit_are_an_error_and_never_cut():
    mine = featuriser(tiny.shared(tiny.tiny_qwen3_vl), max_length=20)
    (feature,) = mine.features([of_images(image(32, 64), text="many words " * 20)])
    assert feature.length == 20
    with pytest.raises(
        UserError,
        match=r"1 image\(s\) of 16 tokens does not fit into max_length 20: raise max_length",
    ):
        mine.features([of_images(image(200, 200))])


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (Item(text="look: <|image_pad|>"), "placeholder of an image"),
        (Item(images=(image(900, 3),)), "900 x 3 pixels, cannot be used: absolute"),
    ],
)
def test_what_a_chat_cannot_hold_is_said(item, message):
    with pytest.raises(UserError, match=message):
        featuriser(tiny.shared(tiny.tiny_qwen3_vl)).features([(item, "query")])


def test_an_image_that_changed_since_is_named(tmp_path):
    path = tmp_path / "moving.png"
    Image.new("RGB", (64, 64)).save(path)
    mine = featuriser(tiny.shared(tiny.tiny_qwen3_vl))
    features = mine.features([of_images(ImageRef(path=str(path)))])
    Image.new("RGB", (64, 128)).save(path)
    with pytest.raises(
        UserError,
        match=r"changed its size since its header was read, one of: .*moving\.png",
    ):
        mine.collate(features)


def test_a_template_that_changes_its_text_is_rendered_for_each(tmp_path):
    folder = tiny.tiny_qwen3_vl(tmp_path)
    template = folder / "chat_template.jinja"
    plain = template.read_text()
    template.write_text(plain.replace("part['text']", "part['text'] | trim | upper"))
    items = [(Item(text=text), "query") for text in ("THE CAT", "  the cat ")]
    loud, quiet = featuriser(folder).features(items)
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
    for item in (Item(text="a cat"), Item(images=(image(),))):
        (feature,) = mine.features([(item, "query")])
        assert int(feature.token_ids[-1]) == 0  # <|endoftext|>, behind the answer
    tiny.write_json(folder / "config.json", {"model_type": "bert"})
    with pytest.raises(
        UserError, match=r"unsupported module type custom_st\.MultiModalTransformer"
    ):
        featuriser(folder)


def test_images_that_would_have_different_sizes_are_refused(tmp_path):
    folder = tiny.tiny_dinov2(tmp_path)
    tiny.save_image_processor(
        folder, "BitImageProcessor", size={"shortest_edge": 32}, do_center_crop=False
    )
    mine = featuriser(folder)
    with pytest.raises(
        UserError, match=r"gives images of different sizes.*set crop_size"
    ):
        mine.features([of_images(image())])
