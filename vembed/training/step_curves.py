"""StepCurves: loss, learning rate and gradient norm of every step, kept in the next logged line."""

from __future__ import annotations

from typing import Any

from vembed.training.hooks import Hook, StepReport


class StepCurves(Hook):
    """Figures of the steps since the last logged line, which metrics.jsonl gets with it: the report draws them all."""

    name = "step_curves"

    def __init__(self) -> None:
        self._steps: list[list[float]] = []

    def on_step(self, report: StepReport) -> None:
        """Keep one step."""
        self._steps.append(
            [
                report.step,
                report.outcome.loss,
                report.learning_rate,
                report.outcome.grad_norm,
            ]
        )

    def figures(self, report: StepReport) -> dict[str, Any]:
        """Return [step, loss, learning rate, gradient norm] of each step since the last logged one."""
        del report
        steps, self._steps = self._steps, []
        return {"steps": steps}

    def state(self) -> dict[str, Any]:
        """Return the steps that no line has yet."""
        return {"steps": self._steps} if self._steps else {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over the steps."""
        self._steps = [list(step) for step in state["steps"]]
