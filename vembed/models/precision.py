"""Precision and kernels: dtypes of weights, attention implementation, recomputation, compilation, batch norms."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import is_flash_attn_2_available

from vembed.errors import UserError
from vembed.models.families.description import ModelDescription
from vembed.models.families.weight_files import read_header

log = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "pure_bfloat16": torch.bfloat16,
}
"""Values of torch_dtype and save_dtype. `auto` is not among them: the dtype of the files."""
_NAMES_IN_FILES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def saved_dtype(save_dtype: str, description: ModelDescription) -> torch.dtype | None:
    """Return the dtype to store the trained model in; None: the dtype that its weights have."""
    if save_dtype != "auto":
        return DTYPES[save_dtype]
    folders = [
        Path(source)
        for source in (description.source, description.image_source)
        if source is not None
    ]
    dtypes = {dtype_in_files(folder) for folder in folders}
    return dtypes.pop() if len(dtypes) == 1 and torch.float32 not in dtypes else None


def dtype_in_files(folder: Path) -> torch.dtype:
    """Return the most frequent weight dtype in a folder's files, whatever its config.json says."""
    sizes: Counter[str] = Counter()
    for path in folder.glob("*.safetensors"):
        for tensor in read_header(path)[0].values():
            if tensor.dtype in _NAMES_IN_FILES:
                sizes[tensor.dtype] += tensor.size
    return _NAMES_IN_FILES[sizes.most_common(1)[0][0]] if sizes else torch.float32


def attention_kernel(
    asked: str,
    backbone: type[PreTrainedModel],
    device: torch.device,
    *,
    half: bool,
) -> tuple[str | None, str]:
    """Return the attention implementation to load and the reason; None: the model's default.

    `asked`: the option attn_implementation. `half`: attention runs in 16 bits.
    """
    has_sdpa = bool(backbone._supports_sdpa)
    has_flash = bool(backbone._supports_flash_attn)
    if asked == "flash_attention_2":
        if not has_flash:
            raise UserError(
                f"attn_implementation: {backbone.__name__} has no flash_attention_2; use sdpa (or auto)"
            )
        if not is_flash_attn_2_available():
            raise UserError(
                "attn_implementation: flash_attention_2 needs the package flash-attn and a CUDA GPU, and at least one "
                "is missing here; use sdpa (or auto)"
            )
    if asked == "sdpa" and not has_sdpa:
        raise UserError(
            f"attn_implementation: {backbone.__name__} has no sdpa; use auto or eager"
        )
    if asked != "auto":
        return asked, "attn_implementation in the config"
    if device.type != "cuda":
        problem = "no CUDA GPU"
    elif not has_flash:
        problem = "this model does not support flash-attn"
    elif not is_flash_attn_2_available():
        problem = "flash-attn is not installed"
    elif torch.cuda.get_device_capability(device) < (8, 0):
        problem = "the GPU is older than flash-attn allows"
    elif not half:
        problem = "flash-attn does not support float32"
    else:
        return (
            "flash_attention_2",
            "auto: flash-attn is installed and the GPU allows it",
        )
    return "sdpa" if has_sdpa else None, f"auto: {problem}"


def enable_checkpointing(layers: list[nn.Module]) -> None:
    """Recompute each layer in the backward pass of training mode, also layers without trainable parameters."""
    # Reentrant checkpointing gives no gradient if no input requires grad, as below frozen embeddings with adapters.
    recompute = partial(checkpoint, use_reentrant=False)
    for layer in layers:
        if isinstance(layer, GradientCheckpointingLayer):
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = recompute
        else:
            layer.forward = partial(_recomputed, layer, layer.forward)


def _recomputed(
    layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if not layer.training:
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def compile_layers(layers: list[nn.Module], backend: str = "inductor") -> None:
    """Compile each layer once, with dynamic numbers of rows and tokens."""
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)
