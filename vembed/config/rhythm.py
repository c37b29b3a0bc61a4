"""Rhythm: length, evaluations, checkpoints and log lines of a run whose config leaves them to `auto`, by the size of
its data. The same config and data give the same decisions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from vembed.config.resolved import Decision
from vembed.config.schema import TrainConfig

FEW = 200.0
"""A data set of n examples is seen FEW / sqrt(n) times: 6 times for 300, 4 times for 3,000, once for 30,000."""
MOST_EPOCHS, MOST_OF_TWO_TOWERS = 6, 12
"""Ends of that, before the ratios below: of models of texts, and of CLIP and SigLIP."""
FROM_SCRATCH = 4
"""Ratio of the passes of initial weights to those of trained ones."""
TWO_TOWERS = 4
"""The same of CLIP and SigLIP, whose rate is low, to the passes of models of texts."""
NUM_EVALUATIONS = 10
FEWEST_EVALUATIONS = 3
SHARE = 0.1
"""Largest share of a run's computation that its evaluations take, where there are more than the fewest."""
SHORT_RUN = 20
"""Steps of a run below which nothing happens between its first and its last step."""
SAVED_RUN = 200
"""Steps of a run without validation data from which it writes checkpoints."""
LARGEST_CHECKPOINT = 20e9
"""Bytes of a checkpoint above which it is written only if asked for."""
NUM_LOGGED = 100
FEWEST_LOGGED, MOST_BETWEEN_LINES = 1, 50
PATIENCE = 4


@dataclass(frozen=True, slots=True)
class Size:
    """The facts about a run that its rhythm depends on."""

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
        return self.num_evaluated / (
            3 * self.total_steps * self.examples_per_step * self.num_training
        )


@dataclass(frozen=True, slots=True)
class Rhythm:
    """Steps between the recurring parts of a run."""

    eval_steps: int | None
    """None: only before and after training."""
    save_steps: int | None
    """None: only where the run is stopped."""
    logging_steps: int
    patience: int | None
    """Evaluations without a better score after which the run ends; None: it does not."""
    keeps_best: bool
    """True if `final/` holds the best evaluated checkpoint."""
    reasons: dict[str, str]
    """Option -> the reason for its value, for those that were left to `auto`."""

    def applied(self, config: TrainConfig, epochs: float) -> TrainConfig:
        """Return the config with numbers in place of `auto`."""
        values = self._values()
        if config.optimizer.max_steps is None:
            values["epochs"] = epochs
        given = config.options()
        return config.changed(
            **{name: value for name, value in values.items() if given[name] == "auto"}
        )

    def lines(self) -> list[str]:
        """Return one line for each decision."""
        values = self._values()
        return [
            f"{name}: {'none' if values[name] is None else str(values[name]).lower()} (auto; {reason})"
            for name, reason in self.reasons.items()
        ]

    def _values(self) -> dict[str, Any]:
        """Return the decisions under the names of their options."""
        return {
            "eval_steps": self.eval_steps,
            "save_steps": self.save_steps,
            "logging_steps": self.logging_steps,
            "patience": self.patience,
            "load_best_model_at_end": self.keeps_best,
        }


def passes(
    config: TrainConfig, num_examples: int, *, has_scale: bool
) -> Decision[float]:
    """Return the passes over the data. `has_scale`: of a model with the scale of its own loss, as CLIP and SigLIP."""
    if config.optimizer.epochs != "auto":
        return Decision(config.optimizer.epochs, "epochs")
    from_scratch = starts_from_nothing(config)
    epochs = epochs_for(num_examples, from_scratch=from_scratch, has_scale=has_scale)
    if from_scratch:
        return Decision(
            epochs,
            f"from scratch: initial weights see {num_examples:,d} examples {epochs:g} times",
        )
    if epochs == 1:
        return Decision(epochs, f"{num_examples:,d} examples are enough for one pass")
    towers = ", and two towers with a low rate need more" if has_scale else ""
    return Decision(
        epochs,
        f"{num_examples:,d} examples are few: each is seen {epochs:g} times{towers}",
    )


def starts_from_nothing(config: TrainConfig) -> bool:
    """Return True if the config says that the weights are initial ones."""
    return config.model.from_scratch or (
        config.model.model_class is not None
        and config.model.model_name == config.model.model_class
    )


def epochs_for(
    num_examples: int, *, from_scratch: bool = False, has_scale: bool = False
) -> float:
    """Return the passes over so many examples."""
    times = (FROM_SCRATCH if from_scratch else 1) * (TWO_TOWERS if has_scale else 1)
    most = times * (MOST_OF_TWO_TOWERS if has_scale else MOST_EPOCHS)
    return float(min(max(round(times * FEW / math.sqrt(num_examples)), 1), most))


def rhythm(config: TrainConfig, size: Size) -> Rhythm:
    """Return the rhythm of a run: what the config gives, and for `auto` what suits the size."""
    reasons: dict[str, str] = {}
    eval_steps = _eval_steps(config, size, reasons)
    save_steps = _save_steps(config, size, eval_steps, reasons)
    keeps_best = _keeps_best(config, eval_steps, save_steps, reasons)
    return Rhythm(
        eval_steps,
        save_steps,
        _logging_steps(config, size, reasons),
        _patience(config, eval_steps, reasons),
        keeps_best,
        reasons,
    )


def needs_checkpoints(config: TrainConfig) -> bool:
    """Return True if the config asks for something that needs evaluated checkpoints."""
    return bool(config.evaluation.guards) or config.run.load_best_model_at_end is True


def _eval_steps(config: TrainConfig, size: Size, reasons: dict[str, str]) -> int | None:
    if config.evaluation.eval_steps != "auto":
        return config.evaluation.eval_steps
    if not size.num_evaluated:
        return None
    if size.total_steps < SHORT_RUN and not needs_checkpoints(config):
        reasons["eval_steps"] = f"before and after a run of {size.total_steps:,d} steps"
        return None
    share = size.evaluation_share
    count = int(min(max(SHARE / share, FEWEST_EVALUATIONS), NUM_EVALUATIONS))
    # Even the fewest evaluations would take longer than the training itself.
    if FEWEST_EVALUATIONS * share > 1 and not needs_checkpoints(config):
        reasons["eval_steps"] = (
            f"before and after training: one evaluation takes {share:.0%} of the computation"
        )
        return None
    every = _round_down(max(size.total_steps // count, 1))
    if isinstance(config.run.save_steps, int):
        # Each checkpoint needs a score, so the interval divides save_steps.
        every = max(
            one for one in range(1, every + 1) if config.run.save_steps % one == 0
        )
    reasons["eval_steps"] = (
        f"{size.total_steps // every:,d} evaluations in {size.total_steps:,d} steps take about "
        f"{size.total_steps // every * share:.0%} of the computation"
    )
    return every


def _save_steps(
    config: TrainConfig, size: Size, eval_steps: int | None, reasons: dict[str, str]
) -> int | None:
    if config.run.save_steps != "auto":
        return config.run.save_steps
    asked = needs_checkpoints(config)
    if size.checkpoint_bytes > LARGEST_CHECKPOINT and not asked:
        reasons["save_steps"] = (
            f"a checkpoint takes {size.checkpoint_bytes / 1e9:,.0f} GB: give save_steps to write some"
        )
        return None
    if (
        eval_steps is not None
        and size.num_evaluated
        and (size.total_steps >= SHORT_RUN or asked)
    ):
        reasons["save_steps"] = (
            "a checkpoint at each evaluation, so that the best one is kept"
        )
        return eval_steps
    if size.total_steps < SAVED_RUN:
        return None
    reasons["save_steps"] = (
        f"about {NUM_EVALUATIONS} checkpoints in {size.total_steps:,d} steps"
    )
    return _round_down(size.total_steps // NUM_EVALUATIONS)


def _keeps_best(
    config: TrainConfig,
    eval_steps: int | None,
    save_steps: int | None,
    reasons: dict[str, str],
) -> bool:
    if config.run.load_best_model_at_end != "auto":
        return config.run.load_best_model_at_end
    if config.data.val_data_path is None and config.data.val_split is None:
        return False
    if eval_steps is None or save_steps is None:
        return False
    if config.evaluation.guards:
        reasons["load_best_model_at_end"] = (
            "the guards decide which checkpoint final/ gets"
        )
        return False
    if save_steps % eval_steps:
        reasons["load_best_model_at_end"] = (
            f"save_steps: {save_steps:,d} is no multiple of eval_steps: {eval_steps:,d}, so that some checkpoints have "
            "no score"
        )
        return False
    reasons["load_best_model_at_end"] = (
        "there are validation data: final/ gets the checkpoint with the best score"
    )
    return True


def _logging_steps(config: TrainConfig, size: Size, reasons: dict[str, str]) -> int:
    if config.logging.logging_steps != "auto":
        return config.logging.logging_steps
    every = _round_down(
        min(max(size.total_steps // NUM_LOGGED, FEWEST_LOGGED), MOST_BETWEEN_LINES)
    )
    reasons["logging_steps"] = (
        f"{math.ceil(size.total_steps / every):,d} lines for {size.total_steps:,d} steps"
    )
    return every


def _patience(
    config: TrainConfig, eval_steps: int | None, reasons: dict[str, str]
) -> int | None:
    if config.evaluation.patience != "auto":
        return config.evaluation.patience
    if eval_steps is None or (
        config.data.val_data_path is None and config.data.val_split is None
    ):
        return None
    if config.optimizer.epochs != "auto" or config.optimizer.max_steps is not None:
        reasons["patience"] = "the config says how long the run is"
        return None
    reasons["patience"] = (
        "the run ends early where so many evaluations in a row find nothing better"
    )
    return PATIENCE


def _round_down(value: int) -> int:
    """Return the largest of 1, 2, 3, 4, 5, 6, 8 times a power of ten that is not above the value."""
    # The power of ten with as many digits.
    unit: int = 10 ** (len(str(value)) - 1)
    return max(one * unit for one in (1, 2, 3, 4, 5, 6, 8) if one * unit <= value)
