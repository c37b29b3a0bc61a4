"""Trainings of tiny models that run on the CPU and on the imitation device."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from tests import tiny

Data = Literal["texts", "captions", "pictures"]
NUM_PAIRS = 16
STEPS = 3
SHARED_OPTIONS: dict[str, Any] = {
    "batch_size": 8,
    "max_steps": STEPS,
    "learning_rate": 1e-3,
    "logging_steps": STEPS,
    "num_workers": 0,
    "report_to": [],
    "save_steps": 1_000_000,
}


@dataclass(frozen=True)
class Case:
    """One training."""

    name: str
    make: Callable[..., Path]
    """The tiny model."""
    data: Data = "texts"
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the config."""
    models: dict[str, Callable[..., Path]] = field(default_factory=dict)
    """Further models, by the option that names them."""
    is_default: bool = False
    """True if it is among those that run in every test, and stand in the table of kernels."""

    def config(self, folder: Path, *, on_cpu: bool) -> dict[str, Any]:
        """Return the config, with the data written into the folder. CPUs have no float16: float32 takes its place."""
        options = dict(self.options)
        if on_cpu and options["mixed_precision"] == "fp16":
            options["mixed_precision"] = "no"
        others = {
            option: str(tiny.shared(make)) for option, make in self.models.items()
        }
        return {
            "model_name": str(tiny.shared(self.make)),
            "data_path": str(DATA[self.data](folder)),
            "output_dir": str(folder / "run"),
            **SHARED_OPTIONS,
            **others,
            **options,
        }


# ---- data ------------------------------------------------------------------------------------------------------


def write_texts(folder: Path) -> Path:
    """Queries with a positive and a hard negative; every fourth positive is the first one again."""
    words = tiny.texts(3 * NUM_PAIRS, seed=3, longest=30)
    rows = [
        {
            "query": words[3 * row],
            "positive": words[1] if row % 4 == 3 else words[3 * row + 1],
            "negatives": [words[3 * row + 2]],
            "positive_scores": [0.9],
            "negative_scores": [0.1 + row / 50],
        }
        for row in range(NUM_PAIRS)
    ]
    return write_rows(folder, rows)


def write_captions(folder: Path) -> Path:
    """Texts with the picture that they find."""
    captions = tiny.texts(NUM_PAIRS, seed=4, longest=8)
    rows = [
        {"query": caption, "positive": {"image": write_picture(folder, number)}}
        for number, caption in enumerate(captions)
    ]
    return write_rows(folder, rows)


def write_pictures(folder: Path) -> Path:
    """Pairs of pictures."""
    rows = [
        {
            "query": {"image": write_picture(folder, 2 * row)},
            "positive": {"image": write_picture(folder, 2 * row + 1)},
        }
        for row in range(NUM_PAIRS)
    ]
    return write_rows(folder, rows)


def write_picture(folder: Path, number: int) -> str:
    """Write a picture of noise; return its path."""
    path = folder / f"{number}.png"
    pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return str(path)


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write records as JSON Lines; return the path."""
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


DATA: dict[Data, Callable[[Path], Path]] = {
    "texts": write_texts,
    "captions": write_captions,
    "pictures": write_pictures,
}


# ---- families x options ----------------------------------------------------------------------------------------

BF16 = {"mixed_precision": "bf16"}
FLOAT32 = {"mixed_precision": "no"}
FP16 = {"mixed_precision": "fp16"}
LORA = {"use_lora": True, "lora_r": 8}
CHECKPOINTS = {"gradient_checkpointing": True}
SIZES = {"mrl_dims": [24, 16, 8]}
CACHE = {"use_gradient_cache": True, "micro_batch_tokens": 144}
MASKS = {"false_negative_margin": 0.1}
ROUNDED = {"quantize_embeddings": "int8"}
MIXED = {"losses": [{"loss": "infonce", "mix_negatives": 2}]}
HARDNESS = {"losses": [{"loss": "infonce", "hardness_alpha": 1.0, "focal_gamma": 1.0}]}
OWN_NEGATIVES = {"hard_negatives_scope": "own"}
ALL_PAIRS = {"same_side_negatives": "both"}
BY_SCORES = {"loss": "kl", "teacher": "scores"}
SEVERAL_LOSSES = {"losses": [{"loss": "infonce"}, {"loss": "kl", "teacher": "scores"}]}

TEXT_FAMILIES = {
    "bert": tiny.tiny_bert,
    "distilbert": tiny.tiny_distilbert,
    "gemma": tiny.tiny_gemma,
    "gpt2": tiny.tiny_gpt2,
    "llama": tiny.tiny_llama,
    "mistral": tiny.tiny_mistral,
    "modernbert": tiny.tiny_modernbert,
    "mpnet": tiny.tiny_mpnet,
    "qwen2": tiny.tiny_qwen2,
    "qwen3": tiny.tiny_qwen3,
    "roberta": tiny.tiny_roberta,
    "t5": tiny.tiny_t5,
    "xlmr": tiny.tiny_xlmr,
}
CAPTION_FAMILIES = {
    "clip": tiny.tiny_clip,
    "qwen2-vl": tiny.tiny_qwen2_vl,
    "qwen2.5-vl": tiny.tiny_qwen2_5_vl,
    "qwen3-vl": tiny.tiny_qwen3_vl,
    "siglip": tiny.tiny_siglip,
    "siglip2": tiny.tiny_siglip2,
}
PICTURE_FAMILIES = {
    "convnext": tiny.tiny_convnext,
    "dinov2": tiny.tiny_dinov2,
    "dinov3": tiny.tiny_dinov3,
    "vit": tiny.tiny_vit,
    "vitmae": tiny.tiny_vitmae,
}


def default_cases() -> list[Case]:
    """Return what every test runs: one of each kind of model, and each option once."""
    bert = tiny.tiny_bert
    qwen3 = tiny.tiny_qwen3
    clip = tiny.tiny_clip
    teacher = {"teacher": tiny.tiny_roberta}
    rows = [
        Case("bert float32", bert, options=FLOAT32),
        Case("bert bf16", bert, options=BF16),
        Case("bert fp16", bert, options=FP16),
        Case("bert bf16 cache sizes", bert, options=BF16 | CACHE | SIZES),
        Case("bert bf16 masks", bert, options=BF16 | MASKS | OWN_NEGATIVES),
        Case("bert bf16 teacher", bert, options=BF16 | {"loss": "kl"}, models=teacher),
        Case("bert bf16 scores", bert, options=BF16 | SEVERAL_LOSSES),
        Case("qwen3 bf16", qwen3, options=BF16),
        Case("qwen3 bf16 lora", qwen3, options=BF16 | LORA),
        Case("qwen3 bf16 lora checkpoints", qwen3, options=BF16 | LORA | CHECKPOINTS),
        Case("modernbert bf16", tiny.tiny_modernbert, options=BF16),
        Case("clip bf16", clip, "captions", BF16),
        Case("clip bf16 frozen", clip, "captions", BF16 | {"freeze": ["vision"]}),
        Case("vit bf16", tiny.tiny_vit, "pictures", BF16),
        Case("qwen3-vl bf16", tiny.tiny_qwen3_vl, "captions", BF16),
        Case(
            "bert and dinov2 bf16",
            bert,
            "captions",
            BF16,
            {"image_model_name": tiny.tiny_dinov2},
        ),
    ]
    return [Case(**{**vars(row), "is_default": True}) for row in rows]


def further_cases() -> list[Case]:
    """Return the rest of the matrix: every family in float32 and bf16, and every option with several families."""
    rows = []
    families: list[tuple[Data, dict[str, Callable[..., Path]]]] = [
        ("texts", TEXT_FAMILIES),
        ("captions", CAPTION_FAMILIES),
        ("pictures", PICTURE_FAMILIES),
    ]
    for data, makers in families:
        for family, make in makers.items():
            for precision, options in (("float32", FLOAT32), ("bf16", BF16)):
                rows.append(Case(f"{family} {precision}", make, data, options))
    choices = {
        "lora": LORA,
        "checkpoints": CHECKPOINTS,
        "sizes": SIZES,
        "cache": CACHE,
        "lora checkpoints cache sizes": LORA | CHECKPOINTS | CACHE | SIZES,
    }
    for family in ("bert", "qwen3", "modernbert", "gpt2", "clip", "qwen2.5-vl", "vit"):
        for data, makers in families:
            if family in makers:
                for choice, options in choices.items():
                    name = f"{family} bf16 {choice}"
                    rows.append(Case(name, makers[family], data, BF16 | options))
    losses: dict[str, dict[str, Any]] = {
        "own negatives": OWN_NEGATIVES,
        "all pairs": ALL_PAIRS,
        "hardness": HARDNESS,
        "mixed negatives": MIXED,
        "int8 vectors": ROUNDED,
        "bits": {"quantize_embeddings": "binary"},
        "kl by scores": BY_SCORES,
        "several losses": SEVERAL_LOSSES,
        **{
            loss: {"loss": loss}
            for loss in ("sigmoid", "triplet", "circle", "spread_out")
        },
    }
    for choice, options in losses.items():
        name = f"bert bf16 {choice}"
        rows.append(Case(name, tiny.tiny_bert, options=BF16 | options))
    teacher = {"teacher": tiny.tiny_roberta}
    for loss in ("kl", "margin_mse", "embedding", "relational", "listwise", "ranknet"):
        options = BF16 | {"loss": loss}
        rows.append(
            Case(f"bert bf16 {loss}", tiny.tiny_bert, "texts", options, teacher)
        )
    guide = {"guide": tiny.tiny_roberta}
    rows.append(Case("bert bf16 guide", tiny.tiny_bert, "texts", BF16, guide))
    taken = {case.name for case in default_cases()}
    return [row for row in rows if row.name not in taken]


def all_cases() -> list[Case]:
    """Return the whole matrix."""
    return [*default_cases(), *further_cases()]
