"""Identity of a lane's towers: a short name for all that their features depend on besides the inputs."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
import transformers
from torch import Tensor

from vembed.models.description import Lane, ModelDescription
from vembed.models.processors import load_image_processor
from vembed.models.towers import tower_module, towers_of_lane

FORMAT = 1
"""Rises when towers come to give other features for the same inputs and weights."""
_FIELDS = (
    "family", "pooling", "image_pooling", "max_length", "padding_side", "bidirectional_attention", "min_pixels",
    "max_pixels",
)  # fmt: skip
"""What of a description changes what towers give. Prompts are part of the inputs."""


def tower_identity(description: ModelDescription, backbone: Any, lane: Lane, arithmetic: str) -> str:
    """The same for the same weights, settings and dtypes, in any run; it reads every weight. `arithmetic`: the dtype
    that the run computes in."""
    settings: list[object] = [FORMAT, lane, arithmetic, transformers.__version__]
    described = description.to_dict()
    settings += [described[name] for name in _FIELDS]
    if lane != "text":
        processor = load_image_processor(description)
        settings += [type(processor).__name__, processor.to_dict()]
    digest = hashlib.blake2b(digest_size=16)
    for tower in towers_of_lane(lane):
        module: Any = tower_module(backbone, description.family, tower)
        settings.append(type(module).__name__)
        for name, value in module.state_dict().items():
            if isinstance(value, Tensor):
                digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
                digest.update(value.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
        settings.append(module.config.to_dict())
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    return digest.hexdigest()
