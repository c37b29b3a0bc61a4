"""The peak learning rate of `learning_rate: auto`, by what a run trains. docs/choosing.md has the measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from vembed.config.resolved import Decision
from vembed.config.schema import AdapterSection, ObjectiveSection, OptimizerSection
from vembed.losses.table import LOSSES
from vembed.models.families.table import FamilyName

What = Literal["weights", "adapters", "head"]

WIDTH = 384
"""Hidden size of all-MiniLM-L6-v2, on which the rates were measured."""
TUNED = 8e-5
"""Peak for all weights of an embedding model of this width; in inverse proportion to the width in wider ones."""
RAW = 1.2e-4
"""The same for a language model that is no embedding model yet: it has further to go."""
ADAPTERS = 15.0
"""Ratio of the peak of adapters with alpha 32 to that of the weights that they change; in models narrower than those
below, to the geometric mean of that and of the peak at their widths."""
ALPHA = 32
SHORT = 48
SHORTEST = 16
"""Steps of a run below which adapters get a higher rate still, by the root of the ratio, and the end of that: B begins
at zero, so a short run ends before A and B have grown together."""
HEAD = 1e-3
"""Peak for a linear layer on frozen features, and for new projections."""
SCRATCH = 5e-4
"""Peak for initial weights of 512 dimensions: less by the root of the width, and more in proportion where it is
smaller, up to MOST_SCRATCH."""
MOST_SCRATCH = 2e-3
SCRATCH_OF_ORDER = 0.25
"""The same for losses of order, as a part of that for other losses."""
TWO_TOWERS = 1e-5
"""Peak for CLIP and SigLIP: their towers were trained on batches of tens of thousands of pairs."""
WIDTH_OF_TOWERS = 512
"""Hidden size of the text tower of CLIP ViT-B, for which TWO_TOWERS is."""
LONG = 100
LONGEST = 400
"""Steps of a run above which the peak for all weights of models of texts falls, by the fourth root of the ratio, and
the end of that, at 0.71 times it."""
LOWEST = 5e-6
HIGHEST = 1e-4
"""Limits of the peak for weights that are trained further, in models at least as wide as these."""
NARROW = 3
"""Power of the width by which the peak rises in models narrower than those."""
MOST_NARROW = 0.75
"""Largest peak of narrower weights that are trained further, as a part of that of initial weights."""


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
    total_steps: int = SHORT
    """Steps of the run."""


def peak_rate(
    objective: ObjectiveSection, adapters: AdapterSection, trained: Trained
) -> Decision[float]:
    """Return the learning rate of `learning_rate: auto` and the reason."""
    if trained.what == "head":
        return Decision(HEAD, "only layers behind the pooling are trained")
    if trained.is_new and trained.what == "weights":
        is_of_order = objective.losses is None and LOSSES[objective.loss].ranks_pairs
        return Decision(
            _two_digits(
                _of_initial(trained.width) * (SCRATCH_OF_ORDER if is_of_order else 1.0)
            ),
            f"from scratch: initial weights of {trained.width:,d} dimensions"
            + (f", loss: {objective.loss}" if is_of_order else ""),
        )
    wide, reason = _of_weights(trained)
    whole = _of_narrow(trained, wide)
    reason += f", {whole / wide:.2g} times that of wider ones" if whole > wide else ""
    if trained.what == "weights":
        is_long = trained.total_steps > LONG and whole == wide and not trained.has_scale
        reason += f", {trained.total_steps:,d} steps" if is_long else ""
        rate = (
            max(whole * (LONG / min(trained.total_steps, LONGEST)) ** 0.25, LOWEST)
            if is_long
            else whole
        )
        return Decision(_two_digits(rate), f"all weights: {reason}")
    # One step of size lr in B changes the weights by (alpha / r) * lr * r directions of A, so the rank cancels out;
    # with rslora it is alpha / sqrt(r), and the root of the rank is left.
    strength = adapters.lora_alpha * (
        math.sqrt(adapters.lora_r) if adapters.lora_variant == "rslora" else 1.0
    )
    rate = math.sqrt(wide * whole) * ADAPTERS * min(max(ALPHA / strength, 0.1), 10.0)
    rate *= math.sqrt(SHORT / min(max(trained.total_steps, SHORTEST), SHORT))
    root = ", rslora" if adapters.lora_variant == "rslora" else ""
    root += (
        f", only {trained.total_steps:,d} steps" if trained.total_steps < SHORT else ""
    )
    return Decision(
        _two_digits(rate),
        f"LoRA of rank {adapters.lora_r}, alpha {adapters.lora_alpha}{root}: {rate / whole:.3g} times "
        f"the rate of all weights, which is {_two_digits(whole):g} ({reason})",
    )


def _of_weights(trained: Trained) -> tuple[float, str]:
    """Return the peak for all weights and the reason."""
    kind = trained.family.replace("_", " ")
    if trained.has_scale:
        return TWO_TOWERS, f"a {kind} model"
    rate = (TUNED if trained.is_tuned else RAW) * WIDTH / trained.width
    tuned = (
        "an embedding model already" if trained.is_tuned else "no embedding model yet"
    )
    return min(
        max(rate, LOWEST), HIGHEST
    ), f"a {kind} of {trained.width:,d} dimensions, {tuned}"


def _of_narrow(trained: Trained, rate: float) -> float:
    """Return the peak for all weights, which rises by a power of the width where a model is narrower than those on
    which the rates were measured, and stays below that of initial weights."""
    usual = WIDTH_OF_TOWERS if trained.has_scale else WIDTH
    if trained.width >= usual:
        return rate
    base = TWO_TOWERS if trained.has_scale else TUNED if trained.is_tuned else RAW
    wanted = base * (usual / trained.width) ** NARROW
    return max(rate, min(wanted, MOST_NARROW * _of_initial(trained.width)))


def _of_initial(width: int) -> float:
    """Return the peak for initial weights."""
    return min(
        SCRATCH * (512 / width if width < 512 else math.sqrt(512 / width)), MOST_SCRATCH
    )


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")


def rate_of(optimizer: OptimizerSection) -> float:
    """Return the learning rate of a config in which it is decided."""
    assert optimizer.learning_rate != "auto", (
        "peak_rate decides it when the model is built"
    )
    return optimizer.learning_rate
