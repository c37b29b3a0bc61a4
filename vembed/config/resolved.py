"""ResolvedRun: every decision of a run that needs no device, each made once, with its reason and its source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar, get_args

from vembed.config.accelerate_file import AccelerateFile
from vembed.config.layers import Level, OptionValue
from vembed.config.options import yaml_word
from vembed.config.schema import TrainConfig, option_fields
from vembed.errors import UserError

T = TypeVar("T")
Strategy = Literal["single", "ddp", "fsdp"]
AskedStrategy = Literal["auto", "single", "ddp", "fsdp"]
Precision = Literal["no", "bf16", "fp16"]
AskedPrecision = Literal["auto", "no", "bf16", "fp16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
DEFAULT = "default"
USER_LEVELS = (Level.CONFIG, Level.COMMAND_LINE)
"""Sources in which the user sets options one by one. Presets, files and launchers bring whole groups of options."""
TIMEOUT_VARIABLE = "NCCL_TIMEOUT"
"""Seconds that a collective may take; read by older versions of torch, and here where the config gives no limit."""
DEFAULT_MIN_NUM_PARAMS = 1_000_000
FSDP_OPTIONS = tuple(name for name in option_fields() if name.startswith("fsdp_"))


@dataclass(frozen=True, slots=True)
class Decision(Generic[T]):
    """A decision of a run: the value, and why it was chosen."""

    value: T
    reason: str
    """Reason, as the log and a dry run say it."""
    source: str = DEFAULT
    """Source of the value: `cfg.yaml:7`, `command line`, `accelerate launch`, a preset's file, or `default`."""

    def as_text(self) -> dict[str, str]:
        """Return value, reason and source as they are written to run.json."""
        return {"value": self.text, "reason": self.reason, "source": self.source}

    @property
    def text(self) -> str:
        """The value as a config file would have it."""
        text = str(self.value)
        return text.lower() if isinstance(self.value, bool) else text

    def __str__(self) -> str:
        return f"{self.text} ({self.reason})"


@dataclass(frozen=True, slots=True)
class FsdpConfig:
    """All resolved FSDP settings of a run."""

    version: Literal[1, 2] = 2
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"] = (
        "FULL_SHARD"
    )
    offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory between uses."""
    wrap_policy: Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"] = (
        "TRANSFORMER_BASED_WRAP"
    )
    layer_classes: tuple[str, ...] | None = None
    """Class names or dotted paths; None: the classes that the backbone declares."""
    wrap_function: str | None = None
    """Function of the user's that chooses the units, as `file.py:function`."""
    min_num_params: int = DEFAULT_MIN_NUM_PARAMS
    min_layer_params: int = 0
    """TRANSFORMER_BASED_WRAP: layers with fewer parameters are no units."""
    reshard_after_forward: bool = True
    forward_prefetch: bool = False
    state_dict_type: Literal[
        "FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"
    ] = "SHARDED_STATE_DICT"
    reduce_dtype: str = "float32"
    source: str = "the defaults"
    """The file or launcher that the settings start from."""


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A config and the decisions that follow from it. `train`, `--dry-run`, `plan`, `doctor` and the log read them here, and
    decide none of them again."""

    config: TrainConfig
    origins: Mapping[str, str]
    """Option -> the source of its value."""
    translated: tuple[str, ...]
    """Log lines for options that were given under an alias: the alias, and vembed's own name and value."""
    notes: tuple[str, ...]
    """Lines for the log: values that lost against a stronger source, and options without effect."""
    strategy: Decision[AskedStrategy]
    """`auto`: left to the placement, by the size of the model."""
    fsdp: FsdpConfig | None
    """The settings that hold if the model is sharded; None where that is ruled out."""
    fsdp_notes: tuple[str, ...]
    """Lines for the log of a sharded run, and of one whose FSDP options come to plain copies."""
    fsdp_given: tuple[str, ...]
    """FSDP options that the config or the command line gives, as `name: value`."""
    recomputation: Decision[bool]
    """True if activations are recomputed in the backward pass (gradient checkpointing)."""
    precision: Decision[AskedPrecision]
    processes: Decision[int | Literal["auto"]]
    """Processes on each machine."""
    machines: Decision[int]
    timeout_minutes: Decision[float]
    """Longest time that a collective waits for the other processes."""
    file: AccelerateFile | None
    """The Accelerate file that the config or the command line names."""

    def left_to_gpus(self) -> list[str]:
        """Return lines for a dry run on the decisions that a run on a GPU makes later."""
        lines = []
        recomputes = self.recomputation.source == DEFAULT and self.recomputation.value
        if recomputes and self.config.batch.use_gradient_cache is not False:
            lines.append(
                "on a GPU gradient checkpointing is off where micro-batches fit without it, since Gradient Cache "
                "bounds the graphs; `vembed plan` with --gpu says which"
            )
        if self.config.model.torch_compile == "auto":
            lines.append(
                "on a GPU layers are compiled in runs of more than about five minutes (torch_compile: auto)"
            )
        return lines


def decide(
    config: TrainConfig,
    values: Mapping[str, OptionValue],
    *,
    origins: Mapping[str, str],
    translated: tuple[str, ...],
    notes: Sequence[str],
    file: AccelerateFile | None,
    base: str,
    env: Mapping[str, str],
) -> ResolvedRun:
    """Make every decision.

    `values`: each option that any source gives, as the strongest source gives it.
    `base`: the file or launcher that the FSDP settings start from.
    """
    parallel = config.parallel
    sharding = values.get("fsdp_sharding_strategy")
    # ---- strategy
    strategy: Decision[AskedStrategy]
    if parallel.strategy == "auto":
        reason = "decided by the size of the model: ddp where it fits, fsdp where it does not"
        strategy = Decision("auto", reason)
    else:
        asked = values["strategy"]
        is_sharded = parallel.strategy == "fsdp"
        # Contradiction: the Accelerate file is for another strategy. No contradiction if a stronger source than the one
        # that names the file asks for FSDP: it overrides the file.
        if (
            is_sharded
            and file is not None
            and file.distribution != "fsdp"
            and asked.level <= values["accelerate_config"].level
        ):
            raise UserError(
                f"{asked.key}: {asked.written or yaml_word(asked.value)}, but {file.source} is for "
                f"{file.distribution}: name a file with distributed_type: FSDP (for example accelerate_config: "
                f"accelerate_fsdp), or leave {asked.key} out"
            )
        reason = "asked for" if asked.key == "strategy" else f"asked for by {asked.key}"
        strategy = Decision(parallel.strategy, reason, asked.source)
        if is_sharded and sharding is not None and sharding.value == "NO_SHARD":
            # A copy on each process, which ddp gives without wrapping.
            reason = "asked for by fsdp_sharding_strategy: NO_SHARD"
            strategy = Decision("ddp", reason, asked.source)
        elif is_sharded:
            reason = f"asked for, with the options of {base}"
            strategy = Decision("fsdp", reason, asked.source)

    # ---- FSDP
    fsdp_values = {}
    fsdp_given = []
    for name in FSDP_OPTIONS:
        value = values.get(name)
        if value is None or value.value is None:
            continue
        fsdp_values[name] = value.value
        if value.level in USER_LEVELS:
            fsdp_given.append(str(value))
    fsdp = None
    fsdp_notes: list[str] = []
    lines = list(notes)
    # For `auto` too: the placement may choose FSDP later, and then needs the settings.
    if strategy.value in ("auto", "fsdp"):
        fsdp, fsdp_notes = resolve_fsdp(fsdp_values, base)
    elif parallel.strategy == "fsdp":
        fsdp_notes = [
            "fsdp_sharding_strategy: NO_SHARD shards nothing: the run uses ddp (a copy "
            "on each process)"
        ]
    else:
        for text in fsdp_given:
            lines.append(f"{text} has no effect with strategy: {strategy.value}")

    # ---- gradient checkpointing and precision
    recomputation = Decision(False, "default without FSDP")
    if config.model.gradient_checkpointing is not None:
        recomputes = config.model.gradient_checkpointing
        recomputation = _asked("gradient_checkpointing", recomputes, values)
    elif strategy.value == "fsdp":
        recomputation = Decision(True, "default with FSDP")
    precision = _asked("mixed_precision", config.model.mixed_precision, values)
    precision_reason = f"mixed_precision: {precision.value}"
    if precision.value == "auto":
        precision_reason = "auto"
    elif precision.reason != "mixed_precision":
        precision_reason += f", set by {precision.reason}"

    # ---- timeout
    minutes = parallel.dist_timeout_minutes
    timeout = _asked("dist_timeout_minutes", minutes, values)
    limit = env.get(TIMEOUT_VARIABLE)
    if limit:
        try:
            seconds = float(limit)
        except ValueError:
            seconds = 0.0  # refused below
        if not 0 < seconds < math.inf:
            raise UserError(
                f"{TIMEOUT_VARIABLE}={limit} must be a number of seconds above 0; or use "
                "dist_timeout_minutes"
            )
        # An option overrides the environment variable, even if it has the default value.
        stated_timeout = values.get("dist_timeout_minutes")
        if stated_timeout is None:
            reason_of_timeout = f"{TIMEOUT_VARIABLE}={limit}"
            timeout = Decision(seconds / 60, reason_of_timeout, "environment")
        elif seconds != 60 * minutes:
            lines.append(
                f"{stated_timeout} overrides {TIMEOUT_VARIABLE}={limit} (environment)"
            )
    return ResolvedRun(
        config=config,
        origins=origins,
        translated=translated,
        strategy=strategy,
        fsdp=fsdp,
        fsdp_notes=tuple(fsdp_notes),
        fsdp_given=tuple(fsdp_given),
        recomputation=recomputation,
        precision=replace(precision, reason=precision_reason),
        processes=_asked("num_processes", parallel.num_processes, values),
        machines=_asked("num_machines", parallel.num_machines, values),
        timeout_minutes=timeout,
        notes=tuple(lines),
        file=file,
    )


def resolve_fsdp(
    values: Mapping[str, Any], source: str
) -> tuple[FsdpConfig, list[str]]:
    """Return the settings that hold if the model is sharded, and notes for the log.

    `values`: the fsdp_* options that any source gives, the preset included. `source`: what they start from.
    """
    # Keyword arguments of FsdpConfig: the options without their prefix, except for those that are renamed below.
    settings: dict[str, Any] = {"source": source}
    for name, value in values.items():
        settings[name.removeprefix("fsdp_")] = value
    policy = settings.pop("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    classes = settings.pop("transformer_layer_cls_to_wrap", None)
    size = settings.pop("min_num_params", 0)
    settings["offload"] = settings.pop("offload_params", False)
    notes = []
    settings["wrap_policy"] = policy
    if ":" in policy:  # file.py:function of the user's
        settings["wrap_function"] = policy
        settings["wrap_policy"] = "NO_WRAP"
    if classes:
        names = [classes] if isinstance(classes, str) else classes
        settings["layer_classes"] = tuple(names)
        if policy != "TRANSFORMER_BASED_WRAP":
            notes.append(
                f"fsdp_transformer_layer_cls_to_wrap: {classes} has no effect with fsdp_auto_wrap_policy: {policy}"
            )
    # fsdp_min_num_params has two meanings. With SIZE_BASED_WRAP it is the size of a unit, which needs a default. With
    # TRANSFORMER_BASED_WRAP every layer is a unit, unless a size is given.
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
    fsdp = FsdpConfig(**settings)
    if fsdp.version == 2 and fsdp.state_dict_type == "LOCAL_STATE_DICT":
        raise UserError(
            "fsdp_state_dict_type: LOCAL_STATE_DICT does not exist in FSDP2: use SHARDED_STATE_DICT (each process "
            "writes its own part, and any number of processes can read them), or fsdp_version: 1"
        )
    return fsdp, notes


def _asked(name: str, value: T, values: Mapping[str, OptionValue]) -> Decision[T]:
    """Return the decision for an option that is taken as given. The reason is its name, or the file or launcher that sets
    it."""
    asked = values.get(name)
    if asked is None:
        return Decision(value, DEFAULT)
    reason = name if asked.level in USER_LEVELS else asked.place
    return Decision(value, reason, asked.source)
