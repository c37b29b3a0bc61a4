"""Forward pass per modality and family: from collated inputs to one vector per item.

Tower and projection are separate steps, so that features of a frozen tower can be cached while its projection is
trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vembed.models.attention import TOKENS, Packed, packs, token_index
from vembed.models.custom.modeling import OwnConfig
from vembed.models.families.backbones import POSITIONS_AFTER_PADDING, is_decoder_only
from vembed.models.families.description import ModelDescription
from vembed.models.families.family import Modality
from vembed.models.poolings.table import MODEL_POOLING, POOLINGS
from vembed.models.towers import TOWERS_OF_MODALITY, tower_module
from vembed.models.vision import LONGEST, VISION, image_tower_output, tower_output

IMAGE_FEATURES = "image_features"
"""Input key of the modality vision: precomputed output of the image tower, in place of the pixels."""

SEGMENTS = "token_type_ids"
"""Input of pairs: 0 for tokens of the query and 1 for those of the document, for models that tell them apart."""

Inputs = dict[str, Tensor]
Backbone = Any
"""A Transformers model or TwoTowers. Their attributes are untyped."""


@dataclass
class Collected:
    """What a forward pass gives beside its pooled vectors."""

    auxiliary: dict[str, Any] = field(default_factory=dict)
    """The model's own losses by name: a pair (sums, counts), of one number each or of one for each input; or a scalar,
    the mean over the inputs."""
    states: Tensor | None = None
    """[n, tokens, dim] of texts before the pooling, for a language-model head."""


def sums_and_counts(auxiliary: Mapping[str, Any], count: int) -> dict[str, Tensor]:
    """Return each auxiliary loss as [2, n] or [2, 1], sums and counts, in at least float32. `count`: inputs of the
    pass."""
    losses = {}
    for name, value in auxiliary.items():
        if isinstance(value, tuple | list) and len(value) == 2:
            sums = torch.as_tensor(value[0])
            counts = torch.as_tensor(value[1], device=sums.device)
        elif isinstance(value, Tensor) and value.ndim == 0:
            sums = value * count
            counts = torch.tensor(count, device=value.device)
        else:
            raise TypeError(
                f"the auxiliary loss {name} must be a scalar, or a pair (sums, counts) of numbers or of one number for "
                f"each input, and is {type(value).__name__}"
            )
        if sums.ndim > 1 or sums.numel() not in (1, count):
            raise TypeError(
                f"the auxiliary loss {name} has the shape {list(sums.shape)} for {count} inputs"
            )
        sums = at_least_float32(sums)
        counts = counts.detach().to(sums.dtype).expand_as(sums)
        # A new tensor: FSDP wants no view as a result.
        losses[name] = torch.stack([sums.reshape(-1), counts.reshape(-1)])
    return losses


def at_least_float32(values: Tensor) -> Tensor:
    """Return values in float32, or float64 as they are."""
    return values if values.dtype == torch.float64 else values.float()


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
    family = description.traits
    forward = family.forwards[modality]
    collected = Collected() if collected is None else collected
    # Composed and two-tower models are called tower by tower; a vision-language model as a whole.
    if family.has_two_models or forward == "pooled_towers":
        (tower,) = TOWERS_OF_MODALITY[modality]
        backbone = tower_module(backbone, family, tower)
    if forward == "pooled_towers":
        # A family with texts of fixed length was trained without a mask.
        mask = None if family.has_fixed_length else padding_mask(inputs)
        arguments: dict[str, Any] = {**inputs, "attention_mask": mask}
        if mask is None:
            del arguments["attention_mask"]
        vectors: Tensor = backbone(**arguments).pooler_output
        return vectors
    if forward == "image":
        if family.has_two_models:
            pooling = None
        name = description.image_pooling or description.pooling
        return _image_features(backbone, inputs, collected, name, pooling)
    mask = padding_mask(inputs)
    if forward == "chat":
        hidden = _chat_states(backbone, inputs, mask)
    else:
        hidden = _text_states(description, backbone, inputs, mask, collected)
        collected.states = hidden
    return pool(description.pooling, hidden, mask, module=pooling)


def _text_states(
    description: ModelDescription,
    backbone: Backbone,
    inputs: Inputs,
    mask: Tensor | None,
    collected: Collected,
) -> Tensor:
    """Return the hidden states [n, tokens, dim] of texts."""
    if packs(backbone):
        return _packed_states(backbone, inputs, mask, collected)
    arguments: dict[str, object] = {"input_ids": inputs["input_ids"]}
    if SEGMENTS in inputs:
        arguments[SEGMENTS] = inputs[SEGMENTS]
    if mask is not None:
        arguments["attention_mask"] = mask
    if description.traits.reads_chats or is_decoder_only(backbone.config):
        # Keys and values for generation would be kept for every layer, and never read.
        arguments["use_cache"] = False
        if mask is not None and description.padding_side == "left":
            # Positions count from the first real token. Otherwise they would depend on the amount of left padding.
            arguments["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
    output = backbone(**arguments)
    collected.auxiliary.update(output.get("auxiliary") or {})
    states: Tensor = output.last_hidden_state
    return states


def _packed_states(
    backbone: Backbone, inputs: Inputs, mask: Tensor | None, collected: Collected
) -> Tensor:
    """Return the hidden states [n, tokens, dim] of texts, computed in one row without their padding, which is zero."""
    input_ids = inputs["input_ids"]
    num_texts, longest = input_ids.shape
    device = input_ids.device
    index = None
    if mask is None:
        tokens = input_ids.flatten()
        positions = torch.arange(longest, device=device).repeat(num_texts)
        starts = torch.arange(num_texts + 1, device=device) * longest
    else:
        # Each token's position in its own text, wherever the padding stands.
        index = inputs[TOKENS] if TOKENS in inputs else token_index(mask)
        tokens = input_ids.flatten()[index]
        positions = (mask.cumsum(dim=1) - 1).flatten()[index]
        # Cumulative text lengths with a leading 0: [n + 1].
        starts = functional.pad(mask.sum(dim=1).cumsum(dim=0), (1, 0))
    # RoBERTa and its kin count positions from the padding token's id + 1.
    if backbone.config.model_type in POSITIONS_AFTER_PADDING:
        positions = positions + backbone.config.pad_token_id + 1
    starts = starts.to(torch.int32)
    if backbone.config.model_type == OwnConfig.model_type:
        output = backbone(input_ids=tokens[None], cu_seqlens=starts)
    else:
        arguments: dict[str, Any] = {
            "input_ids": tokens[None],
            "position_ids": positions[None],
            # A 4D mask is passed through unchanged, and not used.
            "attention_mask": tokens.new_zeros(1, 1, 1, 1),
            "packed": Packed(starts, longest),
        }
        if SEGMENTS in inputs:
            segments = inputs[SEGMENTS].flatten()
            arguments[SEGMENTS] = (segments if index is None else segments[index])[None]
        if is_decoder_only(backbone.config):
            arguments["use_cache"] = False
        output = backbone(**arguments)
    collected.auxiliary.update(output.get("auxiliary") or {})
    states: Tensor = output.last_hidden_state.squeeze(0)
    if index is not None:
        # Scatter back to the padded layout, out of place for autograd.
        padded = states.new_zeros(num_texts * longest, states.shape[1])
        states = padded.index_copy(0, index, states)
    return states.view(num_texts, longest, -1)


def _chat_states(backbone: Backbone, inputs: Inputs, mask: Tensor | None) -> Tensor:
    """Return the hidden states [n, tokens, dim] of token ids with images. Positions (time, height, width) are made at
    collation."""
    arguments: dict[str, Any] = {
        key: value for key, value in inputs.items() if not key.startswith(VISION)
    }
    arguments.pop("attention_mask", None)
    if mask is not None:
        arguments["attention_mask"] = mask
    features = arguments.pop(IMAGE_FEATURES, None)
    if features is not None:
        image = image_tower_output(features[0], features[1:])
        arguments["mm_encoder_outputs"] = {"image": image}
    elif LONGEST in inputs:
        del arguments["pixel_values"]
        arguments["mm_encoder_outputs"] = {"image": tower_output(backbone, inputs)}
    states: Tensor = backbone(**arguments, use_cache=False).last_hidden_state
    return states


def _image_features(
    backbone: Backbone,
    inputs: Inputs,
    collected: Collected,
    name: str,
    pooling: nn.Module | None,
) -> Tensor:
    """Return the features [n, width] of images by the pooling `name`."""
    # A frozen tower may be held in another dtype than the pixels.
    pixels = inputs["pixel_values"].to(backbone.dtype)
    arguments = {**inputs, "pixel_values": pixels}
    if backbone.config.model_type == "vit_mae":
        # The model orders patches by noise: ascending noise keeps their order, and mask_ratio 0 keeps all of them.
        num_patches = backbone.embeddings.patch_embeddings.num_patches
        ascending = torch.arange(num_patches, device=pixels.device)
        arguments["noise"] = ascending.expand(len(pixels), -1)
    output = backbone(**arguments)
    collected.auxiliary.update(output.get("auxiliary") or {})
    if name == MODEL_POOLING:
        vectors: Tensor = output.pooler_output
        return vectors.flatten(1)
    hidden = output.last_hidden_state
    if hidden.ndim == 4:
        # Convolutional: [n, channels, height, width] to [n, positions, channels].
        hidden = hidden.flatten(2).transpose(1, 2)
    return pool(name, hidden, None, module=pooling)


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


def image_features(backbone: Backbone, inputs: Inputs) -> Tensor:
    """Return [1 + m, tokens, width]: the image tower's output for all images, then the outputs of m inner layers.

    The inner layers are those of Qwen3-VL's deepstack; m is 0 for other models.
    """
    output = tower_output(backbone, inputs)
    inner_outputs = vars(output).get("deepstack_features") or []
    return torch.stack(
        [torch.cat(list(images)) for images in (output.pooler_output, *inner_outputs)]
    )


def padding_mask(inputs: Inputs) -> Tensor | None:
    """Return the attention mask [n, tokens]; None without padding, which lets attention use a faster path.

    The mask is inspected on CPUs only: on a GPU this would force a synchronisation. Collation may omit a mask of ones.
    """
    mask = inputs.get("attention_mask")
    if mask is None or (mask.device.type == "cpu" and bool(mask.all())):
        return None
    return mask
