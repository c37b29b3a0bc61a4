"""Broken model folders: one sentence with the file and what is wrong in it, before any weights are read."""

import json
import os
import time

import pytest
from safetensors.torch import load, save_file
from transformers import PreTrainedModel

import vembed
from tests import tiny
from vembed.errors import UserError


def text(name, content):
    def alter(folder):
        (folder / name).write_text(content)

    return alter


def changed(name, **changes):
    return lambda folder: tiny.change_json(folder / name, **changes)


def changed_module(number, **changes):
    """Set keys of an entry of modules.json."""

    def alter(folder):
        modules = tiny.read_json(folder / MODULES)
        modules[number] |= changes
        tiny.write_json(folder / MODULES, modules)

    return alter


def without(name):
    return lambda folder: (folder / name).unlink()


def normalize_first(folder):
    modules = tiny.read_json(folder / MODULES)
    modules.insert(2, modules.pop())
    tiny.write_json(folder / MODULES, modules)


def without_a_weight(folder):
    path = folder / "model.safetensors"
    weights = load(path.read_bytes())
    del weights["encoder.layer.0.attention.self.query.weight"]
    save_file(weights, path, metadata={"format": "pt"})


def cut(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def pipe(folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def huge_header(folder):
    tensor = {"dtype": "F32", "shape": [9999999999], "data_offsets": [0, 4]}
    header = json.dumps({"a": tensor}).encode()
    size = len(header).to_bytes(8, "little")
    (folder / "model.safetensors").write_bytes(size + header)


def adapter_alone(**settings):
    def alter(folder):
        (folder / "model.safetensors").unlink()
        tiny.write_json(folder / "adapter_config.json", settings)

    return alter


CONFIG = "config.json"
MODULES = "modules.json"
DENSE = "2_Dense/config.json"
INDEX = "model.safetensors.index.json"
ST_CONFIG = "config_sentence_transformers.json"
BROKEN = {
    "a reranker": (changed(ST_CONFIG, model_type="CrossEncoder"), "a reranker"),
    "a sparse encoder": (changed(ST_CONFIG, model_type="SparseEncoder"), "a sparse"),
    # Up to version 5 a CrossEncoder has these settings alone.
    "an older reranker": (changed(CONFIG, sentence_transformers={}), "a reranker"),
    "code for attention": (changed(CONFIG, attn_implementation="me/fast"), "me/fast"),
    "deep JSON": (text(MODULES, "[" * 200_000), "modules.json is damaged"),
    "a module outside": (changed_module(2, path="../../else"), "modules.json: path"),
    "an unknown module": (changed_module(1, type="x.Bow"), "x.Bow"),
    "a Dense behind Normalize": (normalize_first, "modules.json: unsupported module"),
    "no pooling": (changed_module(1, path="9_Pooling"), "9_Pooling"),
    "a Dense of another size": (changed(DENSE, in_features=31), "32 outputs"),
    "a huge Dense": (changed(DENSE, out_features=10**12), "2_Dense/config.json: out"),
    "no config": (without(CONFIG), "config.json"),
    "an unknown type": (changed(CONFIG, model_type="hal9000"), "config.json cannot be"),
    "another hidden size": (changed(CONFIG, hidden_size=64), "embeddings"),
    "heads that do not divide": (changed(CONFIG, num_attention_heads=5), "makes no"),
    "a million layers": (changed(CONFIG, num_hidden_layers=10**6), "1000000 is more"),
    "cut weights": (cut, "copy the file again"),
    "weights that are a pipe": (pipe, "is not a regular file"),
    "a header of huge tensors": (huge_header, "is not a safetensors file"),
    "an index without a map": (text(INDEX, "{}"), "is not an index of weights"),
    "an adapter without a base": (
        adapter_alone(r=4),
        "adapter_config.json: base_model_name_or_path",
    ),
    "an unknown field": (text("vembed.json", '{"mood": 1}'), "vembed.json: "),
}
BROKEN_LATE = {
    "a Dense of a function": (
        changed(DENSE, activation_function="os.system"),
        "os.sys",
    ),
    "a Dense without weights": (without("2_Dense/model.safetensors"), "Dense module"),
    "a missing weight": (without_a_weight, "lacks 1"),
    "no weights": (without("model.safetensors"), "no .safetensors file"),
    "an empty tokenizer": (text("tokenizer.json", "{}"), "the tokenizer of"),
}
"""Kinds that only loading shows, in memory of at most the size of the files and 512 MB."""


@pytest.fixture
def folder(tmp_path):
    return tiny.tiny_bert_st(tmp_path / "model", dense_dim=12)


@pytest.mark.parametrize("name", [*BROKEN, *BROKEN_LATE])
def test_a_broken_folder_is_one_sentence_before_weights_are_read(
    folder, name, monkeypatch
):
    alter, says = (BROKEN | BROKEN_LATE)[name]
    alter(folder)
    if name in BROKEN:
        monkeypatch.setattr(
            PreTrainedModel,
            "from_pretrained",
            lambda *args, **options: pytest.fail("weights are read"),
        )
    began = time.process_time()
    with pytest.raises(UserError) as caught:
        vembed.Embedder(folder)
    message = str(caught.value)
    assert says in message and str(folder) in message and "\n" not in message
    assert time.process_time() - began < 10


def test_an_adapter_of_itself_is_no_endless_loop(folder):
    adapter_alone(base_model_name_or_path=str(folder), r=4)(folder)
    with pytest.raises(UserError, match="adapter on top of another adapter"):
        vembed.Embedder(folder)
