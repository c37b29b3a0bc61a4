"""Models of one architecture with different weights, and evaluation data for them."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file

from tests.tiny import shared, texts, tiny_bert_st


def variant(folder, seed, *, of=None, by=0.05):
    """A copy of a model with noise on its weights."""
    shutil.copytree(of or shared(tiny_bert_st), folder)
    draw = torch.Generator().manual_seed(seed)
    path = folder / "model.safetensors"
    noisy = {
        name: tensor + by * torch.randn(tensor.shape, generator=draw)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(noisy, path, metadata={"format": "pt"})
    return folder


def pairs(path, count=12):
    """Queries that share words with what they should find."""
    rows = [{"query": text, "positive": f"{text} found"} for text in texts(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
