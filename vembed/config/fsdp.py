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
    version: Literal[1, 2] = values.get("fsdp_version", 2)
    offload = bool(values.get("fsdp_offload_params"))
    sharding: Sharding = values.get("fsdp_sharding_strategy") or "FULL_SHARD"
    policy = values.get("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    names_function = ":" in policy
    precision, why = _precision(mixed_precision, values)
    _check(values, version, trains_adapters=trains_adapters)
    settings = FsdpConfig(
        version=version,
        sharding_strategy=sharding,
        offload=offload,
        wrap_policy="NO_WRAP" if names_function else policy,
        layer_classes=_layer_classes(values.get("fsdp_transformer_layer_cls_to_wrap")),
        wrap_function=policy if names_function else None,
        # One option with two meanings: SIZE_BASED_WRAP cannot do without a size; layers are all units unless one is
        # given.
        min_num_params=values.get("fsdp_min_num_params") or DEFAULT_MIN_NUM_PARAMS,
        min_layer_params=values.get("fsdp_min_num_params") or 0,
        reshard_after_forward=sharding != "SHARD_GRAD_OP",
        backward_prefetch=values.get("fsdp_backward_prefetch", "BACKWARD_PRE"),
        forward_prefetch=values.get("fsdp_forward_prefetch", False),
        limit_all_gathers=values.get("fsdp_limit_all_gathers", True),
        use_orig_params=values.get("fsdp_use_orig_params", True),
        state_dict_type=values.get("fsdp_state_dict_type", "SHARDED_STATE_DICT"),
        ram_efficient_loading=values.get("fsdp_cpu_ram_efficient_loading", True),
        sync_module_states=values.get("fsdp_sync_module_states", True),
        mixed_precision=precision,
        precision_reason=why,
        param_dtype=values.get("fsdp_param_dtype"),
        reduce_dtype=values.get("fsdp_reduce_dtype", "float32"),
        buffer_dtype=values.get("fsdp_buffer_dtype", "float32"),
        source=source,
    )
    return settings, _without_effect(mixed_precision, values, version)


def _check(values: Mapping[str, Any], version: int, *, trains_adapters: bool) -> None:
    if version == 2 and values.get("fsdp_state_dict_type") == "LOCAL_STATE_DICT":
        raise UserError(
            "fsdp_state_dict_type: LOCAL_STATE_DICT does not exist in FSDP2: use SHARDED_STATE_DICT (each process "
            "writes its own part, and any number of processes can read them), or fsdp_version: 1"
        )
    if version == 1 and values.get("fsdp_use_orig_params") is False and trains_adapters:
        raise UserError(
            "fsdp_use_orig_params: false with use_lora: true cannot work under fsdp_version: 1, which would flatten "
            "trained and frozen weights together: set fsdp_use_orig_params: true, or use fsdp_version: 2"
        )
    if (
        version == 1
        and values.get("fsdp_sync_module_states") is False
        and values.get("fsdp_cpu_ram_efficient_loading") is True
    ):
        raise UserError(
            "fsdp_sync_module_states: false with fsdp_cpu_ram_efficient_loading: true leaves all processes but the "
            "first without weights: set fsdp_sync_module_states: true"
        )


def _without_effect(
    mixed_precision: AskedPrecision, values: Mapping[str, Any], version: int
) -> list[str]:
    """Return one note for each option that these settings do not look at."""

    def said(name: str) -> str:
        value = values[name]
        if isinstance(value, bool):
            return f"{name}: {str(value).lower()}"
        return f"{name}: {value:,d}" if isinstance(value, int) else f"{name}: {value}"

    notes = []
    if version == 2:
        for name, instead in FSDP1_ONLY.items():
            if name in values:
                notes.append(f"{said(name)} has no effect under FSDP2: {instead}")
    policy = values.get("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    if (
        values.get("fsdp_transformer_layer_cls_to_wrap")
        and policy != "TRANSFORMER_BASED_WRAP"
    ):
        notes.append(
            f"{said('fsdp_transformer_layer_cls_to_wrap')} has no effect with fsdp_auto_wrap_policy: {policy}: only "
            "TRANSFORMER_BASED_WRAP looks at it"
        )
    if values.get("fsdp_min_num_params") and policy not in (
        "TRANSFORMER_BASED_WRAP",
        "SIZE_BASED_WRAP",
    ):
        notes.append(
            f"{said('fsdp_min_num_params')} has no effect with fsdp_auto_wrap_policy: {policy}"
        )
    if policy == "SIZE_BASED_WRAP" and not values.get("fsdp_min_num_params"):
        notes.append(
            f"fsdp_min_num_params: {values.get('fsdp_min_num_params') or 0} with SIZE_BASED_WRAP counts as "
            f"{DEFAULT_MIN_NUM_PARAMS:,d} (without a size nothing would be wrapped as it should)"
        )
    dtype = values.get("fsdp_param_dtype")
    if dtype and mixed_precision not in (
        "auto",
        PRECISION_OF_DTYPE[dtype],
    ):
        notes.append(
            f"mixed_precision: {mixed_precision} has no effect: fsdp_param_dtype: {dtype} is the dtype of the "
            "arithmetic"
        )
    return notes


def _precision(
    mixed_precision: AskedPrecision, values: Mapping[str, Any]
) -> tuple[AskedPrecision, str]:
    """Return the precision of a sharded model's arithmetic, and why: the most specific option first."""
    if dtype := values.get("fsdp_param_dtype"):
        return PRECISION_OF_DTYPE[dtype], f"fsdp_param_dtype: {dtype}"
    if mixed_precision != "auto":
        return (
            mixed_precision,
            f"mixed_precision: {mixed_precision}",
        )
    return "auto", "auto"


def _layer_classes(value: str | list[str] | None) -> tuple[str, ...] | None:
    if not value:
        return None
    return (value,) if isinstance(value, str) else tuple(value)
