"""Towers of a model: their parameters, and freezing."""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from vembed.errors import UserError
from vembed.models.backbone_loading import is_never_used
from vembed.models.families.backbones import layers_of
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
    return [
        tower
        for tower, prefix in family.towers.items()
        if not any(name.startswith(prefix) for name in trained)
    ]


def tower_module(backbone: nn.Module, family: Family, tower: Tower) -> nn.Module:
    """Return the tower's module; the backbone itself if it has a single tower."""
    return backbone.get_submodule(family.towers[tower].removesuffix("."))


def freeze_unused(
    backbone: nn.Module, family: Family, image_pooling: str | None
) -> list[str]:
    """Freeze parameters that no embedding depends on, and return their names.

    They would never get a gradient, and DDP and FSDP would wait for it.
    """
    unused = []
    # `"".startswith(())` is False: without such norms nothing is added.
    norms_left_out = (
        _norms_of_own_pooling(backbone, family)
        if image_pooling != MODEL_POOLING
        else ()
    )
    for name, parameter in backbone.named_parameters():
        if (
            is_never_used(name)
            or name in LOSS_PARAMETERS
            or name.startswith(norms_left_out)
        ):
            parameter.requires_grad = False
            unused.append(name)
    if named := [name for name in unused if name not in LOSS_PARAMETERS]:
        log.info("frozen: %s (no embedding depends on them)", ", ".join(named))
    if of_loss := [name for name in unused if name in LOSS_PARAMETERS]:
        log.info(
            "frozen: %s (the loss learns its own with loss: sigmoid or learn_temperature: true)",
            ", ".join(of_loss),
        )
    return unused


def _norms_of_own_pooling(backbone: nn.Module, family: Family) -> tuple[str, ...]:
    """Return ConvNeXt's final norm: it follows the model's own pooling, so other poolings do not use it."""
    if not family.has_image_encoder:
        return ()
    vision: Any = tower_module(backbone, family, "vision")
    if vision.config.model_type not in ("convnext", "convnextv2"):
        return ()
    return (family.towers["vision"] + "layernorm.",)


def freeze_parts(backbone: nn.Module, family: Family, parts: Sequence[str]) -> None:
    """Freeze the parts named by the option `freeze`."""
    names = names_frozen_by(backbone, family, parts)
    for name, parameter in backbone.named_parameters():
        if name in names:
            parameter.requires_grad = False


def names_frozen_by(
    backbone: nn.Module, family: Family, parts: Sequence[str]
) -> set[str]:
    """Return the names of the backbone parameters that the option `freeze` selects."""
    frozen: set[str] = set()
    for part in parts:
        names = _names_of(backbone, family, part)
        log.info("freeze: %s, %d tensors", part, len(names))
        frozen |= names
    return frozen


def _names_of(backbone: nn.Module, family: Family, part: str) -> set[str]:
    every = [name for name, _ in backbone.named_parameters()]
    if part in get_args(Tower):
        prefix = {str(tower): prefix for tower, prefix in family.towers.items()}.get(
            part
        )
        if prefix is None:
            raise UserError(
                f"freeze: {part} is not a tower of this {family.name} model; it has {', '.join(family.towers)}"
            )
        return {name for name in every if name.startswith(prefix)}
    layers = _layer_prefixes(backbone, family)
    if part == "embeddings":
        # Embeddings inside of layers (of relative positions) belong to their layer.
        inside = tuple(prefix for prefixes in layers.values() for prefix in prefixes)
        return {
            name
            for name in every
            if _INPUT_EMBEDDINGS.search(name) and not name.startswith(inside)
        }
    kind, _, count = part.rpartition("=")
    tower, _, word = kind.rpartition(".")
    if word == "first_n_layers" or part.startswith("first_n_layers"):
        chosen = layers
        if tower:
            chosen = {tower: layers[tower]} if tower in layers else {}
        deepest = max((len(prefixes) for prefixes in chosen.values()), default=0)
        if not count.isdecimal() or not chosen or int(count) > deepest:
            named = ", ".join(
                f"{name} {len(prefixes)}" for name, prefixes in layers.items()
            )
            raise UserError(
                f"freeze: {part} must be first_n_layers=N with N from 0 to {deepest} (of every tower) or "
                f"TOWER.first_n_layers=N; the number of layers: {named}"
            )
        first = tuple(
            prefix for prefixes in chosen.values() for prefix in prefixes[: int(count)]
        )
        return {name for name in every if first and name.startswith(first)}
    chosen_names = {
        name for name in every if name.startswith(part.removeprefix("backbone."))
    }
    if not chosen_names:
        near = difflib.get_close_matches(
            part.removeprefix("backbone."), every, n=1, cutoff=0.0
        )[0]
        raise UserError(
            f"freeze: no parameter's name begins with {part}; the nearest is {near} "
            "(or use text, vision, embeddings, first_n_layers=N, TOWER.first_n_layers=N)"
        )
    return chosen_names


def _layer_prefixes(backbone: nn.Module, family: Family) -> dict[str, list[str]]:
    """Return the name prefixes of each tower's layers, with a trailing dot, in the order of the forward pass.

    The layers of a tower are counted through: the stages of a hierarchical one are not stacks of their own.
    """
    layers = {id(layer) for layer in layers_of(backbone)}
    names = [
        f"{name}." for name, module in backbone.named_modules() if id(module) in layers
    ]
    return {
        tower: [name for name in names if name.startswith(prefix)]
        for tower, prefix in family.towers.items()
    }


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
        for tower, name, target in (
            (self.text_model, "text_model.", folder),
            (self.vision_model, "vision_model.", folder / IMAGE_TOWER_FOLDER),
        ):
            # Each tower's file has the names of the tower itself, so that it loads alone.
            part = {
                key.removeprefix(name): value
                for key, value in state_dict.items()
                if key.startswith(name)
            }
            tower.save_pretrained(target, state_dict=part)
        # Whatever belongs to no tower: the projections.
        projections = {
            key: value.contiguous()
            for key, value in state_dict.items()
            if not key.startswith(("text_model.", "vision_model."))
        }
        save_file(projections, folder / PROJECTIONS_FILE)


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
