"""Backbones as Transformers builds them: the class for a config, its layers and sizes, and loading its weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModel, BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from vembed.errors import UserError
from vembed.models.description import Family, Pooling

log = logging.getLogger(__name__)

_ENCODER_ONLY = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}
"""Encoder-decoder types whose encoder alone is the embedder."""
_POOLED_BY_MEAN = ("convnext", "convnextv2", "dinov3_convnext")


@dataclass(frozen=True)
class Shape:
    """What the rest needs to know of a backbone before its weights are read."""

    hidden_dim: int
    layer_classes: tuple[str, ...]


def read_config(folder: Path, *, trust_remote_code: bool) -> PretrainedConfig:
    """The model's config.json as Transformers understands it."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json, so it is no model that vembed can read")
    try:
        return cast(PretrainedConfig, AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code))
    except (ValueError, OSError) as error:
        if "trust_remote_code" in str(error):
            raise UserError(
                f"{folder} brings Python code that its model needs, and vembed runs none unless asked: set "
                "trust_remote_code: true if you trust it as your own"
            ) from error
        raise UserError(_first_sentence(f"{folder / 'config.json'} cannot be used: {error}")) from error


def model_class(config: PretrainedConfig, *, trust_remote_code: bool) -> type[PreTrainedModel]:
    """The class without a task's head that embeds."""
    kind = str(config.model_type)
    if kind in _ENCODER_ONLY:
        import transformers

        return cast(type[PreTrainedModel], getattr(transformers, _ENCODER_ONLY[kind]))
    own_code = config.to_dict().get("auto_map", {}).get("AutoModel")
    if own_code is not None and trust_remote_code:
        return cast(type[PreTrainedModel], get_class_from_dynamic_module(own_code, config.name_or_path))
    if type(config) not in AutoModel._model_mapping:
        raise UserError(f"Transformers has no model for model_type {kind!r}, so vembed cannot embed with it")
    found = AutoModel._model_mapping[type(config)]
    chosen = found[0] if isinstance(found, tuple) else found
    if config.to_dict().get("is_encoder_decoder"):
        raise UserError(f"model_type {kind!r} is an encoder-decoder, which vembed cannot embed with")
    return cast(type[PreTrainedModel], chosen)


def takes_pixels(config: PretrainedConfig, *, trust_remote_code: bool) -> bool:
    """Whether the model's input is an image and nothing else."""
    return str(model_class(config, trust_remote_code=trust_remote_code).main_input_name) == "pixel_values"


def is_decoder_only(config: PretrainedConfig) -> bool:
    """Whether the model is a language model that generates, without an encoder of its own."""
    kind = config.model_type
    return kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def is_bidirectional(config: PretrainedConfig) -> bool:
    """Whether a decoder's own config lets every token see every other one (EmbeddingGemma does)."""
    values = config.to_dict()
    return values.get("is_causal") is False or values.get("use_bidirectional_attention") is True


def image_pooling(config: PretrainedConfig) -> tuple[Pooling, str]:
    """An image encoder's pooling by its kind, and why."""
    if config.model_type in _POOLED_BY_MEAN:
        return "own", "a convolutional network's mean over positions, behind its layer norm"
    return "cls", "the image's class token, by family"


def shape_of(config: PretrainedConfig, family: Family, *, trust_remote_code: bool) -> Shape:
    """Sizes and layer classes, read off a model without weights."""
    with torch.device("meta"):
        model = model_class(config, trust_remote_code=trust_remote_code)(config)
    return Shape(_hidden_dim(config, family), tuple(sorted({type(layer).__name__ for layer in layers_of(model)})))


def _hidden_dim(config: PretrainedConfig, family: Family) -> int:
    values = config.to_dict()
    if family == "clip":
        return int(values["projection_dim"])
    if family == "siglip":
        return int(values["vision_config"]["hidden_size"])
    if "hidden_sizes" in values:
        return int(values["hidden_sizes"][-1])
    return int(config.get_text_config().hidden_size)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The transformer layers, or what stands for them, in the order of the forward pass of each tower.

    Transformers marks them by a base class in nearly all models. Where it does not, they are the repeated modules that
    the model itself names as not to be split, and where it names none, the longest list of equal modules.
    """
    found = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not found:
        named = {name for module in model.modules() for name in _unsplit_names(module)}
        repeated = [child for group in _repeated(model) for child in group]
        found = [module for module in repeated if type(module).__name__ in named]
    if not found:
        found = max(_repeated(model), key=len, default=[])
    inner = {id(below) for module in found for below in module.modules() if below is not module}
    outermost_of_nested = {id(module) for module in found if any(id(m) in inner for m in _below(module, found))}
    return [module for module in found if id(module) not in outermost_of_nested]


def _below(module: nn.Module, found: list[nn.Module]) -> list[nn.Module]:
    below = {id(inner) for inner in module.modules() if inner is not module}
    return [other for other in found if id(other) in below]


def _unsplit_names(module: nn.Module) -> set[str]:
    return set(module._no_split_modules or ()) if isinstance(module, PreTrainedModel) else set()


def _repeated(model: nn.Module) -> Iterator[list[nn.Module]]:
    for module in model.modules():
        children = list(module.children())
        if isinstance(module, nn.ModuleList) and len({type(child) for child in children}) == 1:
            yield children


def adjust_config(config: PretrainedConfig, *, bidirectional: bool) -> None:
    """Settings that embedding needs and the published config may not have."""
    if config.model_type == "vit_mae":
        config.mask_ratio = 0.0  # what is masked at random in pre-training is what an embedding is made of
    if config.model_type == "dinov3_vit":  # positions moved at random, as pre-training did, would blur the image's
        config.pos_embed_shift = config.pos_embed_jitter = config.pos_embed_rescale = None
    if bidirectional:
        config.get_text_config().is_causal = False


def see_all_tokens(model: nn.Module) -> None:
    """Take the causal mask out of a decoder's attention, also where a kernel applies it without a mask."""
    for module in model.modules():
        if vars(module).get("is_causal") is True:
            vars(module)["is_causal"] = False


def share_embeddings(model: Any) -> None:
    """T5 has one embedding matrix in two modules, and a sharded model would take them for two: make them one module."""
    if model.config.model_type in _ENCODER_ONLY:
        model.set_input_embeddings(model.get_input_embeddings())


# ---- loading ---------------------------------------------------------------------------------------------------


def load_backbone(
    folder: Path,
    config: PretrainedConfig,
    *,
    dtype: torch.dtype | Literal["auto"],
    attn_implementation: str | None,
    trust_remote_code: bool,
    meta: bool,
    quantization: BitsAndBytesConfig | None = None,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """The model with its weights; with `meta` its parameters are empty, and only buffers hold values. `quantization`
    and `device`: weights are packed there as they are read."""
    chosen = model_class(config, trust_remote_code=trust_remote_code)
    if meta:
        resolved = file_dtype(config) if dtype == "auto" else dtype
        with init_empty_weights(include_buffers=False), _default_dtype(resolved):
            return chosen._from_config(config, dtype=resolved, attn_implementation=attn_implementation)
    if not list(folder.glob("*.safetensors")):
        raise UserError(
            f"{folder} has no .safetensors file, and vembed reads no pickled weights; "
            "load the model with Transformers once and save it again"
        )
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
    _check_loading(folder, model, info)
    return cast(PreTrainedModel, model)


def _check_loading(folder: Path, model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Weights that the folder does not have are random: harmless in a pooler, which is never used, else an error."""
    missing = sorted(name for name in info["missing_keys"] if not is_never_used(name))
    if missing:
        raise UserError(
            f"{folder} lacks {len(missing):,d} of the weights of {type(model).__name__}, {missing[0]} among them; "
            "it is incomplete, or its config.json is that of another model"
        )
    unexpected = sorted(info["unexpected_keys"])
    if unexpected:
        log.info("%d weights of %s are not needed to embed, %s among them", len(unexpected), folder, unexpected[0])


def is_never_used(name: str) -> bool:
    """Parameters that no embedding depends on: poolers over the first token, mask tokens."""
    return name.startswith("pooler.") or ".pooler." in name or name.rsplit(".", 1)[-1] == "mask_token"


def file_dtype(config: PretrainedConfig) -> torch.dtype:
    """Dtype that config.json gives for the weights beside it."""
    dtype = config.dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


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
    """Loading bars and reports stay out of the log: what matters of them is checked and said here."""
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


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).split(". ", 1)[0]
