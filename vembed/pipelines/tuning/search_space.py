"""The searched options and their ranges, around what a run has without a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from vembed.config.rate import rate_of
from vembed.config.schema import (
    AdapterSection,
    BatchSection,
    ObjectiveSection,
    OptimizerSection,
    TrainConfig,
)
from vembed.config.terms import loss_terms
from vembed.errors import UserError

Value = float | int


class Trial(Protocol):
    """As much of an optuna trial as choosing values takes."""

    def suggest_float(
        self, name: str, low: float, high: float, *, log: bool = False
    ) -> float:
        """Return a number of a range."""
        ...

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Return one of the values."""
        ...


@dataclass(frozen=True, slots=True)
class Range:
    """Values of one option: all between two limits, or a few."""

    option: str
    start: Value
    """Value of the first trial, which is the run without a search."""
    low: float = 0.0
    high: float = 0.0
    choices: tuple[Value, ...] = ()

    def suggest(self, trial: Trial) -> Value:
        """Return the value that a trial tries."""
        if self.choices:
            value: Value = trial.suggest_categorical(self.option, list(self.choices))
            return value
        return float(
            f"{trial.suggest_float(self.option, self.low, self.high, log=True):.3g}"
        )

    def __str__(self) -> str:
        if self.choices:
            return f"{self.option}: {', '.join(f'{choice:g}' for choice in self.choices)} (first {self.start:g})"
        return f"{self.option}: {self.low:.3g} to {self.high:.3g}, by ratio (first {self.start:.3g})"

    def as_plain(self) -> dict[str, Any]:
        """Return plain values for a file."""
        return asdict(self)


OPTIONS = (
    "learning_rate",
    "temperature",
    "batch_size",
    "warmup_steps",
    "weight_decay",
    "lora_r",
)
"""Options that can be searched, those that usually matter most first."""


def ranges(config: TrainConfig, names: Sequence[str] = ()) -> list[Range]:
    """Return the ranges of the named options, by default of all that have an effect. `config`: that of the first trial,
    with numbers in place of `auto`."""
    unknown = [name for name in names if name not in OPTIONS]
    if unknown:
        raise UserError(f"--options {unknown[0]}: it can search {', '.join(OPTIONS)}")
    all_ranges = _all(
        config.optimizer,
        config.objective,
        config.batch,
        config.adapters,
        config.model.model_name,
    )
    search_ranges = [
        option_range
        for option_range in all_ranges
        if not names or option_range.option in names
    ]
    if not search_ranges:
        raise UserError(
            f"--options {','.join(names)} has no effect on this run: choose others of {', '.join(OPTIONS)}"
        )
    return search_ranges


def from_plain(values: Mapping[str, Any]) -> Range:
    """Return the range that `as_plain` wrote."""
    return Range(**{**values, "choices": tuple(values["choices"])})


def _all(
    optimizer: OptimizerSection,
    objective: ObjectiveSection,
    batch: BatchSection,
    adapters: AdapterSection,
    start_model: str,
) -> list[Range]:
    # Ranges are ratios around what the config has: three doublings of the rate; temperatures stay where a softmax is
    # neither one-hot nor flat.
    rate = rate_of(optimizer)
    search_ranges = [Range("learning_rate", rate, rate / 8, rate * 8)]
    start = loss_terms(objective, start_model)[0].temperature
    if objective.losses is None and start is not None:
        search_ranges.append(
            Range(
                "temperature",
                start,
                min(max(start / 5, 0.005), start),
                max(min(start * 4, 1.0), start),
            )
        )
    if batch.global_batch_size is None:
        size = batch.batch_size
        search_ranges.append(
            Range(
                "batch_size",
                size,
                choices=_with(size, [max(size // 2, 8), size * 2, size * 4]),
            )
        )
    warmup = optimizer.warmup_steps
    if isinstance(warmup, float):
        search_ranges.append(
            Range("warmup_steps", warmup, choices=_with(warmup, [0.0, 0.1, 0.3]))
        )
    search_ranges.append(
        Range(
            "weight_decay",
            optimizer.weight_decay,
            choices=_with(optimizer.weight_decay, [0.0, 0.01, 0.1]),
        )
    )
    if adapters.use_lora:
        search_ranges.append(
            Range(
                "lora_r",
                adapters.lora_r,
                choices=_with(adapters.lora_r, [4, 16, 64]),
            )
        )
    return search_ranges


def _with(start: Value, others: Sequence[Value]) -> tuple[Value, ...]:
    return tuple(sorted({start, *others}))
