"""Backbones with their weights: settings that embedding needs otherwise, loading, and the check of what was loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError
from torch import nn
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from vembed.errors import UserError
from vembed.models.custom.modeling import OwnConfig
from vembed.models.families.backbones import (
    ENCODER_ONLY,
    file_dtype,
    language_class,
    model_class,
)
from vembed.models.families.model_settings import LIBRARY_ERRORS, first_sentence
from vembed.models.families.weight_files import check_whole_weights

log = logging.getLogger(__name__)


def adjust_config(config: PretrainedConfig, *, bidirectional: bool) -> None:
    """Change settings of the published config that embedding needs otherwise."""
    if config.model_type == "vit_mae":
        config.mask_ratio = (
            0.0  # pre-training masks random patches; an embedding must see all of them
        )
    if (
        config.model_type == "dinov3_vit"
    ):  # pre-training moves positions at random; embeddings must be deterministic
        config.pos_embed_shift = config.pos_embed_jitter = config.pos_embed_rescale = (
            None
        )
    if bidirectional:
        config.get_text_config().is_causal = False


def see_all_tokens(model: nn.Module) -> None:
    """Disable causal attention of a decoder, also for kernels that apply it without an explicit mask."""
    for module in model.modules():
        if vars(module).get("is_causal") is True:
            vars(module)["is_causal"] = False


def share_embeddings(model: Any) -> None:
    """Use one module for T5's embedding matrix: it is registered in two, which FSDP would shard as two parameters."""
    if model.config.model_type in ENCODER_ONLY:
        model.set_input_embeddings(model.get_input_embeddings())


def load_backbone(
    folder: Path,
    config: PretrainedConfig,
    *,
    dtype: torch.dtype | Literal["auto"],
    attn_implementation: str | None,
    trust_remote_code: bool,
    meta: bool,
    from_scratch: bool = False,
    with_head: bool = False,
    quantization: BitsAndBytesConfig | None = None,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Return the model with its weights.

    `meta`: leave the parameters empty and fill the buffers only. `from_scratch`: draw random weights. `with_head`: the
    model with its language-model head. `quantization`, `device`: quantise the weights on that device while they are
    read.
    """
    chosen = model_class(config, trust_remote_code=trust_remote_code)
    if with_head:
        chosen = _with_head(config)
    if meta:
        resolved = file_dtype(config) if dtype == "auto" else dtype
        with init_empty_weights(include_buffers=False), _default_dtype(resolved):
            return chosen._from_config(
                config, dtype=resolved, attn_implementation=attn_implementation
            )
    if from_scratch or (
        isinstance(config, OwnConfig) and not list(folder.glob("*.safetensors"))
    ):
        resolved = torch.float32 if dtype == "auto" else dtype
        log.info(
            "weights: random, drawn by the constructor of %s under the run's seed",
            chosen.__name__,
        )
        with _default_dtype(resolved):
            return chosen._from_config(
                config, dtype=resolved, attn_implementation=attn_implementation
            )
    check_whole_weights(folder)
    try:
        with quiet_transformers():
            model, info = chosen.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=attn_implementation,
                quantization_config=quantization,
                device_map=None if quantization is None else {"": device},
                use_safetensors=True,
                output_loading_info=True,
            )
    except torch.OutOfMemoryError:
        raise
    except (*LIBRARY_ERRORS, SafetensorError) as error:
        raise UserError(
            f"the weights of {folder} cannot be loaded: {first_sentence(error)}"
        ) from error
    _check_loading(folder, model, info)
    return cast(PreTrainedModel, model)


def _with_head(config: PretrainedConfig) -> type[PreTrainedModel]:
    head_class = language_class(config)
    if head_class is None:
        raise UserError(
            f"Transformers has no language-model head for model_type {config.model_type!r}, by which loss: none would "
            "train; give a loss, or language_modelling: false"
        )
    return head_class


def _check_loading(folder: Path, model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Raise UserError if weights are missing from the folder, unless no embedding depends on them (poolers)."""
    # A base model's folder may lack a language-model head, which is then new.
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    missing = sorted(
        name
        for name in info["missing_keys"]
        if not is_never_used(name) and name.startswith(prefix)
    )
    if missing:
        raise UserError(
            f"{folder} lacks {len(missing):,d} of the weights of {type(model).__name__}, {missing[0]} among them; "
            "it is incomplete, or its config.json is that of another model"
        )
    unexpected = sorted(info["unexpected_keys"])
    if unexpected:
        log.info(
            "ignored %d unused weights of %s (first: %s)",
            len(unexpected),
            folder,
            unexpected[0],
        )


def is_never_used(name: str) -> bool:
    """Return True for parameters that no embedding depends on: poolers over the first token, mask tokens."""
    return (
        name.startswith("pooler.")
        or ".pooler." in name
        or name.rsplit(".", 1)[-1] == "mask_token"
    )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress progress bars and load reports of Transformers; vembed checks the result itself."""
    verbosity = transformers_logging.get_verbosity()
    bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bar:
            transformers_logging.enable_progress_bar()
