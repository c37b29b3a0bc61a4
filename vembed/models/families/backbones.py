"""Backbones of Transformers, known from their config: model class, layers, sizes, pooling of images and dtype."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from vembed.errors import UserError, did_you_mean
from vembed.models.custom.modeling import UserModelConfig
from vembed.models.custom.own_code import TRUSTED
from vembed.models.families.family import Family
from vembed.models.families.model_files import (
    LIBRARY_ERRORS,
    error_sentence,
    read_object,
    read_tensors,
)

StateDict = dict[str, Tensor]
"""Weights by their names, as torch's `state_dict` gives them."""
ENCODER_ONLY = {
    "t5": "T5EncoderModel",
    "mt5": "MT5EncoderModel",
    "umt5": "UMT5EncoderModel",
}
"""Encoder-decoder types of which only the encoder is used."""
ALWAYS_CAUSAL = frozenset(
    [
        "gpt_neo",
        "openai-gpt",
        "mamba",
        "mamba2",
        "falcon_mamba",
        "rwkv",
        "recurrent_gemma",
        "xlstm",
    ]
)
"""Decoder types that no option makes bidirectional: their causal mask is fixed, or they are recurrent."""
POSITIONS_AFTER_PADDING = frozenset(
    {
        "roberta",
        "xlm-roberta",
        "xlm-roberta-xl",
        "camembert",
        "mpnet",
        "roberta-prelayernorm",
        "data2vec-text",
        "esm",
        "ibert",
        "lilt",
        "longformer",
        "luke",
        "markuplm",
        "xmod",
    }
)
"""Model types whose positions start after the padding token's id, which leaves fewer for the text."""
FIXED_KEYS = frozenset({"architectures", "auto_map", "model_type"})
"""Keys of a config that say which class reads it."""
_CLASS_TOKENS = ("cls_token", "class_embedding", "class_token")
"""Names of the parameter that is the class token."""
_FOREIGN_KERNEL = re.compile(r'_?attn_implementation": (\{[^}]*|"[^"]*)/[^"]*')
_MANY_LAYERS = re.compile(r'layers?": \d{5,}')
"""In config.json, what Transformers must not see: an attention kernel of a repository, which it would fetch and run, and
more layers than any model has, which it would build one by one."""


def read_config(
    folder: Path,
    *,
    trust_remote_code: bool,
    changes: Mapping[str, Any] | None = None,
) -> PretrainedConfig:
    """Read a model's config.json with Transformers, and put other values in place of some. Raise UserError if it cannot
    be used."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(
            f"{folder} has no config.json; give the folder of a Transformers model"
        )
    values = read_object(path)
    text = json.dumps(values)
    kernel = _FOREIGN_KERNEL.search(text)
    if kernel is not None and not trust_remote_code:
        raise UserError(
            f'{path}: "{kernel[0]}" is code of a repository, and trust_remote_code is false; remove it, or set '
            "trust_remote_code: true if you trust this code"
        )
    layers = _MANY_LAYERS.search(text)
    if layers is not None:
        raise UserError(f'{path}: "{layers[0]} is more than any model has')
    needs_trust = (
        f"{folder} needs Python code of its own, and trust_remote_code is false; set trust_remote_code: true if you trust "
        "this code (of a class of yours, give model_class instead)"
    )
    if values.get("model_type") == UserModelConfig.model_type:
        custom = UserModelConfig.from_pretrained(folder)
        custom.name_or_path = str(folder)
        if str(folder) not in TRUSTED and not trust_remote_code:
            raise UserError(needs_trust)
        return custom
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(
                folder, trust_remote_code=trust_remote_code
            )
    except LIBRARY_ERRORS as error:
        if "trust_remote_code" in str(error):
            raise UserError(needs_trust) from error
        raise UserError(f"{path} cannot be used: {error_sentence(error)}") from error
    return config if not changes else _changed_config(config, changes)


def _changed_config(
    config: PretrainedConfig, changes: Mapping[str, Any]
) -> PretrainedConfig:
    """Return a config with other values of some keys. Raise UserError for a key that it does not have, or a value that
    does not fit."""
    renamed = {}
    for key, value in changes.items():
        # DistilBERT's n_layers is num_hidden_layers too.
        renamed[config.attribute_map.get(key, key)] = value
    values = config.to_dict()
    _put_values(values, renamed, f"the config of {config.model_type}")
    kinds = values.get("layer_types")
    num_layers = values.get("num_hidden_layers")
    if kinds and num_layers and "layer_types" not in changes:
        # One for each layer. Of a model that is cut, the first layers stay.
        values["layer_types"] = kinds[:num_layers]
    try:
        changed = type(config).from_dict(values)
    except LIBRARY_ERRORS as error:
        raise UserError(
            f"model_arguments: {dict(changes)} does not fit {type(config).__name__}: {error_sentence(error)}"
        ) from error
    changed.name_or_path = config.name_or_path
    return changed


def _put_values(values: dict[str, Any], changes: Mapping[str, Any], place: str) -> None:
    """Write other values over those of a config, in nested configs too."""
    rope = values.get("rope_parameters") or {}
    for key, value in changes.items():
        if key in FIXED_KEYS or (key not in values and key not in rope):
            raise UserError(
                f"model_arguments: {place} has no {key} to change{did_you_mean(key, values)}"
            )
        owner = values if key in values else rope
        inner = owner[key]
        if isinstance(value, Mapping) and isinstance(inner, dict):
            # Another kind of rotary positions has keys of its own, which Transformers checks.
            if "rope_type" in value:
                inner.update(value)
            else:
                _put_values(inner, value, f"{key} in {place}")
        else:
            owner[key] = value


def model_class(
    config: PretrainedConfig, *, trust_remote_code: bool
) -> type[PreTrainedModel]:
    """Return the model class without a task head."""
    kind = str(config.model_type)
    chosen = None
    if isinstance(config, UserModelConfig):
        chosen = TRUSTED.get(str(config.name_or_path))
    elif kind in ENCODER_ONLY:
        chosen = getattr(transformers, ENCODER_ONLY[kind])
    values = config.to_dict()
    own_code = values.get("auto_map", {}).get("AutoModel")
    if chosen is None and own_code is not None and trust_remote_code:
        try:
            chosen = get_class_from_dynamic_module(own_code, config.name_or_path)
        except LIBRARY_ERRORS as error:
            raise UserError(
                f"trust_remote_code: {config.name_or_path} gives no {own_code}: {error_sentence(error)}; copy the .py "
                "files of the model that was trained into the folder"
            ) from error
        # save_pretrained then writes the code into the model's folder.
        chosen.register_for_auto_class("AutoModel")
    if chosen is not None:
        return chosen
    # The private mapping, since AutoModel.from_config would build the model to tell its class.
    if type(config) not in AutoModel._model_mapping:
        raise UserError(
            f"Transformers has no model for model_type {kind!r}, so vembed cannot use it"
        )
    if values.get("is_encoder_decoder"):
        raise UserError(
            f"model_type {kind!r} is an encoder-decoder, which vembed does not support"
        )
    mapped = AutoModel._model_mapping[type(config)]
    # Several classes for one config: the first is the plain model.
    mapped = mapped[0] if isinstance(mapped, tuple) else mapped
    return cast(type[PreTrainedModel], mapped)


def language_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Return the model class with the language-model head: causal for decoders and vision-language models, masked for
    encoders. None if Transformers has none."""
    known: Mapping[Any, type[PreTrainedModel]] = MODEL_FOR_MASKED_LM_MAPPING
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        known = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    elif is_decoder_only(config):
        known = MODEL_FOR_CAUSAL_LM_MAPPING
    return known.get(type(config), None)


def is_decoder_only(config: PretrainedConfig) -> bool:
    """Return True if the model is a decoder-only language model. One that Transformers does not know says so itself, or
    by the class that its files were saved from."""
    kind = config.model_type
    if isinstance(config, UserModelConfig):
        return config.reads_causally
    if kind in CONFIG_MAPPING_NAMES:
        return (
            kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
            and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
        )
    values = config.to_dict()
    # Names of classes, and names of AutoClasses with code in the folder.
    architectures = values.get("architectures") or ()
    names = " ".join([*architectures, *values.get("auto_map", ())])
    return "ForCausalLM" in names and "ForMaskedLM" not in names


@dataclass(frozen=True)
class Shape:
    """Sizes and layer classes of a backbone, known before its weights are read."""

    hidden_dim: int
    layer_classes: tuple[str, ...]
    has_class_token: bool
    """True: an image encoder with a learned token that stands for the whole image."""


_shapes: dict[tuple[object, ...], Shape] = {}
"""Shapes by folder, family and config: a run asks several times, and a large model takes seconds."""


def shape_of(
    folder: Path,
    config: PretrainedConfig,
    chosen: type[PreTrainedModel],
    family: Family,
    *,
    reads_weights: bool = True,
) -> Shape:
    """Return sizes and layer classes, read from a model on the meta device. Raise UserError if the headers of the
    folder's weights, where they are read, have other sizes. `chosen`: the model's class."""
    values = config.to_dict()
    key = (folder, chosen, family.name, config.to_json_string(), reads_weights)
    if key in _shapes:
        return _shapes[key]
    is_own = isinstance(config, UserModelConfig)
    try:
        # The constructor of an own model may compute with its buffers.
        with init_empty_weights() if is_own else torch.device("meta"):
            model = chosen(config)
        if family.embedding_size is not None:
            hidden_dim = reduce(getitem, family.embedding_size, values)
        elif "hidden_sizes" in values:
            # Convolutional and hierarchical networks widen from stage to stage; the last stage is pooled.
            hidden_dim = values["hidden_sizes"][-1]
        else:
            hidden_dim = config.get_text_config().hidden_size
    except LIBRARY_ERRORS as error:
        raise UserError(
            f"{folder / 'config.json'} makes no {chosen.__name__}: {error_sentence(error)}; copy the model again"
        ) from error
    # Packed weights have shapes of their own.
    stored = {}
    if reads_weights and not values.get("quantization_config"):
        stored = read_tensors(folder)
    leaves = set()
    for name, parameter in model.named_parameters():
        leaves.add(name.rsplit(".", 1)[-1])
        # A model with a head for another task saves its weights under a prefix.
        tensor = stored.get(name) or stored.get(f"{model.base_model_prefix}.{name}")
        # Where the number of elements agrees, Transformers may turn the tensor while it is read.
        if tensor is not None and tensor.size != parameter.numel():
            raise UserError(
                f"{folder / 'config.json'} does not fit the weights: {name} has the shape {list(tensor.shape)} in "
                f"{tensor.path.name}, and config.json makes it {list(parameter.shape)}"
            )
    _shapes[key] = Shape(
        hidden_dim=int(hidden_dim),
        layer_classes=layer_classes_of(model),
        has_class_token=not leaves.isdisjoint(_CLASS_TOKENS),
    )
    return _shapes[key]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the transformer layers (or their counterparts) of each tower, in the order of the forward pass.

    Most models of Transformers mark layers by the base class GradientCheckpointingLayer. Otherwise the layers are the
    repeated modules named in `_no_split_modules`, and without such names the longest list of equal modules.
    """
    layers = []
    stacks = []
    names: set[str] = set()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            layers.append(module)
        elif isinstance(module, PreTrainedModel):
            names.update(module._no_split_modules or ())
        elif isinstance(module, nn.ModuleList) and len({*map(type, module)}) == 1:
            stacks.append(list(module))
    if not layers:
        for stack in stacks:
            layers += [layer for layer in stack if type(layer).__name__ in names]
    if not layers:
        layers = max(stacks, key=len, default=[])
    # Of nested candidates keep the inner ones: a layer that contains other layers is a container.
    candidates = set(map(id, layers))
    inner = []
    for layer in layers:
        num_candidates = sum(id(module) in candidates for module in layer.modules())
        if num_candidates == 1:  # itself
            inner.append(layer)
    return inner


def layer_classes_of(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the classes of a model's transformer layers."""
    return tuple(sorted({type(layer).__name__ for layer in layers_of(model)}))


def file_dtype(config: PretrainedConfig) -> torch.dtype:
    """Return the dtype that config.json states for the weights."""
    name = str(config.dtype or "float32").removeprefix("torch.")
    return cast(torch.dtype, getattr(torch, name))


def linear_names(backbone: nn.Module) -> list[str]:
    """Return the names of all linear layers, except those in nn.MultiheadAttention, which bypasses their forward."""
    names = []
    bypassed = set[nn.Module]()
    for name, module in backbone.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            bypassed.update(module.modules())
        elif isinstance(module, nn.Linear | Conv1D) and module not in bypassed:
            names.append(name)
    return names


def linear_names_inside_layers(backbone: nn.Module) -> list[str]:
    """Return the names of the linear layers inside the transformer layers (attention and feed-forward)."""
    inner = set[nn.Module]()
    for layer in layers_of(backbone):
        inner.update(layer.modules())
    linear = linear_names(backbone)
    return [name for name in linear if backbone.get_submodule(name) in inner]


# ---- names of parameters ---------------------------------------------------------------


WRAPPERS = frozenset(
    {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"}
)
"""Components that FSDP1, checkpointing and compilation add to names."""


def unwrapped_name(name: str) -> str:
    """Return the name of a parameter or module without the components that wrappers add."""
    parts = name.removeprefix("module.").split(".")
    return ".".join(part for part in parts if part and part not in WRAPPERS)


def is_never_used(name: str) -> bool:
    """Return True for parameters that no embedding depends on: poolers over the first token, mask tokens."""
    return ".pooler." in f".{name}" or f".{name}".endswith(".mask_token")


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


# ---- one vector per token, without layers --------------------------------------------


STATIC_TYPE = "vembed_static"


class StaticConfig(PretrainedConfig):  # type: ignore[misc]
    """Sizes of a table of token vectors."""

    model_type = STATIC_TYPE

    def __init__(
        self,
        vocab_size: int = 1,
        hidden_size: int = 1,
        **others: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        super().__init__(**others)


class StaticModel(PreTrainedModel):  # type: ignore[misc]
    """A table of token vectors."""

    config_class = StaticConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    _no_split_modules: list[str] = []  # noqa: RUF012 - Transformers reads it from the class
    _supports_sdpa = True  # no attention: every implementation will do
    _supports_flash_attn = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the table."""
        return self.embedding

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> BaseModelOutput:
        """Return the vectors of the tokens; the mask belongs to the pooling."""
        del attention_mask
        return BaseModelOutput(last_hidden_state=self.embedding(input_ids))


# Known to Transformers, so that its Auto classes read a folder of this type.
AutoConfig.register(STATIC_TYPE, StaticConfig, exist_ok=True)
AutoModel.register(StaticConfig, StaticModel, exist_ok=True)
