"""Precision and kernels: dtypes of weights, the attention kernel, gradient checkpointing, compilation, batch norms."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import is_flash_attn_2_available

from vembed.config.schema import TrainConfig
from vembed.errors import UserError
from vembed.models.description import ModelDescription

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMES_IN_FILES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def wanted_dtype(config: TrainConfig) -> torch.dtype | Literal["auto"]:
    """Dtype of weights that are not trained; `auto`: as they are in the file."""
    return "auto" if config.torch_dtype == "auto" else _DTYPES[config.torch_dtype]


def trained_dtype(config: TrainConfig) -> torch.dtype | Literal["auto"]:
    """Dtype of weights that are trained: float32 masters, unless the user wants none."""
    return wanted_dtype(config) if config.pure_dtype else torch.float32


def frozen_dtype(config: TrainConfig, own: torch.dtype) -> torch.dtype:
    """Dtype of weights that are not trained, where the file has them in the dtype `own`."""
    wanted = wanted_dtype(config)
    return own if wanted == "auto" else wanted


def saved_dtype(config: TrainConfig, description: ModelDescription) -> torch.dtype | None:
    """Dtype that the trained model is stored in; None: as its weights are held."""
    if config.save_dtype != "auto":
        return _DTYPES[config.save_dtype]
    folders = [Path(one) for one in (description.source, description.image_source) if one is not None]
    found = {dtype_in_files(folder) for folder in folders}
    return found.pop() if len(found) == 1 and torch.float32 not in found else None


def dtype_in_files(folder: Path) -> torch.dtype:
    """Dtype of most of the weights in a folder's files, whatever its config.json says."""
    sizes: Counter[str] = Counter()
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__" and tensor["dtype"] in _NAMES_IN_FILES:
                sizes[tensor["dtype"]] += math.prod(tensor["shape"])
    return _NAMES_IN_FILES[sizes.most_common(1)[0][0]] if sizes else torch.float32


def computes_in_half(config: TrainConfig, held: torch.dtype) -> bool:
    """Whether attention gets 16 bits from weights held in a dtype. `pure_dtype` comes without autocast in use."""
    return held in (torch.bfloat16, torch.float16) or (config.mixed_precision != "no" and not config.pure_dtype)


def attention_kernel(
    config: TrainConfig, backbone: type[PreTrainedModel], device: torch.device, held: torch.dtype
) -> tuple[str | None, str]:
    """The attention implementation to load with, and why; None: the model's own, where it offers no choice. `held`:
    dtype of the weights."""
    asked = config.attn_implementation
    has_sdpa, has_flash = bool(backbone._supports_sdpa), bool(backbone._supports_flash_attn)
    if asked == "flash_attention_2":
        if not has_flash:
            raise UserError(f"attn_implementation: {backbone.__name__} has no flash_attention_2; use sdpa (or auto)")
        if not is_flash_attn_2_available():
            raise UserError(
                "attn_implementation: flash_attention_2 needs the package flash-attn and a CUDA GPU, and at least one "
                "is missing here; use sdpa (or auto)"
            )
    if asked == "sdpa" and not has_sdpa:
        raise UserError(f"attn_implementation: {backbone.__name__} has no sdpa; use auto or eager")
    if asked != "auto":
        return asked, "attn_implementation says so"
    reason = _why_no_flash(config, has_flash, device, held)
    if reason is None:
        return "flash_attention_2", "auto: flash-attn is installed and the GPU allows it"
    return "sdpa" if has_sdpa else None, f"auto: {reason}"


def _why_no_flash(config: TrainConfig, has_flash: bool, device: torch.device, held: torch.dtype) -> str | None:
    if device.type != "cuda":
        return "no CUDA GPU"
    if not has_flash:
        return "this model has no flash-attn"
    if not is_flash_attn_2_available():
        return "flash-attn is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than flash-attn allows"
    if not computes_in_half(config, held):
        return "flash-attn has no float32"
    return None


def wants_checkpointing(config: TrainConfig) -> bool:
    """Whether activations are recomputed in the backward pass."""
    if config.gradient_checkpointing is not None:
        return config.gradient_checkpointing
    return config.use_fsdp or config.strategy == "fsdp"


def enable_checkpointing(layers: list[nn.Module]) -> None:
    """Recompute each layer in the backward pass of training mode; the layers need no trainable parameter for it."""
    recompute = partial(checkpoint, use_reentrant=False)
    for layer in layers:
        if isinstance(layer, GradientCheckpointingLayer):
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = recompute
        else:
            layer.forward = partial(_recomputed, layer, layer.forward)


def _recomputed(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not layer.training:
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def compile_layers(layers: list[nn.Module]) -> None:
    """Compile each layer once for all lengths: the compiled code takes the number of rows and tokens as it comes."""
    for layer in layers:
        layer.compile(dynamic=True)


def share_batch_norms(model: nn.Module, device: torch.device) -> int:
    """Turn batch norms into ones that share statistics among processes, and return how many there were."""
    found = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if found and device.type == "cpu":
        raise UserError(f"sync_batchnorm: true needs GPUs for this model's {len(found):,d} batch norms; leave it out")
    if found:
        nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    log.info("sync_batchnorm: %d batch norms share their statistics among processes", len(found))
    return len(found)
