"""Models of the benchmark of defaults: all-MiniLM-L6-v2, and a decoder and a CLIP with initial weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tests.families.scratch import small_clip
from vembed.tools.demo import demo_model
from vembed.tools.demo_data import standard_library_pairs
from vembed.tools.train_tokenizer import train_tokenizer

VOCABULARY = 4096
NUM_PAIRS = 2000


def encoder(_: Path) -> Path:
    """Return all-MiniLM-L6-v2."""
    return demo_model()


def decoder(folder: Path) -> Path:
    """Return a Qwen3 of two layers with initial weights, and a tokenizer for texts of the standard library."""
    from transformers import Qwen3Config, Qwen3Model

    pairs = standard_library_pairs()[:NUM_PAIRS]
    size = train_tokenizer((text for pair in pairs for text in (pair.query, pair.positive)), folder,
                           vocab_size=VOCABULARY)  # fmt: skip
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=size, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, intermediate_size=384, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=1,
        initializer_range=0.05,
    )  # fmt: skip
    Qwen3Model(config).save_pretrained(folder)
    return folder


MODELS: dict[str, Callable[[Path], Path]] = {"encoder": encoder, "decoder": decoder, "clip": small_clip}
"""Family -> function that returns a model's folder, made in the folder that it is given."""
