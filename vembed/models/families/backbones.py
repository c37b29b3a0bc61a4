"""Backbones of Transformers, known from their config: model class, layers, sizes, pooling of images and dtype."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, cast

import torch
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
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D

from vembed.errors import UserError
from vembed.models.custom.classes import trusted_class
from vembed.models.custom.modeling import OwnConfig
from vembed.models.families.family import Family
from vembed.models.families.model_settings import (
    LIBRARY_ERRORS,
    check_attention,
    check_config,
    check_fit,
    first_sentence,
)
from vembed.models.families.weight_files import read_object, read_tensors
from vembed.models.poolings.table import MODEL_POOLING

ENCODER_ONLY = {
    "t5": "T5EncoderModel",
    "mt5": "MT5EncoderModel",
    "umt5": "UMT5EncoderModel",
}
"""Encoder-decoder types of which only the encoder is used."""
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
_POOLED_BY_MEAN = ("convnext", "convnextv2", "dinov3_convnext")
_CLASS_TOKENS = ("cls_token", "class_embedding", "class_token")
"""Names of the parameter that is the class token."""


@dataclass(frozen=True)
class Shape:
    """Sizes and layer classes of a backbone, known before its weights are read."""

    hidden_dim: int
    layer_classes: tuple[str, ...]
    has_class_token: bool
    """True: an image encoder with a learned token that stands for the whole image."""


def read_config(folder: Path, *, trust_remote_code: bool) -> PretrainedConfig:
    """Read a model's config.json with Transformers. Raise UserError if it cannot be used."""
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{folder} has no config.json; give the folder of a Transformers model"
        )
    check_attention(folder, trust_remote_code=trust_remote_code)
    own_config = read_own_config(folder, trust_remote_code=trust_remote_code)
    if own_config is not None:
        return own_config
    if (read_object(folder / "config.json") or {}).get("model_type") == STATIC_TYPE:
        static_config: PretrainedConfig = StaticConfig.from_pretrained(folder)
        return static_config
    check_config(folder / "config.json", len(read_tensors(folder)) or None)
    try:
        return cast(
            PretrainedConfig,
            AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code),
        )
    except LIBRARY_ERRORS as error:
        if "trust_remote_code" in str(error):
            raise UserError(
                f"{folder} needs Python code of its own, and trust_remote_code is false; set "
                "trust_remote_code: true if you trust this code"
            ) from error
        raise UserError(
            f"{folder / 'config.json'} cannot be used: {first_sentence(error)}"
        ) from error


def read_own_config(folder: Path, *, trust_remote_code: bool) -> OwnConfig | None:
    """Return the config of an own model; None for any other. Raise UserError if its code may not run."""
    values = read_object(folder / "config.json")
    if values is None or values.get("model_type") != OwnConfig.model_type:
        return None
    config: OwnConfig = OwnConfig.from_pretrained(folder)
    config.name_or_path = str(folder)
    if trusted_class(str(config.name_or_path)) is None and not trust_remote_code:
        raise UserError(
            f"{folder} needs Python code of its own ({config.class_name}), and trust_remote_code is false; set "
            "trust_remote_code: true if you trust this code, or give model_class your own copy of it"
        )
    return config


def model_class(
    config: PretrainedConfig, *, trust_remote_code: bool
) -> type[PreTrainedModel]:
    """Return the model class without a task head."""
    kind = str(config.model_type)
    if (
        isinstance(config, OwnConfig)
        and (trusted := trusted_class(str(config.name_or_path))) is not None
    ):
        return trusted
    if isinstance(config, StaticConfig):
        return StaticModel
    if kind in ENCODER_ONLY:
        import transformers

        return cast(type[PreTrainedModel], getattr(transformers, ENCODER_ONLY[kind]))
    own_code = config.to_dict().get("auto_map", {}).get("AutoModel")
    if own_code is not None and trust_remote_code:
        return cast(
            type[PreTrainedModel],
            get_class_from_dynamic_module(own_code, config.name_or_path),
        )
    # The private mapping, since AutoModel.from_config would build the model to tell its class.
    if type(config) not in AutoModel._model_mapping:
        raise UserError(
            f"Transformers has no model for model_type {kind!r}, so vembed cannot use it"
        )
    classes = AutoModel._model_mapping[type(config)]
    # Several classes for one config: the first is the plain model.
    chosen = classes[0] if isinstance(classes, tuple) else classes
    if config.to_dict().get("is_encoder_decoder"):
        raise UserError(
            f"model_type {kind!r} is an encoder-decoder, which vembed does not support"
        )
    return cast(type[PreTrainedModel], chosen)


def language_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Return the model class with the language-model head: causal for decoders, masked for encoders. None if
    Transformers has none."""
    known = (
        MODEL_FOR_CAUSAL_LM_MAPPING
        if is_decoder_only(config)
        else MODEL_FOR_MASKED_LM_MAPPING
    )
    return (
        cast(type[PreTrainedModel], known[type(config)])
        if type(config) in known
        else None
    )


def takes_pixels(config: PretrainedConfig, *, trust_remote_code: bool) -> bool:
    """Return True if the model's only input is an image."""
    return (
        str(model_class(config, trust_remote_code=trust_remote_code).main_input_name)
        == "pixel_values"
    )


def takes_both(config: PretrainedConfig) -> bool:
    """Return True if an own model takes texts and images."""
    return isinstance(config, OwnConfig) and {"input_ids", "pixel_values"} <= set(
        config.inputs
    )


def gives_vectors(config: PretrainedConfig) -> bool:
    """Return True if an own model gives one vector for each input, so that there is nothing to pool."""
    return isinstance(config, OwnConfig) and config.gives_vectors


def is_decoder_only(config: PretrainedConfig) -> bool:
    """Return True if the model is a decoder-only language model. One that Transformers does not know says so itself, or
    by the class that its files were saved from."""
    kind = config.model_type
    if isinstance(config, OwnConfig):
        return config.reads_causally
    if kind not in CONFIG_MAPPING_NAMES:
        values = config.to_dict()
        classes = [
            *(values.get("architectures") or ()),
            *(values.get("auto_map") or ()),
        ]
        heads = {
            name
            for name in ("ForCausalLM", "ForMaskedLM")
            if any(class_.endswith(name) for class_ in classes)
        }
        return heads == {"ForCausalLM"}
    return (
        kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    )


def is_bidirectional(config: PretrainedConfig) -> bool:
    """Return True if a decoder's config enables bidirectional attention (as EmbeddingGemma does)."""
    values = config.to_dict()
    return (
        values.get("is_causal") is False
        or values.get("use_bidirectional_attention") is True
    )


def image_pooling(config: PretrainedConfig, shape: Shape) -> tuple[str, str]:
    """Return an image encoder's default pooling and the reason.

    Without a class token the first position is a corner of the image (ResNet, Swin), so all positions are averaged.
    """
    if isinstance(config, OwnConfig) and config.gives_vectors:
        return "cls", "the module gives one vector for each input"
    if config.model_type in _POOLED_BY_MEAN:
        return (
            MODEL_POOLING,
            "a convolutional network's mean over positions, behind its layer norm",
        )
    if not shape.has_class_token:
        return "mean", "the mean over positions: the network has no class token"
    return "cls", "the image's class token, by family"


_shapes: dict[tuple[object, ...], Shape] = {}
"""Shapes by model class, family, settings and files: a run asks several times, and a large model takes seconds."""


def shape_of(
    folder: Path, config: PretrainedConfig, family: Family, *, trust_remote_code: bool
) -> Shape:
    """Return sizes and layer classes, read from a model on the meta device. Raise UserError unless the headers of the
    folder's weights fit it."""
    chosen = model_class(config, trust_remote_code=trust_remote_code)
    if isinstance(config, OwnConfig):  # whose class may change while its name stays
        return _read_shape(folder, chosen, config, family)
    # By the settings' text: values of a config may be lists and dicts, which are no keys.
    key = (
        chosen,
        family.name,
        repr(sorted(config.to_dict().items(), key=str)),
        _files_of(folder),
    )
    if key not in _shapes:
        _shapes[key] = _read_shape(folder, chosen, config, family)
    return _shapes[key]


def _files_of(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return path, size and modification time of each file of a folder."""
    files = [
        (entry.path, entry.stat()) for entry in os.scandir(folder) if entry.is_file()
    ]
    return tuple(
        sorted((path, status.st_size, status.st_mtime_ns) for path, status in files)
    )


def _read_shape(
    folder: Path,
    chosen: type[PreTrainedModel],
    config: PretrainedConfig,
    family: Family,
) -> Shape:
    try:
        # The constructor of an own model may compute with its buffers.
        with (
            init_empty_weights()
            if isinstance(config, OwnConfig)
            else torch.device("meta")
        ):
            model = chosen(config)
        hidden_dim = _hidden_dim(config, family)
    except LIBRARY_ERRORS as error:
        raise UserError(
            f"{folder / 'config.json'} makes no {chosen.__name__}: {first_sentence(error)}; copy the model again"
        ) from error
    if not isinstance(
        config, OwnConfig
    ):  # which has no prefix, and checks its weights when it loads them
        check_fit(folder, model, config.to_dict(), str(model.base_model_prefix))
    return Shape(
        hidden_dim=hidden_dim,
        layer_classes=tuple(
            sorted({type(layer).__name__ for layer in layers_of(model)})
        ),
        has_class_token=any(
            name.rsplit(".", 1)[-1] in _CLASS_TOKENS
            for name, _ in model.named_parameters()
        ),
    )


def _hidden_dim(config: PretrainedConfig, family: Family) -> int:
    values = config.to_dict()
    if family.embedding_size is not None:
        return int(reduce(getitem, family.embedding_size, values))
    # Convolutional and hierarchical networks widen from stage to stage; the last stage is pooled.
    if "hidden_sizes" in values:
        return int(values["hidden_sizes"][-1])
    return int(config.get_text_config().hidden_size)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the transformer layers (or their counterparts) of each tower, in the order of the forward pass.

    Most models of Transformers mark layers by the base class GradientCheckpointingLayer. Otherwise the layers are the
    repeated modules named in `_no_split_modules`, and without such names the longest list of equal modules.
    """
    layers = [
        module
        for module in model.modules()
        if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        named = {name for module in model.modules() for name in _unsplit_names(module)}
        repeated = [child for group in _repeated(model) for child in group]
        layers = [module for module in repeated if type(module).__name__ in named]
    if not layers:
        layers = max(_repeated(model), key=len, default=[])
    # Of nested candidates keep the inner ones: a layer that contains other layers is a container.
    inner = {
        id(below)
        for module in layers
        for below in module.modules()
        if below is not module
    }
    outermost_of_nested = {
        id(module)
        for module in layers
        if any(id(m) in inner for m in _below(module, layers))
    }
    return [module for module in layers if id(module) not in outermost_of_nested]


def _below(module: nn.Module, candidates: list[nn.Module]) -> list[nn.Module]:
    below = {id(inner) for inner in module.modules() if inner is not module}
    return [other for other in candidates if id(other) in below]


def _unsplit_names(module: nn.Module) -> set[str]:
    return (
        set(module._no_split_modules or ())
        if isinstance(module, PreTrainedModel)
        else set()
    )


def _repeated(model: nn.Module) -> Iterator[list[nn.Module]]:
    for module in model.modules():
        children = list(module.children())
        if (
            isinstance(module, nn.ModuleList)
            and len({type(child) for child in children}) == 1
        ):
            yield children


def file_dtype(config: PretrainedConfig) -> torch.dtype:
    """Return the dtype that config.json states for the weights."""
    dtype = config.dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def linear_names(backbone: nn.Module) -> list[str]:
    """Return the names of all linear layers, except those in nn.MultiheadAttention, which bypasses their forward."""
    attentions = tuple(
        f"{name}."
        for name, module in backbone.named_modules()
        if isinstance(module, nn.MultiheadAttention)
    )
    return [
        name
        for name, module in backbone.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and not (attentions and name.startswith(attentions))
    ]


def linear_names_inside_layers(backbone: nn.Module) -> list[str]:
    """Return the names of the linear layers inside the transformer layers (attention and feed-forward)."""
    inner = {id(module) for layer in layers_of(backbone) for module in layer.modules()}
    return [
        name
        for name in linear_names(backbone)
        if id(backbone.get_submodule(name)) in inner
    ]


# ---- one vector per token, without layers --------------------------------------------


STATIC_TYPE = "vembed_static"


class StaticConfig(PretrainedConfig):  # type: ignore[misc]
    """Sizes of a table of token vectors."""

    model_type = STATIC_TYPE

    def __init__(
        self, vocab_size: int = 1, hidden_size: int = 1, **others: Any
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

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the table."""
        self.embedding = value  # type: ignore[assignment]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> BaseModelOutput:
        """Return the vectors of the tokens; the mask belongs to the pooling."""
        del attention_mask
        return BaseModelOutput(last_hidden_state=self.embedding(input_ids))
