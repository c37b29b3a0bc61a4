"""Trainings of tiny models that run on the CPU and on the imitation device."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from tests import tiny
from tests.data.files import write_jsonl
from tests.models import families

Data = Literal["texts", "captions", "pictures"]
NUM_PAIRS = 16
STEPS = 3
SHARED_OPTIONS = {
    "batch_size": 8,
    "max_steps": STEPS,
    "learning_rate": 1e-3,
    "logging_steps": STEPS,
    "num_workers": 0,
    "report_to": [],
    "save_steps": 1_000_000,
    # Two passes of each modality measure the memory otherwise, which takes longer than these steps.
    "use_gradient_cache": False,
    "micro_batch_tokens": 1_000_000,
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

    def config(self, folder, *, on_cpu):
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


def write_texts(folder):
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
    return write_jsonl(folder / "train.jsonl", rows)


def write_captions(folder):
    """Texts with the picture that they find."""
    captions = tiny.texts(NUM_PAIRS, seed=4, longest=8)
    rows = [
        {"query": caption, "positive": {"image": write_picture(folder, number)}}
        for number, caption in enumerate(captions)
    ]
    return write_jsonl(folder / "train.jsonl", rows)


def write_pictures(folder):
    """Pairs of pictures."""
    rows = [
        {
            "query": {"image": write_picture(folder, 2 * row)},
            "positive": {"image": write_picture(folder, 2 * row + 1)},
        }
        for row in range(NUM_PAIRS)
    ]
    return write_jsonl(folder / "train.jsonl", rows)


def write_picture(folder, number):
    """Write a picture of noise; return its path."""
    path = folder / f"{number}.png"
    pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return str(path)


DATA = {
    "texts": write_texts,
    "captions": write_captions,
    "pictures": write_pictures,
}


def tiny_qwen3_of_28_layers(folder):
    """A Qwen3 as deep as Qwen3-Embedding-0.6B."""
    return tiny.tiny_qwen3(folder, layers=28)


FLOAT32 = {"mixed_precision": "no"}
BF16 = {"mixed_precision": "bf16"}
FP16 = {"mixed_precision": "fp16"}
MEASURED = {"use_gradient_cache": "auto", "micro_batch_tokens": "auto"}
LORA = {"use_lora": True, "lora_r": 8}
CACHE = {"use_gradient_cache": True, "micro_batch_tokens": 144, "mrl_dims": [24, 16, 8]}
PARTS = {"micro_batch_tokens": 144}
MASKS = {"false_negative_margin": 0.1, "hard_negatives_scope": "own"}
SEVERAL_LOSSES = {"losses": [{"loss": "infonce"}, {"loss": "kl", "teacher": "scores"}]}
TOWERS = {"image_model_name": tiny.tiny_dinov2}
TEACHER = {"teacher": tiny.tiny_roberta}


def twelve_layers(folder):
    """Write a BERT as deep as the published ones."""
    return tiny.tiny_bert(folder, layers=12)


# One of each kind of model, and each option once.
CASES = [
    Case("bert float32", tiny.tiny_bert, options=FLOAT32 | MEASURED),
    Case("bert bf16", tiny.tiny_bert, options=BF16),
    Case(
        "bert fp16 masks scores", tiny.tiny_bert, options=FP16 | MASKS | SEVERAL_LOSSES
    ),
    Case("bert bf16 cache sizes", tiny.tiny_bert, options=BF16 | CACHE),
    Case("bert-12 bf16 in 5 parts", twelve_layers, options=BF16 | PARTS),
    Case("bert bf16 teacher", tiny.tiny_bert, "texts", BF16 | {"loss": "kl"}, TEACHER),
    Case("qwen3 bf16", tiny.tiny_qwen3, options=BF16),
    Case("qwen3 bf16 lora", tiny.tiny_qwen3, options=BF16 | LORA),
    Case(
        "qwen3 bf16 lora checkpoints",
        tiny.tiny_qwen3,
        options=BF16 | LORA | {"gradient_checkpointing": True},
    ),
    Case(
        "qwen3 28 layers bf16 lora",
        tiny_qwen3_of_28_layers,
        options=BF16 | LORA | {"torch_dtype": "bfloat16"},
    ),
    Case("modernbert bf16", tiny.tiny_modernbert, options=BF16),
    Case("clip bf16", tiny.tiny_clip, "captions", BF16),
    Case("clip bf16 frozen", tiny.tiny_clip, "captions", BF16 | {"freeze": ["vision"]}),
    Case("vit bf16", tiny.tiny_vit, "pictures", BF16),
    Case("qwen3-vl bf16", tiny.tiny_qwen3_vl, "captions", BF16),
    Case("bert and dinov2 bf16", tiny.tiny_bert, "captions", BF16, TOWERS),
]

EVERY_RUN = (
    "bert float32",
    "bert fp16 masks scores",
    "bert bf16 cache sizes",
    "qwen3 bf16 lora checkpoints",
    "clip bf16 frozen",
    "qwen3-vl bf16",
    "bert and dinov2 bf16",
)
"""Cases of CASES that every run of the tests has: each precision, the options with code of their own, and each kind of
input. The others belong to the matrix."""

# ---- the whole matrix, on demand -------------------------------------------------------------------------------

FAMILIES = {
    "texts": [*families.TEXT_ENCODERS, *families.TEXT_DECODERS],
    "captions": [*families.TWO_TOWERS, *families.VISION_LANGUAGE],
    "pictures": families.IMAGE_ENCODERS,
}
# Adam divides small gradients by their own size, and so their rounding errors: at 1e-3 the third loss of a Qwen2.5-VL
# differs by 2e-5, where the first loss and gradient differ by 7e-7.
PRECISIONS = {
    "float32": {"mixed_precision": "no", "learning_rate": 1e-4},
    "bf16": BF16,
}
WITH_CHOICES = ["bert", "qwen3", "modernbert", "gpt2", "clip", "qwen2_5_vl", "vit"]
CHOICES = {
    "lora": LORA,
    "checkpoints": {"gradient_checkpointing": True},
    "cache sizes": CACHE,
    "all": LORA | CACHE | {"gradient_checkpointing": True},
}
LOSS_OPTIONS = {
    "all pairs": {"same_side_negatives": "both"},
    "hardness": {
        "losses": [{"loss": "infonce", "hardness_alpha": 1.0, "focal_gamma": 1.0}]
    },
    "mixed negatives": {"losses": [{"loss": "infonce", "mix_negatives": 2}]},
    "int8 vectors": {"quantize_embeddings": "int8"},
    "bits": {"quantize_embeddings": "binary"},
    "kl by scores": {"loss": "kl", "teacher": "scores"},
}
PLAIN_LOSSES = ("sigmoid", "triplet", "circle", "spread_out")
TAUGHT_LOSSES = (
    "kl", "margin_mse", "embedding", "relational", "listwise", "ranknet"
)  # fmt: skip
RERANKER_LOSSES = ("bce", "infonce", "lambda", "ranknet", "listwise")


def whole_matrix():
    """Return every family, some with every option, and every loss of embedding models and rerankers with a BERT."""
    cases = list(CASES)
    for data, makes in FAMILIES.items():
        for make in makes:
            family = make.__name__.removeprefix("tiny_")
            for precision, options in PRECISIONS.items():
                cases.append(Case(f"{family}: {precision}", make, data, options))
            for choice, options in CHOICES.items():
                if family in WITH_CHOICES:
                    name = f"{family}: {choice}"
                    cases.append(Case(name, make, data, BF16 | options))
    bert = tiny.tiny_bert
    # Beside a GPU a single worker is a process, which starts during these steps.
    worker = BF16 | {"num_workers": 1}
    cases.append(Case("bert: a process for batches", bert, "texts", worker))
    for name, options in LOSS_OPTIONS.items():
        cases.append(Case(f"loss: {name}", bert, "texts", BF16 | options))
    for loss in PLAIN_LOSSES:
        cases.append(Case(f"loss: {loss}", bert, "texts", BF16 | {"loss": loss}))
    for loss in TAUGHT_LOSSES:
        options = BF16 | {"loss": loss}
        cases.append(Case(f"taught: {loss}", bert, "texts", options, TEACHER))
    guide = {"guide": tiny.tiny_roberta}
    cases.append(Case("loss: guide", bert, "texts", BF16, guide))
    for loss in RERANKER_LOSSES:
        options = BF16 | {"task": "rerank", "loss": loss}
        cases.append(Case(f"reranker: {loss}", bert, "texts", options))
    return cases
