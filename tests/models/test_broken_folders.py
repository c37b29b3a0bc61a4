"""Broken model folders: one sentence with the file and what is wrong in it, before any weights are read."""

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
    "no modules": (text("modules.json", "[]"), "modules.json: "),
    "deep JSON": (
        text("modules.json", "[" * 200_000),
        "modules.json is damaged: it is not JSON",
    ),
    "a module without type": (module(1, type=GONE), "modules.json: 1.type"),
    "a module outside": (module(2, path="../../elsewhere"), "modules.json: path"),
    "an unknown module": (module(1, type="x.Bow"), "unsupported module type x.Bow"),
    "a Dense behind Normalize": (normalize_first, "modules.json: unsupported module"),
    "a pooling that is missing": (
        module(1, path="9_Pooling"),
        "9_Pooling has no config.json",
    ),
    "a length that is a text": (
        values("sentence_bert_config.json", max_seq_length="long"),
        "max_seq_length",
    ),
    "a Dense of another size": (dense(in_features=31), "follows 32 outputs"),
    "a Dense of a huge size": (dense(out_features=10**12), "2_Dense/config.json: out"),
    "a Dense of an unknown class": (
        dense(activation_function="os.system"),
        "os.system",
    ),
    "a Dense of a layer": (dense(activation_function="torch.nn.Linear"), "Linear."),
    "a Dense without weights": (
        lambda folder: (folder / "2_Dense/model.safetensors").unlink(),
        "the Dense module of",
    ),
    "a config that is a list": (
        text("config.json", "[]"),
        "config.json is damaged: it holds a list",
    ),
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        "has no config.json",
    ),
    "an unknown model_type": (config(model_type="hal9000"), "config.json cannot be"),
    "another hidden size": (
        config(hidden_size=64),
        "config.json does not fit the weights: embeddings",
    ),
    "heads that do not divide": (config(num_attention_heads=5), "config.json makes no"),
    "a large vocabulary": (
        config(vocab_size=2**31),
        "config.json does not fit the weights",
    ),
    "a million layers": (config(num_hidden_layers=10**6), 'layers": 1000000 is more'),
    "layers that are not there": (config(num_hidden_layers=100), "lacks"),
    "weights that are a pickle": (torch_file, "is not a safetensors file"),
    "weights that are cut": (cut, "copy the file again"),
    "weights that are a pipe": (pipe, "is not a regular file"),
    "a header of huge tensors": (
        header(
            '{"a": {"dtype": "F32", "shape": [9999999999], "data_offsets": [0, 4]}}'
        ),
        "is not a safetensors file",
    ),
    "an index without a map": (
        text("model.safetensors.index.json", "{}"),
        "is not an index of weights",
    ),
    "an index of a missing file": (
        text("model.safetensors.index.json", '{"weight_map": {"a": "b.safetensors"}}'),
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
    "a description of another version": (saved(mood="good"), "vembed.json: mood"),
    "a description of an unknown family": (saved(family="martian"), "family 'martian'"),
    "a description that leads out": (
        saved(image_source="../../x"),
        "vembed.json: image_source '../../x' leads out",
    ),
    "a tokenizer of nothing": (text("tokenizer.json", "{}"), "the tokenizer of"),
}
LATE = {
    "layers that are not there",
    "a missing weight",
    "a tokenizer of nothing",
}
"""Kinds that only loading shows, in memory of at most the size of the files and 512 MB."""
LATE |= {"a Dense of an unknown class", "a Dense of a layer", "no weights"}
LATE.add("a Dense without weights")


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
    ["no config", "a Dense of another size", "weights that are a pipe"],
)
def test_the_commands_say_it_with_code_2(folder, tmp_path, name):
    BROKEN[name][0](folder)
    data = tmp_path / "data.jsonl"
    data.write_text('{"query": "a", "positive": "b"}\n')
    result = CliRunner().invoke(app, ["eval", str(folder), str(data)])
    assert result.exit_code == 2 and BROKEN[name][1] in result.output.replace("\n", " ")
    assert "Traceback" not in result.output
