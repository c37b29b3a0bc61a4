"""A model tuned by LoRA is saved merged, with the adapter beside it, or as the adapter alone; all score the same."""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import vembed
from tests import tiny
from tests.built import described, model_of
from tests.data.pictures import write
from tests.files.saving import (
    assert_alike,
    assert_same,
    config_of,
    encoded,
    load_in_sentence_transformers,
    ours,
)
from tests.files.test_text_models import TEXTS
from tests.harness import run_ranks
from tests.training.test_run import metrics, settings
from vembed.data.examples import ImageRef, Item
from vembed.data.features import Featuriser
from vembed.saving.files import save_model


def tuned(source, **options):
    """A model with adapters that have learned something."""
    model = model_of(config_of(source, use_lora=True, lora_r=4, **options))
    draw = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) / 10)
    return model


def save(model, directory, *, merge):
    return save_model(directory, model, model.state_dict(), merge_adapters=merge)


def assert_close(folder, trained):
    np.testing.assert_allclose(ours(folder, TEXTS), trained, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (tiny.tiny_bert, {}),
        (tiny.tiny_qwen3_st, {"mrl_dims": [16]}),
        (tiny.tiny_llama, {"lora_variant": "dora"}),
    ],
)
def test_merged_or_not_the_embeddings_are_the_same(make, options, tmp_path):
    model = tuned(make, **options)
    trained = encoded(model, TEXTS)
    merged = save(model, tmp_path / "merged", merge=True)
    alone = save(model, tmp_path / "alone", merge=False)
    assert (merged / "adapter" / "adapter_model.safetensors").is_file()
    (weights,) = alone.glob("*.safetensors")
    assert weights.name == "adapter_model.safetensors"
    assert "holds an adapter (LoRA) alone" in (alone / "README.md").read_text()
    assert "(LoRA)" not in (merged / "README.md").read_text()
    for folder in (merged, alone):
        assert_close(folder, trained)
        assert_alike(folder, TEXTS)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (tiny.tiny_clip, {}),
        (tiny.tiny_siglip, {}),
        (tiny.tiny_qwen2, {"bidirectional_attention": True}),
        (tiny.tiny_bert, {"model_arguments": {"num_hidden_layers": 1}}),
    ],
)
def test_models_that_are_more_than_their_adapters_are_saved_whole(
    make, options, tmp_path, caplog
):
    caplog.set_level("INFO", logger="vembed")
    folder = save(tuned(make, **options), tmp_path / "final", merge=False)
    assert "save_merged: the whole model is saved" in caplog.text
    assert (folder / "model.safetensors").is_file()
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()
    assert_alike(folder, TEXTS[:3])


@pytest.mark.parametrize("place", ["final", "0_Transformer"])
def test_an_adapter_alone_names_the_folder_that_holds_the_weights(place, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(tiny.shared(tiny.tiny_qwen3_st), base / place)
    if place == "final":
        (base / "config.yaml").write_text("model_name: other\n")
    else:
        for path in (base / place).glob("*_*"):
            if path.is_dir() or path.name == "config_sentence_transformers.json":
                path.rename(base / path.name)
        modules = base / "modules.json"
        (base / place / "modules.json").rename(modules)
        entries = tiny.read_json(modules)
        entries[0]["path"] = place
        modules.write_text(json.dumps(entries))
    model = tuned(base)
    trained = encoded(model, TEXTS)
    alone = save(model, tmp_path / "alone", merge=False)
    assert_close(alone, trained)
    assert_alike(alone, TEXTS)


def test_an_adapter_alone_of_a_masked_auto_encoder_masks_nothing(tmp_path):
    folder = save(tuned(tiny.tiny_vitmae), tmp_path / "final", merge=False)
    paths = [write(tmp_path / f"{seed}.png", "PNG", seed) for seed in range(3)]
    items = [Item(images=(ImageRef(path=str(path)),)) for path in paths]
    theirs = load_in_sentence_transformers(folder).encode([str(path) for path in paths])
    assert_same(ours(folder, items, "document"), theirs)


@pytest.mark.parametrize("make", [tiny.tiny_bert, tiny.tiny_qwen3_st])
def test_a_tokenizer_that_was_saved_with_an_adapter_is_the_one_that_is_used(
    make, tmp_path
):
    alone = save(tuned(make), tmp_path / "alone", merge=False)
    before = ours(alone, TEXTS)
    path = alone / "tokenizer.json"
    tokenizer = tiny.read_json(path)
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [word for word in vocabulary if word.isalpha()][-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    normalizer = {"type": "Replace", "pattern": {"String": "e"}, "content": "o"}
    tokenizer["normalizer"] = normalizer
    path.write_text(json.dumps(tokenizer))
    assert_alike(alone, TEXTS)
    assert np.abs(ours(alone, TEXTS) - before).max() > 0.01
    again = save(tuned(alone), tmp_path / "again", merge=False)
    assert_alike(again, TEXTS)
    assert tiny.read_json(again / "tokenizer.json")["normalizer"] == normalizer


def test_a_padding_token_that_was_added_without_a_row_is_not_used(tmp_path):
    alone = save(tuned(tiny.tiny_llama), tmp_path / "alone", merge=False)
    before = ours(alone, TEXTS)
    tokenizer = AutoTokenizer.from_pretrained(alone)
    tokenizer.add_tokens([f"<{number}>" for number in range(1_000)])
    tokenizer.add_special_tokens({"pad_token": "<999>"})
    tokenizer.save_pretrained(alone)
    np.testing.assert_allclose(ours(alone, TEXTS), before, atol=1e-5)
    featuriser = Featuriser(described(config_of(alone)))
    texts = ("red", " ".join(TEXTS))
    features = featuriser.features([(Item(text=text), "query") for text in texts])
    num_rows = tiny.read_json(tiny.shared(tiny.tiny_llama) / "config.json")[
        "vocab_size"
    ]
    assert int(featuriser.collate(features)["input_ids"].max()) < num_rows


@pytest.mark.parametrize("merge", [True, False])
def test_an_adapter_over_four_bits_counts_with_the_rounded_weights(merge, tmp_path):
    model = tuned(tiny.tiny_bert, quantize_weights="nf4")
    trained = encoded(model, TEXTS)
    folder = save(model, tmp_path / "final", merge=merge)
    assert_close(folder, trained)
    assert ("4 bits" in (folder / "README.md").read_text()) != merge
    if merge:
        assert "quantization_config" not in tiny.read_json(folder / "config.json")
        assert_alike(folder, TEXTS)


def test_a_composed_model_with_adapters_is_saved_whole(tmp_path):
    vit = str(tiny.shared(tiny.tiny_vit))
    options = {"model_family": "composed", "image_model_name": vit, "mrl_dims": [16]}
    model = tuned(tiny.tiny_bert, **options)
    trained = encoded(model, TEXTS)
    assert_close(save(model, tmp_path / "final", merge=True), trained)


def test_two_processes_start_from_an_adapter_that_was_saved_alone(tmp_path):
    folder = save(tuned(tiny.tiny_bert), tmp_path / "alone", merge=False)
    options = settings(
        tmp_path, max_steps=2, use_lora=True, lora_dropout=0.0, val_data_path=None
    )
    options |= {"model_name": str(folder), "output_dir": str(tmp_path / "one")}
    vembed.train(options)
    options |= {"strategy": "fsdp", "output_dir": str(tmp_path / "two")}
    options["global_batch_size"] = options.pop("batch_size")
    run_ranks(trained_there, 2, options)
    one = metrics(tmp_path / "one")
    assert metrics(tmp_path / "two") == pytest.approx(one, rel=1e-5)


def trained_there(options):
    """On a rank."""
    vembed.train(options)
