"""Resolution of the FSDP options from the training config, the launcher and the Accelerate file or preset."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vembed.config.accelerate_file import AccelerateFile, launcher_options, read_accelerate_file
from vembed.config.options import shown
from vembed.config.schema import TrainConfig
from vembed.errors import UserError

DEFAULT_FILE = "accelerate_fsdp"
DEFAULT_MIN_NUM_PARAMS = 1_000_000
ACCELERATE_MIN_NUM_PARAMS = 100_000_000

Strategy = Literal["auto", "single", "ddp", "fsdp"]
Sharding = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"]
StateDictType = Literal["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"]
WrapPolicy = Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]


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
    min_num_params: int = DEFAULT_MIN_NUM_PARAMS
    wrap_embeddings: bool = True
    reshard_after_forward: bool = True
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"] = "BACKWARD_PRE"
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = True
    state_dict_type: StateDictType = "SHARDED_STATE_DICT"
    ram_efficient_loading: bool = True
    sync_module_states: bool = True
    activation_checkpointing: bool | None = None
    """Gradient checkpointing in the Accelerate file. Options of the training YAML take precedence."""
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    """auto: chosen by the device. bf16 in the Accelerate file becomes auto, so that the file also runs on a CPU."""
    param_dtype: str | None = None
    """None: from `mixed_precision`."""
    reduce_dtype: str = "float32"
    buffer_dtype: str = "float32"
    output_dtype: str = "float32"
    source: str = "the defaults"


FSDP1_ONLY = {
    "fsdp_backward_prefetch": "FSDP2 gathers the next unit of the backward pass by itself",
    "fsdp_limit_all_gathers": "FSDP2 bounds the gathers in flight by itself",
    "fsdp_use_orig_params": "FSDP2 always keeps the original parameters",
    "fsdp_buffer_dtype": "FSDP2 leaves buffers in their own dtype, and fsdp_output_dtype sets that of the output",
    "fsdp_sync_module_states": "FSDP2 always starts from the weights of the first process",
}
"""Options that FSDP2 does not have, with its own behaviour."""
FSDP2_ONLY = {
    "fsdp_output_dtype": "FSDP1 has fsdp_buffer_dtype, and the loss is computed in float32 either way",
    "fsdp_reshard_after_forward": "FSDP1 has fsdp_sharding_strategy: SHARD_GRAD_OP keeps the parameters gathered",
}
FSDP_OPTIONS = tuple(name for name in TrainConfig.model_fields if name.startswith("fsdp_"))


def chosen_strategy(config: TrainConfig, env: Mapping[str, str] = os.environ) -> Strategy:
    """Return the strategy that the config asks for; `auto` if the session has to decide."""
    if config.use_fsdp or config.strategy == "fsdp":
        wanted: Strategy = "fsdp"
    elif config.strategy != "auto":
        return config.strategy
    elif launcher_options(env):
        wanted = "fsdp"
    elif config.accelerate_config:
        wanted = read_accelerate_file(config.accelerate_config).distribution
    else:
        return "auto"
    if wanted == "fsdp" and _gathered(config, env)[0].get("fsdp_sharding_strategy") == "NO_SHARD":
        return "ddp"
    return wanted


def resolve_fsdp(config: TrainConfig, env: Mapping[str, str] = os.environ) -> tuple[FsdpConfig | None, list[str]]:
    """Return the FSDP settings and notes for the log.

    The settings are None if the config excludes sharding (`strategy: ddp` or `single`, NO_SHARD). With
    `strategy: auto` they apply if `auto` chooses FSDP.
    """
    strategy = chosen_strategy(config, env)
    values, source, notes = _gathered(config, env)
    if strategy in ("single", "ddp"):
        if values.get("fsdp_sharding_strategy") == "NO_SHARD" and (config.use_fsdp or config.strategy == "fsdp"):
            notes.append("fsdp_sharding_strategy: NO_SHARD shards nothing: the run uses ddp (a copy on each process)")
        return None, notes
    version: Literal[1, 2] = values.get("fsdp_version", 2)
    sharding, reshard = _sharding(values, version)
    _check(config, values, version)
    notes += _without_effect(values, version)
    min_num_params = values.get("fsdp_min_num_params")
    policy = values.get("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    if policy == "SIZE_BASED_WRAP" and not min_num_params:
        notes.append(
            f"fsdp_min_num_params: {min_num_params or 0} with SIZE_BASED_WRAP counts as {DEFAULT_MIN_NUM_PARAMS:,d} "
            "(without a size nothing would be wrapped as it should)"
        )
    settings = FsdpConfig(
        version=version,
        sharding_strategy=sharding,
        offload=bool(values.get("fsdp_offload_params")),
        wrap_policy=policy,
        layer_classes=_layer_classes(values.get("fsdp_transformer_layer_cls_to_wrap")),
        min_num_params=min_num_params or DEFAULT_MIN_NUM_PARAMS,
        wrap_embeddings=values.get("fsdp_wrap_embeddings", True),
        reshard_after_forward=reshard,
        backward_prefetch=values.get("fsdp_backward_prefetch", "BACKWARD_PRE"),
        forward_prefetch=values.get("fsdp_forward_prefetch", False),
        limit_all_gathers=values.get("fsdp_limit_all_gathers", True),
        use_orig_params=values.get("fsdp_use_orig_params", True),
        state_dict_type=values.get("fsdp_state_dict_type", "SHARDED_STATE_DICT"),
        ram_efficient_loading=values.get("fsdp_cpu_ram_efficient_loading", True),
        sync_module_states=values.get("fsdp_sync_module_states", True),
        activation_checkpointing=values.get("fsdp_activation_checkpointing"),
        mixed_precision=_mixed_precision(config, values),
        param_dtype=None if values.get("fsdp_mixed_precision") is False else values.get("fsdp_param_dtype"),
        reduce_dtype=values.get("fsdp_reduce_dtype", "float32"),
        buffer_dtype=values.get("fsdp_buffer_dtype", "float32"),
        output_dtype=values.get("fsdp_output_dtype", "float32"),
        source=source,
    )
    return settings, notes


def resolve_gradient_checkpointing(config: TrainConfig, env: Mapping[str, str] = os.environ) -> tuple[bool, str]:
    """Return (gradient checkpointing is on, reason)."""
    for name, value in (
        ("gradient_checkpointing", config.gradient_checkpointing),
        ("fsdp_activation_checkpointing", config.fsdp_activation_checkpointing),
    ):
        if value is not None:
            return value, name
    if chosen_strategy(config, env) == "fsdp":
        values, source, _ = _gathered(config, env)
        said = values.get("fsdp_activation_checkpointing")
        return (True, "default with use_fsdp: true") if said is None else (bool(said), source)
    return False, "default without use_fsdp"


def _gathered(config: TrainConfig, env: Mapping[str, str]) -> tuple[dict[str, Any], str, list[str]]:
    """Return (explicit options, source of the base, notes). The config overrides the launcher or the file."""
    own = config.model_dump(include=set(FSDP_OPTIONS), exclude_none=True)
    if own["fsdp_wrap_embeddings"]:
        del own["fsdp_wrap_embeddings"]  # the default must not override the file
    base, notes = launcher_options(env), []
    if base:
        source = "accelerate launch"
        listed = ", ".join(f"{name}: {value}" for name, value in base.items() if name != "use_fsdp")
        notes.append(f"FSDP options set by accelerate launch: {listed}")
        if base.get("fsdp_auto_wrap_policy") == "SIZE_BASED_WRAP" and (
            own.get("fsdp_min_num_params", base.get("fsdp_min_num_params")) == ACCELERATE_MIN_NUM_PARAMS
        ):
            notes.append(
                f"fsdp_min_num_params: {ACCELERATE_MIN_NUM_PARAMS:,d} is what accelerate launch sets when its file "
                "does not say; smaller modules do not become units"
            )
    else:
        file = _file(config)
        base, source, notes = dict(file.fsdp), file.source, list(file.notes)
        if file.mixed_precision:
            base["mixed_precision"] = file.mixed_precision
    if own.get("fsdp_version", base.get("fsdp_version", 2)) != base.get("fsdp_version", 2):
        # The file was written for the other FSDP version: drop the options that only that version has.
        base = {name: value for name, value in base.items() if name not in FSDP1_ONLY | FSDP2_ONLY}
    # A switch set in the config overrides its alias in the base, so that the two cannot contradict each other.
    for one, other in (
        ("fsdp_offload_params", "fsdp_cpu_offload"),
        ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"),
    ):
        if one in own or other in own:
            base.pop(one, None)
            base.pop(other, None)
    values = {name: value for name, value in base.items() if name not in own} | own
    offload = {values[name] for name in ("fsdp_offload_params", "fsdp_cpu_offload") if name in values}
    if len(offload) == 2:
        raise UserError(
            f"fsdp_offload_params: {values['fsdp_offload_params']} and fsdp_cpu_offload: {values['fsdp_cpu_offload']} "
            f"are one switch and contradict each other (in {source} or the training config): keep one of them"
        )
    if offload:
        values["fsdp_offload_params"] = offload.pop()
    return values, source, notes


def _file(config: TrainConfig) -> AccelerateFile:
    if config.accelerate_config is None:
        return read_accelerate_file(DEFAULT_FILE)
    file = read_accelerate_file(config.accelerate_config)
    if file.distribution != "fsdp" and (config.use_fsdp or config.strategy == "fsdp"):
        raise UserError(
            f"use_fsdp: true, but {file.source} is for {file.distribution}: name a file with distributed_type: FSDP "
            f"(for example accelerate_config: {DEFAULT_FILE}), or leave use_fsdp out"
        )
    return file


def _sharding(values: Mapping[str, Any], version: int) -> tuple[Sharding, bool]:
    strategy, reshard = values.get("fsdp_sharding_strategy"), values.get("fsdp_reshard_after_forward")
    keeps = strategy == "SHARD_GRAD_OP"
    if version == 1 or reshard is None:
        return strategy or "FULL_SHARD", not keeps
    if strategy is not None and reshard == keeps:
        raise UserError(
            f"fsdp_sharding_strategy: {strategy} and fsdp_reshard_after_forward: {shown(reshard).lower()} contradict "
            f"each other, since under FSDP2 the first means {shown(not keeps).lower()} for the second: keep one of them"
        )
    return strategy or ("FULL_SHARD" if reshard else "SHARD_GRAD_OP"), bool(reshard)


def _check(config: TrainConfig, values: Mapping[str, Any], version: int) -> None:
    if version == 2 and values.get("fsdp_state_dict_type") == "LOCAL_STATE_DICT":
        raise UserError(
            "fsdp_state_dict_type: LOCAL_STATE_DICT does not exist in FSDP2: use SHARDED_STATE_DICT (each process "
            "writes its own part, and any number of processes can read them), or fsdp_version: 1"
        )
    if version == 1 and values.get("fsdp_use_orig_params") is False and (config.use_lora or config.use_qlora):
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


def _without_effect(values: Mapping[str, Any], version: int) -> list[str]:
    table = FSDP1_ONLY if version == 2 else FSDP2_ONLY
    notes = [
        f"{name}: {str(values[name]).lower() if isinstance(values[name], bool) else values[name]} has no effect "
        f"under FSDP{version}: {substitute}"
        for name, substitute in table.items()
        if name in values
    ]
    if "fsdp_min_num_params" in values and values.get("fsdp_auto_wrap_policy") != "SIZE_BASED_WRAP":
        notes.append(
            f"fsdp_min_num_params: {values['fsdp_min_num_params']:,d} has no effect with fsdp_auto_wrap_policy: "
            f"{values.get('fsdp_auto_wrap_policy', 'TRANSFORMER_BASED_WRAP')}: only SIZE_BASED_WRAP looks at it"
        )
    classes = values.get("fsdp_transformer_layer_cls_to_wrap")
    if classes and values.get("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP") != "TRANSFORMER_BASED_WRAP":
        notes.append(
            f"fsdp_transformer_layer_cls_to_wrap: {shown(classes)} has no effect with fsdp_auto_wrap_policy: "
            f"{values['fsdp_auto_wrap_policy']}: only TRANSFORMER_BASED_WRAP looks at it"
        )
    return notes


def _mixed_precision(config: TrainConfig, values: Mapping[str, Any]) -> Literal["auto", "no", "bf16", "fp16"]:
    if values.get("fsdp_mixed_precision") is False:
        return "no"
    if config.mixed_precision != "auto":
        return config.mixed_precision
    if values.get("fsdp_mixed_precision") is True:
        return "fp16" if values.get("fsdp_param_dtype") == "float16" else "bf16"
    said: Literal["no", "bf16", "fp16", None] = values.get("mixed_precision")
    return "auto" if said in (None, "bf16") else said


def _layer_classes(value: str | list[str] | None) -> tuple[str, ...] | None:
    if not value:
        return None
    return (value,) if isinstance(value, str) else tuple(value)
