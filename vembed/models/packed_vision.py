"""Image towers of vision-language models: one attention over the patches of all images, each restricted to its own.

Without flash-attn, Transformers calls attention once per image in every layer, with lengths read from the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from vembed.models import cpu_kernels, packing
from vembed.models.image_positions import LONGEST, VISION

IMPLEMENTATION = "vembed_packed_flash_images"
"""Name of `attention` in Transformers' registry. With "flash" in it, image towers hand over cumulative lengths."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function for Transformers, for all images of a batch in one row. Versions that do not hand over the
    lengths call it for each image."""
    packed = None
    if cu_seq_lens_q is not None and max_length_q is not None:
        packed = packing.Packed(cu_seq_lens_q.to(torch.int32), int(max_length_q))
    return packing.attention(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=False,
        packed=packed,
    )


def why_by_image(tower: Any, device: torch.device, *, half: bool) -> str | None:
    """Return the reason for attention image by image; None: all images at once."""
    if device.type == "cpu":
        return None
    if not half:
        return "flash attention does not support float32"
    values = tower.config.to_dict()
    width = int(values.get("embed_dim") or values["hidden_size"])
    return packing.why_no_kernel_for(width // int(values["num_heads"]), device)


def pack_images(tower: Any) -> None:
    """Let an image tower compute attention over all images at once."""
    cpu_kernels.register(IMPLEMENTATION, attention)
    tower.config._attn_implementation = IMPLEMENTATION


def tower_output(backbone: Any, inputs: Mapping[str, Tensor]) -> Any:
    """Return what the image tower gives for all images of a batch: `pooler_output` and `deepstack_features`, each as a
    tuple of one tensor for all images."""
    given: dict[str, Any] = {
        name.removeprefix(VISION): value
        for name, value in inputs.items()
        if name.startswith(VISION)
    }
    if not given:
        return backbone.get_image_features(
            inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True
        )
    given["max_seqlen"] = inputs[LONGEST].shape[0]
    output = backbone.visual(
        inputs["pixel_values"].type(backbone.visual.dtype),
        grid_thw=inputs["image_grid_thw"],
        return_dict=True,
        **given,
    )
    return in_one_piece(output.pooler_output, output.deepstack_features)


def in_one_piece(pooled: Tensor, on_the_way: list[Tensor] | Tensor) -> SimpleNamespace:
    """Return features of all images in the form of get_image_features' output: one tensor for all images, and one for
    each inner layer."""
    return SimpleNamespace(
        pooler_output=(pooled,), deepstack_features=[(one,) for one in on_the_way]
    )
