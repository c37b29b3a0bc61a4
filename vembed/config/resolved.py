"""ResolvedRun: every decision of a run that needs no device, each made once, with its reason and its source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

from vembed.config.accelerate_file import AccelerateFile
from vembed.config.fsdp import FSDP_OPTIONS, AskedPrecision, FsdpConfig, resolve_fsdp
from vembed.config.layers import Level, OptionValue, yaml_word
from vembed.config.schema import TrainConfig
from vembed.errors import UserError

T = TypeVar("T")
Strategy = Literal["single", "ddp", "fsdp"]
AskedStrategy = Literal["auto", "single", "ddp", "fsdp"]
DEFAULT = "default"
BY_HAND = (Level.CONFIG, Level.COMMAND_LINE)
"""Sources in which a person gives single options."""
TIMEOUT_VARIABLE = "NCCL_TIMEOUT"
"""Seconds that a collective may take; read by older versions of torch, and here where the config gives no limit."""


@dataclass(frozen=True, slots=True)
class Decision(Generic[T]):
    """One answer to one question."""

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
        return (
            str(self.value).lower() if isinstance(self.value, bool) else str(self.value)
        )

    def __str__(self) -> str:
        return f"{self.text} ({self.reason})"


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A config and what follows from it. `train`, `--dry-run`, `plan`, `doctor` and the log read it, and decide nothing
    that stands here a second time."""

    config: TrainConfig
    origins: Mapping[str, str]
    """Option -> the source of its value."""
    translated: tuple[str, ...]
    """Options given under another name, and their name here."""
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
    """Precision of a model that is not sharded; `FsdpConfig.mixed_precision` is that of a sharded one."""
    processes: Decision[int | Literal["auto"]]
    """Processes on each machine."""
    machines: Decision[int]
    timeout_minutes: Decision[float]
    """Longest time that a collective waits for the other processes."""
    file: AccelerateFile | None
    """The Accelerate file that the config or the command line names."""

    def left_to_gpus(self) -> list[str]:
        """Return what is decided by the GPU where the run is on one, as lines for a dry run."""
        lines = []
        recomputation = self.recomputation
        if (
            recomputation.source == DEFAULT
            and recomputation.value
            and self.config.batch.use_gradient_cache is not False
        ):
            lines.append(
                "on a GPU gradient checkpointing is off where micro-batches fit without it, since Gradient Cache "
                "bounds the graphs; `vembed plan` with --gpu says which"
            )
        if self.config.model.torch_compile == "auto":
            lines.append(
                "on a GPU layers are compiled in runs of more than about five minutes (torch_compile: auto)"
            )
        return lines

    def asked_precision(self, *, sharded: bool) -> Decision[AskedPrecision]:
        """The precision that was asked for, for a sharded model or a whole one."""
        if not sharded or self.fsdp is None:
            return self.precision
        return Decision(
            self.fsdp.mixed_precision, self.fsdp.precision_reason, self.fsdp.source
        )


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
    strategy: Decision[AskedStrategy]
    if parallel.strategy == "auto":
        reason = "decided by the size of the model: ddp where it fits, fsdp where it does not"
        strategy = Decision("auto", reason)
    else:
        asked = values["strategy"]
        is_sharded = parallel.strategy == "fsdp"
        # Refused beside a file without FSDP, unless a stronger source than the file asks for it.
        is_other_file = file is not None and file.distribution != "fsdp"
        is_weaker = (
            file is not None and asked.level <= values["accelerate_config"].level
        )
        if file is not None and is_sharded and is_other_file and is_weaker:
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

    fsdp_values = {}
    fsdp_given = []
    for name in FSDP_OPTIONS:
        value = values.get(name)
        if value is None or value.value is None:
            continue
        fsdp_values[name] = value.value
        if value.level in BY_HAND:
            fsdp_given.append(str(value))
    fsdp = None
    fsdp_notes: list[str] = []
    lines = list(notes)
    # Also for `auto`: the placement may choose FSDP, and needs its settings then.
    if strategy.value in ("auto", "fsdp"):
        fsdp, fsdp_notes = resolve_fsdp(
            config.model.mixed_precision,
            fsdp_values,
            base,
            trains_adapters=config.adapters.use_lora,
        )
    elif parallel.strategy == "fsdp":
        fsdp_notes = [
            "fsdp_sharding_strategy: NO_SHARD shards nothing: the run uses ddp (a copy "
            "on each process)"
        ]
    else:
        for text in fsdp_given:
            lines.append(f"{text} has no effect with strategy: {strategy.value}")

    word = "with" if strategy.value == "fsdp" else "without"
    recomputation = Decision(word == "with", f"default {word} strategy: fsdp")
    if config.model.gradient_checkpointing is not None:
        recomputes = config.model.gradient_checkpointing
        recomputation = _asked("gradient_checkpointing", recomputes, values)
    precision = _asked("mixed_precision", config.model.mixed_precision, values)
    if precision.value == "auto":
        precision = replace(precision, reason="auto")
    else:
        place = (
            ""
            if precision.reason == "mixed_precision"
            else f", set by {precision.reason}"
        )
        precision = replace(
            precision, reason=f"mixed_precision: {precision.value}{place}"
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
        precision=precision,
        processes=_asked("num_processes", parallel.num_processes, values),
        machines=_asked("num_machines", parallel.num_machines, values),
        timeout_minutes=_timeout(parallel.dist_timeout_minutes, values, env, lines),
        notes=tuple(lines),
        file=file,
    )


def _asked(name: str, value: T, values: Mapping[str, OptionValue]) -> Decision[T]:
    """Return an option as it is. The reason is its name, or the file or launcher that gives it."""
    asked = values.get(name)
    if asked is None:
        return Decision(value, DEFAULT)
    reason = name if asked.level in BY_HAND else asked.place
    return Decision(value, reason, asked.source)


def _timeout(
    minutes: float,
    values: Mapping[str, OptionValue],
    env: Mapping[str, str],
    notes: list[str],
) -> Decision[float]:
    asked = values.get("dist_timeout_minutes")
    decision = _asked("dist_timeout_minutes", minutes, values)
    text = env.get(TIMEOUT_VARIABLE)
    if not text:
        return decision
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise UserError(
            f"{TIMEOUT_VARIABLE}={text} must be a number of seconds above 0; or use "
            "dist_timeout_minutes"
        )
    # The config is more specific than the environment, also with the default's value.
    if asked is None:
        return Decision(seconds / 60, f"{TIMEOUT_VARIABLE}={text}", "environment")
    if seconds != 60 * minutes:
        notes.append(f"{asked} overrides {TIMEOUT_VARIABLE}={text} (environment)")
    return decision
