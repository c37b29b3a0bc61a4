"""MLflow."""

from __future__ import annotations

from vembed.training.trackers.declaration import (
    AccelerateTracker,
    TrackedReport,
    TrackedRun,
)


class Mlflow(AccelerateTracker):
    """A run of MLflow."""

    name = "mlflow"
    summary = "MLflow, with the report as an artifact; the project is the experiment."
    package = "mlflow"
    options = frozenset({"wandb_project"})

    def start(self, run: TrackedRun) -> None:
        """Start a run in the experiment, with the options as parameters."""
        from accelerate.tracking import MLflowTracker

        self.tracker = MLflowTracker(run.project, run_name=run.display_name)
        self.tracker.start()
        self.tracker.store_init_configuration(dict(run.settings))

    def send_report(self, report: TrackedReport) -> None:
        """Send the page and the picture as artifacts."""
        from PIL import Image

        self.tracker.log_artifact(str(report.page))
        picture = report.page.with_name("report.png")
        Image.fromarray(report.picture).save(picture)
        self.tracker.log_artifact(str(picture))
        picture.unlink()
