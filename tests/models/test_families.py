"""Describing a model: what is decided from its files, by the user, or by its family, and what is refused and why."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModel

import vembed
from tests import tiny
from tests.built import described, model_of
from tests.models.families import (
    COMPOSED,
    EVERY,
    IMAGE_ENCODERS,
    TEXT_DECODERS,
    TEXT_ENCODERS,
    VISION_LANGUAGE,
    config_for,
)
from tests.tiny_tokenizers import wordpiece_tokenizer
from vembed.config.schema import TrainConfig
from vembed.errors import UserError
from vembed.models.families.description import (
    DESCRIPTION_FILE,
    ModelDescription,
)

FAMILY = {
    **dict.fromkeys(TEXT_ENCODERS, ("text_encoder", "mean")),
    **dict.fromkeys(TEXT_DECODERS, ("text_decoder", "last")),
    **dict.fromkeys(IMAGE_ENCODERS, ("image_encoder", "cls")),
    tiny.tiny_convnext: ("image_encoder", "own"),
    tiny.tiny_clip: ("clip", "own"),
    tiny.tiny_siglip: ("siglip", "own"),
    tiny.tiny_siglip2: ("siglip", "own"),
    **dict.fromkeys(VISION_LANGUAGE, ("vision_language", "last")),
}


def of_folder(folder, **options):
    return described(TrainConfig(model_name=str(folder), data_path=[], **options))


@pytest.mark.parametrize("make", EVERY)
def test_family_and_pooling_are_seen_in_the_files_and_given_a_reason(make):
    description = described(config_for(make))
    assert (description.family, description.pooling) == FAMILY[make]
    assert {"family", "pooling"} <= set(description.reasons)
    assert f"family: '{description.family}'" in description.summary()


def test_a_feature_map_is_pooled_by_its_mean():
    config = config_for(tiny.tiny_resnet)
    description = described(config)
    assert (description.pooling, description.family) == ("mean", "image_encoder")
    model = model_of(config, description).eval()
    pixels = torch.randn(2, 3, 32, 32)
    (actual,) = model([("image", {"pixel_values": pixels})])
    feature_map = model.backbone(pixel_values=pixels).last_hidden_state
    assert feature_map.ndim == 4
    torch.testing.assert_close(actual, feature_map.mean(dim=(2, 3)))


def test_composed_models_have_two_towers_in_the_smaller_space():
    wide = str(tiny.shared(tiny.tiny_vit, hidden=48))
    description = described(config_for(COMPOSED, image_model_name=wide))
    assert description.family == "composed"
    assert description.modalities == ("text", "image")
    assert description.text_hidden_dim == 32
    assert description.image_hidden_dim == 48
    assert description.hidden_dim == description.embedding_dim == 32
    assert described(config_for(COMPOSED, mrl_dims=[40])).embedding_dim == 40
    bert = str(tiny.shared(tiny.tiny_bert))
    with pytest.raises(UserError, match="not an image encoder"):
        described(config_for(COMPOSED, image_model_name=bert))
    clip = str(tiny.shared(tiny.tiny_clip))
    with pytest.raises(
        UserError, match="give image_model_name with a text model alone"
    ):
        described(config_for(COMPOSED, model_name=clip))


def test_sentence_transformers_files_decide_unless_the_user_does(tmp_path):
    folder = tiny.tiny_bert_st(
        tmp_path,
        pooling="cls",
        max_seq_length=64,
        normalize=False,
        prompts={"query": "q: ", "passage": "p: "},
        similarity="dot",
    )
    description = of_folder(folder)
    assert description.pooling == "cls"
    assert description.max_length == 64
    assert description.normalize is False
    assert description.query_prompt == "q: "
    assert description.document_prompt == "p: "
    assert description.reasons["pooling"] == "from 1_Pooling/config.json"
    options = {
        "pooling": "mean",
        "max_length": 48,
        "query_prompt": "",
        "document_prompt": "d",
    }
    description = of_folder(folder, **options)
    for name, value in options.items():
        assert getattr(description, name) == value
    assert "the model's files say dot" in description.reasons["similarity"]


def test_longrope_texts_stay_within_the_original_positions(tmp_path):
    folder = tiny.tiny_qwen3(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    factors = [1.0] * (config["head_dim"] // 2)
    config["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": 8,
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert of_folder(folder).max_length == 8
    with pytest.raises(UserError, match=r"max_length: 9 .* 8 original .*longrope"):
        of_folder(folder, max_length=9)


def test_a_model_trained_by_dot_product_is_not_saved_as_one_of_unit_vectors(tmp_path):
    description = of_folder(tiny.tiny_bert_st(tmp_path), similarity="dot")
    assert not description.normalize
    assert "similarity: dot" in description.reasons["normalize"]


@pytest.mark.parametrize(
    ("make", "options", "named"),
    [
        (tiny.tiny_bert, {"model_family": "clip"}, "model_family: clip"),
        (tiny.tiny_qwen3, {"pooling": "cls"}, "same embedding"),
        (tiny.tiny_clip, {"pooling": "mean"}, "pooling"),
        (tiny.tiny_siglip, {"max_length": 8}, "16 positions"),
        (tiny.tiny_vit, {"pooling": "last"}, "have no order"),
        (tiny.tiny_convnext, {"pooling": "cls"}, "pooling: cls is not available"),
        (tiny.tiny_resnet, {"pooling": "cls"}, "no class token"),
        (tiny.tiny_bert, {"mrl_dims": [16, 64]}, "mrl_dims: 64 is larger than the 32"),
        (tiny.tiny_bert, {"mrl_dims": [16, 8], "mrl_weights": [1]}, "mrl_weights"),
    ],
)
def test_what_does_not_fit_is_named(make, options, named):
    with pytest.raises(UserError, match=named):
        described(config_for(make, **options))


def test_only_decoders_with_rotary_positions_pad_on_the_left():
    assert described(config_for(tiny.tiny_qwen3)).padding_side == "left"
    assert described(config_for(tiny.tiny_gpt2)).padding_side == "right"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pooling_mode_cls_token": True}, "pools by cls and mean"),
        ({"include_prompt": False}, "leaves the prompt out of the pooling"),
    ],
)
def test_poolings_that_vembed_has_not_are_named(changes, named, tmp_path):
    folder = tiny.tiny_bert_st(tmp_path)
    tiny.change_json(folder / "1_Pooling" / "config.json", **changes)
    with pytest.raises(UserError, match=named):
        of_folder(folder)
    assert of_folder(folder, pooling="mean").pooling == "mean"
    # As newer files name them.
    settings = {"pooling_mode": "lasttoken", "embedding_dimension": 32}
    tiny.write_json(folder / "1_Pooling" / "config.json", settings)
    assert of_folder(folder).pooling == "last"


@pytest.mark.parametrize(
    ("name", "query", "document"),
    [
        ("intfloat/multilingual-e5-base", "query: ", "passage: "),
        ("BAAI/bge-base-en-v1.5", "passages: ", ""),
        ("Qwen/Qwen3-Embedding-0.6B", "Query:", ""),
        ("BAAI/bge-m3", "", ""),
    ],
)
def test_prompts_of_published_models_are_known_by_name(name, query, document, tmp_path):
    folder = tiny.tiny_bert(tmp_path / name)
    description = of_folder(folder)
    assert description.query_prompt.endswith(query)
    assert bool(description.query_prompt) == bool(query)
    assert description.document_prompt == document
    tiny.add_sentence_transformers_files(folder, prompts={"query": "other: "})
    assert of_folder(folder).query_prompt == "other: "
    assert of_folder(folder).document_prompt == ""


@pytest.mark.parametrize(
    ("options", "dims", "size"),
    [
        ({}, (), 128),
        ({"mrl_dims": "auto"}, (128, 64), 128),
        ({"mrl_dims": [64, 96]}, (64, 96), 96),
        ({"mrl_dims": [64, 96], "mrl_projection": False}, (64, 96), 128),
        ({"mrl_dims": [128, 32], "mrl_projection": True}, (128, 32), 128),
    ],
)
@pytest.mark.promise("D24")
def test_matryoshka_sizes(options, dims, size):
    description = of_folder(tiny.shared(tiny.tiny_bert, hidden=128), **options)
    assert description.mrl_dims == dims
    assert description.embedding_dim == size
    assert description.hidden_dim == 128


def test_dense_modules_of_the_model_count_in_its_size():
    folder = tiny.shared(tiny.tiny_bert_st, dense_dim=12)
    description = of_folder(folder)
    assert (description.hidden_dim, description.embedding_dim) == (32, 12)
    with pytest.raises(UserError, match="24 is larger than the 12-dimensional"):
        of_folder(folder, mrl_dims=[24])


def test_a_saved_description_is_believed(tmp_path):
    folder = tiny.tiny_qwen3(tmp_path)
    saved = of_folder(folder).with_(
        pooling="mean",
        bidirectional_attention=True,
        query_prompt="ask: ",
        max_length=33,
        mrl_dims=(32, 16),
    )
    tiny.write_json(folder / DESCRIPTION_FILE, saved.to_dict())
    again = of_folder(folder)
    assert again.with_(reasons={}) == saved.with_(reasons={})
    assert again.reasons["pooling"] == f"from {DESCRIPTION_FILE}"
    values = saved.to_dict()
    assert ModelDescription.from_dict(values, folder).source == str(folder)
    for name, value in (("family", "martian"), ("image_source", "../../x")):
        with pytest.raises(UserError, match=value):
            ModelDescription.from_dict({**values, name: value}, folder)


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("bart", "encoder-decoder"),
        ("llava", "texts and images that vembed does not know"),
    ],
)
def test_models_that_are_not_supported_are_said(tmp_path, model_type, said):
    tiny.write_json(tmp_path / "config.json", {"model_type": model_type})
    with pytest.raises(UserError, match=said):
        of_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("/no/such/folder", "is not a folder"),
        ("org/model", "not in the Hub's cache"),
        ("a b c", "neither a folder here nor a model on the Hub"),
    ],
)
def test_a_model_that_is_not_there_is_said(name, said, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=f"^model_name: {name}.*{said}"):
        of_folder(name)
    # Here nobody has written an option, and what the client of the Hub says stands in the sentence.
    with pytest.raises(UserError, match=f"^{name}.*{said}") as caught:
        vembed.Embedder(name)
    error = caught.value
    assert error.__context__ is None or error.__suppress_context__
    assert error.__cause__ is None


@pytest.mark.parametrize("kind", ["roberta", "longformer", "luke", "xmod", "esm"])
def test_positions_after_padding_leave_fewer_for_the_text(kind, tmp_path):
    settings = AutoConfig.for_model(
        kind,
        max_position_embeddings=20,
        num_hidden_layers=1,
        hidden_size=32,
        intermediate_size=64,
        pad_token_id=1,
        num_attention_heads=2,
        vocab_size=400,
        attention_window=4,
        languages=["en_XX"],
        default_language="en_XX",
    )
    model = AutoModel.from_config(settings).eval()
    model.save_pretrained(tmp_path)
    wordpiece_tokenizer().save_pretrained(tmp_path)
    longest = of_folder(tmp_path).max_length
    with torch.no_grad():
        states = model(input_ids=torch.full((1, longest), 5)).last_hidden_state
        assert states.shape[1] >= longest
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=torch.full((1, longest + 1), 5))
