"""Fingerprint of a modality's towers: a hash of everything, besides the inputs, that determines their features."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
import transformers
from torch import Tensor

from vembed.models.families.description import ModelDescription
from vembed.models.families.table import Modality
from vembed.models.processors import load_image_processor
from vembed.models.towers import tower_module, towers_of_modality

FORMAT = 1
"""Version of the fingerprint. Increase it when towers give other features for the same inputs and weights."""
_FIELDS = (
    "family",
    "pooling",
    "image_pooling",
    "max_length",
    "padding_side",
    "bidirectional_attention",
    "min_pixels",
    "max_pixels",
)
"""Description fields that change tower features. Prompts are part of the inputs."""


def tower_identity(
    description: ModelDescription, backbone: Any, modality: Modality, arithmetic: str
) -> str:
    """Return a hash that is equal in any run with the same weights, settings and dtypes. It reads every weight.

    `arithmetic`: the dtype that the run computes in.
    """
    settings: list[object] = [FORMAT, modality, arithmetic, transformers.__version__]
    described = description.to_dict()
    settings += [described[name] for name in _FIELDS]
    if modality != "text":
        processor = load_image_processor(description)
        settings += [type(processor).__name__, processor.to_dict()]
    digest = hashlib.blake2b(digest_size=16)
    for tower in towers_of_modality(modality):
        module: Any = tower_module(backbone, description.traits, tower)
        settings.append(type(module).__name__)
        for name, value in module.state_dict().items():
            if isinstance(value, Tensor):
                # The header separates tensors: equal bytes under another name or shape give another hash.
                digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
                digest.update(
                    value.detach()
                    .contiguous()
                    .cpu()
                    .reshape(-1)
                    .view(torch.uint8)
                    .numpy()
                    .data
                )
        settings.append(module.config.to_dict())
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    return digest.hexdigest()
