"""Model folders of known shapes with random weights, and rows of texts and images for them. Nothing is downloaded."""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from benchmarks.cases import Row, write_rows
from tests.tiny import add_sentence_transformers_files
from tests.tiny_tokenizers import (
    WORDS,
    clip_tokenizer,
    qwen_tokenizer,
    qwen_vl_tokenizer,
    wordpiece_tokenizer,
)

MEAN_WORDS = 80
"""Median length of the texts, which vary as natural ones do: many short ones, a few that fill `max_length`."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, of its batches and of its texts."""

    name: str
    layers: int
    hidden: int
    heads: int
    inner: int
    groups: int = 0
    """Heads of keys and values; 0: as many as of queries."""
    head: int = 64
    vocabulary: int = 30522
    max_length: int = 512
    batch: int = 1024
    images: bool = False
    image_size: int = 224
    vision: tuple[int, int, int, int] = (12, 768, 12, 3072)
    """Layers, width, heads and feed-forward of the image tower."""
    options: tuple[tuple[str, Any], ...] = ()
    """Options of the run, besides those of every run."""


BERT = Shape("bert-base", 12, 768, 12, 3072, options=(("use_gradient_cache", True),))
QWEN_SMALL = Shape(
    "qwen3-0.6b", 28, 1024, 16, 3072, groups=8, head=128, vocabulary=151_669, batch=256
)
QWEN_LARGE = Shape(
    "qwen3-8b-lora",
    36,
    4096,
    32,
    12_288,
    groups=8,
    head=128,
    vocabulary=151_665,
    batch=64,
    options=(
        ("use_lora", True),
        ("lora_dropout", 0.0),
        ("lora_r", 16),
        ("gradient_checkpointing", None),
    ),
)
CLIP = Shape(
    "clip-vit-b16",
    12,
    512,
    8,
    2048,
    vocabulary=49_408,
    max_length=77,
    batch=512,
    images=True,
)
QWEN_VL = Shape(
    "qwen3-vl-2b",
    28,
    2048,
    16,
    6144,
    groups=8,
    head=128,
    vocabulary=151_936,
    max_length=512,
    batch=64,
    images=True,
    vision=(24, 1024, 16, 4096),
    options=(("use_lora", True), ("lora_dropout", 0.0), ("lora_r", 16)),
)
SHAPES = (BERT, QWEN_SMALL, QWEN_LARGE, CLIP, QWEN_VL)


def small(shape: Shape) -> Shape:
    """Return the same kind of model in a size for CPUs."""
    values = {name: getattr(shape, name) for name in Shape.__dataclass_fields__}
    groups = 2 if shape.groups else 0
    values |= {
        "layers": 2,
        "hidden": 64,
        "heads": 4,
        "inner": 128,
        "groups": groups,
        "head": 16,
        "vocabulary": 1000,
    }
    values |= {
        "max_length": min(shape.max_length, 64),
        "batch": 8,
        "image_size": 32,
        "vision": (2, 64, 4, 128),
    }
    return Shape(**values)


def make_model(
    shape: Shape, folder: Path, device: torch.device, *, dropout: float = 0.0
) -> Path:
    """Write a model of this shape with random weights and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    makers: dict[str, Callable[[Shape, Path, float], Callable[[], PreTrainedModel]]] = {
        "bert": _bert,
        "qwen3": _qwen3,
        "clip": _clip,
        "qwen3-vl": _qwen3_vl,
    }
    kind = next(
        kind
        for kind in sorted(makers, key=len, reverse=True)
        if shape.name.startswith(kind)
    )
    make = makers[kind](shape, folder, dropout)
    # Drawn on the device and in 16 bits where the model is large: 8B numbers take minutes on a CPU.
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if shape.hidden >= 2048 else torch.float32)
    torch.manual_seed(0)
    try:
        with device:
            model = make()
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(folder)
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return folder


def count_parameters(folder: Path) -> tuple[int, int]:
    """Return the parameters of the language or text layers, and of the image tower, without embedding tables."""
    settings = json.loads((folder / "config.json").read_text())
    kind = settings["model_type"]
    classes: dict[str, tuple[Any, Any]] = {
        "bert": (BertConfig, BertModel),
        "qwen3": (Qwen3Config, Qwen3Model),
        "clip": (CLIPConfig, CLIPModel),
        "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
    }
    config_class, model_class = classes[kind]
    with torch.device("meta"):
        model = model_class(config_class.from_pretrained(folder))
    text = vision = 0
    for name, parameter in model.named_parameters():
        if "embed" in name or "lm_head" in name:
            continue
        if "vision" in name or "visual" in name:
            vision += parameter.numel()
        else:
            text += parameter.numel()
    return text, vision


def make_rows(shape: Shape, steps: int) -> list[Row]:
    """Return rows of distinct texts, or of texts and images."""
    draw = random.Random(0)

    def text(number: int, most: int) -> str:
        length = min(
            max(int(draw.lognormvariate(0.0, 0.8) * min(MEAN_WORDS, most / 2)), 3), most
        )
        # The number as words makes each text a different one.
        digits = [WORDS[int(digit)] for digit in str(number)]
        return " ".join([*digits, *draw.choices(WORDS, k=length)])

    most = max(shape.max_length - 12, 8)
    numbers = range(steps * shape.batch)
    if shape.images:
        return [
            {"query": text(number, min(most, 40)), "positive": f"{number}.jpg"}
            for number in numbers
        ]
    return [
        {
            "query": text(2 * number, min(most, 64)),
            "positive": text(2 * number + 1, most),
        }
        for number in numbers
    ]


def write_data(shape: Shape, rows: list[Row], folder: Path) -> Path:
    """Write the rows so that vembed's shuffling gives them in order, and their images. Return the data file."""
    folder.mkdir(parents=True, exist_ok=True)
    if shape.images:
        write_images([folder / str(row["positive"]) for row in rows], shape.image_size)
        rows = [
            {"query": row["query"], "positive": {"image": row["positive"]}}
            for row in rows
        ]  # type: ignore[dict-item]
    write_rows(rows, shape.batch, folder / "data.jsonl")
    return folder / "data.jsonl"


def write_images(paths: list[Path], size: int) -> None:
    """Write distinct JPEG files of this size, with low-frequency content as photographs have."""
    generator = torch.Generator().manual_seed(0)
    side = max(size // 8, 2)
    for path in paths:
        coarse = torch.randint(
            0, 256, (side, side, 3), generator=generator, dtype=torch.uint8
        )
        buffer = io.BytesIO()
        Image.fromarray(coarse.numpy()).resize(
            (size, size), Image.Resampling.BICUBIC
        ).save(buffer, "JPEG", quality=90)
        path.write_bytes(buffer.getvalue())


def remove(folder: Path) -> None:
    """Remove a folder that may be large."""
    shutil.rmtree(folder, ignore_errors=True)


# ---- one function per kind: writes tokenizer and processor, and returns the maker of the model ---


def _bert(shape: Shape, folder: Path, dropout: float) -> Callable[[], PreTrainedModel]:
    tokenizer = wordpiece_tokenizer()
    tokenizer.model_max_length = shape.max_length
    tokenizer.save_pretrained(folder)
    config = BertConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.inner,
        max_position_embeddings=shape.max_length,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        pad_token_id=0,
    )
    return lambda: BertModel(config)


def _decoder(shape: Shape) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.groups or shape.heads,
        "head_dim": shape.head,
        "intermediate_size": shape.inner,
        "max_position_embeddings": 4096,
    }


def _qwen3(shape: Shape, folder: Path, dropout: float) -> Callable[[], PreTrainedModel]:
    tokenizer = qwen_tokenizer()
    tokenizer.model_max_length = shape.max_length
    tokenizer.save_pretrained(folder)
    # As Qwen3-Embedding is published. Without these files Sentence Transformers would take the mean of a decoder.
    add_sentence_transformers_files(
        folder,
        pooling="last",
        similarity="cosine",
        hidden_dim=shape.hidden,
        max_seq_length=shape.max_length,
    )
    config = Qwen3Config(
        **_decoder(shape),
        attention_dropout=dropout,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=2,
    )
    return lambda: Qwen3Model(config)


def _clip(shape: Shape, folder: Path, dropout: float) -> Callable[[], PreTrainedModel]:
    tokenizer = clip_tokenizer()
    tokenizer.save_pretrained(folder)
    size = shape.image_size
    _write(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": size},
            "do_center_crop": True,
            "crop_size": {"height": size, "width": size},
            "do_resize": True,
            "do_normalize": True,
            "do_rescale": True,
            "image_mean": [0.481, 0.458, 0.408],
            "image_std": [0.269, 0.261, 0.276],
            "resample": 3,
        },
    )
    layers, width, heads, inner = shape.vision
    text = {
        "vocab_size": max(shape.vocabulary, len(tokenizer)),
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.inner,
        "max_position_embeddings": 77,
        "attention_dropout": dropout,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "image_size": size,
        "patch_size": 16,
        "attention_dropout": dropout,
    }
    config = CLIPConfig(
        text_config=text, vision_config=vision, projection_dim=min(512, shape.hidden)
    )
    return lambda: CLIPModel(config)


def _qwen3_vl(
    shape: Shape, folder: Path, dropout: float
) -> Callable[[], PreTrainedModel]:
    tokenizer = qwen_vl_tokenizer("right")
    tokenizer.model_max_length = 4096
    tokenizer.save_pretrained(folder)
    _write(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen3VLProcessor",
            "patch_size": 16,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "do_resize": True,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "size": {"shortest_edge": 32 * 32, "longest_edge": shape.image_size**2},
            "do_normalize": True,
            "do_convert_rgb": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "resample": 3,
        },
    )
    numbers = tokenizer.get_vocab()
    layers, width, heads, inner = shape.vision
    head = shape.head
    sections = [head // 2 - 2 * (head // 8), head // 8, head // 8]
    rope = {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": sections,
        "mrope_interleaved": True,
    }
    text = _decoder(shape) | {"rope_parameters": rope, "attention_dropout": dropout}
    vision = {
        "depth": layers,
        "hidden_size": width,
        "num_heads": heads,
        "intermediate_size": inner,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": shape.hidden,
        "num_position_embeddings": 16 if width < 512 else 2304,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=numbers["<|image_pad|>"],
        video_token_id=numbers["<|vision_end|>"],
        vision_start_token_id=numbers["<|vision_start|>"],
        vision_end_token_id=numbers["<|vision_end|>"],
    )
    return lambda: Qwen3VLForConditionalGeneration(config)


def _write(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=2))
