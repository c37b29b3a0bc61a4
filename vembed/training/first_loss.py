"""FirstLoss: check of a run from initial weights, whose first loss is near the log of its number of candidates."""

from __future__ import annotations

import logging
import math

from vembed.config.terms import losses_of
from vembed.parallel import collectives
from vembed.training.hooks import Hook, Run, StepReport

log = logging.getLogger("vembed")

FAR = 0.5
"""Share of the logarithm by which the loss may differ."""


class FirstLoss(Hook):
    """Compares the loss of step 1 with the logarithm of the number of candidates, which is that of equal scores."""

    def __init__(self) -> None:
        self.applies = False

    def on_start(self, run: Run) -> None:
        """Find out whether the run begins with a loss over candidates."""
        self.applies = run.state.step == 0 and losses_of(run.config) == ("infonce",)

    def on_step(self, report: StepReport) -> None:
        """Log the comparison after the first step. Collective."""
        if not self.applies:
            return
        self.applies = False
        batches = [rank_batch for rank_batch, _ in report.batches]
        mine = [len(one.positive) + len(one.negative) for one in batches]
        count = collectives.sum_scalars([float(sum(mine))])[0] / len(batches)
        if count < 2:
            return
        loss, expected = report.outcome.loss, math.log(count)
        said = f"step 1: loss {loss:.4g}; log of its {count:,.0f} candidates is {expected:.4g}"
        if abs(loss - expected) <= FAR * expected:
            log.info("%s (as of initial weights, which score all alike)", said)
        elif loss > expected:
            log.warning(
                "%s: initial weights should score all alike, and these are sure of wrong answers; check temperature "
                "(similarity: dot needs a larger one), and the initial values of the module",
                said,
            )
        else:
            log.info(
                "%s (initial weights tell pairs apart already, as where queries and positives share words)",
                said,
            )
