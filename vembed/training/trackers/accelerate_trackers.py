"""TensorBoard and the services that Accelerate has a tracker for."""

import json
import warnings
from typing import Any

from vembed.training.trackers.base import TrackedRun, Tracker


class AccelerateTracker(Tracker):
    """A tracker of Accelerate, which `start` makes."""

    tracker: Any

    def log(self, values: dict[str, float], step: int) -> None:
        """See Tracker."""
        self.tracker.log(values, step=step)

    def finish(self) -> None:
        """See Tracker."""
        self.tracker.finish()


class TensorBoard(AccelerateTracker):
    """Event files in tensorboard/ of the run's folder."""

    name = "tensorboard"
    summary = "Event files in `tensorboard/` of the run's folder; the default."
    spellings = "tb"
    package = "tensorboard"

    def start(self, run: TrackedRun) -> None:
        """Open an event file, with the options for the page HPARAMS."""
        from accelerate.tracking import TensorBoardTracker

        # TensorBoard names a run by its folder.
        folder = "tensorboard"
        if run.name:
            folder += f"/{run.name.replace('/', '_')}"
        # Drop what was logged after the checkpoint's step; in a new run, everything in the folder.
        purge_step = run.first_step + 1 if run.first_step else 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.tracker = TensorBoardTracker(
                folder, str(run.output), purge_step=purge_step
            )
        self.tracker.start()
        values = {}
        for name, value in run.settings.items():
            is_simple = isinstance(value, bool | int | float | str)
            values[name] = value if is_simple else json.dumps(value)
        # Into the same folder, or they would be a run of their own.
        self.tracker.writer.add_hparams(values, {}, run_name=".")


class Wandb(AccelerateTracker):
    """A run of Weights & Biases."""

    name = "wandb"
    summary = "Weights & Biases."
    spellings = "weights_and_biases"
    package = "wandb"
    options = frozenset({"wandb_project", "wandb_tags"})

    def start(self, run: TrackedRun) -> None:
        """See Tracker."""
        from accelerate.tracking import WandBTracker

        self.tracker = WandBTracker(
            run.project, name=run.display_name, tags=run.tags, config=run.settings
        )
        self.tracker.start()


class Trackio(AccelerateTracker):
    """A run of Trackio."""

    name = "trackio"
    summary = "Trackio, a local dashboard."
    package = "trackio"
    options = frozenset({"wandb_project"})

    def start(self, run: TrackedRun) -> None:
        """See Tracker."""
        from accelerate.tracking import TrackioTracker

        self.tracker = TrackioTracker(
            run.project, name=run.display_name, config=run.settings
        )
        self.tracker.start()


class Mlflow(AccelerateTracker):
    """A run of MLflow."""

    name = "mlflow"
    summary = "MLflow; the project is the experiment."
    package = "mlflow"
    options = frozenset({"wandb_project"})

    def start(self, run: TrackedRun) -> None:
        """See Tracker."""
        from accelerate.tracking import MLflowTracker

        self.tracker = MLflowTracker(run.project, run_name=run.display_name)
        self.tracker.start()
        self.tracker.store_init_configuration(dict(run.settings))
