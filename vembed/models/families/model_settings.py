"""Schemas of the small JSON files of a model folder, with one sentence for what does not fit them."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from vembed.errors import UserError
from vembed.models.families.weight_files import (
    read_header,
    read_json,
    read_object,
    read_tensors,
)
from vembed.models.poolings.table import MODE_FLAGS

LIBRARY_ERRORS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    ImportError,
    OSError,
    RuntimeError,
    StrictDataclassError,
)
"""Exceptions that Transformers raises for settings that make no sense; which one depends on the model class."""
MOST_LAYERS = 2_000
"""Limit for a config without weights beside it."""
MOST_LABELS = 1_000_000
MOST_BUILT = 2**27
"""Elements that a model may have beyond twice those of its weights: parts that the file leaves out, such as poolers."""
LAYER_COUNTS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
    "depth",
    "depths",
    "num_hidden_groups",
    "inner_group_num",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
)
"""Names of settings that say how often something is built: numbers, or lists of them."""
PACKED = frozenset({"U8", "I8", "I32", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4"})
"""Types of quantised weights."""

Positive = Annotated[int, Field(ge=1, le=2**31)]


class Settings(BaseModel):
    """Base of the schemas. Other libraries write more into these files than vembed reads."""

    model_config = ConfigDict(extra="allow", strict=True)


class ModuleSettings(Settings):
    """One module of modules.json."""

    path: str
    type: str


class PoolingSettings(Settings):
    """The config.json of a Pooling module; old files have one flag per pooling."""

    pooling_mode: str | list[str] | None = None
    include_prompt: bool = True

    def modes(self) -> tuple[str, ...]:
        """Modes by name. Old files have one flag per mode, new files a name or a list of names."""
        if isinstance(self.pooling_mode, str):
            return (self.pooling_mode,)
        if self.pooling_mode is not None:
            return tuple(self.pooling_mode)
        flags = self.model_extra or {}
        modes = tuple(mode for mode, flag in MODE_FLAGS.items() if flags.get(flag))
        return modes or ("mean",)


class DenseSettings(Settings):
    """The config.json of a Dense module."""

    in_features: Positive
    out_features: Positive
    bias: bool = True
    activation_function: str | None = None
    use_residual: bool = False
    module_input_name: str = "sentence_embedding"


class ModelSettings(Settings):
    """config_sentence_transformers.json."""

    model_type: str | None = None
    prompts: dict[str, str | None] | None = None
    default_prompt_name: str | None = None
    similarity_fn_name: str | None = None
    truncate_dim: Positive | None = None


class TextSettings(Settings):
    """sentence_bert_config.json."""

    max_seq_length: Positive | None = None
    do_lower_case: bool | None = None
    modality_config: dict[str, Any] = {}
    processing_kwargs: dict[str, Any] | None = None


class TokenizerSettings(Settings):
    """The keys of tokenizer_config.json that are read."""

    model_max_length: int | float | None = None
    padding_side: str | None = None


class AdapterSettings(Settings):
    """adapter_config.json."""

    base_model_name_or_path: Annotated[str, Field(min_length=1)]
    revision: str | None = None


MODULES = TypeAdapter(Annotated[list[ModuleSettings], Field(min_length=1)])
Kind = TypeVar("Kind")


def read_settings(path: Path, kind: type[Kind] | TypeAdapter[Kind]) -> Kind | None:
    """Read a JSON file by its schema; None if it does not exist."""
    values = read_json(path)
    if values is None:
        return None
    schema = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
    try:
        return schema.validate_python(values)
    except ValidationError as error:
        raise UserError(f"{path}: {first_problem(error)}") from error


def check_inside(path: Path, key: str, name: str) -> None:
    """Raise UserError if a name in a file leads out of its folder."""
    place = PurePosixPath(name)
    if place.is_absolute() or ".." in place.parts or "\0" in name:
        raise UserError(f"{path}: {key} {name!r} leads out of the model's folder")


def read_dense(folder: Path) -> DenseSettings:
    """Read the settings of a Dense module, and compare them with the header of its weights."""
    settings = read_settings(folder / "config.json", DenseSettings)
    if settings is None:
        raise UserError(
            f"{folder} has no config.json, although modules.json names it as a Dense module"
        )
    if settings.use_residual or settings.module_input_name != "sentence_embedding":
        raise UserError(
            f"{folder}: vembed does not support Dense modules with a residual or on single tokens"
        )
    if not (folder / "model.safetensors").is_file():
        raise UserError(
            f"{folder} has no model.safetensors; vembed reads no pickled weights"
        )
    wanted = {"linear.weight": (settings.out_features, settings.in_features)}
    if settings.bias:
        wanted["linear.bias"] = (settings.out_features,)  # type: ignore[assignment]
    tensors, _ = read_header(folder / "model.safetensors")
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if shapes != wanted:
        raise UserError(
            f"{folder / 'config.json'} makes a Dense module of the shapes {wanted}, and its model.safetensors holds "
            f"{shapes}"
        )
    return settings


def check_config(folder: Path) -> None:
    """Raise UserError if a config.json has more layers than the weights beside it can have.

    Done before Transformers sees it: a config with a million layers would be built layer by layer.
    """
    path = folder / "config.json"
    # A layer has a tensor of its own, but for layers that share theirs (ALBERT): hence 128 at the least.
    num_tensors = len(read_tensors(folder))
    most = max(num_tensors, 128) if num_tensors else MOST_LAYERS
    limits = dict.fromkeys(LAYER_COUNTS, most) | {"num_labels": MOST_LABELS}
    for settings in parts_of_config(path):
        for name, limit in limits.items():
            value = settings.get(name)
            numbers = value if isinstance(value, list) else [value]
            total = sum(number for number in numbers if isinstance(number, int))
            if total > limit:
                raise UserError(
                    f"{path}: {name} is {total:,d}, more than the weights beside it can have (at most {limit:,d})"
                )


def parts_of_config(path: Path) -> list[dict[str, Any]]:
    """Return the settings of a config.json, and those of each part that has settings of its own."""
    values = read_object(path) or {}
    return [values, *(part for part in values.values() if isinstance(part, dict))]


def check_attention(folder: Path, *, trust_remote_code: bool) -> None:
    """Raise UserError if a config.json names an attention kernel of a repository, whose code Transformers would fetch
    and run."""
    path = folder / "config.json"
    for settings in parts_of_config(path):
        for key in ("attn_implementation", "_attn_implementation"):
            value = settings.get(key)
            for name in value.values() if isinstance(value, dict) else [value]:
                if isinstance(name, str) and "/" in name and not trust_remote_code:
                    raise UserError(
                        f"{path}: {key} {name} is code of a repository, and trust_remote_code is false; remove it, or set "
                        "trust_remote_code: true if you trust this code"
                    )


def check_fit(folder: Path, model: torch.nn.Module, prefix: str) -> None:
    """Raise UserError if the weights in a folder are not those of `model`, which its config.json describes.

    `model` is on the meta device, and only headers are read. `prefix`: under which a model with a head for another
    task saves its weights.
    """
    path = folder / "config.json"
    tensors = read_tensors(folder)
    is_packed = any(tensor.dtype in PACKED for tensor in tensors.values())
    if (read_object(path) or {}).get("quantization_config") is not None:
        if tensors and not is_packed:
            raise UserError(
                f"{path} has a quantization_config, and the weights beside it are not quantised: remove it"
            )
        return
    num_built = 0
    for name, parameter in model.named_parameters():
        num_built += parameter.numel()
        for key in (name, f"{prefix}.{name}", f"model.{name}"):
            stored = tensors.get(key)
            # Where the number of elements agrees, Transformers may turn the tensor while it is read.
            if stored is not None and stored.size != parameter.numel():
                raise UserError(
                    f"{path} does not fit the weights: {name} has the shape {list(stored.shape)} in {stored.path.name}, "
                    f"and config.json makes it {list(parameter.shape)}"
                )
    num_stored = sum(tensor.size for tensor in tensors.values())
    if tensors and num_built > 2 * num_stored + MOST_BUILT:
        raise UserError(
            f"{path} does not fit the weights: it makes a model of {num_built:,d} values, and they are {num_stored:,d}"
        )


def first_problem(error: ValidationError) -> str:
    """Return the first problem that pydantic found: where it is, what is wrong, and the value."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    value = first["input"]
    value_note = f" ({value!r:.60})" if isinstance(value, str | int | float) else ""
    message = f"{first['msg'][:1].lower()}{first['msg'][1:]}{value_note}"
    return f"{place}: {message}" if place else message


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of a library's error, with its kind where the message alone says nothing."""
    text = " ".join(str(error).split()).split(". ", 1)[0]
    return (
        text
        if isinstance(error, ValueError | OSError | ImportError) and text
        else f"{type(error).__name__}: {text}"
    )
