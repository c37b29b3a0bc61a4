"""Images of a vision-language model: their positions and lengths, made at collation, and attention over all at once.

The models of Transformers compute them in every forward pass from values that they read back from the device, image
by image. On a GPU each of these reads waits until the device has caught up.
"""

from collections.abc import Mapping
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vembed.models.attention import IMAGE_ATTENTION, register, why_no_flash

POSITIONS = "position_ids"
"""Input key: [3, n, tokens], the time, height and width of each token."""
VISION_PREFIX = "vision."
"""Beginning of the input keys for the image tower alone."""
LONGEST_IMAGE = f"{VISION_PREFIX}max_seqlen"
"""Input key: an empty tensor [patches of the largest image, 0]. Its shape is known without reading from the device. Inputs
have it if collation has made what the image tower would compute from the grid (`tower_inputs`)."""
LONGEST_WINDOW = f"{VISION_PREFIX}max_window_seqlen"
"""Input key: the same for the patches of the largest window."""
_WITH_POSITION_TABLE = "qwen3_vl"
"""Model type whose image tower interpolates a table of positions."""
_WITH_WINDOWS = "qwen2_5_vl"
"""Model type whose image tower has layers that attend inside of windows."""
_MODEL_TYPES = ("qwen2_vl", _WITH_WINDOWS, _WITH_POSITION_TABLE)
"""Model types whose image tower takes what it would compute from the grid."""


def token_positions(
    is_image: Tensor,
    mask: Tensor | None,
    grid: Tensor,
    merge_size: int,
) -> Tensor:
    """Return [3, n, tokens] positions: text counts on, an image spans rows and columns from where the text before it
    ended. Padding has zeros.

    `is_image`, `mask`: [n, tokens]; `grid`: [images, (time, height, width)] in patches.
    """
    merged_grid = grid // torch.tensor([1, merge_size, merge_size])
    images = iter(merged_grid.tolist())
    positions = np.zeros((3, *is_image.shape), dtype=np.int64)
    for row, kinds in enumerate(is_image.numpy()):
        places = np.arange(len(kinds))
        if mask is not None:
            places = np.flatnonzero(mask[row].numpy())
        start = 0
        done = 0
        for kind, run in groupby(kinds[places].tolist()):
            count = len(list(run))
            columns = places[done : done + count]
            if kind:
                # [3, count] the place of each of the image's tokens. The next text begins behind its longer side.
                time, height, width = next(images)
                axes = np.indices((time, height, width)).reshape(3, -1)
                positions[:, row, columns] = axes + start
                start += max(height, width)
            else:
                positions[:, row, columns] = np.arange(start, start + count)
                start += count
            done += count
    return torch.from_numpy(positions)


def tower_inputs(config: Mapping[str, Any], grid: Tensor) -> dict[str, Tensor]:
    """Return what the image tower would compute from the grid; nothing for models whose tower computes it itself.

    `config`: the values of the model's config.json.
    """
    model_type = config.get("model_type")
    if model_type not in _MODEL_TYPES:
        return {}
    try:
        from transformers.vision_utils import (
            get_vision_attention_seqlens,  # noqa: F401 - which takes what is made here
            get_vision_cu_seqlens,
            get_vision_interpolation_indices_and_weights,
            get_vision_position_ids,
            get_vision_window_index,
        )
    except ImportError:  # an older version
        return {}
    vision = config["vision_config"]
    merge = int(vision["spatial_merge_size"])
    inputs = {
        "cu_seqlens": get_vision_cu_seqlens(grid),
        "position_ids": get_vision_position_ids(grid, merge),
    }
    if model_type == _WITH_POSITION_TABLE:
        indices, weights = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=int(vision["num_position_embeddings"] ** 0.5),
            mode="bilinear",
            align_corners=True,
            spatial_merge_size=merge,
        )
        inputs["interp_indices"] = indices
        inputs["interp_weights"] = weights
    if model_type == _WITH_WINDOWS:
        window_index, window_starts = get_vision_window_index(
            grid,
            spatial_merge_size=merge,
            window_size=int(vision["window_size"]),
            patch_size=int(vision["patch_size"]),
        )
        inputs["window_index"] = window_index
        inputs["cu_window_seqlens"] = window_starts
    named = {f"{VISION_PREFIX}{name}": value for name, value in inputs.items()}
    longest = int((grid[:, 1] * grid[:, 2]).max())
    named[LONGEST_IMAGE] = torch.empty(longest, 0)
    if model_type == _WITH_WINDOWS:
        longest_window = int(inputs["cu_window_seqlens"].diff().max())
        named[LONGEST_WINDOW] = torch.empty(longest_window, 0)
    return named


# ---- attention over all images at once -----------------------------------------------


def pack_images(
    tower: Any,
    device: torch.device,
    *,
    half: bool,
) -> str | None:
    """Let an image tower compute attention over all images at once, or return the reason for doing it image by image."""
    if device.type != "cpu":
        values = tower.config.to_dict()
        width = int(values.get("embed_dim") or values["hidden_size"])
        head_size = width // int(values["num_heads"])
        problem = why_no_flash(device, half=half, head_size=head_size)
        if problem is not None:
            return problem
    tower.config._attn_implementation = register(IMAGE_ATTENTION)
    return None


def run_image_tower(backbone: Any, inputs: Mapping[str, Tensor]) -> Any:
    """Return what the image tower gives for all images of a batch: `pooler_output` and `deepstack_features`, each as a
    tuple of one tensor for all images."""
    arguments = {}
    for name, value in inputs.items():
        if name.startswith(VISION_PREFIX):
            is_length = name in (LONGEST_IMAGE, LONGEST_WINDOW)
            argument = value.shape[0] if is_length else value
            arguments[name.removeprefix(VISION_PREFIX)] = argument
    if not arguments:
        return backbone.get_image_features(
            inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True
        )
    # A number on the host: kernels need it before the device has caught up.
    output = backbone.visual(
        inputs["pixel_values"].type(backbone.visual.dtype),
        grid_thw=inputs["image_grid_thw"],
        return_dict=True,
        **arguments,
    )
    inner_outputs = vars(output).get("deepstack_features") or []
    return image_tower_output(output.pooler_output, inner_outputs)


def image_tower_output(
    pooled: Tensor, inner_outputs: list[Tensor] | Tensor
) -> SimpleNamespace:
    """Return features of all images in the form of get_image_features' output: one tensor for all images, and one for
    each inner layer."""
    return SimpleNamespace(
        pooler_output=(pooled,),
        deepstack_features=[(feature,) for feature in inner_outputs],
    )


# ---- inner outputs of the image tower ------------------------------------------------


def add_at_images(
    hidden: Tensor,
    is_image: Tensor,
    features: Tensor,
) -> Tensor:
    """Return hidden states [n, tokens, dim] with features [image tokens, dim] added at image tokens.

    `is_image`: bool [n, tokens].
    """
    flat = is_image.flatten()
    # [all tokens] the row of an image token's features. Text tokens get that of any token, times 0.
    rows = (flat.cumsum(dim=0) - 1).clamp(min=0)
    added = features.to(hidden.dtype).index_select(0, rows)
    added = added * flat[:, None]
    return hidden + added.view_as(hidden)
