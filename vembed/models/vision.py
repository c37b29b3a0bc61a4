"""Images of a vision-language model: their positions and lengths, made at collation, and attention over all at once.

The models of Transformers compute them in every forward pass from values that they read back from the device, image
by image. On a GPU each of these reads waits until the device has caught up.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vembed.models.attention import IMAGE_ATTENTION, register, why_no_kernel

POSITIONS = "position_ids"
"""Input key: [3, n, tokens], the time, height and width of each token."""
VISION_PREFIX = "vision."
"""Beginning of the input keys for the image tower alone."""
LONGEST_IMAGE = f"{VISION_PREFIX}max_seqlen"
"""Input key: an empty tensor [patches of the largest image, 0]. Its shape is known without reading from the device."""
_WITH_POSITION_TABLE = "qwen3_vl"
"""Model type whose image tower takes all of this."""

_NEEDED = {
    "get_vision_interpolation_indices_and_weights",
    "get_vision_attention_seqlens",
    "get_vision_cu_seqlens",
    "get_vision_position_ids",
}
"""Functions of Transformers whose results its image tower takes as arguments."""


def token_positions(
    is_image: Tensor, mask: Tensor | None, grid: Tensor, merge_size: int
) -> Tensor:
    """Return [3, n, tokens] positions: text counts on, an image spans rows and columns from where the text before it
    ended. Padding has zeros.

    `is_image`, `mask`: [n, tokens]; `grid`: [images, (time, height, width)] in patches.
    """
    images = iter((grid // torch.tensor([1, merge_size, merge_size])).tolist())
    positions = np.zeros((3, *is_image.shape), dtype=np.int64)
    for row, kinds in enumerate(is_image.numpy()):
        places = (
            np.arange(len(kinds)) if mask is None else np.flatnonzero(mask[row].numpy())
        )
        start = done = 0
        for kind, run in groupby(kinds[places].tolist()):
            count = len(list(run))
            here = places[done : done + count]
            if kind:
                # [3, count] the place of each of the image's tokens. The next text begins behind its longer side.
                time, height, width = next(images)
                axes = np.indices((time, height, width)).reshape(3, -1)
                positions[:, row, here] = axes + start
                start += max(height, width)
            else:
                positions[:, row, here] = np.arange(start, start + count)
                start += count
            done += count
    return torch.from_numpy(positions)


def tower_inputs(config: Mapping[str, Any], grid: Tensor) -> dict[str, Tensor]:
    """Return what the image tower would compute from the grid; nothing for models whose tower computes it itself.

    `config`: the values of the model's config.json.
    """
    is_known = find_spec("transformers.vision_utils") is not None
    if config.get("model_type") != _WITH_POSITION_TABLE or not is_known:
        return {}
    from transformers import vision_utils

    if not vars(vision_utils).keys() >= _NEEDED:  # an older version
        return {}
    vision: Mapping[str, Any] = config["vision_config"]
    merge = int(vision["spatial_merge_size"])
    # The table of positions is a square grid. An image takes the weighted mean of its nearest places in it.
    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        grid,
        num_grid_per_side=int(vision["num_position_embeddings"] ** 0.5),
        mode="bilinear",
        align_corners=True,
        spatial_merge_size=merge,
    )
    longest = int((grid[:, 1] * grid[:, 2]).max())
    return {
        f"{VISION_PREFIX}cu_seqlens": vision_utils.get_vision_cu_seqlens(grid),
        f"{VISION_PREFIX}position_ids": vision_utils.get_vision_position_ids(
            grid, merge
        ),
        f"{VISION_PREFIX}interp_indices": indices,
        f"{VISION_PREFIX}interp_weights": weights,
        LONGEST_IMAGE: torch.empty(longest, 0),
    }


# ---- attention over all images at once -----------------------------------------------


def pack_images(tower: Any, device: torch.device, *, half: bool) -> str | None:
    """Let an image tower compute attention over all images at once, or return the reason for doing it image by image."""
    if device.type != "cpu":
        values = tower.config.to_dict()
        width = int(values.get("embed_dim") or values["hidden_size"])
        head_size = width // int(values["num_heads"])
        problem = why_no_kernel(head_size, device, half=half)
        if problem is not None:
            return problem
    tower.config._attn_implementation = register(IMAGE_ATTENTION)
    return None


def tower_output(backbone: Any, inputs: Mapping[str, Tensor]) -> Any:
    """Return what the image tower gives for all images of a batch: `pooler_output` and `deepstack_features`, each as a
    tuple of one tensor for all images."""
    arguments: dict[str, Any] = {}
    for name, value in inputs.items():
        if name.startswith(VISION_PREFIX):
            arguments[name.removeprefix(VISION_PREFIX)] = value
    if not arguments:
        return backbone.get_image_features(
            inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True
        )
    # A number on the host: kernels need it before the device has caught up.
    arguments["max_seqlen"] = inputs[LONGEST_IMAGE].shape[0]
    output = backbone.visual(
        inputs["pixel_values"].type(backbone.visual.dtype),
        grid_thw=inputs["image_grid_thw"],
        return_dict=True,
        **arguments,
    )
    return image_tower_output(output.pooler_output, output.deepstack_features)


def image_tower_output(
    pooled: Tensor, inner_outputs: list[Tensor] | Tensor
) -> SimpleNamespace:
    """Return features of all images in the form of get_image_features' output: one tensor for all images, and one for
    each inner layer."""
    return SimpleNamespace(
        pooler_output=(pooled,),
        deepstack_features=[(feature,) for feature in inner_outputs],
    )
