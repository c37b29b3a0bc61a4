"""Every FSDP setting of a run, from the options that a preset, an Accelerate file, the launcher and the user give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from vembed.config.schema import option_fields
from vembed.errors import UserError

DEFAULT_MIN_NUM_PARAMS = 1_000_000

Sharding = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"]
StateDictType = Literal["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"]
WrapPolicy = Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
AskedPrecision = Literal["auto", "no", "bf16", "fp16"]
Precision = Literal["no", "bf16", "fp16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

PRECISION_OF_DTYPE: dict[str, AskedPrecision] = {
    "float32": "no",
    "bfloat16": "bf16",
    "float16": "fp16",
}


@dataclass(frozen=True, slots=True)
class FsdpConfig:
    """All resolved FSDP settings of a run. Dtypes are given by name."""

    version: Literal[1, 2] = 2
    sharding_strategy: Sharding = "FULL_SHARD"
    offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory between uses."""
    wrap_policy: WrapPolicy = "TRANSFORMER_BASED_WRAP"
    layer_classes: tuple[str, ...] | None = None
    """Class names or dotted paths; None: the classes that the backbone declares."""
    wrap_function: str | None = None
    """Function of the user's that chooses the units, as `file.py:function`."""
    min_num_params: int = DEFAULT_MIN_NUM_PARAMS
    min_layer_params: int = 0
    """TRANSFORMER_BASED_WRAP: layers with fewer parameters are no units."""
    reshard_after_forward: bool = True
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"] = (
        "BACKWARD_PRE"
    )
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = True
    state_dict_type: StateDictType = "SHARDED_STATE_DICT"
    ram_efficient_loading: bool = True
    sync_module_states: bool = True
    mixed_precision: AskedPrecision = "auto"
    """Precision of the arithmetic as asked for; `auto`: as the device allows."""
    precision_reason: str = "auto"
    param_dtype: str | None = None
    """Dtype of gathered parameters; None: from the precision."""
    reduce_dtype: str = "float32"
    buffer_dtype: str = "float32"
    source: str = "the defaults"
    """The file or launcher that the settings start from."""


FSDP1_ONLY = {
    "fsdp_backward_prefetch": "FSDP2 gathers the next unit of the backward pass by itself",
    "fsdp_limit_all_gathers": "FSDP2 bounds the gathers in flight by itself",
    "fsdp_use_orig_params": "FSDP2 always keeps the original parameters",
    "fsdp_buffer_dtype": "FSDP2 leaves buffers in their own dtype",
    "fsdp_sync_module_states": "FSDP2 always starts from the weights of the first process",
}
"""Options that FSDP2 does not have, with its own behaviour."""
FIELD_NAMES = {
    "fsdp_offload_params": "offload",
    "fsdp_cpu_ram_efficient_loading": "ram_efficient_loading",
}
"""Option -> field of FsdpConfig, where it is not the option's name without `fsdp_`."""
FSDP_OPTIONS = tuple(name for name in option_fields() if name.startswith("fsdp_"))


def resolve_fsdp(
    mixed_precision: AskedPrecision,
    values: Mapping[str, Any],
    source: str,
    *,
    trains_adapters: bool,
) -> tuple[FsdpConfig, list[str]]:
    """Return the settings that hold if the model is sharded, and notes for the log.

    `values`: the fsdp_* options that somebody has given, the preset's included; `source`: what they start from.
    """
    settings: dict[str, Any] = {"source": source}
    for name, value in values.items():
        settings[FIELD_NAMES.get(name, name.removeprefix("fsdp_"))] = value
    policy = settings.pop("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    classes = settings.pop("transformer_layer_cls_to_wrap", None)
    size = settings.pop("min_num_params", 0)
    notes = []
    if ":" in policy:
        settings["wrap_function"] = policy
        settings["wrap_policy"] = "NO_WRAP"
    else:
        settings["wrap_policy"] = policy
    if classes:
        settings["layer_classes"] = tuple(
            [classes] if isinstance(classes, str) else classes
        )
        if policy != "TRANSFORMER_BASED_WRAP":
            notes.append(
                f"fsdp_transformer_layer_cls_to_wrap: {classes} has no effect with fsdp_auto_wrap_policy: {policy}"
            )
    # One option with two meanings: SIZE_BASED_WRAP cannot do without a size; layers are all units unless one is given.
    if size:
        settings["min_num_params"] = size
        settings["min_layer_params"] = size
        if policy not in ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"):
            notes.append(
                f"fsdp_min_num_params: {size:,d} has no effect with fsdp_auto_wrap_policy: {policy}"
            )
    elif policy == "SIZE_BASED_WRAP":
        notes.append(
            f"fsdp_min_num_params: {size} with SIZE_BASED_WRAP counts as {DEFAULT_MIN_NUM_PARAMS:,d} (without a size "
            "nothing would be wrapped as it should)"
        )
    sharding = settings.get("sharding_strategy", "FULL_SHARD")
    settings["reshard_after_forward"] = sharding != "SHARD_GRAD_OP"
    # The most specific option first.
    settings["mixed_precision"] = mixed_precision
    if mixed_precision != "auto":
        settings["precision_reason"] = f"mixed_precision: {mixed_precision}"
    dtype = settings.get("param_dtype")
    if dtype is not None:
        precision = PRECISION_OF_DTYPE[dtype]
        settings["mixed_precision"] = precision
        settings["precision_reason"] = f"fsdp_param_dtype: {dtype}"
        if mixed_precision not in ("auto", precision):
            notes.append(
                f"mixed_precision: {mixed_precision} has no effect: fsdp_param_dtype: {dtype} is the dtype of the "
                "arithmetic"
            )
    fsdp = FsdpConfig(**settings)
    if fsdp.version == 2:
        for name, instead in FSDP1_ONLY.items():
            if name in values:
                word = str(values[name])
                if isinstance(values[name], bool):
                    word = word.lower()
                notes.append(f"{name}: {word} has no effect under FSDP2: {instead}")
        if fsdp.state_dict_type == "LOCAL_STATE_DICT":
            raise UserError(
                "fsdp_state_dict_type: LOCAL_STATE_DICT does not exist in FSDP2: use SHARDED_STATE_DICT (each process "
                "writes its own part, and any number of processes can read them), or fsdp_version: 1"
            )
        return fsdp, notes
    if trains_adapters and not fsdp.use_orig_params:
        raise UserError(
            "fsdp_use_orig_params: false with use_lora: true cannot work under fsdp_version: 1, which would flatten "
            "trained and frozen weights together: set fsdp_use_orig_params: true, or use fsdp_version: 2"
        )
    reads_once = values.get("fsdp_cpu_ram_efficient_loading") is True
    if reads_once and not fsdp.sync_module_states:
        raise UserError(
            "fsdp_sync_module_states: false with fsdp_cpu_ram_efficient_loading: true leaves all processes but the "
            "first without weights: set fsdp_sync_module_states: true"
        )
    return fsdp, notes
