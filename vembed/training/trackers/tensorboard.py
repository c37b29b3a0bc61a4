"""TensorBoard."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vembed.training.trackers.declaration import (
    REPORT,
    REPORT_PICTURE,
    AccelerateTracker,
    TrackedReport,
    TrackedRun,
)


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
        _wait_for_new_second(run.output / folder)
        # Drop what was logged after the checkpoint's step; in a new run, everything in the folder.
        purge_step = run.first_step + 1 if run.first_step else 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.tracker = TensorBoardTracker(
                folder, str(run.output), purge_step=purge_step
            )
        self.tracker.start()
        _write_options(self.tracker.writer, run.settings)

    def send_report(self, report: TrackedReport) -> None:
        """Write the text and the picture."""
        writer = self.tracker.writer
        text = report.page.with_suffix(".md").read_text(encoding="utf-8")
        writer.add_text(REPORT, text, report.step)
        writer.add_image(REPORT_PICTURE, report.picture, report.step, dataformats="HWC")


def _write_options(writer: Any, settings: Mapping[str, Any]) -> None:
    from torch.utils.tensorboard.summary import hparams

    values = {}
    for name, value in settings.items():
        is_simple = isinstance(value, bool | int | float | str)
        values[name] = value if is_simple else json.dumps(value)
    for summary in hparams(values, {}):  # type: ignore[no-untyped-call]
        writer._get_file_writer().add_summary(summary)


def _wait_for_new_second(folder: Path) -> None:
    """Wait for the next clock second.

    TensorBoard sorts its files by name, which begins with the second of their start. With two files of one second the
    order is undefined, and the older file could hide steps of the newer one.
    """
    while any(folder.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
        time.sleep(0.05)
