"""Broken model folders: one sentence with the file and what is wrong in it, before any weights are read."""

from __future__ import annotations

import json
import os
import shutil
import time

import pytest
import torch
from safetensors.torch import load, save_file
from transformers import PreTrainedModel
from typer.testing import CliRunner

import vembed
from tests import tiny
from vembed.cli.main import app
from vembed.errors import UserError

GONE = object()
TEXT = "Lorem"


def values(name, **changes):
    """An alteration of a JSON file of the folder: keys set, or taken out."""

    def alter(folder):
        held = json.loads((folder / name).read_text())
        for key, value in changes.items():
            held.pop(key, None) if value is GONE else held.update({key: value})
        (folder / name).write_text(json.dumps(held))

    return alter


def config(**changes):
    return values("config.json", **changes)


def dense(**changes):
    return values("2_Dense/config.json", **changes)


def module(number, **changes):
    def alter(folder):
        held = json.loads((folder / "modules.json").read_text())
        for key, value in changes.items():
            held[number].pop(key, None) if value is GONE else held[number].update(
                {key: value}
            )
        (folder / "modules.json").write_text(json.dumps(held))

    return alter


def normalize_first(folder):
    held = json.loads((folder / "modules.json").read_text())
    held.insert(
        2,
        {
            "idx": 9,
            "name": "9",
            "path": "",
            "type": "sentence_transformers.models.Normalize",
        },
    )
    (folder / "modules.json").write_text(json.dumps(held))


def text(name, content):
    def alter(folder):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)

    return alter


def weights(change):
    def alter(folder):
        held = load((folder / "model.safetensors").read_bytes())
        change(held)
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})

    return alter


def torch_file(folder):
    torch.save({"a": torch.ones(3)}, folder / "model.safetensors")


def cut(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def pipe(folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def header(content):
    def alter(folder):
        data = content.encode()
        (folder / "model.safetensors").write_bytes(
            len(data).to_bytes(8, "little") + data
        )

    return alter


def adapter_alone(settings):
    def alter(folder):
        (folder / "model.safetensors").unlink()
        (folder / "adapter_config.json").write_text(json.dumps(settings))

    return alter


SAVED = {
    "family": "text_encoder",
    "source": ".",
    "embedding_dim": 12,
    "hidden_dim": 32,
    "pooling": "mean",
    "modalities": ["text"],
    "layer_classes": ["BertLayer"],
    "max_length": 64,
}


def saved(**changes):
    return text("vembed.json", json.dumps({**SAVED, **changes}))


BROKEN = {
    "modules that are an object": (
        text("modules.json", "{}"),
        "modules.json: input should be a valid list",
    ),
    "modules that are numbers": (text("modules.json", "[1, 2]"), "modules.json: 0"),
    "no modules": (
        text("modules.json", "[]"),
        "modules.json: list should have at least 1",
    ),
    "modules that are no JSON": (
        text("modules.json", "[{"),
        "modules.json is not valid JSON",
    ),
    "deep JSON": (
        text("modules.json", "[" * 200_000),
        "modules.json is not valid JSON",
    ),
    "a module without type": (module(1, type=GONE), "modules.json: 1.type"),
    "a module without path": (module(1, path=GONE), "modules.json: 1.path"),
    "a module of a number": (module(1, path=5), "modules.json: 1.path"),
    "a module outside": (
        module(2, path="../../elsewhere"),
        "modules.json: path '../../elsewhere' leads out",
    ),
    "an unknown module": (
        module(1, type="sentence_transformers.models.Bow"),
        "unsupported module type",
    ),
    "a Dense behind Normalize": (
        normalize_first,
        "modules.json: a Dense module behind Normalize",
    ),
    "a pooling that is missing": (
        module(1, path="9_Pooling"),
        "9_Pooling has no config.json",
    ),
    "a pooling of a number": (
        values("1_Pooling/config.json", pooling_mode=5),
        "1_Pooling/config.json: pooling_mode",
    ),
    "prompts that are a list": (
        values("config_sentence_transformers.json", prompts=["a"]),
        "prompts",
    ),
    "a length that is a text": (
        values("sentence_bert_config.json", max_seq_length="long"),
        "max_seq_length",
    ),
    "a Dense of another size": (
        dense(in_features=31),
        "2_Dense/config.json makes a Dense module of",
    ),
    "a Dense of a negative size": (
        dense(out_features=-4),
        "2_Dense/config.json: out_features",
    ),
    "a Dense of a huge size": (
        dense(out_features=10**12),
        "2_Dense/config.json: out_features",
    ),
    "a large Dense that is not there": (
        dense(out_features=10**9),
        "makes a Dense module of",
    ),
    "a Dense without size": (
        dense(in_features=GONE),
        "2_Dense/config.json: in_features",
    ),
    "a Dense with text for a size": (
        dense(in_features="32"),
        "2_Dense/config.json: in_features",
    ),
    "a Dense of an unknown class": (
        dense(activation_function="os.system"),
        "os.system of a Dense module",
    ),
    "a Dense of a layer": (
        dense(activation_function="torch.nn.Linear"),
        "is not an activation",
    ),
    "a Dense without weights": (
        lambda folder: (folder / "2_Dense/model.safetensors").unlink(),
        "no model.safetensors",
    ),
    "a config that is a list": (text("config.json", "[]"), "config.json holds a list"),
    "a config that is no JSON": (
        text("config.json", "{'a': 1}"),
        "config.json is not valid JSON",
    ),
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        "has no config.json",
    ),
    "no model_type": (config(model_type=GONE), "config.json cannot be used"),
    "an unknown model_type": (
        config(model_type="hal9000"),
        "config.json cannot be used",
    ),
    "a model_type that is a list": (
        config(model_type=["bert"]),
        "config.json cannot be used",
    ),
    "another hidden size": (
        config(hidden_size=64),
        "config.json does not fit the weights: embeddings",
    ),
    "a hidden size of zero": (config(hidden_size=0), "hidden_size is 0"),
    "a hidden size that is a text": (config(hidden_size="32"), "hidden_size is '32'"),
    "heads that do not divide": (
        config(num_attention_heads=5),
        "config.json makes no BertModel",
    ),
    "negative heads": (config(num_attention_heads=-2), "num_attention_heads is -2"),
    "more positions": (
        config(max_position_embeddings=4096),
        "embeddings.position_embeddings.weight has the shape",
    ),
    "a large vocabulary": (
        config(vocab_size=2**31),
        "config.json does not fit the weights",
    ),
    "a small vocabulary": (
        config(vocab_size=7),
        "config.json does not fit the weights",
    ),
    "an unknown activation": (
        config(hidden_act="swoosh"),
        "config.json makes no BertModel: KeyError",
    ),
    "a million layers": (
        config(num_hidden_layers=10**6),
        "num_hidden_layers is 1,000,000",
    ),
    "layers that are not there": (config(num_hidden_layers=100), "lacks"),
    "a million labels": (config(num_labels=10**7), "num_labels is 10,000,000"),
    "an unknown type": (
        config(dtype="float99"),
        "dtype 'float99' is not a floating point type",
    ),
    "a type that is a number": (config(dtype=16), "dtype 16 is not"),
    "quantisation that is not there": (
        config(
            quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}
        ),
        "has a quantization_config, and the weights beside it are not quantised",
    ),
    "weights that are a pickle": (torch_file, "is not a safetensors file"),
    "weights that are a text": (
        text("model.safetensors", "hello"),
        "is not a safetensors file",
    ),
    "weights that are empty": (
        text("model.safetensors", ""),
        "is not a safetensors file",
    ),
    "weights that are cut": (cut, "copy the file again"),
    "weights that are a pipe": (pipe, "is not a regular file"),
    "a header that is a list": (header("[1]"), "its header is not a JSON object"),
    "a header without shapes": (
        header('{"a": {"dtype": "F32"}}'),
        "entry for a is damaged",
    ),
    "a header of huge tensors": (
        header(
            '{"a": {"dtype": "F32", "shape": [99999999999], "data_offsets": [0, 4]}}'
        ),
        "does not fit into the 4 bytes",
    ),
    "an index without a map": (
        text("model.safetensors.index.json", "{}"),
        "is not an index of weights",
    ),
    "an index that leads out": (
        text(
            "model.safetensors.index.json",
            '{"metadata": {}, "weight_map": {"a": "../a.safetensors"}}',
        ),
        "weight_map names '../a.safetensors'",
    ),
    "an index of a missing file": (
        text(
            "model.safetensors.index.json",
            '{"metadata": {}, "weight_map": {"a": "b.safetensors"}}',
        ),
        "names b.safetensors, which is not a file",
    ),
    "a missing weight": (
        weights(lambda held: held.pop("encoder.layer.0.attention.self.query.weight")),
        "lacks 1",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "no .safetensors file",
    ),
    "an adapter without a base": (
        adapter_alone({"r": 4}),
        "adapter_config.json: base_model_name_or_path",
    ),
    "a description of another version": (
        saved(mood="good"),
        "vembed.json: 'mood' is no field",
    ),
    "a description of an unknown family": (
        saved(family="martian"),
        "vembed.json: family 'martian' is none of",
    ),
    "a description that leads out": (
        saved(image_source="../../x"),
        "vembed.json: image_source '../../x' leads out",
    ),
    "a description of a negative length": (
        saved(max_length=-1),
        "vembed.json: max_length is -1",
    ),
    "a tokenizer that is no JSON": (text("tokenizer.json", "{"), "the tokenizer of"),
    "a tokenizer of nothing": (text("tokenizer.json", "{}"), "the tokenizer of"),
    "a tokenizer's length as text": (
        values("tokenizer_config.json", model_max_length="long"),
        "tokenizer_config.json",
    ),
}
LATE = {
    "layers that are not there",
    "a missing weight",
    "a tokenizer that is no JSON",
    "a tokenizer of nothing",
}
"""Kinds that only loading shows, in memory of at most the size of the files and 512 MB."""
LATE |= {"a Dense of an unknown class", "a Dense of a layer", "no weights"}


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(
        tiny.shared(tiny.tiny_bert_st, dense_dim=12), tmp_path / "model"
    )


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_one_sentence_before_weights_are_read(
    folder, name, monkeypatch
):
    alter, says = BROKEN[name]
    alter(folder)
    if name not in LATE:
        monkeypatch.setattr(
            PreTrainedModel,
            "from_pretrained",
            lambda *args, **options: pytest.fail("weights are read"),
        )
    began = time.process_time()
    with pytest.raises(UserError) as caught:
        vembed.Embedder(folder)
    said = str(caught.value)
    assert says in said and str(folder) in said and "\n" not in said
    assert time.process_time() - began < 10


def test_an_adapter_of_itself_is_no_endless_loop(folder):
    adapter_alone({"base_model_name_or_path": str(folder), "r": 4})(folder)
    with pytest.raises(UserError, match="adapter on top of another adapter"):
        vembed.Embedder(folder)


@pytest.mark.parametrize(
    "name",
    ["a million layers", "a Dense of a negative size", "weights that are a pipe"],
)
def test_the_commands_say_it_with_code_2(folder, tmp_path, name):
    BROKEN[name][0](folder)
    data = tmp_path / "data.jsonl"
    data.write_text('{"query": "a", "positive": "b"}\n')
    result = CliRunner().invoke(app, ["eval", str(folder), str(data)])
    assert result.exit_code == 2 and BROKEN[name][1] in result.output.replace("\n", " ")
    assert "Traceback" not in result.output
