"""RunningReport: report.html and report.md of a run as it goes on (`report_every`)."""

from __future__ import annotations

import logging

from typing_extensions import override

from vembed.errors import UserError
from vembed.evaluation.report.report import write_report
from vembed.training.hooks import Hook, Run, StepReport

log = logging.getLogger("vembed")


class RunningReport(Hook):
    """Writes the report after so many steps. A report that cannot be written is a line in the log."""

    def __init__(self, every: int) -> None:
        self.every = every

    @override
    def on_start(self, run: Run) -> None:
        self.folder = run.config.run.output_dir if run.session.is_main else None

    @override
    def on_step(self, report: StepReport) -> None:
        if self.folder is None or report.step % self.every:
            return
        try:
            path = write_report(self.folder)
        except (OSError, UserError) as error:
            log.warning(
                "report_every: the report of step %d was not written (%s)",
                report.step,
                error,
            )
        else:
            log.debug("report_every: %s", path)
