"""Trackio."""

from __future__ import annotations

from vembed.training.trackers.declaration import (
    REPORT_PICTURE,
    AccelerateTracker,
    TrackedReport,
    TrackedRun,
)


class Trackio(AccelerateTracker):
    """A run of Trackio."""

    name = "trackio"
    summary = "Trackio, a local dashboard."
    package = "trackio"
    options = frozenset({"wandb_project"})

    def start(self, run: TrackedRun) -> None:
        """Start a run in the project."""
        from accelerate.tracking import TrackioTracker

        self.tracker = TrackioTracker(
            run.project, name=run.display_name, config=run.settings
        )
        self.tracker.start()

    def send_report(self, report: TrackedReport) -> None:
        """Send the picture."""
        import trackio

        values = {REPORT_PICTURE: trackio.Image(report.picture)}
        self.tracker.run.log(values, step=report.step)
