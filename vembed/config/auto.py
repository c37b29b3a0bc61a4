"""What `auto` means where it depends on the model or the data: learning rate, epochs, and the intervals of a run.

The same config, model and data give the same decisions.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from vembed.config.resolved import Decision
from vembed.config.schema import (
    AdapterSection,
    ModelSection,
    ObjectiveSection,
    OptimizerSection,
    TrainConfig,
)
from vembed.losses.table import LOSSES
from vembed.models.families.table import FamilyName

What = Literal["weights", "adapters", "head"]

MEASURED_WIDTH = 384
"""Hidden size of all-MiniLM-L6-v2, on which the rates were measured."""
EMBEDDING_MODEL_RATE = 8e-5
"""Peak for all weights of an embedding model of this width. In wider models it falls in inverse proportion to the width."""
LANGUAGE_MODEL_RATE = 1.2e-4
"""The same for a language model that was not trained as an embedding model yet: it has further to go."""
MIN_RATE = 5e-6
MAX_RATE = 1e-4
"""Limits of the peak for pretrained weights, in models at least as wide as MEASURED_WIDTH."""
NARROW_POWER = 3
"""In narrower models the peak rises by this power of MEASURED_WIDTH / width."""
MAX_NARROW_SHARE = 0.75
"""Largest peak for pretrained weights of a narrower model, as a share of the peak for initial weights."""
LONG_RUN_STEPS = 100
MAX_LONG_RUN_STEPS = 400
"""In runs of more than LONG_RUN_STEPS steps the peak for all weights of a text model falls by the fourth root of
LONG_RUN_STEPS / steps. It stays at 0.71 times the peak from MAX_LONG_RUN_STEPS on."""

TWO_TOWER_RATE = 1e-5
"""Peak for CLIP and SigLIP: their towers were trained on batches of tens of thousands of pairs."""
TWO_TOWER_WIDTH = 512
"""Hidden size of the text tower of CLIP ViT-B, for which TWO_TOWER_RATE was measured."""

ADAPTER_RATIO = 15.0
"""Peak for adapters with alpha 32 over the peak for the weights that they change. In models narrower than MEASURED_WIDTH
over the geometric mean of that peak and of the one without the rise for narrow models."""
ADAPTER_ALPHA = 32
MIN_ALPHA_FACTOR = 0.1
MAX_ALPHA_FACTOR = 10.0
"""Limits of the factor by which another alpha changes the peak for adapters."""
SHORT_RUN_OF_ADAPTERS = 48
MIN_RUN_OF_ADAPTERS = 16
"""In runs of fewer than SHORT_RUN_OF_ADAPTERS steps the peak for adapters rises by the root of SHORT_RUN_OF_ADAPTERS /
steps, at most to that of MIN_RUN_OF_ADAPTERS steps. B begins at zero, so a short run ends before A and B have grown
together."""

HEAD_RATE = 1e-3
"""Peak for a linear layer on frozen features, and for new projections."""

INITIAL_WIDTH = 512
INITIAL_RATE = 5e-4
"""Peak for initial weights of INITIAL_WIDTH dimensions. In wider models it falls by the root of the width. In narrower
ones it rises in proportion, up to MAX_INITIAL_RATE."""
MAX_INITIAL_RATE = 2e-3
PAIR_RANKING_FACTOR = 0.25
"""Factor of the peak for initial weights with losses that rank pairs."""

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
class Trained:
    """The facts about a model that its learning rate depends on."""

    what: What
    family: FamilyName
    width: int
    """Hidden size of the layers."""
    is_tuned: bool
    """True if the model is an embedding model already: its folder names pooling and other modules."""
    is_new: bool
    """True if the weights are initial ones, from which nothing was trained yet."""
    has_scale: bool = False
    """True if the weights contain the scale of the loss that they were trained with, as those of CLIP and SigLIP do."""
    total_steps: int = SHORT_RUN_OF_ADAPTERS
    """Steps of the run."""


def peak_rate(
    objective: ObjectiveSection, adapters: AdapterSection, trained: Trained
) -> Decision[float]:
    """Return the learning rate of `learning_rate: auto` and the reason. docs/choosing.md has the measurements."""
    width = trained.width
    steps = trained.total_steps
    if trained.what == "head":
        return Decision(HEAD_RATE, "only layers behind the pooling are trained")
    ratio = INITIAL_WIDTH / width
    growth = ratio if ratio > 1 else math.sqrt(ratio)
    initial = min(INITIAL_RATE * growth, MAX_INITIAL_RATE)
    if trained.is_new and trained.what == "weights":
        reason = f"from scratch: initial weights of {width:,d} dimensions"
        if objective.losses is None and LOSSES[objective.loss].ranks_pairs:
            initial *= PAIR_RANKING_FACTOR
            reason += f", loss: {objective.loss}"
        return Decision(_two_digits(initial), reason)

    # The peak for all pretrained weights, first without the rise for narrow models.
    kind = trained.family.replace("_", " ")
    if trained.has_scale:
        measured_width = TWO_TOWER_WIDTH
        base = TWO_TOWER_RATE
        usual = base
        reason = f"a {kind} model"
    else:
        measured_width = MEASURED_WIDTH
        base = LANGUAGE_MODEL_RATE
        tuned = "no embedding model yet"
        if trained.is_tuned:
            base = EMBEDDING_MODEL_RATE
            tuned = "an embedding model already"
        usual = max(base * measured_width / width, MIN_RATE)
        usual = min(usual, MAX_RATE)
        reason = f"a {kind} of {width:,d} dimensions, {tuned}"
    # Narrow models take more, but less than initial weights would.
    all_weights = usual
    if width < measured_width:
        risen = base * (measured_width / width) ** NARROW_POWER
        risen = min(risen, MAX_NARROW_SHARE * initial)
        all_weights = max(usual, risen)
    is_risen = all_weights > usual
    if is_risen:
        reason += f", {all_weights / usual:.2g} times that of wider ones"

    if trained.what == "weights":
        rate = all_weights
        if steps > LONG_RUN_STEPS and not is_risen and not trained.has_scale:
            reason += f", {steps:,d} steps"
            shortening = LONG_RUN_STEPS / min(steps, MAX_LONG_RUN_STEPS)
            rate = max(all_weights * shortening**0.25, MIN_RATE)
        return Decision(_two_digits(rate), f"all weights: {reason}")

    # One step of size lr in B changes the weights by (alpha / r) * lr * r directions of A, so the rank cancels out.
    # With rslora the factor is alpha / sqrt(r), and the root of the rank is left.
    strength = float(adapters.lora_alpha)
    details = ""
    if adapters.lora_variant == "rslora":
        strength *= math.sqrt(adapters.lora_r)
        details = ", rslora"
    alpha_factor = max(ADAPTER_ALPHA / strength, MIN_ALPHA_FACTOR)
    alpha_factor = min(alpha_factor, MAX_ALPHA_FACTOR)
    rate = math.sqrt(usual * all_weights) * ADAPTER_RATIO * alpha_factor
    if steps < SHORT_RUN_OF_ADAPTERS:
        details += f", only {steps:,d} steps"
        rate *= math.sqrt(SHORT_RUN_OF_ADAPTERS / max(steps, MIN_RUN_OF_ADAPTERS))
    return Decision(
        _two_digits(rate),
        f"LoRA of rank {adapters.lora_r}, alpha {adapters.lora_alpha}{details}: {rate / all_weights:.3g} times "
        f"the rate of all weights, which is {_two_digits(all_weights):g} ({reason})",
    )


def _two_digits(value: float) -> float:
    """Round to two significant digits, as the log shows the rate."""
    return float(f"{value:.2g}")


def rate_of(optimizer: OptimizerSection) -> float:
    """Return the learning rate of a config in which it is decided."""
    assert optimizer.learning_rate != "auto", (
        "peak_rate decides it when the model is built"
    )
    return optimizer.learning_rate


# ---- epochs


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
    limit = MAX_EPOCHS
    if has_scale:
        ratio = TWO_TOWERS_EPOCH_RATIO
        limit = MAX_EPOCHS_TWO_TOWERS
    if from_scratch:
        ratio *= FROM_SCRATCH_EPOCH_RATIO
    epochs = round(ratio * EPOCHS_PER_ROOT / math.sqrt(num_examples))
    return float(min(max(epochs, 1), ratio * limit))


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


# ---- intervals


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
        values = asdict(self)
        del values["reasons"]
        return values

    def lines(self) -> list[str]:
        """Return one log line for each value that was left to `auto`."""
        lines = []
        for name, reason in self.reasons.items():
            value = getattr(self, name)
            text = "none" if value is None else str(value).lower()
            lines.append(f"{name}: {text} (auto; {reason})")
        return lines


def run_intervals(
    config: TrainConfig, size: RunSize, *, is_length_given: bool
) -> RunIntervals:
    """Return the intervals of a run: what the config gives, and for `auto` what suits the size of the run.

    `is_length_given`: the user has said how many epochs or steps the run has.
    """
    evaluation = config.evaluation
    run = config.run
    reasons: dict[str, str] = {}
    steps = size.total_steps
    needs_checkpoints = bool(evaluation.guards) or run.load_best_model_at_end is True
    has_validation = config.data.has_validation

    eval_steps = evaluation.eval_steps
    if eval_steps == "auto":
        eval_steps = _auto_eval_steps(
            size, run.save_steps, reasons, is_needed=needs_checkpoints
        )

    save_steps = run.save_steps
    if save_steps == "auto":
        save_steps = None
        is_evaluated = eval_steps is not None and size.num_evaluated > 0
        if size.checkpoint_bytes > LARGE_CHECKPOINT_BYTES and not needs_checkpoints:
            gigabytes = size.checkpoint_bytes / 1e9
            reasons["save_steps"] = (
                f"a checkpoint takes {gigabytes:,.0f} GB: give save_steps to write some"
            )
        elif is_evaluated and (steps >= SHORT_RUN_STEPS or needs_checkpoints):
            save_steps = eval_steps
            reasons["save_steps"] = (
                "a checkpoint at each evaluation, so that the best one is kept"
            )
        elif steps >= MIN_STEPS_FOR_CHECKPOINTS:
            save_steps = _round_down(steps // MAX_EVALUATIONS)
            reasons["save_steps"] = (
                f"about {MAX_EVALUATIONS} checkpoints in {steps:,d} steps"
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

    logging_steps = config.logging.logging_steps
    if logging_steps == "auto":
        interval = min(max(steps // LOG_LINES_PER_RUN, 1), MAX_STEPS_PER_LOG_LINE)
        logging_steps = _round_down(interval)
        num_lines = math.ceil(steps / logging_steps)
        reasons["logging_steps"] = f"{num_lines:,d} lines for {steps:,d} steps"

    patience = evaluation.patience
    if patience == "auto":
        patience = None
        if eval_steps is not None and has_validation:
            reasons["patience"] = "the config says how long the run is"
            if not is_length_given:
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
    # Forward passes of an evaluation over those of the run. A backward pass counts as two.
    num_trained = steps * size.examples_per_step * size.num_training
    share = size.num_evaluated / (3 * num_trained)
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


def _round_down(value: int) -> int:
    """Return the largest of 1, 2, 3, 4, 5, 6, 8 times a power of ten that is not above the value."""
    unit: int = 10 ** (len(str(value)) - 1)
    leading_digit = value // unit
    return unit * {7: 6, 9: 8}.get(leading_digit, leading_digit)
