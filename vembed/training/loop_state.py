"""LoopState: the state of the loop between two steps. With weights and optimizer state it is all that a run needs to
resume."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vembed.training.update import GradientScale


@dataclass
class LoopState:
    """State of the loop. Every rank holds the same."""

    step: int = 0
    """Number of optimizer steps taken."""
    num_skipped: int = 0
    """Number of steps skipped because of non-finite values."""
    skipped_in_a_row: int = 0
    """Number of the last steps that were skipped, float16 overflows aside."""
    best: float | None = None
    best_step: int | None = None
    best_scores: dict[str, float] = field(default_factory=dict)
    held_step: int | None = None
    """Step whose checkpoint `final/` gets if a guard falls, and its scores."""
    held_scores: dict[str, float] = field(default_factory=dict)
    fell: str | None = None
    """Reason why a guard ended the run."""
    scale: GradientScale = field(default_factory=GradientScale)
    before: dict[str, float] = field(default_factory=dict)
    """Scores before the first step."""
    scores: dict[str, float] = field(default_factory=dict)
    """Newest scores, and the step at which they were measured."""
    scored_step: int | None = None
    seconds: float = 0.0
    """Training time so far, over all resumed parts."""
    hooks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """State of each hook that has one, by its name. Written when the state is saved."""

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> LoopState:
        """Return the state that a checkpoint holds."""
        return cls(**{**saved, "scale": GradientScale(**saved["scale"])})
