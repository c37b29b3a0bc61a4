"""Towers of a model: their parameters, and freezing."""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, get_args

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from vembed.errors import UserError
from vembed.models.families.backbones import is_never_used, layers_of
from vembed.models.families.description import IMAGE_TOWER_FOLDER, ModelDescription
from vembed.models.families.family import Family, Modality, Tower
from vembed.models.poolings.table import MODEL_POOLING
from vembed.models.processors import load_image_processor

log = logging.getLogger(__name__)

TOWERS_OF_MODALITY: dict[Modality, tuple[Tower, ...]] = {
    "text": ("text",),
    "image": ("vision",),
    "multimodal": ("text", "vision"),
}
"""Modality -> the towers that its inputs pass through."""
_INPUT_EMBEDDINGS = re.compile(
    r"(^|\.)(embeddings|embed_tokens|shared|wte|wpe|patch_embed|pos_embed)(\.|$)"
)
LOSS_PARAMETERS = ("logit_scale", "logit_bias")
"""Parameters of CLIP and SigLIP that the loss replaces by its own."""


def frozen_towers(backbone: nn.Module, family: Family) -> list[Tower]:
    """Return the towers without trained parameters."""
    # By parameters and not by the option: adapters freeze towers too.
    trained = [
        name
        for name, parameter in backbone.named_parameters()
        if parameter.requires_grad
    ]
    frozen = []
    for tower, prefix in family.towers.items():
        if not any(name.startswith(prefix) for name in trained):
            frozen.append(tower)
    return frozen


def tower_module(backbone: nn.Module, family: Family, tower: Tower) -> nn.Module:
    """Return the tower's module; the backbone itself if it has a single tower."""
    return backbone.get_submodule(family.towers[tower].removesuffix("."))


def freeze_unused(
    backbone: nn.Module, family: Family, image_pooling: str | None
) -> None:
    """Freeze parameters that no embedding depends on. They would never get a gradient, and FSDP would wait for it."""
    norms_left_out: tuple[str, ...] = ()
    if family.has_image_encoder and image_pooling != MODEL_POOLING:
        vision: Any = tower_module(backbone, family, "vision")
        if vision.config.model_type in ("convnext", "convnextv2"):
            # ConvNeXt's final norm follows the model's own pooling, so other poolings do not use it.
            norms_left_out = (family.towers["vision"] + "layernorm.",)
    unused = []
    for name, parameter in backbone.named_parameters():
        if name in LOSS_PARAMETERS:
            parameter.requires_grad = False
            log.info(
                "frozen: %s (the loss learns its own with loss: sigmoid or learn_temperature: true)",
                name,
            )
        elif is_never_used(name) or name.startswith(norms_left_out):
            parameter.requires_grad = False
            unused.append(name)
    if unused:
        log.info("frozen: %s (no embedding depends on them)", ", ".join(unused))


def names_frozen_by(
    backbone: nn.Module, family: Family, parts: Sequence[str]
) -> set[str]:
    """Return the names of the backbone parameters that the option `freeze` selects."""
    every = [name for name, _ in backbone.named_parameters()]
    layer_ids = set(map(id, layers_of(backbone)))
    # Each tower's layers in the order of the forward pass, by the prefix of their parameters. The layers of a tower are
    # counted through: the stages of a hierarchical one are not stacks of their own.
    layers: dict[str, list[str]] = {tower: [] for tower in family.towers}
    for module_name, module in backbone.named_modules():
        for tower, tower_prefix in family.towers.items():
            if id(module) in layer_ids and module_name.startswith(tower_prefix):
                layers[tower].append(f"{module_name}.")
    frozen: set[str] = set()
    for part in parts:
        kind, _, count = part.rpartition("=")
        if part in get_args(Tower):
            prefix = family.towers.get(cast(Tower, part))
            if prefix is None:
                raise UserError(
                    f"freeze: {part} is not a tower of this {family.name} model; it has {', '.join(family.towers)}"
                )
            names = {name for name in every if name.startswith(prefix)}
        elif part == "embeddings":
            # Embeddings inside of layers (of relative positions) belong to their layer.
            inside = tuple(prefix for stack in layers.values() for prefix in stack)
            names = {
                name
                for name in every
                if _INPUT_EMBEDDINGS.search(name) and not name.startswith(inside)
            }
        elif kind.endswith("first_n_layers"):
            tower_name = kind.removesuffix("first_n_layers").removesuffix(".")
            stacks = [
                stack for name, stack in layers.items() if tower_name in ("", name)
            ]
            deepest = max(map(len, stacks), default=0)
            if not count.isdecimal() or int(count) > deepest or not stacks:
                numbers = [f"{name} {len(stack)}" for name, stack in layers.items()]
                raise UserError(
                    f"freeze: {part} must be first_n_layers=N with N from 0 to {deepest} (of every tower) or "
                    f"TOWER.first_n_layers=N; the number of layers: {', '.join(numbers)}"
                )
            first = tuple(prefix for stack in stacks for prefix in stack[: int(count)])
            names = {name for name in every if name.startswith(first)}
        else:
            beginning = part.removeprefix("backbone.")
            names = {name for name in every if name.startswith(beginning)}
            if not names:
                near = difflib.get_close_matches(beginning, every, n=1, cutoff=0.0)[0]
                raise UserError(
                    f"freeze: no parameter's name begins with {part}; the nearest is {near} "
                    "(or use text, vision, embeddings, first_n_layers=N, TOWER.first_n_layers=N)"
                )
        log.info("freeze: %s, %d tensors", part, len(names))
        frozen |= names
    return frozen


# ---- two models in one ----------------------------------------------------------------


PROJECTIONS_FILE = "projections.safetensors"
"""File with the weights of both projections, in the text tower's folder."""


class TwoTowers(nn.Module):
    """Two independent models, projected into a shared space."""

    def __init__(
        self,
        text_model: PreTrainedModel,
        vision_model: PreTrainedModel,
        description: ModelDescription,
    ) -> None:
        super().__init__()
        self.text_model = text_model
        self.vision_model = vision_model
        shared_dim = description.hidden_dim
        projections = []
        for width in (description.text_hidden_dim, description.image_hidden_dim):
            assert width is not None
            projection = nn.Linear(width, shared_dim, bias=False)
            if width == shared_dim:
                nn.init.eye_(projection.weight)
            else:
                nn.init.orthogonal_(projection.weight)
            projections.append(projection)
        self.text_projection, self.visual_projection = projections

    def load_projections(self, folder: Path) -> None:
        """Load the projections of a saved composed model."""
        path = folder / PROJECTIONS_FILE
        if not path.is_file():
            raise UserError(
                f"{folder} is a composed model without {PROJECTIONS_FILE}; it is incomplete"
            )
        weights = load_file(path)
        with torch.no_grad():
            self.text_projection.weight.copy_(weights["text_projection.weight"])
            self.visual_projection.weight.copy_(weights["visual_projection.weight"])

    def save_pretrained(
        self, folder: str | Path, *, state_dict: dict[str, Tensor]
    ) -> None:
        """Save the text tower and the projections in `folder`, and the image tower in a subfolder."""
        folder = Path(folder)
        # Each tower's file has the names of the tower itself, so that it loads alone.
        text = taken(state_dict, "text_model.")
        self.text_model.save_pretrained(folder, state_dict=text)
        vision = taken(state_dict, "vision_model.")
        target = folder / IMAGE_TOWER_FOLDER
        self.vision_model.save_pretrained(target, state_dict=vision)
        known = {"text_projection.weight", "visual_projection.weight"}
        if state_dict.keys() != known:
            raise RuntimeError(
                f"two towers are saved with {sorted(known)}, and not with {sorted(state_dict)}"
            )
        projections = {key: value.contiguous() for key, value in state_dict.items()}
        save_file(projections, folder / PROJECTIONS_FILE)


def taken(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Take what begins with a prefix out of a state dict, and return it under names without the prefix."""
    names = [name for name in state if name.startswith(prefix)]
    return {name.removeprefix(prefix): state.pop(name) for name in names}


# ---- fingerprint of a modality's towers, for what is kept of frozen ones --------------


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
    for tower in TOWERS_OF_MODALITY[modality]:
        module: Any = tower_module(backbone, description.traits, tower)
        settings.append(type(module).__name__)
        for name, value in module.state_dict().items():
            if isinstance(value, Tensor):
                # The header separates tensors: equal bytes under another name or shape give another hash.
                digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
                flat = value.detach().contiguous().cpu().reshape(-1)
                digest.update(flat.view(torch.uint8).numpy().data)
        settings.append(module.config.to_dict())
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    return digest.hexdigest()
