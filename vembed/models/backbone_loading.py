"""Backbones with their weights: loading, and the check of what was loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from vembed.errors import UserError
from vembed.models.custom.modeling import OwnConfig
from vembed.models.families.backbones import file_dtype
from vembed.models.families.model_settings import LIBRARY_ERRORS, first_sentence
from vembed.models.families.weight_files import check_whole_weights

log = logging.getLogger(__name__)


def load_backbone(
    folder: Path,
    config: PretrainedConfig,
    chosen: type[PreTrainedModel],
    *,
    dtype: torch.dtype | None,
    attn_implementation: str | None,
    quantization: BitsAndBytesConfig | None,
    device: torch.device,
    meta: bool,
    from_scratch: bool,
) -> PreTrainedModel:
    """Return a model of the class `chosen` with its weights.

    `dtype`: None is that of the files. `quantization`, `device`: quantise the weights on that device while they are
    read. `meta`: leave the parameters empty and fill the buffers only. `from_scratch`: draw random weights.
    """
    has_weights = any(folder.glob("*.safetensors"))
    is_new = from_scratch or (isinstance(config, OwnConfig) and not has_weights)
    if meta or is_new:
        built_in = dtype or (file_dtype(config) if meta else torch.float32)
        empty: Any = (
            init_empty_weights(include_buffers=False) if meta else nullcontext()
        )
        if not meta:
            log.info(
                "weights: random, drawn by the constructor of %s under the run's seed",
                chosen.__name__,
            )
        default = torch.get_default_dtype()
        torch.set_default_dtype(built_in)
        try:
            with empty:
                return chosen._from_config(
                    config, dtype=built_in, attn_implementation=attn_implementation
                )
        finally:
            torch.set_default_dtype(default)
    check_whole_weights(folder)
    try:
        with quiet_transformers():
            model, info = chosen.from_pretrained(
                folder,
                config=config,
                dtype=dtype or "auto",
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
    # A base model's folder may lack a language-model head, which is then new.
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    missing = sorted(
        name
        for name in info["missing_keys"]
        if not is_never_used(name) and name.startswith(prefix)
    )
    if missing:
        raise UserError(
            f"{folder} lacks {len(missing):,d} of the weights of {chosen.__name__}, {missing[0]} among them; "
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
    return cast(PreTrainedModel, model)


def is_never_used(name: str) -> bool:
    """Return True for parameters that no embedding depends on: poolers over the first token, mask tokens."""
    return (
        name.startswith("pooler.")
        or ".pooler." in name
        or name.rsplit(".", 1)[-1] == "mask_token"
    )


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
