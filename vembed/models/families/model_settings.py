"""Schemas of the small JSON files of a model folder, with one sentence for what does not fit them."""

from __future__ import annotations

from collections.abc import Mapping
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
EXPERT_COUNTS = frozenset({"num_experts", "num_local_experts", "n_routed_experts"})
LAYER_COUNTS = EXPERT_COUNTS | {
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
}
"""Names of settings that say how often something is built."""
SIZES = LAYER_COUNTS | {
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "image_size",
    "patch_size",
    "num_channels",
    "n_embd",
    "n_head",
    "n_heads",
    "d_model",
    "d_ff",
    "d_kv",
    "num_heads",
    "hidden_dim",
    "dim",
    "embed_dim",
    "num_labels",
}
"""Names of settings that are positive numbers, or lists of them, wherever they are set."""
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


_MODULES = TypeAdapter(Annotated[list[ModuleSettings], Field(min_length=1)])
Kind = TypeVar("Kind", bound=Settings)


def read_settings(path: Path, kind: type[Kind]) -> Kind | None:
    """Read a JSON file by its schema; None if it does not exist."""
    values = read_object(path)
    if values is None:
        return None
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{path}: {first_problem(error)}") from error


def read_modules(folder: Path) -> list[ModuleSettings] | None:
    """Read modules.json, whose modules are in the folder; None if it does not exist."""
    path = folder / "modules.json"
    values = read_json(path)
    if values is None:
        return None
    try:
        modules = _MODULES.validate_python(values)
    except ValidationError as error:
        raise UserError(f"{path}: {first_problem(error)}") from error
    for module in modules:
        check_inside(path, "path", module.path)
    return modules


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
    wanted: dict[str, tuple[int, ...]] = {
        "linear.weight": (settings.out_features, settings.in_features)
    }
    if settings.bias:
        wanted["linear.bias"] = (settings.out_features,)
    shapes = {
        name: tensor.shape
        for name, tensor in read_header(folder / "model.safetensors")[0].items()
    }
    if shapes != wanted:
        raise UserError(
            f"{folder / 'config.json'} makes a Dense module of {_shapes(wanted)}, and its model.safetensors holds "
            f"{_shapes(shapes)}"
        )
    return settings


def check_config(path: Path, tensors: int | None) -> None:
    """Raise UserError if sizes in a config.json are no sizes. `tensors`: number of tensors in the weights, if known.

    Done before Transformers sees it: a config with a million layers would be built layer by layer.
    """
    values = read_object(path) or {}
    # A layer has a tensor of its own, but for layers that share theirs (ALBERT): hence 128 at the least.
    most = MOST_LAYERS if tensors is None else max(tensors, 128)
    for place, settings in (
        ("", values),
        *(
            (f"{key}.", value)
            for key, value in values.items()
            if isinstance(value, dict)
        ),
    ):
        for name in sorted(SIZES & settings.keys()):
            _check_size(
                path,
                place + name,
                settings[name],
                most if name in LAYER_COUNTS else None,
            )
        for name in ("dtype", "torch_dtype"):
            _check_dtype(path, place + name, settings.get(name))
        labels = settings.get("num_labels")
        if isinstance(labels, int) and labels > MOST_LABELS:
            raise UserError(
                f"{path}: {place}num_labels is {labels:,d}, and at most {MOST_LABELS:,d} are built"
            )


def check_attention(folder: Path, *, trust_remote_code: bool) -> None:
    """Raise UserError if a config.json names an attention kernel of a repository, whose code Transformers would fetch
    and run."""
    path = folder / "config.json"
    settings = read_object(path) or {}
    parts = [settings, *(part for part in settings.values() if isinstance(part, dict))]
    for part in parts:
        for key in ("attn_implementation", "_attn_implementation"):
            value = part.get(key)
            names = value.values() if isinstance(value, dict) else [value]
            for name in names:
                if isinstance(name, str) and "/" in name and not trust_remote_code:
                    raise UserError(
                        f"{path}: {key} {name} is code of a repository, and trust_remote_code is false; remove it, or set "
                        "trust_remote_code: true if you trust this code"
                    )


def check_fit(
    folder: Path, model: torch.nn.Module, values: Mapping[str, Any], prefix: str
) -> None:
    """Raise UserError if the weights in a folder are not those of `model`, which its config.json describes.

    `model` is on the meta device, and only headers are read. `values`: the config. `prefix`: under which a model with a
    head for another task saves its weights.
    """
    tensors = read_tensors(folder)
    if not tensors:
        return
    path = folder / "config.json"
    is_packed = any(tensor.dtype in PACKED for tensor in tensors.values())
    if values.get("quantization_config") is not None:
        if not is_packed:
            raise UserError(
                f"{path} has a quantization_config, and the weights beside it are not quantised: remove it"
            )
        return
    for name, parameter in model.named_parameters():
        keys = (name, f"{prefix}.{name}", f"model.{name}")
        stored = next((tensors[key] for key in keys if key in tensors), None)
        # Where the number of elements agrees, Transformers may turn the tensor while it is read.
        if stored is not None and stored.size != parameter.numel():
            raise UserError(
                f"{path} does not fit the weights: {name} has the shape {list(stored.shape)} in {stored.path.name}, "
                f"and config.json makes it {list(parameter.shape)}"
            )
    built = sum(weight.numel() for weight in model.parameters())
    held = sum(entry.size for entry in tensors.values())
    if built > 2 * held + MOST_BUILT:
        raise UserError(
            f"{path} does not fit the weights: it makes a model of {built:,d} values, and they are {held:,d}"
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


def _check_size(path: Path, name: str, value: Any, most: int | None) -> None:
    sizes = value if isinstance(value, list) else [value]
    # Dense models of a family that also has experts say 0 experts.
    least = 0 if name.rpartition(".")[2] in EXPERT_COUNTS else 1
    for size in sizes:
        if size is not None and (
            isinstance(size, bool) or not isinstance(size, int) or size < least
        ):
            raise UserError(
                f"{path}: {name} is {size!r:.60}, and a positive whole number is needed"
            )
    total = sum(size for size in sizes if size is not None)
    if most is not None and total > most:
        raise UserError(
            f"{path}: {name} is {total:,d}, more than the weights beside it can have (at most {most:,d})"
        )


def _check_dtype(path: Path, name: str, value: Any) -> None:
    if value is None or isinstance(value, dict) or value == "auto":
        return
    dtype = (
        vars(torch).get(value.removeprefix("torch."))
        if isinstance(value, str)
        else None
    )
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UserError(
            f"{path}: {name} {value!r:.60} is not a floating point type, such as float32 or bfloat16"
        )


def _shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return (
        ", ".join(f"{name} {list(shape)}" for name, shape in sorted(shapes.items()))
        or "no tensors"
    )
