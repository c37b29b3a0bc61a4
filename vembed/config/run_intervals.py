"""Run intervals: epochs, evaluations, checkpoints and log lines of a run whose config leaves them to `auto`.

They follow from the size of the data. The same config and data give the same decisions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vembed.config.resolved import Decision
from vembed.config.schema import (
    EvaluationSection,
    ModelSection,
    OptimizerSection,
    RunSection,
)

EPOCHS_PER_ROOT = 200.0
"""n examples are seen 200 / sqrt(n) times: 6 times for 300, 4 times for 3,000, once for 30,000."""
MAX_EPOCHS = 6
MAX_EPOCHS_TWO_TOWERS = 12
"""Of CLIP and SigLIP. Both limits hold before the ratios below."""
FROM_SCRATCH_EPOCH_RATIO = 4
"""Epochs of initial weights, over those of trained ones."""
TWO_TOWERS_EPOCH_RATIO = 4
"""Epochs of CLIP and SigLIP, whose rate is low, over those of models of texts."""
MAX_EVALUATIONS = 10
MIN_EVALUATIONS = 3
MAX_EVALUATION_SHARE = 0.1
"""Share of a run's computation that its evaluations may take, beyond the fewest."""
SHORT_RUN_STEPS = 20
"""Shorter runs do nothing between their first and their last step."""
MIN_STEPS_FOR_CHECKPOINTS = 200
"""Length of a run without validation data from which it writes checkpoints."""
LARGE_CHECKPOINT_BYTES = 20e9
"""Larger checkpoints are written only if asked for."""
LOG_LINES_PER_RUN = 100
MAX_STEPS_PER_LOG_LINE = 50
AUTO_PATIENCE = 4


@dataclass(frozen=True, slots=True)
class RunSize:
    """Facts about a run that its intervals depend on."""

    total_steps: int
    examples_per_step: int
    num_training: float
    """Texts and images of an example, on average."""
    num_evaluated: int
    """Texts and images of the evaluation data; 0 without them."""
    checkpoint_bytes: int

    @property
    def evaluation_share(self) -> float:
        """Forward passes of an evaluation over those of the run. A backward pass counts as two."""
        num_trained = self.total_steps * self.examples_per_step * self.num_training
        return self.num_evaluated / (3 * num_trained)


@dataclass(frozen=True, slots=True)
class RunIntervals:
    """Steps between the recurring parts of a run."""

    eval_steps: int | None
    """None: only before and after training."""
    save_steps: int | None
    """None: only where the run is stopped."""
    logging_steps: int
    patience: int | None
    """Evaluations without a better score after which the run ends; None: it does not."""
    load_best_model_at_end: bool
    """True if `final/` holds the best evaluated checkpoint."""
    reasons: dict[str, str]
    """Option -> the reason for its value, for those that were left to `auto`."""

    def options(self) -> dict[str, Any]:
        """Return the values under the names of their options."""
        return {
            "eval_steps": self.eval_steps,
            "save_steps": self.save_steps,
            "logging_steps": self.logging_steps,
            "patience": self.patience,
            "load_best_model_at_end": self.load_best_model_at_end,
        }

    def lines(self) -> list[str]:
        """Return one log line for each value that was left to `auto`."""
        lines = []
        for name, reason in self.reasons.items():
            value = self.options()[name]
            text = "none" if value is None else str(value).lower()
            lines.append(f"{name}: {text} (auto; {reason})")
        return lines


def decide_epochs(
    optimizer: OptimizerSection,
    model: ModelSection,
    num_examples: int,
    *,
    has_scale: bool,
) -> Decision[float]:
    """Return the passes over the data. `has_scale`: of a model with the scale of its own loss, as CLIP and SigLIP."""
    if optimizer.epochs != "auto":
        return Decision(optimizer.epochs, "epochs")
    from_scratch = has_initial_weights(model)
    epochs = epochs_for(num_examples, from_scratch=from_scratch, has_scale=has_scale)
    if from_scratch:
        reason = f"from scratch: initial weights see {num_examples:,d} examples {epochs:g} times"
    elif epochs == 1:
        reason = f"{num_examples:,d} examples are enough for one pass"
    else:
        reason = f"{num_examples:,d} examples are few: each is seen {epochs:g} times"
        if has_scale:
            reason += ", and two towers with a low rate need more"
    return Decision(epochs, reason)


def has_initial_weights(model: ModelSection) -> bool:
    """Return whether the config says that the weights are initial ones."""
    is_own_class = (
        model.model_class is not None and model.model_name == model.model_class
    )
    return model.from_scratch or is_own_class


def epochs_for(
    num_examples: int, *, from_scratch: bool = False, has_scale: bool = False
) -> float:
    """Return the passes over so many examples."""
    ratio = 1
    if from_scratch:
        ratio *= FROM_SCRATCH_EPOCH_RATIO
    if has_scale:
        ratio *= TWO_TOWERS_EPOCH_RATIO
    limit = ratio * (MAX_EPOCHS_TWO_TOWERS if has_scale else MAX_EPOCHS)
    epochs = round(ratio * EPOCHS_PER_ROOT / math.sqrt(num_examples))
    return float(min(max(epochs, 1), limit))


def run_intervals(
    evaluation: EvaluationSection,
    run: RunSection,
    logging_steps: int | Literal["auto"],
    size: RunSize,
    kept: Mapping[str, Any] | None = None,
    *,
    has_validation: bool,
    is_length_given: bool,
) -> RunIntervals:
    """Return the intervals of a run: what the config gives, and for `auto` what suits the size of the run.

    `has_validation`: there are validation data. `is_length_given`: the config says how
    many epochs or steps the run has. `kept`: values that the run that is resumed had for options left to `auto`.
    """
    reasons: dict[str, str] = {}
    kept = kept or {}
    steps = size.total_steps
    needs_checkpoints = bool(evaluation.guards) or run.load_best_model_at_end is True

    eval_steps = kept.get("eval_steps", evaluation.eval_steps)
    if eval_steps == "auto":
        eval_steps = _auto_eval_steps(
            size, run.save_steps, reasons, is_needed=needs_checkpoints
        )

    save_steps = kept.get("save_steps", run.save_steps)
    if save_steps == "auto":
        save_steps = _auto_save_steps(
            size, eval_steps, reasons, is_needed=needs_checkpoints
        )

    keeps_best = run.load_best_model_at_end
    if keeps_best == "auto":
        keeps_best = False
        if has_validation and eval_steps is not None and save_steps is not None:
            if evaluation.guards:
                reason = "the guards decide which checkpoint final/ gets"
            elif save_steps % eval_steps:
                reason = (
                    f"save_steps: {save_steps:,d} is no multiple of eval_steps: {eval_steps:,d}, so that some "
                    "checkpoints have no score"
                )
            else:
                keeps_best = True
                reason = "there are validation data: final/ gets the checkpoint with the best score"
            reasons["load_best_model_at_end"] = reason

    logging_steps = kept.get("logging_steps", logging_steps)
    if logging_steps == "auto":
        interval = min(max(steps // LOG_LINES_PER_RUN, 1), MAX_STEPS_PER_LOG_LINE)
        logging_steps = _round_down(interval)
        num_lines = math.ceil(steps / logging_steps)
        reasons["logging_steps"] = f"{num_lines:,d} lines for {steps:,d} steps"

    patience = evaluation.patience
    if patience == "auto":
        patience = None
        if eval_steps is not None and has_validation:
            if is_length_given:
                reasons["patience"] = "the config says how long the run is"
            else:
                patience = AUTO_PATIENCE
                reasons["patience"] = (
                    "the run ends early where so many evaluations in a row find nothing better"
                )
    return RunIntervals(
        eval_steps, save_steps, logging_steps, patience, keeps_best, reasons
    )


def _auto_eval_steps(
    size: RunSize, save_steps: Any, reasons: dict[str, str], *, is_needed: bool
) -> int | None:
    """Return the interval of evaluations. `is_needed`: the config asks for evaluated checkpoints."""
    steps = size.total_steps
    if not size.num_evaluated:
        return None
    if steps < SHORT_RUN_STEPS and not is_needed:
        reasons["eval_steps"] = f"before and after a run of {steps:,d} steps"
        return None
    share = size.evaluation_share
    # Even the fewest evaluations would take longer than the training itself.
    if MIN_EVALUATIONS * share > 1 and not is_needed:
        reasons["eval_steps"] = (
            f"before and after training: one evaluation takes {share:.0%} of the computation"
        )
        return None
    num_affordable = max(MAX_EVALUATION_SHARE / share, MIN_EVALUATIONS)
    count = int(min(num_affordable, MAX_EVALUATIONS))
    interval = _round_down(max(steps // count, 1))
    if isinstance(save_steps, int):
        # Each checkpoint needs a score, so the interval divides save_steps.
        while save_steps % interval:
            interval -= 1
    num_evaluations = steps // interval
    reasons["eval_steps"] = (
        f"{num_evaluations:,d} evaluations in {steps:,d} steps take about "
        f"{num_evaluations * share:.0%} of the computation"
    )
    return interval


def _auto_save_steps(
    size: RunSize, eval_steps: int | None, reasons: dict[str, str], *, is_needed: bool
) -> int | None:
    """Return the interval of checkpoints. `is_needed`: the config asks for evaluated checkpoints."""
    steps = size.total_steps
    if size.checkpoint_bytes > LARGE_CHECKPOINT_BYTES and not is_needed:
        gigabytes = size.checkpoint_bytes / 1e9
        reasons["save_steps"] = (
            f"a checkpoint takes {gigabytes:,.0f} GB: give save_steps to write some"
        )
        return None
    is_evaluated = eval_steps is not None and size.num_evaluated > 0
    if is_evaluated and (steps >= SHORT_RUN_STEPS or is_needed):
        reasons["save_steps"] = (
            "a checkpoint at each evaluation, so that the best one is kept"
        )
        return eval_steps
    if steps < MIN_STEPS_FOR_CHECKPOINTS:
        return None
    reasons["save_steps"] = f"about {MAX_EVALUATIONS} checkpoints in {steps:,d} steps"
    return _round_down(steps // MAX_EVALUATIONS)


def _round_down(value: int) -> int:
    """Return the largest of 1, 2, 3, 4, 5, 6, 8 times a power of ten that is not above the value."""
    unit: int = 10 ** (len(str(value)) - 1)
    leading_digit = value // unit
    return unit * {7: 6, 9: 8}.get(leading_digit, leading_digit)
