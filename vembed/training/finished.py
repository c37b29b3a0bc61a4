"""Finished runs in an output folder: how one is recognised, and what keeps a later run from replacing it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vembed.evaluation.report.record import read_run
from vembed.evaluation.report.summary import SUMMARY_FILE, read_summary

FINAL = "final"


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run that has written its model and its summary."""

    folder: Path
    step: int
    """Number of optimizer steps of the run."""
    when: str
    """Date and time of its end; empty if not known."""

    @property
    def model_dir(self) -> Path:
        """Folder of the model."""
        return self.folder / FINAL

    def __str__(self) -> str:
        when = f", {self.when[:16].replace('T', ' ')}" if self.when else ""
        return f"a finished run ({self.step:,d} steps{when})"

    def scores(self) -> dict[str, float]:
        """Return the scores of the saved model, and those before training with the prefix "before/"."""
        record = read_run(self.folder)
        return {
            **{f"before/{name}": value for name, value in record.before.items()},
            **record.after,
        }

    def leaves_nothing(self, total_steps: int, checkpoint_step: int | None) -> bool:
        """Return whether a resumed run that ends at `total_steps` has nothing to add to this one.

        A checkpoint of exactly the last step means that the run was stopped before it wrote its model.
        """
        return self.step >= total_steps or (
            checkpoint_step is not None and checkpoint_step > total_steps
        )


class NothingLeft(Exception):  # noqa: N818 - not an error: the run is done
    """The end of a resumed run whose folder holds a finished one that it would not change."""

    def __init__(self, run: FinishedRun, total_steps: int) -> None:
        super().__init__(
            f"nothing is left to train: {run} is in {run.model_dir}, and epochs or max_steps ask for "
            f"{total_steps:,d} steps; nothing was changed"
        )
        self.run = run


def finished_run(output_dir: Path) -> FinishedRun | None:
    """Return the finished run of a folder, or None: both the model and run.json must be there."""
    if not (output_dir / SUMMARY_FILE).is_file() or not (output_dir / FINAL).is_dir():
        return None
    summary = read_summary(output_dir)
    step = summary.num_steps
    if step is None:  # written by an older vembed
        steps = (
            read_run(output_dir).steps if (output_dir / "config.yaml").is_file() else []
        )
        step = int(steps[-1]["step"]) if steps else 0
    return FinishedRun(output_dir, step, summary.finished)


def forget_finished(output_dir: Path) -> None:
    """Remove summary and report, so that the folder no longer counts as finished. `final/` stays until the new model
    replaces it."""
    for name in (SUMMARY_FILE, "report.html", "report.md"):
        (output_dir / name).unlink(missing_ok=True)
