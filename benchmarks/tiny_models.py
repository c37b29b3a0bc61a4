"""Models of the benchmark of defaults: all-MiniLM-L6-v2, a decoder and a CLIP with initial weights, and both with
weights that vembed has trained: the decoder by the next token on functions of the standard library, the CLIP on words
in another form."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.families.pictures import words_and_pictures
from tests.families.scratch import small_clip
from tests.tiny import WORDS
from vembed.cli.commands.demo import demo_model, standard_library_pairs
from vembed.data_tools.new_tokenizer import train_tokenizer

VOCABULARY = 4096
NUM_PAIRS = 2000
OF_EMBEDDING_MODELS = (
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "vembed.json",
)
NUM_LINES = 4
MOST_LINES = 16
"""Lines of a piece of a function, and of a function in all."""


def encoder(_: Path) -> Path:
    """Return all-MiniLM-L6-v2."""
    return demo_model()


def decoder(folder: Path) -> Path:
    """Return a Qwen3 of two layers with initial weights, and a tokenizer for texts of the standard library."""
    return _decoder(folder, hidden_size=128, layers=2)


def trained_decoder(folder: Path) -> Path:
    """Return a Qwen3 of four layers, trained by the next token on docstrings and functions of the standard library."""
    pairs = standard_library_pairs()
    lines = [text for pair in pairs for text in (pair.query, *_pieces(pair.positive))]
    random.Random(0).shuffle(lines)
    with tempfile.TemporaryDirectory() as name:
        data = Path(name, "texts.jsonl")
        data.write_text(
            "".join(json.dumps({"text": line}) + "\n" for line in lines),
            encoding="utf-8",
        )
        start = _decoder(Path(name, "start"), hidden_size=192, layers=4)
        return _trained(start, data, folder, loss="none", max_length=48, epochs=1)


def trained_clip(folder: Path) -> Path:
    """Return a CLIP that was trained on pictures of words in one size."""
    with tempfile.TemporaryDirectory() as name:
        start = Path(name, "start")
        start.mkdir()
        words = sorted({word[:5] for word in WORDS})
        data = words_and_pictures(Path(name), words, copies=200, name="train", seed=0)
        return _trained(small_clip(start), data, folder, batch_size=64, epochs=24)


def _decoder(folder: Path, *, hidden_size: int, layers: int) -> Path:
    from transformers import Qwen3Config, Qwen3Model

    pairs = standard_library_pairs()[:NUM_PAIRS]
    size = train_tokenizer(
        (text for pair in pairs for text in (pair.query, pair.positive)),
        folder,
        vocab_size=VOCABULARY,
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=size,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=3 * hidden_size,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        initializer_range=0.05,
    )
    Qwen3Model(config).save_pretrained(folder)
    return folder


def _pieces(text: str) -> list[str]:
    """Return a function in pieces of a few lines."""
    lines = text.splitlines()
    return [
        "\n".join(lines[at : at + NUM_LINES])
        for at in range(0, min(len(lines), MOST_LINES), NUM_LINES)
    ]


def _trained(model: Path, data: Path, folder: Path, **options: Any) -> Path:
    """Train initial weights by the defaults and copy the model's own files to `folder`: without those that would say
    that it is an embedding model already."""
    import vembed

    settings = {
        "model_name": str(model),
        "from_scratch": True,
        "data_path": str(data),
        "report_to": "none",
    }
    with tempfile.TemporaryDirectory() as name:
        result = vembed.train(
            {
                **settings,
                "output_dir": str(Path(name, "run")),
                "console": "quiet",
                "seed": 0,
                **options,
            }
        )
        folder.mkdir(parents=True, exist_ok=True)
        for file in result.model_dir.iterdir():
            if file.is_file() and file.name not in OF_EMBEDDING_MODELS:
                shutil.copy(file, folder)
    return folder


MODELS: dict[str, Callable[[Path], Path]] = {
    "encoder": encoder,
    "decoder": decoder,
    "clip": small_clip,
    "trained-decoder": trained_decoder,
    "trained-clip": trained_clip,
}
"""Family -> function that returns a model's folder, made in the folder that it is given."""
INITIAL = ("decoder", "clip")
"""Those with initial weights."""


def made(family: str, folder: Path) -> Path:
    """Return the model's folder below `folder`, where it is made if it is not there."""
    model_folder = folder / family
    if not (model_folder / "config.json").is_file():
        model_folder.mkdir(parents=True, exist_ok=True)
        return MODELS[family](model_folder)
    return model_folder
