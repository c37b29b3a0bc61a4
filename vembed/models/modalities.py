"""Forward pass per modality and family: from collated inputs to one vector per item.

Tower and projection are separate steps, so that features of a frozen tower can be cached while its projection is
trained.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vembed.models import packing
from vembed.models.collected_losses import Collected
from vembed.models.families.backbones import is_decoder_only
from vembed.models.families.description import ModelDescription
from vembed.models.families.family import Forward, Modality
from vembed.models.poolings.table import MODEL_POOLING, POOLINGS
from vembed.models.towers import tower_module, towers_of_modality
from vembed.models.vision import LONGEST, VISION, image_tower_output, tower_output

IMAGE_FEATURES = "image_features"
"""Input key of the modality vision: precomputed output of the image tower, in place of the pixels."""

Inputs = dict[str, Tensor]
Backbone = Any
"""A Transformers model or TwoTowers. Their attributes are untyped."""
PoolTokens = Callable[[Tensor, Tensor | None], Tensor]
"""Maps [n, tokens, dim] and the mask to [n, width]."""


def pool(
    pooling: str,
    hidden: Tensor,
    mask: Tensor | None,
    *,
    module: nn.Module | None = None,
) -> Tensor:
    """Map [n, tokens, dim] to [n, width], in at least float32.

    `mask` [n, tokens] is 1 on real tokens, with the padding on either side. None: no
    padding. `module`: that of a trained pooling.
    """
    if hidden.dtype in (torch.bfloat16, torch.float16):
        hidden = hidden.float()
    with torch.autocast(hidden.device.type, enabled=False):
        if module is None:
            return POOLINGS[pooling].pool(hidden, mask)
        vectors: Tensor = module(hidden, mask)
        return vectors


def tower_features(
    description: ModelDescription,
    backbone: Backbone,
    modality: Modality,
    inputs: Inputs,
    collected: Collected | None = None,
    pooling: nn.Module | None = None,
) -> Tensor:
    """Return tower features [n, width], one vector per item of one modality's collated inputs.

    `collected` gets the model's own losses. `pooling`: the module of a trained pooling.
    """
    # Composed and two-tower models are called tower by tower; a vision-language model as a whole.
    family = description.traits
    forward = family.forwards[modality]
    if family.has_two_models or forward == "pooled_towers":
        (tower,) = towers_of_modality(modality)
        backbone = tower_module(backbone, family, tower)
    if family.has_two_models and modality == "image":
        assert description.image_pooling is not None
        description = description.with_(pooling=description.image_pooling)
        pooling = None
    return _FORWARDS[forward](
        description,
        backbone,
        inputs,
        Collected() if collected is None else collected,
        partial(pool, description.pooling, module=pooling),
    )


def project(
    description: ModelDescription,
    backbone: Backbone,
    modality: Modality,
    features: Tensor,
) -> Tensor:
    """Map tower features [n, width] to [n, hidden_dim]; the identity for families without projections."""
    name = description.traits.projections.get(modality)
    if name is None:
        return features
    projection = backbone.get_submodule(name)
    with torch.autocast(features.device.type, enabled=False):
        projected: Tensor = projection(features.to(projection.weight.dtype))
    return projected


def takes_image_features(backbone: Backbone) -> bool:
    """Return True if a vision-language model accepts precomputed image features (older Transformers do not)."""
    return "mm_encoder_outputs" in inspect.signature(backbone.forward).parameters


def image_features(backbone: Backbone, inputs: Inputs) -> Tensor:
    """Return [1 + m, tokens, width]: the image tower's output for all images, then the outputs of m inner layers.

    The inner layers are those of Qwen3-VL's deepstack; m is 0 for other models.
    """
    output = tower_output(backbone, inputs)
    inner_outputs = vars(output).get("deepstack_features") or []
    return torch.stack(
        [torch.cat(list(images)) for images in (output.pooler_output, *inner_outputs)]
    )


def num_image_features(backbone: Backbone) -> int:
    """Return the number of vectors per token in `image_features`."""
    return 1 + len(
        backbone.config.vision_config.to_dict().get("deepstack_visual_indexes") or ()
    )


def padding_mask(inputs: Inputs) -> Tensor | None:
    """Return the attention mask [n, tokens]; None without padding, which lets attention use a faster path.

    The mask is inspected on CPUs only: on a GPU this would force a synchronisation. Collation may omit a mask of ones.
    """
    mask = inputs.get("attention_mask")
    if mask is None or (mask.device.type == "cpu" and bool(mask.all())):
        return None
    return mask


def _text(
    description: ModelDescription,
    backbone: Backbone,
    inputs: Inputs,
    collected: Collected,
    pooled: PoolTokens,
) -> Tensor:
    mask = padding_mask(inputs)
    if packing.packs(backbone):
        hidden = packing.hidden_states(
            backbone, inputs["input_ids"], mask, inputs.get(packing.TOKENS), collected
        )
        collected.states = hidden
        return pooled(hidden, mask)
    arguments: dict[str, object] = {"input_ids": inputs["input_ids"]}
    if mask is not None:
        arguments["attention_mask"] = mask
    if description.traits.reads_chats or is_decoder_only(backbone.config):
        # Keys and values for generation would be kept for every layer, and never read.
        arguments["use_cache"] = False
        if mask is not None and description.padding_side == "left":
            # Positions count from the first real token. Otherwise they would depend on the amount of left padding.
            arguments["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
    output = backbone(**arguments)
    collected.take(output)
    collected.states = output.last_hidden_state
    return pooled(output.last_hidden_state, mask)


def _chat(
    _description: ModelDescription,
    backbone: Backbone,
    inputs: Inputs,
    _collected: Collected,
    pooled: PoolTokens,
) -> Tensor:
    """Return embeddings of token ids with images. Positions (time, height, width) are made at collation."""
    mask = padding_mask(inputs)
    of_tower = ("attention_mask", IMAGE_FEATURES)
    arguments: dict[str, Any] = {
        key: value
        for key, value in inputs.items()
        if key not in of_tower and not key.startswith(VISION)
    }
    if mask is not None:
        arguments["attention_mask"] = mask
    features = inputs.get(IMAGE_FEATURES)
    if features is not None:
        arguments["mm_encoder_outputs"] = {
            "image": image_tower_output(features[0], features[1:])
        }
    elif LONGEST in inputs:
        del arguments["pixel_values"]
        arguments["mm_encoder_outputs"] = {"image": tower_output(backbone, inputs)}
    return pooled(backbone(**arguments, use_cache=False).last_hidden_state, mask)


def _image(
    description: ModelDescription,
    backbone: Backbone,
    inputs: Inputs,
    collected: Collected,
    pooled: PoolTokens,
) -> Tensor:
    # A frozen tower may be held in another dtype than the pixels.
    arguments = {**inputs, "pixel_values": inputs["pixel_values"].to(backbone.dtype)}
    if backbone.config.model_type == "vit_mae":
        # The model orders patches by noise: ascending noise keeps their order, and mask_ratio 0 keeps all of them.
        num_patches = backbone.embeddings.patch_embeddings.num_patches
        ascending = torch.arange(num_patches, device=inputs["pixel_values"].device)
        arguments["noise"] = ascending.expand(len(inputs["pixel_values"]), -1)
    output = backbone(**arguments)
    collected.take(output)
    if description.pooling == MODEL_POOLING:
        vectors: Tensor = output.pooler_output
        return vectors.flatten(1)
    hidden = output.last_hidden_state
    if (
        hidden.ndim == 4
    ):  # convolutional: [n, channels, height, width] to [n, positions, channels]
        hidden = hidden.flatten(2).transpose(1, 2)
    return pooled(hidden, None)


def _pooled_tower(
    description: ModelDescription,
    tower: Backbone,
    inputs: Inputs,
    _collected: Collected,
    _pooled: PoolTokens,
) -> Tensor:
    arguments = {key: value for key, value in inputs.items() if key != "attention_mask"}
    # A family with texts of fixed length was trained without a mask.
    mask = None if description.traits.has_fixed_length else padding_mask(inputs)
    if mask is not None:
        arguments["attention_mask"] = mask
    vectors: Tensor = tower(**arguments).pooler_output
    return vectors


_FORWARDS: dict[
    Forward,
    Callable[[ModelDescription, Backbone, Inputs, Collected, PoolTokens], Tensor],
] = {
    "text": _text,
    "image": _image,
    "chat": _chat,
    "pooled_towers": _pooled_tower,
}
