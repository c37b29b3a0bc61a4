"""Weights & Biases."""

from __future__ import annotations

from vembed.training.trackers.declaration import (
    REPORT,
    REPORT_PICTURE,
    AccelerateTracker,
    TrackedReport,
    TrackedRun,
)


class Wandb(AccelerateTracker):
    """A run of Weights & Biases."""

    name = "wandb"
    summary = "Weights & Biases, with the report as a page of the run."
    spellings = "weights_and_biases"
    package = "wandb"
    options = frozenset({"wandb_project", "wandb_tags"})

    def start(self, run: TrackedRun) -> None:
        """Start a run in the project."""
        from accelerate.tracking import WandBTracker

        self.tracker = WandBTracker(
            run.project, name=run.display_name, tags=run.tags, config=run.settings
        )
        self.tracker.start()

    def send_report(self, report: TrackedReport) -> None:
        """Send the page and the picture."""
        import wandb

        page = wandb.Html(report.page.read_text(encoding="utf-8"))
        values = {REPORT: page, REPORT_PICTURE: wandb.Image(report.picture)}
        self.tracker.run.log(values, step=report.step)
