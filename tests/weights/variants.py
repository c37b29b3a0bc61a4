"""Models of one architecture with different weights, and evaluation data for them."""

import shutil

import torch
from safetensors.torch import load_file, save_file

from tests.data.files import pair, write_jsonl
from tests.tiny import shared, texts, tiny_bert_st


def variant(folder, seed, *, by=0.05):
    """A copy of a model with noise on its weights."""
    shutil.copytree(shared(tiny_bert_st), folder)
    draw = torch.Generator().manual_seed(seed)
    path = folder / "model.safetensors"
    noisy = {}
    for name, tensor in load_file(path).items():
        noisy[name] = tensor + by * torch.randn(tensor.shape, generator=draw)
    save_file(noisy, path, metadata={"format": "pt"})
    return folder


def pairs(path, count=12):
    """Queries that share words with what they should find."""
    rows = [pair(text, f"{text} found") for text in texts(count)]
    write_jsonl(path, rows)
    return path
