"""Pickled weights and files outside of the folder: refused by every command that reads a model folder."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

import vembed
from tests import tiny
from vembed.cli.commands.export import copy_model
from vembed.errors import UserError
from vembed.mining.judges import load_judge
from vembed.mining.options import MineConfig, Retriever
from vembed.mining.retrievers import load_encoder
from vembed.weights.sources import open_source


class Marker:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture(params=["x.bin", "../outside.safetensors", 5])
def indexed(request, tmp_path):
    """A model whose index names a pickle or a file elsewhere, and the file that unpickling makes."""
    folder = tmp_path / "model"
    trace = tmp_path / "trace"
    tiny.tiny_bert(folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    target = folder / str(request.param)
    target.parent.mkdir(exist_ok=True)
    if target.suffix == ".safetensors":
        shutil.copy(folder / "other.safetensors", target)
    else:
        torch.save({"a": Marker(trace)}, target)
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, request.param)}
    tiny.write_json(folder / "model.safetensors.index.json", index)
    return folder, trace


def test_an_index_that_names_anything_but_safetensors_files_of_its_folder_is_refused(
    indexed, tmp_path
):
    folder, trace = indexed
    model = str(folder)
    data = tmp_path / "data.jsonl"
    data.write_text('{"query": "a", "positive": "b"}\n' * 4)
    run = {"model_name": model, "data_path": str(data), "batch_size": 2}
    options = MineConfig(
        data_path=str(data),
        output_path="mined.jsonl",
        model_name="m",
        judges=[{"model": model}],
    )
    retriever = Retriever(model=model, library="sentence_transformers")
    cpu = torch.device("cpu")
    copy = tmp_path / "copy"
    readers = {
        "training": lambda: vembed.train({**run, "output_dir": str(tmp_path / "out")}),
        "Embedder": lambda: vembed.Embedder(folder),
        "export": lambda: copy_model(model, copy),
        "export --merge": lambda: copy_model(model, copy, merge=True),
        "merge": lambda: open_source(model),
        "mining": lambda: load_encoder(retriever, options, cpu),
        "a judge": lambda: load_judge(options.judges[0], options, cpu),
    }
    for name, read in readers.items():
        with pytest.raises(UserError, match=r"plain names of \.safetensors files"):
            read()
            pytest.fail(name)
    assert not trace.exists() and not copy.exists()


def test_other_ways_to_a_pickle_are_closed_too(tmp_path):
    folder = tiny.tiny_bert(tmp_path)
    path = folder / "config.json"
    tiny.change_json(path, transformers_weights="adapter_model.bin")
    with pytest.raises(UserError, match=r"transformers_weights .*adapter_model\.bin"):
        vembed.Embedder(folder)
    tiny.change_json(path, transformers_weights=None)
    adapter = {"base_model_name_or_path": "../elsewhere", "r": 1}
    tiny.write_json(folder / "adapter_config.json", adapter)
    with pytest.raises(UserError, match=r"adapter_config\.json"):
        vembed.Embedder(folder)
