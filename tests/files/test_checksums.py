"""Checksums of weights: written with a model, compared where the weights are used."""

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.tiny import shared, tiny_bert_st
from tests.training.test_run import settings
from vembed import Embedder, train
from vembed.cli.main import run_process
from vembed.errors import UserError
from vembed.files import CHECKSUMS


@pytest.fixture(scope="module")
def final(tmp_path_factory):
    options = settings(
        tmp_path_factory.mktemp("run"),
        max_steps=1,
        val_data_path=None,
        mrl_dims=[8, 16],
        mrl_projection=True,
    )
    return train(options).output_dir / "final"


@pytest.fixture
def model(final, tmp_path):
    return shutil.copytree(final, tmp_path / "model")


def flip_last_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("part", ["", "*_Dense/"])
@pytest.mark.parametrize("command", ["encode", "merge"])
def test_a_flipped_bit_is_found_where_weights_are_used(
    command, part, model, tmp_path, capsys
):
    (weights,) = model.glob(f"{part}model.safetensors")
    flip_last_bit(weights)
    texts = tmp_path / "texts.txt"
    texts.write_text("a red apple\n")
    words = {
        "encode": f"{texts} {tmp_path}/vectors.npy",
        "merge": f"{model} --output {tmp_path}/merged",
    }[command]
    assert run_process(command, [str(model), *words.split()]) != 0
    error = capsys.readouterr().err
    assert "model.safetensors does not match its checksum" in error
    assert str(model / CHECKSUMS) in error


def test_a_copy_keeps_the_checksums_and_a_merge_has_new_ones(model, tmp_path):
    flip_last_bit(model / "model.safetensors")
    copy = tmp_path / "copy"
    assert run_process("export", [str(model), str(copy)]) == 0
    with pytest.raises(UserError, match=r"model\.safetensors"):
        Embedder(copy)


def test_a_folder_without_checksums_and_a_model_that_was_changed(model):
    weights = model / "model.safetensors"
    tensors = load_file(weights)
    name = next(iter(tensors))
    tensors[name] = tensors[name] + np.float32(1)
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(UserError, match=CHECKSUMS):
        Embedder(model)
    (model / CHECKSUMS).unlink()
    assert Embedder(model).encode(["a"]).shape == (1, 16)
    assert not (shared(tiny_bert_st) / CHECKSUMS).exists()
