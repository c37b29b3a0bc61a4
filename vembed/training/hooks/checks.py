"""Checks of a run: non-finite values, a loss that does not fall, collapsed embeddings, changed data files."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from vembed.config.rate import rate_of
from vembed.config.schema import TrainConfig
from vembed.config.terms import losses_of
from vembed.data.batching.rank_batch import RankBatch
from vembed.data.example_store import ExampleStore
from vembed.errors import RunError
from vembed.parallel import collectives
from vembed.training.checkpoint.folder import list_checkpoints
from vembed.training.hooks.base import Hook, Run, StepReport
from vembed.training.update import LoopState, Outcome

log = logging.getLogger("vembed")

COLLAPSED = 0.99
"""Mean cosine between inputs above which embeddings no longer distinguish them."""
SMALLEST_LOSS = 1e-6
"""Below it a gradient of 0 is that of a loss that has nothing left to separate, in float32."""
STILL_STEPS = 200
"""Number of steps after which a loss still in its initial range causes a warning."""
STILL_RANGE = 0.001
MOST_SKIPPED = 10
"""Steps in a row that `on_nonfinite: skip` skips before the run ends."""
MAX_NAMED = 5


class Watch(Hook):
    """Checks of each step's figures. Each warning is given once."""

    def __init__(self, config: TrainConfig) -> None:
        self.stops = config.optimizer.on_nonfinite == "stop"
        self.loss = config.objective.loss
        self.warned: set[str] = set()
        self.lowest = math.inf
        self.highest = -math.inf
        self.first: int | None = None
        """First step that was looked at; of a resumed run not the first one."""
        self.precision = "no"
        self.loop: LoopState | None = None
        self.output = Path(config.run.output_dir)
        self.learning_rate = rate_of(config)

    def on_start(self, run: Run) -> None:
        """Take the precision, which decides the advice, and the state, which counts the skipped steps."""
        self.precision = run.session.mixed_precision
        self.loop = run.state

    def finite(
        self,
        step: int,
        outcome: Outcome,
        parts: Sequence[tuple[RankBatch, Tensor]],
        *,
        broken_weights: bool = False,
        in_a_row: int = 1,
    ) -> bool:
        """Return whether the step counted. A non-finite step stops the run or is logged, the same on every rank.
        `parts`: this rank's part of each global batch of the step, and whether its embeddings are finite.
        `broken_weights`: not one embedding of this rank is finite. `in_a_row`: skipped steps with this one."""
        if outcome.applied:
            self._trains(step, outcome)
            return True
        if outcome.is_overflow:
            log.info(
                "step %d: float16 overflow, gradient scale halved, step skipped", step
            )
            return False
        broken = [rank_batch for rank_batch, is_finite in parts if not bool(is_finite)]
        mine = [where for rank_batch in broken for where in rank_batch.where][
            :MAX_NAMED
        ]
        named = collectives.gather_objects_as_json(mine)
        culprits = "; ".join(
            f"rank {rank}: {', '.join(where)}"
            for rank, where in enumerate(named)
            if where
        )
        if not culprits:
            # The embeddings were finite everywhere, so it was the gradient.
            culprits = f"no rank (the gradient overflowed; first examples: {', '.join(parts[0][0].where[:2])})"
        found = f"non-finite embeddings on {culprits}"
        if broken_weights and step > 1:
            found = f"all embeddings are non-finite, so the weights are: an earlier update with {self._rate()} broke them"
        what = f"step {step}: loss {outcome.loss}, gradient norm {outcome.grad_norm}; {found}"
        if self.stops:
            advice = (
                ", use mixed_precision: bf16 instead of fp16"
                if self.precision == "fp16"
                else ""
            )
            skip = (
                ""
                if broken_weights
                else ", or set on_nonfinite: skip to skip such steps"
            )
            raise RunError(
                f"{what}. Lower learning_rate or max_grad_norm{advice}{skip}; {self._kept()}"
            )
        log.warning("%s; step skipped (on_nonfinite: skip)", what)
        if in_a_row >= MOST_SKIPPED:
            raise RunError(
                f"{in_a_row} steps in a row were skipped (on_nonfinite: skip), the last one {step}, so the weights no "
                f"longer change: lower learning_rate or max_grad_norm, or mend the examples that the log names; "
                f"{self._kept()}"
            )
        return False

    def _trains(self, step: int, outcome: Outcome) -> None:
        """Raise RunError where a loss has no gradient at all: the run would go on and change nothing."""
        if outcome.grad_norm == 0.0 and abs(outcome.loss) > SMALLEST_LOSS:
            raise RunError(
                f"step {step}: the loss is {outcome.loss:g} and the gradient norm exactly 0, so nothing is trained: "
                "either all embeddings are the same, or no gradient reaches the weights; check pooling, freeze and "
                f"learning_rate (mean cosines are in metrics.jsonl); {self._kept()}"
            )

    def on_step(self, report: StepReport) -> None:
        """Stop the run at a non-finite step, or log it."""
        parts = [
            (rank_batch, result.is_finite) for rank_batch, result in report.batches
        ]
        is_broken = not report.outcome.applied and not bool(
            torch.isfinite(report.embeddings).all(dim=1).any()
        )
        in_a_row = 0 if self.loop is None else self.loop.skipped_in_a_row
        self.finite(
            report.step,
            report.outcome,
            parts,
            broken_weights=is_broken,
            in_a_row=in_a_row,
        )

    def figures(self, report: StepReport) -> dict[str, float]:
        """Return the mean cosine between this rank's inputs, and log warnings."""
        step, loss, embeddings = report.step, report.outcome.loss, report.embeddings
        self.first = step if self.first is None else self.first
        self.lowest, self.highest = min(self.lowest, loss), max(self.highest, loss)
        cosine = mean_cosine(embeddings)
        if cosine > COLLAPSED and self.loss != "none":
            self._once(
                "collapse",
                f"embeddings collapse: the mean cosine between inputs is {cosine:.3f}; lower learning_rate, check that "
                "pooling fits the model, and that positives are not the same text in every row",
            )
        if loss == 0.0 and self.loss == "infonce":
            self._once(
                "nothing",
                f"the loss of step {step:,d} is exactly 0, so there is no gradient: positives had no negatives to be "
                "compared with, or are separated already; check that positives differ (mask_duplicates: copies in a "
                "batch do not count as negatives), or add negatives",
            )
        is_still = self.highest - self.lowest <= STILL_RANGE * max(
            abs(self.highest), 1e-12
        )
        num_steps = step - self.first + 1
        if num_steps >= STILL_STEPS and is_still:
            self._once(
                "still",
                f"the loss has stayed at {loss:.4f} for {num_steps:,d} steps; raise learning_rate, and check that "
                "parameters are trained at all (freeze, use_lora)",
            )
        return {"mean_cosine": cosine}

    def _rate(self) -> str:
        return f"learning_rate: {self.learning_rate:g}"

    def _kept(self) -> str:
        """Return what is left of the run."""
        found = list_checkpoints(self.output)
        if not found:
            return "no checkpoint was saved before (save_steps keeps some)"
        return f"{found[-1][1].name} is untouched"

    def _once(self, what: str, message: str) -> None:
        if what not in self.warned:
            self.warned.add(what)
            log.warning(message)


def mean_cosine(embeddings: Tensor) -> float:
    """Return the mean cosine over all pairs of different rows. Computed from the length of the mean direction,
    without a matrix of pairs."""
    num = embeddings.shape[0]
    if num < 2:
        return 0.0
    unit = torch.nn.functional.normalize(embeddings.detach().float(), dim=1)
    # |sum of unit vectors|^2 is the sum of all cosines, the num of each with itself included.
    total = float(unit.sum(dim=0).square().sum())
    return (total - num) / (num * (num - 1))


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


class DataWatch(Hook):
    """Looks at the data files at each epoch and at the end. Most changes do no harm: files stay open as they were."""

    def __init__(self) -> None:
        self._examples: ExampleStore | None = None
        self._said: set[str] = set()

    @override
    def on_start(self, run: Run) -> None:
        self._examples = run.data.examples

    @override
    def on_epoch(self, epoch: int) -> None:
        self._look()

    @override
    def on_finish(self, run: Run) -> None:
        self._look()

    def _look(self) -> None:
        for change in [] if self._examples is None else self._examples.changed_files():
            file = change.partition(" has ")[0]
            if file not in self._said:
                self._said.add(file)
                log.warning("%s", change)
