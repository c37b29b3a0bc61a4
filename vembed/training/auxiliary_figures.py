"""AuxiliaryFigures: the model's own losses by name, in the log and in metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping

from vembed.training.hooks import Hook, StepReport


class AuxiliaryFigures(Hook):
    """Mean of each auxiliary loss since the last log line, by name."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._num = 0

    def on_step(self, report: StepReport) -> None:
        """Add the losses of a step."""
        for _, result in report.batches:
            self._num += 1
            for name, value in result.auxiliary.items():
                self._sums[name] = self._sums.get(name, 0.0) + value

    def figures(self, report: StepReport) -> Mapping[str, float]:
        """Return the means since the last call. They are those of the global batch, the same on every rank."""
        del report
        means = {
            f"loss/{name}": value / self._num for name, value in self._sums.items()
        }
        self._sums, self._num = {}, 0
        return means
