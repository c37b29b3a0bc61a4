"""Every family through the real step: Gradient Cache on and off, one rank and two, copies and shards, one gradient."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests import tiny
from tests.harness import run_ranks
from tests.models.families import pictures
from tests.parity.engine import (
    LORA,
    all_gradients,
    assert_equal_gradients,
    build,
    formula_gradients,
    joined_batch,
    step_of,
    with_whole_loss,
)
from tests.tiny import shared, texts
from vembed.config.schema import TrainConfig
from vembed.data.batching.rank_batch import make_rank_batch
from vembed.data.examples import Example, Item
from vembed.inference.embedder import to_item
from vembed.models.building import stored_scale_and_bias
from vembed.parallel.session import start_session
from vembed.parallel.step_memory import Budget

NUM_EXAMPLES = 7
EXACT = 1e-9
ROUNDED = 2e-5
"""Errors in float64; rotary positions, RMS norms and resized tables of positions round to float32 inside the models."""


@dataclass(frozen=True)
class Family:
    """A model and how it is trained."""

    name: str
    make: Callable[..., Path]
    options: dict[str, Any] = field(default_factory=dict)
    image_model: Callable[..., Path] | None = None
    tolerance: float = EXACT

    def config(self, **more):
        """The run that this stands for; to be called where the tiny models are made."""
        options = {"gradient_checkpointing": False, **self.options, **more}
        if self.image_model is not None:
            options["image_model_name"] = str(shared(self.image_model))
        return TrainConfig(
            model_name=str(shared(self.make)),
            data_path="none",
            mixed_precision="no",
            **options,
        )


FAMILIES = [
    Family("clip", tiny.tiny_clip),
    Family("clip-frozen-images", tiny.tiny_clip, {"freeze": ["vision"]}),
    Family("clip-lora", tiny.tiny_clip, LORA),
    Family("siglip", tiny.tiny_siglip, {"loss": "sigmoid"}),
    Family(
        "siglip-frozen-texts", tiny.tiny_siglip, {"loss": "sigmoid", "freeze": ["text"]}
    ),
    Family("siglip2", tiny.tiny_siglip2, tolerance=ROUNDED),
    Family("vit", tiny.tiny_vit),
    Family("dinov2", tiny.tiny_dinov2),
    Family("dinov3", tiny.tiny_dinov3, tolerance=ROUNDED),
    Family("convnext", tiny.tiny_convnext),
    Family("mae", tiny.tiny_vitmae),
    Family("qwen3-vl", tiny.tiny_qwen3_vl, tolerance=ROUNDED),
    Family(
        "qwen3-vl-frozen-images",
        tiny.tiny_qwen3_vl,
        {"freeze": ["vision"]},
        tolerance=ROUNDED,
    ),
    Family(
        "qwen3-vl-lora",
        tiny.tiny_qwen3_vl,
        {**LORA, "freeze": ["vision"]},
        tolerance=ROUNDED,
    ),
    Family("qwen2-vl", tiny.tiny_qwen2_vl, tolerance=ROUNDED),
    Family(
        "qwen2.5-vl", tiny.tiny_qwen2_5_vl, {"freeze": ["vision"]}, tolerance=ROUNDED
    ),
    Family("composed", tiny.tiny_bert, image_model=tiny.tiny_dinov2),
    Family(
        "composed-frozen-texts",
        tiny.tiny_bert,
        {"freeze": ["text"]},
        image_model=tiny.tiny_dinov2,
    ),
]
BY_NAME = {family.name: family for family in FAMILIES}
GROUPS = {
    "one": (1, {"strategy": "single"}),
    "ddp-2": (2, {"strategy": "ddp"}),
    "fsdp2-2": (2, {"strategy": "fsdp"}),
}
SHARDED = (
    "clip",
    "siglip",
    "vit",
    "convnext",
    "qwen3-vl-lora",
    "composed",
)
"""What runs sharded too; tests/models/test_sharded.py has the gradients of every family's units."""
FAMILIES_OF = {
    "one": ("clip", "qwen3-vl-frozen-images"),
    "ddp-2": tuple(BY_NAME),
    "fsdp2-2": SHARDED,
}
TABLE = [(group, family) for group in GROUPS for family in FAMILIES_OF[group]]


def examples(modalities):
    """Rows for a model with these modalities. Of two ranks only the second meets images with texts, of other shapes."""
    words = texts(3 * NUM_EXAMPLES, seed=3, longest=12)
    refs = []
    for picture in pictures(3 * NUM_EXAMPLES):
        refs += to_item(picture).images
    built = []
    for row in range(NUM_EXAMPLES):
        text, other, third = (Item(words[3 * row + place]) for place in range(3))
        image, second, last = (
            Item(images=(refs[3 * row + place],)) for place in range(3)
        )
        if "multimodal" in modalities:
            both = Item(words[3 * row + 1], images=(refs[3 * row], refs[3 * row + 1]))
            query, positive, negative = (
                (text, other, third) if row < 4 else (text, both, image)
            )
        elif modalities == ("image",):
            query = image
            positive = second
            negative = last
        else:
            query = text
            positive = image
            negative = other if row % 2 else last
        built.append(Example(query, (positive,), (negative,) if row % 3 == 0 else ()))
    return built


def on_ranks(configs):
    """Called on every rank: each config's step without and with Gradient Cache; gradients, loss, units and
    modalities."""
    results = []
    with start_session(configs[0]) as session:
        for config in configs:
            embedder, loss, featuriser = build(config)
            frozen = embedder.frozen_modalities()
            image_bytes = embedder.frozen_image_token_bytes()
            modalities = embedder.description.modalities
            classes = embedder.description.layer_classes
            num_layers = sum(
                type(module).__name__ in classes for module in embedder.modules()
            )
            model = session.prepare(embedder, classes)
            units = sum(
                isinstance(module, FSDPModule)
                and type(module).__name__.removeprefix("FSDP") in classes
                for module in model.modules()
            )
            for cached in (False, True):
                step, rank_batch = step_of(
                    model,
                    loss,
                    featuriser,
                    session,
                    examples(modalities),
                    Budget(45, 10**9, cached),
                    frozen=frozen,
                    image_bytes=image_bytes,
                )
                result = step.accumulate(rank_batch, 3, weight=1.0, is_last_batch=True)
                step.synchronise(0.0)
                results.append(
                    {
                        "gradients": all_gradients(model, loss, result.loss_share),
                        "units": (units, num_layers),
                        "kept": result.num_kept_graphs,
                        "calls": result.num_forwards,
                    }
                )
                for module in (model, loss):
                    module.zero_grad(set_to_none=True)
    return results


@cache
def found(group):
    """All families of a group, in one start of its ranks: (family, cached) -> per rank."""
    world_size, more = GROUPS[group]
    families = FAMILIES_OF[group]
    configs = [BY_NAME[family].config(**more) for family in families]
    by_rank = run_ranks(on_ranks, world_size, configs)
    keys = [(family, cached) for family in families for cached in (False, True)]
    return {key: [rank[number] for rank in by_rank] for number, key in enumerate(keys)}


@cache
def wanted(name):
    """From the formula: one padded batch of each modality, one dense loss, autograd."""
    config = BY_NAME[name].config()
    model, loss, featuriser = build(config)
    rank_batch = make_rank_batch(examples(model.description.modalities), 0, featuriser)
    embeddings = torch.zeros(
        len(rank_batch.features), model.description.embedding_dim, dtype=torch.float64
    )
    for modality in model.description.modalities:
        places = []
        features = []
        for place, feature in enumerate(rank_batch.features):
            if feature.modality == modality:
                places.append(place)
                features.append(feature)
        if places:
            (rows,) = model([(modality, featuriser.collate(features))])
            embeddings = embeddings.index_put((torch.tensor(places),), rows)
    scale, _ = stored_scale_and_bias(model.description) or (None, None)
    return formula_gradients(
        config,
        model,
        loss,
        joined_batch(embeddings, [rank_batch]),
        model_temperature=None if scale is None else 1 / scale,
    )


@pytest.mark.parametrize("cached", [False, True], ids=["kept-graphs", "cached"])
@pytest.mark.parametrize(("group", "name"), TABLE)
def test_gradient_of_every_family_is_that_of_the_formula(group, name, cached):
    ranks = found(group)[name, cached]
    plain = wanted(name)
    assert all(rank["kept"] is not cached and rank["calls"] > 2 for rank in ranks)
    for rank in ranks:
        units, num_layers = rank["units"]
        assert num_layers > 0 and units == (num_layers if group == "fsdp2-2" else 0)
    ours = with_whole_loss([rank["gradients"] for rank in ranks])
    assert_equal_gradients(ours, plain, BY_NAME[name].tolerance)
