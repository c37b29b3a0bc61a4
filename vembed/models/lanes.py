"""Lanes: how the inputs of each lane go through a backbone of each family and become one vector per item.

In two steps: what the tower gives, and the projection behind it. They are apart so that what a frozen tower gives can
be kept while its projection is trained.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from vembed.models import packing
from vembed.models.backbones import is_decoder_only
from vembed.models.description import ModelDescription
from vembed.models.pooling import pool

IMAGE_FEATURES = "image_features"
"""Key of inputs of the vision lane that holds what its image tower gave: it takes the place of the pixels."""
_FAMILIES_WITH_PROJECTIONS = ("clip", "composed")

Inputs = dict[str, Tensor]
Backbone = Any
"""A module of Transformers, or TwoTowers; their attributes have no types."""


def tower_features(description: ModelDescription, backbone: Backbone, lane: str, inputs: Inputs) -> Tensor:
    """[n, width of the tower]: one vector per item from one lane's collated inputs."""
    if description.family in ("clip", "siglip"):
        return _contrastive_tower(description, backbone, lane, inputs)
    if description.family == "composed":
        if lane == "image":
            assert description.image_pooling is not None
            return _image(description.with_(pooling=description.image_pooling), backbone.vision_model, inputs)
        return _text(description, backbone.text_model, inputs)
    if lane == "image":
        return _image(description, backbone, inputs)
    if lane == "vision":
        return _vision_language(description, backbone, inputs)
    return _text(description, backbone, inputs)


def project(description: ModelDescription, backbone: Backbone, lane: str, features: Tensor) -> Tensor:
    """[n, width of the tower] to [n, hidden_dim], where the family has projections behind its towers."""
    if description.family not in _FAMILIES_WITH_PROJECTIONS:
        return features
    projection = backbone.text_projection if lane == "text" else backbone.visual_projection
    with torch.autocast(features.device.type, enabled=False):
        projected: Tensor = projection(features.to(projection.weight.dtype))
    return projected


def takes_image_features(backbone: Backbone) -> bool:
    """Whether a vision-language model can be handed what its image tower gave; older Transformers have no way."""
    return "mm_encoder_outputs" in inspect.signature(backbone.forward).parameters


def image_features(backbone: Backbone, inputs: Inputs) -> Tensor:
    """[1 + m, tokens, width]: what the image tower of a vision-language model gives for all images of the inputs, at
    its end and at m layers on the way (Qwen3-VL's deepstack)."""
    output = backbone.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True)
    on_the_way = output.get("deepstack_features", [])
    return torch.stack([torch.cat(list(images)) for images in (output.pooler_output, *on_the_way)])


def num_image_features(backbone: Backbone) -> int:
    """How many vectors `image_features` has for each token."""
    return 1 + len(backbone.config.vision_config.to_dict().get("deepstack_visual_indexes") or ())


def padding_mask(inputs: Inputs) -> Tensor | None:
    """The attention mask; None where nothing is padded, which spares attention the mask. It is looked at only where
    that costs no wait for a GPU; collation may leave out a mask of ones."""
    mask = inputs.get("attention_mask")
    if mask is None or (mask.device.type == "cpu" and bool(mask.all())):
        return None
    return mask


def _text(description: ModelDescription, backbone: Backbone, inputs: Inputs) -> Tensor:
    mask = padding_mask(inputs)
    if packing.packs(backbone):
        hidden = packing.hidden_states(backbone, inputs["input_ids"], mask, inputs.get(packing.TOKENS))
        return pool(description.pooling, hidden, mask)
    arguments: dict[str, object] = {"input_ids": inputs["input_ids"]}
    if mask is not None:
        arguments["attention_mask"] = mask
    if description.family == "vision_language" or is_decoder_only(backbone.config):
        arguments["use_cache"] = False
        if mask is not None and description.padding_side == "left":
            # Counted from the first real token, or a text's numbers would depend on how far it is padded.
            arguments["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return pool(description.pooling, backbone(**arguments).last_hidden_state, mask)


def _vision_language(description: ModelDescription, backbone: Backbone, inputs: Inputs) -> Tensor:
    """Token ids with images in them; the model itself computes positions along time, height and width."""
    mask = padding_mask(inputs)
    arguments: dict[str, Any] = {key: value for key, value in inputs.items() if key != "attention_mask"}
    if mask is not None:
        arguments["attention_mask"] = mask
    features = inputs.get(IMAGE_FEATURES)
    if features is not None:
        del arguments[IMAGE_FEATURES]
        given = SimpleNamespace(pooler_output=(features[0],), deepstack_features=[(one,) for one in features[1:]])
        arguments["mm_encoder_outputs"] = {"image": given}
    return pool(description.pooling, backbone(**arguments, use_cache=False).last_hidden_state, mask)


def _image(description: ModelDescription, backbone: Backbone, inputs: Inputs) -> Tensor:
    # A tower that is not trained may be held in another dtype than images come in.
    arguments = {**inputs, "pixel_values": inputs["pixel_values"].to(backbone.dtype)}
    if backbone.config.model_type == "vit_mae":
        # Ascending noise keeps the patches in their order, and the mask ratio of 0 keeps all of them.
        num_patches = backbone.embeddings.patch_embeddings.num_patches
        ascending = torch.arange(num_patches, device=inputs["pixel_values"].device)
        arguments["noise"] = ascending.expand(len(inputs["pixel_values"]), -1)
    output = backbone(**arguments)
    if description.pooling == "own":
        pooled: Tensor = output.pooler_output
        return pooled.flatten(1)
    hidden = output.last_hidden_state
    if hidden.ndim == 4:  # a convolutional network's channels and positions
        hidden = hidden.flatten(2).transpose(1, 2)
    return pool(description.pooling, hidden, None)


def _contrastive_tower(description: ModelDescription, backbone: Backbone, lane: str, inputs: Inputs) -> Tensor:
    if lane == "image":
        return _pooled(backbone.vision_model, inputs)
    arguments = {"input_ids": inputs["input_ids"]}
    if description.family == "clip":  # SigLIP was trained without a mask, on texts padded to one length
        mask = padding_mask(inputs)
        if mask is not None:
            arguments["attention_mask"] = mask
    return _pooled(backbone.text_model, arguments)


def _pooled(tower: Backbone, arguments: Inputs) -> Tensor:
    pooled: Tensor = tower(**arguments).pooler_output
    return pooled
