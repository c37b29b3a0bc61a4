"""LoopState: what a run carries from step to step besides weights and optimizer, and what a checkpoint may hold of it.

Imports no torch: a dry run looks at checkpoints too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import ConfigDict, Field

MAX_STEPS = 10**10
Step = Annotated[int, Field(ge=0, le=MAX_STEPS)]
Count = Annotated[int, Field(ge=0)]

FIRST_SCALE = 2.0**16
GROWTH_STEPS = 2000


@dataclass
class GradientScale:
    """Loss scale that keeps float16 gradients from underflowing. Constant 1 for every other dtype."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    value: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    good_steps: Count = 0
    is_started: bool = False
    """True if the first float16 value was set. A value that overflows reduced to 1 must not be reset."""

    def adapt(self, is_finite: bool) -> None:
        """Halve the scale after an overflow, and double it after many good steps."""
        self.good_steps += 1
        if not is_finite:
            self.value = max(self.value / 2, 1.0)
            self.good_steps = 0
        elif self.good_steps == GROWTH_STEPS:
            self.value *= 2
            self.good_steps = 0


@dataclass
class LoopState:
    """State of the loop. Every rank holds the same. Checkpoints hold it as JSON."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    step: Step = 0
    """Number of optimizer steps taken."""
    num_skipped: Count = 0
    """Number of steps skipped because of non-finite values."""
    skipped_in_a_row: Count = 0
    """Number of the last steps that were skipped, float16 overflows aside."""
    best: float | None = None
    best_step: Step | None = None
    best_scores: dict[str, float] = field(default_factory=dict)
    held_step: Step | None = None
    """Step whose checkpoint `final/` gets if a guard ends the run, and its scores."""
    held_scores: dict[str, float] = field(default_factory=dict)
    fell: str | None = None
    """Reason why a guard ended the run."""
    scale: GradientScale = field(default_factory=GradientScale)
    before: dict[str, float] = field(default_factory=dict)
    """Scores before the first step."""
    scores: dict[str, float] = field(default_factory=dict)
    """Newest scores, and the step at which they were measured."""
    scored_step: Step | None = None
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Training time so far, over all resumed parts."""
    hooks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """State of each hook that has one, by its name. Written when the state is saved."""

    def set_best(self, metric: str) -> None:
        """Take the newest scores as the best."""
        self.best = self.scores[metric]
        self.best_step = self.step
        self.best_scores = self.scores

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> LoopState:
        """Return the state that a checkpoint holds."""
        return cls(**{**saved, "scale": GradientScale(**saved["scale"])})
